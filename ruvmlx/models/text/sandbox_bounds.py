"""This module limits the amount of text and the memory that one render of a chat template can use, and checks
the time limit of template_time.py.

Jinja's sandbox has one limit: 100,000 steps of a range(). With this limit, two nested loops can run for
hours, and "a" * 10**10 takes gigabytes. A limit of time alone is not enough: one call of a C function can
take hours, and Python can neither stop nor measure the call. Because one call can take hours, the size of
every value has a limit. The expanded size of a value (a part is counted at each place where it occurs) is at
most `Budget.longest`. All texts that one render makes have together at most TIMES * `Budget.longest`
characters. The texts of a render that exist at one time, and all its lists, take at most `Budget.most_held`
bytes; some short texts do not count (SHORT). The module refuses most operations whose result would be too
large before they run. Templates can call only the filters in `FILTERS` and, of the methods of Python's
built-in types, those in `METHODS`. Loops and calls check the time.
"""

import re
import sys
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2.sandbox import SecurityError
from jinja2.utils import Namespace

from .template_time import TimeLimit

MAX_STEPS = 100_000  # the maximum number of steps of one range()
MAX_SOURCE = 1 << 17  # the maximum characters of a template's code; real templates have some thousands
# The limit of one value in characters is BASE_VALUE_CHARACTERS + PER_CHARACTER * the conversation's size.
BASE_VALUE_CHARACTERS, PER_CHARACTER = 1 << 20, 8
TIMES = 64  # one render can make TIMES * (the limit of one value) characters of text and lists
# The texts and lists of a render take at one time at most HELD + PER_BYTE * (the conversation's bytes) bytes.
HELD, PER_BYTE = 64 << 20, 16
SHORT = 256  # the memory limit ignores a text up to this length, made by text + text, if no list has it
TOGETHER = 4096  # the number of pieces that `bounded_join` joins at once; a waiting piece takes 50 bytes
MAX_WIDTH = 1024  # the maximum width of padding, indentation and repetition
MAX_DIGITS = 100  # the maximum number of digits of a rounded number
MAX_BITS = 4096  # the maximum number of bits of an integer
MAX_INDENT = 16  # the maximum indentation of JSON
MAX_DEPTH = 100  # the maximum depth of nested lists; Python itself allows about 1,000 nested calls
OTHER = 64  # the size, in characters, that the limits assume for a number, None or another object

FILTERS = frozenset(
    """
    abs attr batch capitalize center count d default dictsort e escape first float forceescape format groupby
    indent int items join last length list lower map max min reject rejectattr replace reverse round safe
    select selectattr slice sort string sum title tojson trim truncate unique upper urlencode wordcount
    """.split()  # noqa: SIM905
)
_TEXT = frozenset(
    """
    capitalize casefold center count endswith find format format_map index isalnum isalpha isascii isdecimal
    isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip
    partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines
    startswith strip swapcase title upper zfill
    """.split()  # noqa: SIM905
)
METHODS: Mapping[type, frozenset[str]] = {
    str: _TEXT,
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    float: frozenset(("is_integer",)),
}
_WIDENING = frozenset(("center", "ljust", "rjust", "zfill", "batch", "slice", "truncate"))
_STRIPPING = frozenset(("trim", "strip", "lstrip", "rstrip"))
_NESTED = re.compile(r"\{[^{}]*\{")  # a format field whose width is another field, as in "{:{}}"
_ESCAPING = re.compile(r"%[^a-zA-Z%]*[ra]|![ra]")  # %r and !r can write ten characters for one character


