"""This module defines `Settings`, the list of all settings.

Flags, environment variables, settings files, `config show` and the reference page of the settings all follow
from the fields of this class. `meanings` explains each setting in plain words.
"""

import re
from dataclasses import dataclass, field, fields
from typing import Any

from .. import tiers
from ..errors import UsageError
from ..text import did_you_mean
from .meanings import MEANINGS
from .setting_spec import SettingSpec

_LENGTHS = ",".join(tiers.LENGTHS)  # hot,warm
_MODULE = "(q|k|v|o|gate|up|down)_proj"
_GROUP = "head|lm_head|attention|ffn|embedding|embed_tokens|all"
_TARGET = rf"({_GROUP}|top:[1-9]\d{{0,3}}|{_MODULE}(:\d{{1,4}}(-\d{{1,4}})?)?)"
TARGETS = re.compile(rf"{_TARGET}(,{_TARGET})*", re.ASCII)
BASE_TARGETS = "attention,ffn"
TARGETS_EXPECTED = "head, attention, ffn, embedding, all, top:8, or modules as in q_proj,v_proj:20-29"


def _check_ranges(targets: str) -> None:
    """Raise ValueError if a range of layers runs backwards, as in "q_proj:29-20"."""
    if any(int(first) > int(last) for first, last in re.findall(r":(\d+)-(\d+)", targets)):
        raise ValueError


AUTO = "auto"  # the value of the setting `model` that lets ruvmlx choose a model for each question
_OWN = "the model's own"
_MOST_COUNT = 2**31 - 1  # the largest count that the C library and the server's requests can hold
_MOST_MIB = 1 << 30  # 1 PiB, more than any machine has


def _setting(kind: type, default: Any, **rules: Any) -> Any:
    return field(default=default, metadata={"rules": {"kind": kind, **rules}})


