"""Settings: flag > RUVMLX_* environment > project toml > user toml > default.

The project file is `ruvmlx.toml` in the working folder, the user file `config.toml` in the data folder.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from .errors import StoreError, UsageError

_MODULE = "(q|k|v|o|gate|up|down)_proj"
_TARGET = rf"(head|lm_head|attention|ffn|all|top:[1-9]\d{{0,3}}|{_MODULE}(:\d{{1,4}}(-\d{{1,4}})?)?)"
TARGETS = re.compile(rf"{_TARGET}(,{_TARGET})*", re.ASCII)
TARGETS_EXPECTED = "head, attention, ffn, all, top:8, or modules as in q_proj,v_proj:20-29"
BACKENDS = ("auto", "mlx", "native", "reference")
_ALLOWED = {
    "backend": (re.compile("|".join(BACKENDS)), "one of " + ", ".join(BACKENDS)),
    "kv": (re.compile("auto|tiered|f16"), "auto, tiered or f16"),
    "kv_tiers": (
        re.compile(r"\d{1,9},(\d{1,9}|all)", re.ASCII),
        "hot,warm in tokens, as in 64,1024",
    ),
    "implicit_feedback": (re.compile("on|off"), "on or off"),
    "learn_when_idle": (re.compile("on|off"), "on or off"),
    "router": (re.compile("on|off"), "on or off"),
    "motion": (re.compile("on|off"), "on or off"),
    "theme": (re.compile(r"[\w-]{1,40}", re.ASCII), "auto, dark, light, contrast, or a name of Textual's"),
    "keys": (re.compile(r"([a-z_]+=[a-z0-9+_]+(,[a-z_]+=[a-z0-9+_]+)*)?"), "as in again=ctrl+t,chats=f3"),
    "learn_targets": (TARGETS, TARGETS_EXPECTED),
    "adapter": (re.compile(r"[\w-]{1,64}", re.ASCII), "letters, digits, - and _"),
}
# name -> (type, default, meaning). None: the model's own value, or the engine's.
SETTINGS: dict[str, tuple[type, Any, str]] = {
    "model": (str, None, "folder, .gguf file, Hugging Face repo, or the starter model"),
    "backend": (str, "auto", "auto, mlx, native or reference"),
    "threads": (int, None, "CPU threads; all physical cores by default"),
    "kv": (str, None, "KV cache: tiered (f16, then 8 bits, then 4 bits by age; where built), f16 or auto"),
    "kv_tiers": (str, None, "hot,warm: tokens in f16 and up to which 8 bits; auto is what was measured"),
    "kv_limit": (float, None, "KL that the tiers may cost against f16, nats per token; 0.004 by default"),
    "kv_budget": (int, None, "MiB that KV caches should stay within; older tokens lose precision sooner"),
    "kv_disk": (int, 1024, "MiB of chats' KV caches kept for the next start, the newest; 0 keeps none"),
    "adapter": (str, "default", "named adapter that ratings change, or none"),
    "temperature": (float, None, "0 is greedy; the model's own, or 0.7"),
    "top_p": (float, None, "nucleus mass"),
    "top_k": (int, None, "0 is off"),
    "min_p": (float, None, "0 is off"),
    "max_tokens": (int, 512, "longest reply, in tokens"),
    "system": (str, None, "system prompt of new chats"),
    "examples": (int, 0, "liked replies to similar questions shown to the model first, at most this many"),
    "implicit_feedback": (str, "off", "on: what you do with unrated replies counts a little, too"),
    "learn_when_idle": (str, "on", "off: the chat does not train on your ratings while you do not type"),
    "theme": (
        str,
        "auto",
        "of the chat: dark, light, contrast, a name of Textual's; auto asks the terminal",
    ),
    "motion": (str, "on", "off: nothing in the chat blinks, slides or fades"),
    "keys": (str, "", "of the chat, as in again=ctrl+t,chats=f3; a wrong name says which there are"),
    "learn_targets": (str, "head", "what a rating changes: " + TARGETS_EXPECTED),
    "router": (str, "off", "on: learns from ratings and latency when to use what was learned, and examples"),
}


def home() -> Path:
    """The folder that holds all of the user's data."""
    moved = os.environ.get("RUVMLX_HOME")
    return Path(moved).expanduser() if moved else Path(platformdirs.user_data_dir("ruvmlx", appauthor=False))