class Budget:
    """This object checks the limits of one render of a template.

    names: the variables of the template
    limit: the time limit; several renders can use the same object, and then share its time
    """

    def __init__(self, names: Mapping[str, Any], limit: TimeLimit):
        self._known: dict[int, tuple[Any, int, int]] = {}  # id of a list or mapping -> (it, size, depth)
        self.check_clock = limit.check
        self._texts: dict[int, str] = {}  # id(text) -> a string that the template made or received
        self._text_bytes = self._list_bytes = self._sweep_at = 0
        self.longest, self.most_held = BASE_VALUE_CHARACTERS, sys.maxsize
        sizes = [self.spread(value)[0] for value in names.values()]
        self.longest += PER_CHARACTER * sum(sizes)
        self._left = TIMES * self.longest
        self.most_held = HELD + PER_BYTE * (self._text_bytes + self._list_bytes)

    def check_size(self, size: int) -> None:
        if size > self.longest:
            raise SecurityError(f"it makes a text of more than {self.longest} characters")

    def admit(self, value: Any) -> Any:
        """Return `value` if its expanded size is allowed, and count its text for the render's limit."""
        size, _ = self.spread(value)
        self.check_size(size)
        self.take(
            size if isinstance(value, str) else 8 * len(value) if isinstance(value, list | tuple) else 0
        )
        return value

    def hold(self, text: str) -> None:
        """Count the bytes of a text for the memory limit until no other object uses the text."""
        if len(text) < 2 or id(text) in self._texts:  # Python keeps only one copy of each one-character text
            return
        self._texts[id(text)] = text
        self._text_bytes += sys.getsizeof(text)
        if self._text_bytes + self._list_bytes > self._sweep_at:
            self._sweep()

    def _sweep(self) -> None:
        """Stop counting the texts that no other object uses; raise SecurityError if the counted texts and
        lists exceed the memory limit. The next sweep comes at about twice as many bytes or at the limit."""
        used = [text for text, references in _with_counts(self._texts.values()) if references > _UNUSED]
        self._texts = {id(text): text for text in used}
        self._text_bytes = sum(map(sys.getsizeof, used))
        total = self._text_bytes + self._list_bytes
        if total > self.most_held:
            raise SecurityError(f"it holds more than {self.most_held >> 20} MB of text and lists")
        self._sweep_at = min(self.most_held, 2 * total + (1 << 20))

    def take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise SecurityError("it makes too much text")

    def spread(self, value: Any, level: int = 0) -> tuple[int, int]:
        """Return (expanded size, depth). Templates cannot change values, so each list is read only once."""
        if isinstance(value, str):
            self.hold(value)
            return len(value) + 2, 0
        if isinstance(value, bytes):
            return len(value) + 2, 0
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise SecurityError(f"a number of more than {MAX_BITS} bits")
        if not isinstance(value, list | tuple | Mapping | ItemsView | KeysView | ValuesView):
            return OTHER, 0
        if found := self._known.get(id(value)):
            return found[1:]
        if level > MAX_DEPTH:
            raise SecurityError(f"lists in lists, more than {MAX_DEPTH} deep")
        parts = (*value.keys(), *value.values()) if isinstance(value, Mapping) else tuple(value)
        size, depth = 2, 0
        for part in parts:
            more, below = self.spread(part, level + 1)
            size, depth = size + more + 2, max(depth, below + 1)
        if depth > MAX_DEPTH:
            raise SecurityError(f"lists in lists, more than {MAX_DEPTH} deep")
        self._known[id(value)] = value, size, depth
        self._list_bytes += sys.getsizeof(value)
        return size, depth

    def note_joined(self, whole: list[Any], left: list[Any], right: list[Any]) -> None:
        """Store the result of `spread` for whole = left + right without reading the lists, because a loop can
        build a long list piece by piece."""
        (size, depth), (more, below) = self.spread(left), self.spread(right)
        self._known[id(whole)] = whole, size + more - 2, max(depth, below)
        self._list_bytes += sys.getsizeof(whole)


def _with_counts(texts: Iterable[str]) -> list[tuple[str, int]]:
    return [(text, sys.getrefcount(text)) for text in texts]


# The reference count of a text that only its dict uses. Python 3.14 counts fewer references than Python 3.13.
_UNUSED = _with_counts({0: str(MAX_SOURCE)}.values())[0][1]

_budget: ContextVar[Budget] = ContextVar("budget")


class budgeted:
    """This context manager makes a `Budget` of `names` and `limit` for the `with` block."""

    def __init__(self, names: Mapping[str, Any], limit: TimeLimit):
        self._names, self._limit = names, limit

    def __enter__(self) -> Budget:
        budget = Budget(self._names, self._limit)
        self._token = _budget.set(budget)
        return budget

    def __exit__(self, *_: object) -> None:
        _budget.reset(self._token)


def check_clock() -> None:
    _budget.get().check_clock()


def admit(value: Any) -> Any:
    return _budget.get().admit(value)


