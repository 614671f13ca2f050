"""A Jinja sandbox for text that came with a model: no attribute tricks, no files, bounded work.

Jinja's ImmutableSandboxedEnvironment keeps templates away from Python's insides. On top of it a
render may step through `MAX_STEPS` of range(), make strings of `MAX_TEXT` characters and run `MAX_SECONDS`.
The clock is looked at whenever a template looks something up, calls something or writes.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 2.0
MAX_STEPS = 100_000
MAX_TEXT = 1 << 24

_deadline: ContextVar[float] = ContextVar("deadline", default=float("inf"))


class Refused(TemplateError):
    """raise_exception() was called: the template does not take this conversation."""


class _Environment(ImmutableSandboxedEnvironment):
    """Looks at the clock and at sizes where a template could run away."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def getattr(self, obj: Any, attribute: str) -> Any:
        check_clock()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        check_clock()
        return super().getitem(obj, argument)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        check_clock()
        return super().call(*args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        check_clock()
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """`a ~ b` becomes a filter of ours: Jinja cannot intercept that operator."""
        return _BoundConcat().visit(super()._parse(source, name, filename))


class _BoundConcat(NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "bounded_concat", [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """{% generation %}...{% endgeneration %} marks assistant text for training; here it is just its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def check_clock() -> None:
    if time.monotonic() > _deadline.get():
        raise SecurityError(f"it ran for more than {MAX_SECONDS:g} seconds")


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Refuse results that would be huge before they are made."""
    if operator == "+" and _size(left) + _size(right) > MAX_TEXT:
        raise SecurityError(f"it makes a text of more than {MAX_TEXT} characters")
    if operator == "%" and isinstance(left, str | bytes):
        raise SecurityError("the % operator on text is not allowed")
    if operator == "**" or (operator == "*" and _size(left) + _size(right)):
        small = all(isinstance(x, int | float) and abs(x) < 1024 for x in (left, right) if not _size(x))
        if not small or _size(left) + _size(right) > MAX_TEXT // 1024:
            raise SecurityError(f"the {operator} operator would make too large a value")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _concat(parts: list) -> str:
    check_clock()
    texts = [str(part) for part in parts]
    if sum(map(len, texts)) > MAX_TEXT:
        raise SecurityError(f"it makes a text of more than {MAX_TEXT} characters")
    return "".join(texts)


def _bounded_range(*args: int) -> range:
    steps = range(*args)
    if len(steps) > MAX_STEPS:
        raise SecurityError(f"range() of {len(steps)} steps; at most {MAX_STEPS} are allowed")
    return _Steps(steps)  # type: ignore[return-value]


class _Steps:
    """A range that looks at the clock while it is stepped through."""

    def __init__(self, steps: range):
        self._steps = steps

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, at: int) -> int:
        return self._steps[at]

    def __iter__(self) -> Iterator[int]:
        for step in self._steps:
            check_clock()
            yield step


def _raise(message: str) -> None:
    raise Refused(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys=False) -> str:
    """As Hugging Face renders it: no HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def compile_template(source: str) -> Template:
    env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    env.filters |= {"tojson": _tojson, "bounded_concat": _concat}
    for name in ("center", "indent", "format", "wordwrap"):  # could ask for any width
        env.filters[name] = _narrow(env.filters[name])
    env.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now, "range": _bounded_range}
    return env.from_string(source)


def _narrow(filter_: Any) -> Any:
    """A filter whose numeric arguments are small and whose format has no widths."""

    def narrowed(value: Any, *args: Any, **kwargs: Any) -> Any:
        wide = [x for x in (*args, *kwargs.values()) if isinstance(x, int) and abs(x) > 1024]
        if wide or (filter_.__name__ == "do_format" and any(c.isdigit() or c == "*" for c in str(value))):
            raise SecurityError(f"filter {filter_.__name__.removeprefix('do_')} with width {wide[:1] or value!r}")
        return filter_(value, *args, **kwargs)

    return narrowed


def run(template: Template, names: Mapping[str, Any]) -> str:
    """Render within the bounds."""
    token = _deadline.set(time.monotonic() + MAX_SECONDS)
    try:
        return "".join(_within_bounds(template.generate(**names)))
    finally:
        _deadline.reset(token)


def _within_bounds(pieces: Iterator[str]) -> Iterator[str]:
    size = 0
    for piece in pieces:
        check_clock()
        size += len(piece)
        if size > MAX_TEXT:
            raise SecurityError(f"it writes more than {MAX_TEXT} characters")
        yield piece