def user_file() -> Path:
    return home() / "config.toml"


def project_file() -> Path:
    return Path("ruvmlx.toml")


def store_file() -> Path:
    return home() / "ruvmlx.db"


@dataclass(frozen=True)
class Setting:
    """A value and where it came from."""

    value: Any
    origin: str


def load(flags: Mapping[str, Any] | None = None) -> dict[str, Setting]:
    """Every setting, resolved. Flags that are None were not given."""
    project, user = _read(project_file()), _read(user_file())
    sources: list[tuple[str, Mapping[str, Any]]] = [
        ("flag", {k: v for k, v in (flags or {}).items() if v is not None}),
        ("environment", _environment()),
        (str(project_file()), project),
        (str(user_file()), user),
        ("default", {name: default for name, (_, default, _) in SETTINGS.items()}),
    ]
    return {name: _first(name, sources) for name in SETTINGS}


def _first(name: str, sources: list[tuple[str, Mapping[str, Any]]]) -> Setting:
    for origin, values in sources:
        if name in values:
            value = values[name]
            return Setting(value if origin == "default" else parse(name, value, origin), origin)
    raise KeyError(name)


def parse(name: str, value: Any, origin: str) -> Any:
    """A value of the setting's type; UsageError otherwise, or for an unknown name."""
    if name not in SETTINGS:
        raise UsageError(f"no setting {name!r}; there are: {', '.join(SETTINGS)}.")
    kind = SETTINGS[name][0]
    try:
        if isinstance(value, bool) or (kind is int and isinstance(value, float)):
            raise ValueError
        parsed = kind(value)
    except (TypeError, ValueError):
        raise UsageError(f"{name} = {value!r} (from {origin}): expected {kind.__name__}.") from None
    pattern, expected = _ALLOWED.get(name, (None, ""))
    if pattern and not pattern.fullmatch(parsed):
        raise UsageError(f"{name} = {value!r} (from {origin}): expected {expected}.")
    return parsed


def _environment() -> dict[str, str]:
    found = {name: os.environ.get(f"RUVMLX_{name.upper()}") for name in SETTINGS}
    return {name: value for name, value in found.items() if value}


def _read(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):  # the store tells if the folder cannot be used
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise UsageError(f"cannot read {path}: {e}. Mend or remove it.") from e
    unknown = [name for name in values if name not in SETTINGS]
    if unknown:
        raise UsageError(f"{path}: no setting {unknown[0]!r}; there are: {', '.join(SETTINGS)}.")
    return values


def save(name: str, value: str) -> Path:
    """Set one value in the user file; its other lines, comments too, stay as they are."""
    line = f"{name} = {_toml(parse(name, value, 'the command line'))}\n"
    _read(user_file())  # a file that cannot be read is not written over
    path = user_file()
    fresh = path.with_suffix(".new")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        # Write beside the target, then rename: a full disk leaves the old file intact.
        with open(fresh, "w", encoding="utf-8") as f:
            f.writelines(_replaced(lines, name, line))
            f.flush()
            os.fsync(f.fileno())
        os.replace(fresh, path)
    except OSError as e:
        fresh.unlink(missing_ok=True)
        raise StoreError(
            f"cannot write {path}: {e.strerror}. Set RUVMLX_HOME to a folder you can write."
        ) from e
    return path


def _replaced(lines: list[str], name: str, line: str) -> list[str]:
    """The lines with one setting in place of its old one, or at the end."""
    at = [i for i, old in enumerate(lines) if re.match(rf"\s*{name}\s*=", old)]
    if at:
        return [*lines[: at[0]], line, *lines[at[0] + 1 :]]
    ended = [old if old.endswith("\n") else old + "\n" for old in lines]
    return [*ended, line]


def _toml(value: Any) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        escaped = "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in escaped)
        return f'"{escaped}"'
    return repr(value)