def bounded_operation(operator: str, left: Any, right: Any, apply: Callable[[Any, Any], Any]) -> Any:
    """Compute `left operator right` for the operators +, *, ** and %, after a check of the result's size.
    Raises SecurityError for too large results."""
    budget = _budget.get()
    budget.check_clock()
    # This case comes first because most operations add two texts.
    if operator == "+" and isinstance(left, str) and isinstance(right, str):
        budget.check_size(len(left) + len(right))
        budget.take(len(left) + len(right))
        text = apply(left, right)
        if len(text) > SHORT:
            budget.hold(text)
        return text
    if operator == "%" and isinstance(left, str | bytes):
        _check_format(left, right if isinstance(right, tuple) else (right,))
    if operator in ("*", "**") and any(
        abs(x) > MAX_WIDTH for x in (left, right) if isinstance(x, int | float)
    ):
        raise SecurityError(f"the {operator} operator would make too large a value")
    if operator == "*":
        times = max((x for x in (left, right) if isinstance(x, int)), default=1)
        sequences = [x for x in (left, right) if isinstance(x, str | list | tuple)]
        budget.check_size(sum(budget.spread(x)[0] for x in sequences) * max(1, times))
    if operator == "+" and not isinstance(left, int | float):
        budget.check_size(budget.spread(left)[0] + budget.spread(right)[0])
    result = apply(left, right)
    if operator == "+" and type(left) is type(right) is list:
        budget.note_joined(result, left, right)
    return budget.admit(result)


