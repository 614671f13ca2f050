"""This module has the step of the command `/set`, which changes settings of one chat's replies until the
program ends.
The command `ruvmlx config set` changes settings permanently."""

from dataclasses import replace
from typing import Any

from ruvmlx.errors import UsageError
from ruvmlx.runtime import Runtime
from ruvmlx.sampling import check_sampling
from ruvmlx.settings import SAMPLING, parse
from ruvmlx.text import did_you_mean

from ..options import ChatOptions
from ..state import ChatState, Outcome, text_outcome

NAMES = (*SAMPLING, "max_tokens", "best_of")


def set_value(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Change one setting of the open chat's replies (for example the temperature) until the program ends, if
    the argument has a name and a value. Then show all settings of replies."""
    name, _, value = argument.partition(" ")
    if name:
        state.change_options(change_option(runtime, state.options, name, value.strip()))
    return text_outcome("\n".join(value_lines(runtime, state.options)))


def change_option(runtime: Runtime, options: ChatOptions, name: str, value: str) -> ChatOptions:
    """Return the options of the chat with one setting changed. Raise UsageError for a name or a value that is
    not allowed."""
    if name not in NAMES:
        raise UsageError(
            f"/set has no {name[:40]!r}.{did_you_mean(name, NAMES)} It has: {', '.join(NAMES)}; "
            "`ruvmlx config set` has the others"
        )
    if not value:
        raise UsageError(f"/set {name} needs a value, as in /set temperature 0.2")
    chosen: Any = parse(name, value, "/set")
    if name == "max_tokens":
        return replace(options, max_new_tokens=chosen)
    if name == "best_of":
        return replace(options, best_of=chosen)
    sampling = replace(options.sampling or runtime.writer.sampling(), **{name: chosen})
    check_sampling(sampling)
    return replace(options, sampling=sampling)


def value_lines(runtime: Runtime, options: ChatOptions) -> list[str]:
    """Return a heading, and a line for each setting of replies, with the value that the next reply uses."""
    sampling = options.sampling or runtime.writer.sampling()
    values = {name: getattr(sampling, name) for name in SAMPLING}
    values |= {
        "max_tokens": options.max_new_tokens,
        "best_of": options.best_of or runtime.settings.best_of,
    }
    width = max(map(len, values))
    lines = [f"{name:<{width}}  {value}" for name, value in values.items()]
    return ["How replies are written (`ruvmlx config show` explains each setting):", *lines]
