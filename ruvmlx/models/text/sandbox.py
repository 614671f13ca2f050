"""This module runs a model's Jinja chat templates in a sandbox with limits of time and memory.

Jinja's ImmutableSandboxedEnvironment keeps templates away from Python's internals;
`tests/models/test_sandbox.py` has attacks that must fail. Of a template's time and memory, Jinja limits only
range(); `sandbox_bounds.py` limits the rest. Jinja must not evaluate expressions when it compiles a template,
because the limits apply only while the template renders.
"""

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import pass_environment
from jinja2.visitor import NodeTransformer

from .sandbox_bounds import (
    FILTERS,
    MAX_INDENT,
    MAX_SOURCE,
    Loop,
    Steps,
    Variables,
    admit,
    bounded_concat,
    bounded_filter,
    bounded_join,
    bounded_operation,
    bounded_slice,
    bounded_sum,
    budgeted,
    call_function,
    check_clock,
)
from .template_time import TimeLimit
from .typed_text import GUARD

_ESCAPED = re.compile(f"[^\0-\x7f{GUARD}]")


class Refused(TemplateError):
    """This error means that a template called raise_exception(), because it does not accept the
    conversation."""


class _NothingFolded(CodeGenerator):
    """A Jinja compiler that does not evaluate constant expressions such as {{ 1.5 | round(9) }} at compile
    time. Constant expressions are evaluated while the template renders, because the limits apply only during
    rendering."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Any, finalize: Any) -> str:
        if isinstance(node, nodes.TemplateData):
            return super()._output_child_to_const(node, frame, finalize)
        raise nodes.Impossible


class _Environment(ImmutableSandboxedEnvironment):
    """A Jinja environment that checks the time, and the sizes of new values, at the operations of a
    template."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])
    code_generator_class = _NothingFolded
    concat = staticmethod(bounded_concat)

    def getattr(self, obj: Any, attribute: str) -> Any:
        check_clock()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        check_clock()
        return super().getitem(obj, argument)

    def call(self, context: Any, function: Callable, /, *args: Any, **kwargs: Any) -> Any:
        return call_function(function, args, partial(super().call, context, function), kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        return bounded_operation(operator, left, right, partial(super().call_binop, context, operator))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse a template. Replace the operations that Jinja's sandbox cannot intercept by calls of filters
        that check the limits (_Bound)."""
        return _Bound().visit(super()._parse(source, name, filename))


class _Bound(NodeTransformer):
    """A visitor of a template's syntax tree. The visitor replaces concatenations, loops, slices and literals
    by calls of filters that check the limits. For each node, Jinja calls the method `visit_<type of the
    node>`."""

    def _filter_node(self, name: str, node: Any, *args: nodes.Expr | None) -> nodes.Filter:
        given = [arg or nodes.Const(None, lineno=node.lineno) for arg in args]
        return nodes.Filter(node, name, given, [], None, None, lineno=node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return self._filter_node("bounded_concat", nodes.List(node.nodes, lineno=node.lineno))

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = self._filter_node("bounded_loop", node.iter)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        return self._filter_node("bounded_slice", node.node, node.arg.start, node.arg.stop, node.arg.step)

    def _literal(self, node: Any) -> Any:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else self._filter_node("bounded_value", node)

    visit_List = visit_Tuple = visit_Dict = _literal


class _Generation(Extension):
    """The Jinja tag {% generation %}...{% endgeneration %}, which marks assistant text for training. This
    class renders the text between the two tags and ignores the tags."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as an instance's attribute

    def parse(self, parser: Any) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # As in transformers, variables that are set between the tags do not exist after the end tag.
        return [nodes.Scope(body, lineno=line)]


def _raise(message: str) -> None:
    raise Refused(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON without HTML escapes, as transformers does. The character U+FDD0 that marks
    users' text (typed_text.py) is not escaped."""
    widths = [len(x) if isinstance(x, str) else x for x in (indent, *(separators or ())) if x is not None]
    if any(width > MAX_INDENT for width in widths):
        raise SecurityError(f"tojson with an indent above {MAX_INDENT}")
    encoder = json.JSONEncoder(ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    # Without an indent, the JSON is at most about six times as long as the value, and json's C code makes it
    # quickly, so the limits need no checks in between.
    text = encoder.encode(admit(value)) if indent is None else bounded_join(encoder.iterencode(admit(value)))
    return _ESCAPED.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form[:100])


@pass_environment
def _sum(environment: Any, values: Any, attribute: Any = None, start: Any = 0) -> Any:
    getter = (lambda value: value) if attribute is None else make_attrgetter(environment, attribute)
    return bounded_sum(values, getter, start)


def compile_template(source: str) -> Template:
    if len(source) > MAX_SOURCE:
        raise SecurityError(f"it has {len(source)} characters; at most {MAX_SOURCE} are read")
    env = _Environment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols]
    )
    known = env.filters | {"tojson": _tojson, "sum": _sum}
    env.filters = {name: bounded_filter(name, known[name]) for name in FILTERS}
    env.filters |= {
        "bounded_concat": bounded_concat, "bounded_loop": Loop, "bounded_slice": bounded_slice,
        "bounded_value": admit,
    }  # fmt: skip
    env.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now, "range": Steps}
    env.globals["namespace"] = Variables
    del env.globals["lipsum"]
    return env.from_string(source)


def run(template: Template, names: Mapping[str, Any], limit: TimeLimit) -> str:
    """Render the template with the variables `names`, within the limits of sandbox_bounds.py. Raises
    SecurityError beyond a limit. limit: the time limit; several renders can use the same object, and
    then share its time"""
    with budgeted(names, limit):
        return bounded_join(template.generate(**names))
