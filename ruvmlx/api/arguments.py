"""This module checks the arguments of the public API, so that a wrong type is one line of error."""

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, get_type_hints

from ..errors import UsageError
from ..sampling import ReplyOptions
from ..settings import parse

NO_ADAPTER = "none"  # in place of an adapter's name: no adapter
THIS_CALL = "this call"  # the words with which an error says that the value of a setting came from a call


def check_text(text: Any, what: str) -> None:
    """Raise UsageError unless `text` is a text that UTF-8 can hold. what: its name in the error."""
    if not isinstance(text, str):
        raise UsageError(f"{what} is a text; got {kind_of(text)}.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} has half of a character (a lone surrogate); give whole ones.") from None


def check_number(value: Any, what: str) -> None:
    """Raise UsageError unless `value` is a number. what: its name in the error."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise UsageError(f"{what} is {value!r:.80}; give a number.")


def check_count(value: Any, what: str, least: int = 0) -> None:
    """Raise UsageError unless `value` is a whole number of at least `least` that the store can hold. what:
    its name in the error."""
    if not isinstance(value, Integral) or isinstance(value, bool) or not least <= int(value) < 2**63:
        raise UsageError(f"{what} is {value!r:.80}; give a whole number, {least} or more.")


def check_adapter(name: Any) -> None:
    """Raise UsageError unless `name` can be the name of an adapter."""
    check_text(name, "the name of an adapter")
    parse("adapter", name, THIS_CALL)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise UsageError for an option that no reply has, and for a value of a wrong type. A number that is too
    large or too small is an error of the reply itself (`check_sampling`)."""
    kinds = get_type_hints(ReplyOptions)
    if unknown := set(options) - kinds.keys():
        raise UsageError(f"no option {min(unknown)!r}; there are: {', '.join(kinds)}.")
    for name, value in options.items():
        if name == "max_tokens":
            check_count(value, name, 1)
        elif value is None:
            continue  # this option is not given
        elif name == "adapter":
            check_adapter(value)
        elif name == "logit_bias":
            _check_biases(value)
        elif kinds[name] is int:
            check_count(value, name)
        else:
            check_number(value, name)


def _check_biases(pairs: Any) -> None:
    """Raise UsageError unless `pairs` is a tuple or a list of pairs of a token id and a number."""
    kinds = tuple, list
    if not isinstance(pairs, kinds) or not all(isinstance(pair, kinds) and len(pair) == 2 for pair in pairs):
        raise UsageError(f"logit_bias is {pairs!r:.80}; give pairs as in ((5, -1.0), (7, 2.5)).")
    for token, bias in pairs:
        check_count(token, "a token id of logit_bias")
        check_number(bias, f"logit_bias of token {token}")


def kind_of(value: Any) -> str:
    """Return the name of the value's type, for an error."""
    return type(value).__name__