@dataclass(frozen=True)
class Settings:
    """The values of all settings for one run of the program. `sources.load` makes this object. None means
    that the setting has no value; `unset` in its SettingSpec says what then applies."""

    model: str | None = _setting(
        str,
        None,
        flag="--model -m",
        unset="starter",
    )
    auto_models: str | None = _setting(str, None, unset="what fits")
    backend: str = _setting(
        str, "auto", choices=("auto", "mlx", "native", "hybrid", "reference"), public=True
    )
    threads: int | None = _setting(
        int,
        None,
        least=1,
        most=1024,
        public=True,
        unset="all physical cores",
    )
    max_context: int | None = _setting(
        int,
        None,
        least=64,
        most=_MOST_COUNT,
        unset="the model's own",
    )
    memory_limit: int | None = _setting(
        int,
        None,
        is_size=True,
        least=1,
        most=_MOST_MIB,
        unset="what is free",
    )
    kv: str | None = _setting(
        str,
        None,
        choices=("auto", "tiered", "f16"),
        unset="auto",
        witnessed=True,
        public=True,
    )
    kv_tiers: str | None = _setting(
        str,
        None,
        pattern=re.compile(r"\d{1,9}" + rf"(,(\d{{1,9}}|all)){{1,{len(tiers.LENGTHS) - 1}}}", re.ASCII),
        check=tiers.parse_lengths,
        expected=f"{_LENGTHS} in tokens, {tiers.RULE}, as in {tiers.EXAMPLE}; the last may be all",
        unset="automatic",
        witnessed=True,
        public=True,
    )
    kv_limit: float | None = _setting(
        float,
        None,
        least=0,
        most=10,
        unset="0.004",
        witnessed=True,
        public=True,
    )
    kv_budget: int | None = _setting(
        int,
        None,
        is_size=True,
        least=0,
        most=_MOST_MIB,
        unset="what memory allows",
        witnessed=True,
        public=True,
    )
    kv_disk: int | None = _setting(int, 1024, is_size=True, least=0, most=_MOST_MIB)
    server_memory: int | None = _setting(
        int,
        None,
        is_size=True,
        least=64,
        most=_MOST_MIB,
        unset="what is free",
    )
    server_unload: float = _setting(
        float,
        10.0,
        least=0,
        most=525_600,  # a year
    )
    adapter: str = _setting(
        str,
        "default",
        pattern=re.compile(r"[\w-]{1,64}", re.ASCII),
        expected="letters, digits, - and _",
        witnessed=True,
    )
    temperature: float | None = _setting(
        float,
        None,
        least=0,
        most=100,
        flag="--temp",
        sampling=True,
        unset=_OWN,
    )
    top_p: float | None = _setting(
        float,
        None,
        least=0,
        most=1,
        over=True,
        sampling=True,
        unset=_OWN,
    )
    top_k: int | None = _setting(int, None, least=0, most=_MOST_COUNT, sampling=True, unset=_OWN)
    min_p: float | None = _setting(
        float,
        None,
        least=0,
        most=1,
        under=True,
        sampling=True,
        unset=_OWN,
    )
    presence_penalty: float | None = _setting(
        float,
        None,
        least=-2,
        most=2,
        sampling=True,
        unset=_OWN,
    )
    frequency_penalty: float | None = _setting(float, None, least=-2, most=2, sampling=True, unset=_OWN)
    repetition_penalty: float | None = _setting(
        float,
        None,
        least=0.1,
        most=2,
        sampling=True,
        unset=_OWN,
    )
    max_tokens: int = _setting(int, 512, least=1, most=_MOST_COUNT)
    best_of: int | str = _setting(
        int,
        1,
        least=1,
        most=16,
        word="auto",
        witnessed=True,
        public=True,
    )
    speculate: str = _setting(
        str,
        "auto",
        pattern=re.compile(r"auto|off|[1-7]"),
        expected="auto, off, or 1 to 7",
        public=True,
    )
    optimizer: str = _setting(str, "on", choices=("on", "off", "watch"), witnessed=True, public=True)
    draft_model: str | None = _setting(str, None, unset="none")
    system: str | None = _setting(str, None, nothing="none", unset="none")
    thinking: str = _setting(
        str,
        "auto",
        choices=("auto", "on", "off"),
        public=True,
    )
    rate_thoughts: bool = _setting(bool, False, witnessed=True)
    examples: int = _setting(
        int,
        0,
        least=0,
        most=8,
        witnessed=True,
    )
    implicit_feedback: bool = _setting(bool, False, witnessed=True)
    learn_when_idle: bool = _setting(bool, True, witnessed=True)
    slow_loop: str = _setting(
        str,
        "auto",
        choices=("auto", "style", "training"),
        witnessed=True,
    )
    kv_measure: bool = _setting(bool, False, witnessed=True)
    theme: str = _setting(
        str,
        "auto",
        pattern=re.compile(r"[\w-]{1,40}", re.ASCII),
        expected="auto, dark, light, contrast, or a name of Textual's",
    )
    motion: bool = _setting(bool, True)
    keys: str = _setting(
        str,
        "",
        pattern=re.compile(r"([a-z_]+=[a-z0-9+_]+(,[a-z_]+=[a-z0-9+_]+)*)?"),
        expected="as in again=f7,chats=f9",
    )
    learn_targets: str = _setting(
        str,
        "head",
        pattern=TARGETS,
        check=_check_ranges,
        expected=TARGETS_EXPECTED,
        witnessed=True,
        public=True,
    )
    base_targets: str = _setting(
        str,
        BASE_TARGETS,
        pattern=TARGETS,
        check=_check_ranges,
        expected=TARGETS_EXPECTED,
        witnessed=True,
        public=True,
    )
    adapter_bits: int = _setting(
        int,
        32,
        choices=("32", "4"),
        witnessed=True,
        public=True,
    )
    micro_rank: int = _setting(
        int,
        2,
        choices=("1", "2"),
        witnessed=True,
        public=True,
    )
    layer_rank: int = _setting(
        int,
        1,
        choices=("1", "2"),
        witnessed=True,
        public=True,
    )
    router: bool = _setting(
        bool,
        False,
        witnessed=True,
        public=True,
    )

    def __post_init__(self) -> None:
        """Raise UsageError if a value is not allowed."""
        for name, spec in SPECS.items():
            value = getattr(self, name)
            if value is not None:
                _parse_value(name, spec, value)

    @property
    def adapter_name(self) -> str | None:
        """Return the adapter's name, or None if the setting `adapter` is "none"."""
        return None if self.adapter == "none" else self.adapter

    @property
    def memory_bytes(self) -> int:
        """Return the setting `memory_limit` in bytes; 0: not set."""
        return (self.memory_limit or 0) << 20

    @property
    def sampling(self) -> dict[str, Any]:
        """Return the user's sampling values. A value is None if the user has not set it; in this case the
        model's own value applies, or the default of `Sampling`."""
        return {name: getattr(self, name) for name in SAMPLING}


_RULES: dict[str, dict[str, Any]] = {setting.name: setting.metadata["rules"] for setting in fields(Settings)}
SPECS = {name: SettingSpec(doc=meaning, **_RULES[name]) for name, meaning in MEANINGS.items()}
SAMPLING = tuple(name for name, spec in SPECS.items() if spec.sampling)


def parse(name: str, value: Any, origin: str) -> Any:
    """Return a value in the setting's type. Raises UsageError for a value that is not allowed, or an unknown
    setting. origin: the source of the value, for the text of the error."""
    return _parse_value(name, spec_of(name), value, f" (from {origin})")


def _parse_value(name: str, spec: SettingSpec, value: Any, origin: str = "") -> Any:
    try:
        return spec.parse(value)
    except ValueError as e:
        raise UsageError(f"{name} = {value!r}{origin}: expected {e}.") from None


def spec_of(name: str, where: str = "") -> SettingSpec:
    if name not in SPECS:
        similar = did_you_mean(name, SPECS)
        more = f"{similar} `ruvmlx config show` lists all settings."
        known = f".{more}" if similar else f"; there are: {', '.join(SPECS)}."
        raise UsageError(f"{where}no setting {name!r}{known}")
    return SPECS[name]


def setting_text(value: Any) -> Any:
    """Return a value as settings files, flags and JSON write it: True becomes "on"."""
    return ("off", "on")[value] if isinstance(value, bool) else value