def call_function(function: Any, args: tuple, apply: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of a function, macro or method that the template calls."""
    budget = _budget.get()
    budget.check_clock()
    args = as_lists(args)
    method = getattr(function, "__wrapped__", function)  # Jinja wraps str.format in another function
    owner, name = getattr(method, "__self__", None), str(getattr(method, "__name__", ""))
    if owner is not None and type(owner).__module__ in ("builtins", "markupsafe"):
        if not any(isinstance(owner, kind) and name in names for kind, names in METHODS.items()):
            raise SecurityError(f"the method {name!r} is not known")
        if isinstance(owner, str):
            check_work(name, owner, args, kwargs)
    result = apply(*args, **kwargs)
    if isinstance(owner, str) and isinstance(result, list | tuple):
        budget.take(sum(map(len, result)))  # new texts
    return budget.admit(result)


def check_work(name: str, subject: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise SecurityError for a call of a text method or a filter that would make a long text from a short
    text, or run for a long time."""
    budget, given = _budget.get(), (*args, *kwargs.values())
    if name in _WIDENING and any(isinstance(x, int) and abs(x) > MAX_WIDTH for x in given):
        raise SecurityError(f"{name} with a width above {MAX_WIDTH}")
    if name in _STRIPPING and any(isinstance(x, str) and len(x) > MAX_WIDTH for x in given):
        raise SecurityError(f"{name} of more than {MAX_WIDTH} characters")
    if name in ("format", "format_map"):
        _check_format(subject, given)
    if name == "round" and any(isinstance(x, int) and abs(x) > MAX_DIGITS for x in given):
        raise SecurityError(f"round to more than {MAX_DIGITS} digits")
    if name == "replace" and len(given) >= 2:
        old, new, whole = (len(str(x)) for x in (given[0], given[1], subject))
        budget.check_size((whole // max(1, old) + 1) * new + whole)
    if name == "indent":
        budget.check_size(str(subject).count("\n") * max((_width(x) for x in given), default=4))
    if name == "join":
        parts, between = (
            (given[0] if given else (), subject) if isinstance(subject, str) else (subject, given)
        )
        if isinstance(parts, Iterable) and not isinstance(parts, str):
            sizes = [budget.spread(part)[0] for part in parts]
            budget.check_size(sum(sizes) + len(sizes) * budget.spread(between)[0])
    if name == "batch" and len(given) >= 2:
        budget.check_size(budget.spread(subject)[0] + MAX_WIDTH * budget.spread(given[1])[0])
    if name == "slice" and len(given) >= 2:
        budget.check_size(budget.spread(subject)[0] + MAX_WIDTH * budget.spread(given[1])[0])


def _width(given: Any) -> int:
    if isinstance(given, int) and abs(given) > MAX_WIDTH:
        raise SecurityError(f"indent with a width above {MAX_WIDTH}")
    return len(given) if isinstance(given, str) else int(given) if isinstance(given, int) else 0


def _check_format(form: Any, given: Any) -> None:
    """Raise SecurityError if a width in a format is above 999 or is an argument, or if the result could be
    too large."""
    text, budget = str(form), _budget.get()
    digits = "".join(c if c.isdigit() else " " for c in text).split()
    if any(len(run) > 3 for run in digits) or "*" in text or _NESTED.search(text.replace("{{", "")):
        raise SecurityError("a format with a width above 999")
    escaping = _ESCAPING.search(text) or not all(isinstance(x, str | int | float) for x in given)
    fields = text.count("{") + text.count("%")  # the check assumes that each field gets all values
    budget.check_size(fields * ((10 if escaping else 1) * budget.spread(given)[0] + 1000) + len(text))


def as_lists(args: Iterable[Any]) -> tuple[Any, ...]:
    """Return the arguments with lists in place of iterators, because a check would use up an iterator."""
    return tuple(admit(list(ticking(arg))) if isinstance(arg, Iterator) else arg for arg in args)


def ticking(values: Iterable[Any]) -> Iterator[Any]:
    budget = _budget.get()
    for value in values:
        budget.check_clock()
        yield value


class Loop:
    """An iterator over the values of a {% for %} loop. Each step of the loop checks the time."""

    def __init__(self, values: Any):
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        return ticking(self._values)

    def __len__(self) -> int:
        return len(self._values)  # raises TypeError for values without a length, as Jinja expects


class Steps:
    """A range() that checks the time at each step."""

    def __init__(self, *args: int):
        self._steps = range(*args)
        if len(self._steps) > MAX_STEPS:
            raise SecurityError(f"range() of {len(self._steps)} steps; at most {MAX_STEPS} are allowed")

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, at: int) -> int:
        return self._steps[at]

    def __iter__(self) -> Iterator[int]:
        return ticking(self._steps)


class Variables(Namespace):
    """Jinja's namespace(), but with a fixed text, because the text of a namespace that contains itself would
    be endless."""

    def __repr__(self) -> str:
        return "<Namespace>"


def bounded_concat(parts: Iterable[Any]) -> str:
    """Join the parts of a ~ b ~ c, or the output of a macro or a block, after a check of their sizes."""
    budget, texts = _budget.get(), list(parts)
    budget.check_clock()
    budget.check_size(sum(budget.spread(part)[0] - 2 for part in texts if isinstance(part, str)))
    return budget.admit("".join([part if isinstance(part, str) else str(admit(part)) for part in texts]))


def bounded_slice(values: Any, start: Any, stop: Any, step: Any) -> Any:
    """Return values[start:stop:step]."""
    found = values[start:stop:step]
    budget = _budget.get()
    budget.take(len(found) if isinstance(found, str) else 8 * len(found))
    budget.spread(found)
    return found


def bounded_join(pieces: Iterable[str]) -> str:
    """Join pieces of text. At each piece, the function checks the size of all pieces so far."""
    budget, texts, size = _budget.get(), list[str](), 0
    whole: list[str] = []
    for piece in pieces:
        budget.check_clock()
        size += len(piece)
        budget.check_size(size)
        texts.append(piece)
        if len(texts) == TOGETHER:
            whole.append("".join(texts))
            texts.clear()
    return "".join(whole + texts)


def bounded_sum(values: Iterable[Any], getter: Callable[[Any], Any], start: Any) -> Any:
    """Do the work of the filter `sum` with one checked addition at a time, because a sum of lists copies the
    lists at each addition."""
    total = start
    for value in ticking(values):
        total = bounded_operation("+", total, getter(value), lambda a, b: a + b)
    return total


def bounded_filter(name: str, plain: Callable) -> Callable:
    """Return a filter that calls `check_work` and then the filter `plain`. If Jinja
    passes a context to `plain` as the first argument, Jinja also passes it to the new filter.

    If the filter `plain` returns an iterator, the new filter computes all its values at once.
    """
    skip = 1 if hasattr(plain, "jinja_pass_arg") else 0

    @wraps(plain)  # `wraps` copies the attribute that makes Jinja pass the context
    def call_filter(*args: Any, **kwargs: Any) -> Any:
        check_clock()
        args = args[:skip] + as_lists(args[skip:])
        if len(args) > skip:
            check_work(name, args[skip], args[skip + 1 :], kwargs)
        found = plain(*args, **kwargs)
        return iter(admit(list(ticking(found)))) if isinstance(found, Iterator) else admit(found)

    return call_filter
