"""Which GPU kernels work on this machine: what the self-check found, and where that is kept.

A verdict belongs to a key: the GPU, the build of its compiler, the versions of MLX and mlx-lm, our kernels'
sources, and the model's shapes. The file is a convenience: damaged, missing or not writable, it only costs
another check. Format of DATA/gpu_check.json, the newest verdict last:

    {"format": 1, "verdicts": [
        {"key": {"gpu": "Apple M3", ...}, "seconds": 2.1, "made": "2026-01-31T12:00:00Z",
         "results": [{"name": "append", "ok": true, "why": "", "ratio": 0.4}, ...]}]}
"""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ... import settings
from ...models.model import ModelConfig
from ...platform.gpu import gpu
from ...text import one_line

FORMAT, KEPT = 1, 16  # verdicts: one for each kind of model that was opened last
GRAPH = "mlx"  # the check of mlx-lm's own graph, without a kernel of ours
SKIPPED = "not checked: the check ended before it"
LONGEST, BRIEF = 160, 70  # characters of a reason: in doctor's row, in the chat's line


@dataclass(frozen=True)
class Shapes:
    """What of a model decides how a kernel is compiled and run. dtype: "float16", "bfloat16" or "float32"."""

    head_dim: int
    n_heads: int
    n_kv_heads: int
    dtype: str

    @classmethod
    def of(cls, model: ModelConfig, dtype: str) -> "Shapes":
        return cls(model.head_dim, model.n_heads, model.n_kv_heads, dtype)


STARTER = Shapes(64, 9, 3, "float16")


@dataclass(frozen=True)
class Result:
    """Of one kernel. why: what is wrong; ratio: its time by plain MLX's, None where it was not timed."""

    name: str
    ok: bool
    why: str = ""
    ratio: float | None = None

    @property
    def words(self) -> str:
        if not self.ok:
            return f"{self.name}: {self.why}"
        return f"{self.name} ok" + (f" ({self.ratio:.2g}x MLX's time)" if self.ratio is not None else "")


@dataclass(frozen=True)
class Verdict:
    """told: the check ran, so that the verdict says something of the machine and may be kept."""

    results: tuple[Result, ...]
    seconds: float = 0.0
    told: bool = True

    @property
    def graph_fails(self) -> str:
        """Why mlx-lm's own graph cannot run on the GPU; "" when it can, or nobody knows."""
        return next((r.why for r in self.results if r.name == GRAPH and not r.ok), "")

    @property
    def kernels_work(self) -> bool:
        """All of them: a cache needs each. False, too, where no kernel is made for the shapes."""
        kernels = [r for r in self.results if r.name != GRAPH]
        return bool(kernels) and all(r.ok for r in kernels)

    @property
    def caveat(self) -> str:
        """One line for the user; "" where nothing failed."""
        wrong = next((r for r in self.results if not r.ok), None)
        if wrong is None:
            return ""
        return (
            f"Our GPU kernels are not used on this machine ({shortened(wrong.words, BRIEF)}); replies come "
            "from MLX's own attention with a plain KV cache. `ruvmlx doctor` checks again."
        )


def reason(text: str) -> str:
    """The first line that says something, and no more than fits a line."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    return shortened(one_line(first), LONGEST)


def shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


# The key ------------------------------------------------------------------------------------------


def key(shapes: Shapes) -> dict[str, Any]:
    """What a verdict depends on."""
    return {
        "device": gpu.kind,
        "gpu": gpu.name,
        "system": gpu.system,
        "mlx": _version("mlx"),
        "mlx_lm": _version("mlx-lm"),
        "kernels": sources_hash(),
        **asdict(shapes),
    }


def _version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return ""


def sources_hash() -> str:
    """Of the kernels' bodies and headers, and of the Python that launches them."""
    from .kernels import source

    found = hashlib.sha256()
    for folder, kinds in ((source.folder(), (".metal", ".h")), (Path(source.__file__).parent, (".py",))):
        for file in sorted(f for f in folder.iterdir() if f.suffix in kinds):
            data = file.read_bytes()
            found.update(f"{file.name} {len(data)}\n".encode() + data)
    return found.hexdigest()[:32]


# The file -----------------------------------------------------------------------------------------


def path() -> Path:
    return settings.home() / "gpu_check.json"


def kept(wanted: dict[str, Any]) -> Verdict | None:
    """The verdict for this key, if there is one that can be read."""
    for entry in reversed(_entries()):
        with suppress(KeyError, TypeError, ValueError):
            if entry["key"] == wanted:
                return _checked(entry)
    return None


def keep(wanted: dict[str, Any], verdict: Verdict) -> None:
    """Remember it. Where the folder cannot be written, the next start checks again."""
    entry = {
        "key": wanted,
        "seconds": round(verdict.seconds, 2),
        "made": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "results": [asdict(result) for result in verdict.results],
    }
    others = [e for e in _entries() if not (isinstance(e, dict) and e.get("key") == wanted)]
    with suppress(OSError):
        _write({"format": FORMAT, "verdicts": [*others[-(KEPT - 1) :], entry]})


def _entries() -> list[Any]:
    try:
        whole = json.loads(path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    right = isinstance(whole, dict) and whole.get("format") == FORMAT
    found = whole.get("verdicts") if right else None
    return found if isinstance(found, list) else []


def _checked(entry: dict[str, Any]) -> Verdict:
    """ValueError, TypeError or KeyError where it is none."""
    results: Sequence[dict[str, Any]] = entry["results"]
    made = tuple(Result(**result) for result in results)
    if not made or not all(isinstance(r.ok, bool) and isinstance(r.name, str) for r in made):
        raise ValueError("no verdict")
    return Verdict(made, float(entry["seconds"]))


def _write(whole: dict[str, Any]) -> None:
    """Beside the target, then renamed: who reads sees the old file or the new one."""
    fresh = path().with_suffix(f".{os.getpid()}.new")
    try:
        path().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh.write_text(json.dumps(whole, indent=1), encoding="utf-8")
        os.replace(fresh, path())
    except OSError:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise
