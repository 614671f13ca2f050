"""How much work and text a chat template may make. Checks run before the work is done.

Jinja's sandbox has one bound, 100,000 steps of a range(). Within it, two nested loops run for hours, and
"a" * 10**10 or center(10**9) takes gigabytes; `sandbox.py` has the figures.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from jinja2.sandbox import SecurityError

MAX_SECONDS = 2.0
MAX_STEPS = 100_000  # of one range()
MAX_TEXT = 1 << 24  # characters; the longest context has a few million
MAX_WIDTH = 1024  # of padding, indentation, repetition

_WIDENING = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap", "batch", "slice"}
)
_FORMATTING = frozenset({"format", "format_map"})
_deadline: ContextVar[float] = ContextVar("deadline", default=float("inf"))


class clock:
    """Everything inside has MAX_SECONDS."""

    def __enter__(self) -> None:
        self._token = _deadline.set(time.monotonic() + MAX_SECONDS)

    def __exit__(self, *_: object) -> None:
        _deadline.reset(self._token)


def check_clock() -> None:
    if time.monotonic() > _deadline.get():
        raise SecurityError(f"it ran for more than {MAX_SECONDS:g} seconds")


def check_text(size: int) -> None:
    if size > MAX_TEXT:
        raise SecurityError(f"it makes a text of more than {MAX_TEXT} characters")


def check_operands(operator: str, left: Any, right: Any) -> None:
    """+, *, ** and % of numbers are free below 1e9; of texts and lists only while the result is small."""
    check_clock()
    sizes = size_of(left) + size_of(right)
    if operator == "%" and isinstance(left, str | bytes):
        check_format(left, (right,))
    if operator == "+":
        check_text(sizes)
    if operator in ("*", "**") and any(
        abs(x) > MAX_WIDTH for x in (left, right) if isinstance(x, int | float)
    ):
        raise SecurityError(f"the {operator} operator would make too large a value")
    if operator == "*":
        check_text(sizes * MAX_WIDTH)


def size_of(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def check_call(name: str, subject: Any, args: tuple, kwargs: dict) -> None:
    """A text method or a filter that could make a long text out of a short one."""
    check_clock()
    given = (*args, *kwargs.values())
    if name in _WIDENING and any(isinstance(x, int) and abs(x) > MAX_WIDTH for x in given):
        raise SecurityError(f"{name} with a width above {MAX_WIDTH}")
    if name in _FORMATTING:
        check_format(subject, given)
    if name == "replace" and len(given) >= 2:
        check_text(len(str(subject)) // max(1, len(str(given[0]))) * len(str(given[1])) + len(str(subject)))
    if name == "join":
        parts = [str(x) for x in (given[0] if isinstance(subject, str) and given else subject)]
        between = subject if isinstance(subject, str) else str(given[0]) if given else ""
        check_text(sum(map(len, parts)) + len(parts) * len(between))


def check_format(form: Any, given: tuple) -> None:
    """Widths are numbers in the form, or numbers handed over where it has a "*" or a nested "{"."""
    digits = [c if c.isdigit() else " " for c in str(form)]
    if any(len(run) > 3 for run in "".join(digits).split()) or "*" in str(form) or str(form).count("{:{"):
        raise SecurityError("a format with a width above 999")
    fields = str(form).count("{") + str(form).count("%")  # each may name the longest value
    check_text(fields * text_size(given) + len(str(form)))


def text_size(value: Any) -> int:
    """About as many characters as a value has when it is written out."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(text_size, value.values()))
    return sum(map(text_size, value)) if isinstance(value, list | tuple) else 64


def text_method(function: Any) -> tuple[str, Any]:
    """-> name and text of a bound text method; ("", None) for any other function."""
    method = getattr(function, "__wrapped__", function)  # Jinja wraps str.format in a function of its own
    owner = getattr(method, "__self__", None)
    return (str(getattr(method, "__name__", "")), owner) if isinstance(owner, str) else ("", None)


def settled(args: tuple) -> tuple:
    """Iterators as lists: they are looked at before they are used, and can be stepped through only once."""
    return tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)


class Steps:
    """range() that looks at the clock while it is stepped through."""

    def __init__(self, *args: int):
        self._steps = range(*args)
        if len(self._steps) > MAX_STEPS:
            raise SecurityError(f"range() of {len(self._steps)} steps; at most {MAX_STEPS} are allowed")

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, at: int) -> int:
        return self._steps[at]

    def __iter__(self) -> Iterator[int]:
        for step in self._steps:
            check_clock()
            yield step


def concat(parts: list) -> str:
    """a ~ b ~ c."""
    check_clock()
    texts = [str(part) for part in parts]
    check_text(sum(map(len, texts)))
    return "".join(texts)


def bounded_filter(name: str, plain: Callable) -> Callable:
    """The same filter behind `check_call`. Jinja hands some filters a context first; it stays where it is."""
    from functools import wraps

    skip = 1 if hasattr(plain, "jinja_pass_arg") else 0

    @wraps(plain)  # keeps the mark that makes Jinja pass the context
    def checked(*args: Any, **kwargs: Any) -> Any:
        args = args[:skip] + settled(args[skip:])
        if len(args) > skip:
            check_call(name, args[skip], args[skip + 1 :], kwargs)
        return plain(*args, **kwargs)

    return checked
