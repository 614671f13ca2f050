"""A Jinja sandbox for templates that came with a model: no attribute tricks, no files, bounded work.

Jinja's ImmutableSandboxedEnvironment keeps templates away from Python's insides: alone it stops all 21
escapes in `tests/models/test_sandbox.py`. Of other work it bounds only range(): of the 27 runaway templates
there, 25 ran into a limit of 10 s of processor time or 2 GiB of memory, or wrote a text of 1 GB. So a render
has limits of time and size on top of it (`sandbox_bounds.py`); the clock is looked at whenever a template
looks something up, calls, computes or writes.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from .sandbox_bounds import (
    Steps,
    bounded_filter,
    check_call,
    check_clock,
    check_operands,
    check_text,
    clock,
    concat,
    settled,
    text_method,
)
from .typed_text import GUARD

_ESCAPED = re.compile(f"[^\0-\x7f{GUARD}]")


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

    def call(self, context: Any, function: Callable, *args: Any, **kwargs: Any) -> Any:
        args = settled(args)
        check_call(*text_method(function), args, kwargs)
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """`a ~ b` becomes a filter of ours: Jinja cannot intercept that operator."""
        return _BoundConcat().visit(super()._parse(source, name, filename))


class _BoundConcat(NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # Jinja finds it by this name
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "bounded_concat", [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """{% generation %}...{% endgeneration %} marks assistant text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as an instance's

    def parse(self, parser: Any) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [nodes.Scope(body, lineno=line)]  # as in transformers: what it sets is unknown outside


def _raise(message: str) -> None:
    raise Refused(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """As Hugging Face renders it: no HTML escapes. The marks of typed text are never escaped."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _ESCAPED.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form[:100])


def compile_template(source: str) -> Template:
    env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    env.filters = {name: bounded_filter(name, plain) for name, plain in env.filters.items()}
    env.filters |= {"tojson": _tojson, "bounded_concat": concat}
    env.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now, "range": Steps}
    del env.globals["lipsum"]
    return env.from_string(source)


def run(template: Template, names: Mapping[str, Any]) -> str:
    """Render within the bounds."""
    with clock():
        return "".join(_within_bounds(template.generate(**names)))


def _within_bounds(pieces: Iterator[str]) -> Iterator[str]:
    size = 0
    for piece in pieces:
        check_clock()
        size += len(piece)
        check_text(size)
        yield piece
