"""Flags that several verbs share, and the runtime that they describe."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ruvmlx import settings as config
from ruvmlx.progress import Watch

if TYPE_CHECKING:
    from ruvmlx.models.model import Model

_MODEL = [
    click.option(
        "--model", "-m", help="Folder, .gguf file, Hugging Face repo; the starter model by default."
    ),
    click.option(
        "--backend", type=click.Choice(config.BACKENDS), help="What computes; chosen by itself if not given."
    ),
    click.option("--threads", type=click.IntRange(min=1), help="CPU threads."),
    click.option(
        "--kv",
        type=click.Choice(["auto", "tiered", "f16"]),
        help="Key-value cache; tiers as measured on your replies by default.",
    ),
    click.option("--adapter", help="Named adapter that ratings change, or none."),
    click.option(
        "--router",
        type=click.Choice(["on", "off"]),
        help="Learn from ratings and latency when to use what was learned, and examples; off by default.",
    ),
]
_SAMPLING = [
    click.option("--max-tokens", type=click.IntRange(min=1), help="Longest reply, in tokens."),
    click.option(
        "--temp", "temperature", type=float, help="0 is greedy; the model's own by default, or 0.7."
    ),
    click.option("--top-p", type=float, help="Nucleus mass, over 0 and at most 1."),
    click.option("--min-p", type=float, help="Least share of the likeliest token's probability."),
    click.option("--top-k", type=int, help="How many tokens may be drawn; 0 is all."),
    click.option("--system", help="System prompt."),
    click.option(
        "--examples",
        type=click.IntRange(0, 8),
        help="Show the model up to N replies that you liked to similar questions.",
    ),
]


def _decorated(options: list) -> Callable:
    def decorate(function: Callable) -> Callable:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


model_options = _decorated(_MODEL)
sampling_options = _decorated(_SAMPLING)


def resolve(flags: dict[str, Any]) -> dict[str, Any]:
    """Settings by name: what the flags say, else environment, files, defaults."""
    known = {k: v for k, v in flags.items() if k in config.SETTINGS}
    return {name: setting.value for name, setting in config.load(known).items()}


def adapter_name(settings: dict[str, Any]) -> str | None:
    """The adapter's name; None when the user said "none"."""
    name = settings["adapter"]
    return None if name == "none" else name


def load_model(name: str | None) -> "Model":
    """A model by its name, fetched if need be; the terminal shows how far that has come."""
    from ruvmlx.models.load import load_model as load

    from ..progress import watching

    with watching() as watch:
        return load(name, watch)


def open_runtime(settings: dict[str, Any], watch: Watch | None = None):
    """Load everything; seconds. Without a watch the terminal shows what takes long."""
    if watch is None:
        from ..progress import watching

        with watching() as shown:
            return open_runtime(settings, shown)
    from ruvmlx.runtime import Runtime

    return Runtime.open(
        settings["model"],
        settings["backend"],
        adapter_name(settings),
        settings["threads"],
        {k: settings[k] for k in ("temperature", "top_p", "top_k", "min_p")},
        settings["kv"],
        settings["kv_budget"],
        examples=settings["examples"],
        implicit=settings["implicit_feedback"] == "on",
        kv_tiers=settings["kv_tiers"],
        kv_limit=settings["kv_limit"],
        router=settings["router"] == "on",
        targets=settings["learn_targets"],
        kv_disk=settings["kv_disk"],
        watch=watch,
    )
