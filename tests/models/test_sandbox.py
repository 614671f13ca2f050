"""Templates that try to get out, or to never end."""

import json
import time
from types import SimpleNamespace

import jinja2
import pytest
from jinja2.sandbox import SecurityError

from ruvmlx.errors import RuvmlxError, UnsupportedModel
from ruvmlx.models.config.model import Message
from ruvmlx.models.text.chat_template import ChatTemplate
from ruvmlx.models.text.sandbox_bounds import Budget
from ruvmlx.models.text.template_time import TimeLimit
from tests.limits import peak_memory

from . import template_mutants

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ().__class__.__base__.__subclasses__() | length }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ strftime_now.__globals__ }}",
    "{{ range.__init__.__globals__ }}",
    "{{ self.__init__.__globals__.__builtins__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ ''['__class__'] }}",
    "{{ (''|attr('__class__')).__name__ }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{0.__class__.__init__.__globals__}'.format_map({'0': ''}) }}",
    "{{ [''] | map(attribute='__class__') | list }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ open('/etc/passwd').read() }}",
    "{% import 'os' as os %}{{ os }}",
    "{% extends 'x' %}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_cannot_leave_the_sandbox(template):
    """Nothing of Python's insides, no files, no changes to the chat: refused, or rendered as nothing."""
    chat = [Message("user", "harmless")]
    try:
        out = ChatTemplate(template, []).render(chat)
    except RuvmlxError as error:
        assert "\n" not in str(error)
    else:
        assert out.strip("[] \n") in ("", "Undefined", ", ")


def grown(step: str) -> str:
    """A template that replaces x by `step`, which is longer, sixty times."""
    loop = f"{{% for i in range(60) %}}{{% set n.x = {step} %}}{{% endfor %}}"
    return "{% set n = namespace(x='aa') %}" + loop


def nested_loops(body: str) -> str:
    """Ten thousand million turns of two loops."""
    return f"{{% for a in range(99999) %}}{{% for b in range(99999) %}}{body}{{% endfor %}}{{% endfor %}}"


RUNAWAYS = [
    nested_loops(""),
    nested_loops("{{ a }}"),
    "{{ range(10**9) | list }}",
    "{{ 'a' * 10**10 }}",
    "{{ ['a'] * 10**10 }}",
    "{{ 9 ** 9 ** 9 ** 9 }}",
    grown("n.x + n.x"),
    grown("n.x ~ n.x"),
    grown("n.x.replace('a', 'aaaa')"),
    grown("n.x | replace('a', 'aaaa')"),
    grown("n.x.join([n.x, n.x])"),
    grown("[n.x, n.x] | join(n.x)"),
    grown("'%s%s' % (n.x, n.x)"),
    grown("'%(a)s%(a)s' % {'a': n.x}"),
    grown("'{0}{0}{0}'.format(n.x)"),
    grown("'{a}{a}'.format(a=n.x)"),
    grown("'{a}{a}'.format_map({'a': n.x})"),
    grown("'%s%s' | format(n.x, n.x)"),
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:>1000000000}'.format('a') }}",
    "{{ '{:{}}'.format('a', 1000000000) }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ 'a'.ljust(1000000000) }}",
    "{{ 'a\\nb' | indent(1000000000) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ 'a'.zfill(10 * 1000 * 1000 * 1000) }}",
]


def doubling_template(step: str, then: str) -> str:
    """Sixty steps, each of which puts x into a value twice: small in memory, endless when written."""
    loop = f"{{% for i in range(60) %}}{{% set n.x = {step} %}}{{% endfor %}}"
    return "{% set n = namespace(x=[[1, [1]]]) %}" + loop + then


LISTED = "range(100000) | list"
RUNAWAYS += [
    # Loops that look nothing up, and calls of C functions that take hours or all memory.
    f"{{% for a in {LISTED} %}}{{% for b in {LISTED} %}}{{% endfor %}}{{% endfor %}}",
    "{{ 1.5 | round(1000000000, 'ceil') }}",
    "{% set x = 1.5 | round(1000000000, 'ceil') %}",
    "{{ messages | tojson(indent=1500000000) }}",
    "{{ 'a\tb'.expandtabs(1500000000) }}",
    "{{ ('a\n' * 1000) | indent('b' * 1000 * 1000) }}",
    "{{ ('a' * 1000 * 1000) | wordwrap(1) }}",
    "{{ ('http://a ' * 1000 * 100) | urlize }}",
    "{{ (range(90000) | batch(1) | list) | sum(start=[]) | length }}",
    "{{ ('a' * 1000 * 1000).translate({97: 'b' * 1000}) }}",
    "{{ 1 }}" * 400_000,
    "{% set d = {'k': 'a' * 1000 * 1000} %}{{ [d.items()] * 1000 }}",
    "{% set a = 'a' * 1000 * 700 %}{{ a.strip('b' * 1000 * 700) }}",
    "{{ (1).to_bytes(1000000000, 'big') }}",
    "{{ {}.fromkeys(range(100000), 'a' * 1000) }}",
    "{{ '{0:{1}}'.format('a', 1000000000) }}",
    "{% set a = ('f' * 1000 * 800) | int(0, 16) %}{{ a // 3 }}",
    "{% macro m() %}{% for a in range(99999) %}{{ 'a' * 1000 }}{% endfor %}{% endmacro %}{{ m() }}",
    "{% macro m(x) %}{{ m(x) ~ m(x) }}{% endmacro %}{{ m(1) }}",
    "".join(f"{{% set a{i} = 'a' * 1000 * 900 %}}" for i in range(2000)),
    doubling_template("[n.x, n.x]", "{{ n.x }}"),
    doubling_template("[n.x, n.x]", "{{ n.x | join }}"),
    doubling_template("[n.x, n.x]", "{{ n.x | tojson }}"),
    doubling_template("(n.x, n.x)", "{{ '%s' | format(n.x) }}"),
    doubling_template("{'a': n.x, 'b': n.x}", "{{ n.x }}"),
    doubling_template("dict(a=n.x, b=n.x)", "{{ n.x }}"),
    doubling_template("n.x | groupby(1) | list", "{{ n.x }}"),
    doubling_template("[n.x, n.x]", "{% set m = n.x %}" + doubling_template("[n.x, n.x]", "{{ m == n.x }}")),
]


@pytest.mark.parametrize("template", RUNAWAYS)
def test_runaway_templates_are_stopped(template, monkeypatch):
    """Loops, repetitions, doublings and widths end within the bounds, in little memory."""
    monkeypatch.setattr("ruvmlx.models.text.template_time.MAX_SECONDS", 0.3)
    before = peak_memory()
    with pytest.raises(UnsupportedModel, match=r"template (fails|cannot be read)"):
        ChatTemplate(template, []).render([Message("user", "x")])
    assert peak_memory() - before < 300 << 20


def test_all_renders_of_a_conversation_have_one_limit_of_time(monkeypatch):
    """A template that fails with a system message is tried again without it, but not with new time."""
    monkeypatch.setattr("ruvmlx.models.text.template_time.MAX_SECONDS", 0.3)
    endless = ChatTemplate(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", []
    )
    said = [Message("system", "a"), Message("user", "b"), Message("system", "c"), Message("user", "d")]
    started = time.thread_time()
    with pytest.raises(UnsupportedModel, match="ran for more than"):
        endless.render(said)
    assert time.thread_time() - started < 0.55


def test_a_pause_of_the_machine_does_not_end_a_template(monkeypatch):
    """The system can count a pause as processor time. Before, a template of some microseconds then failed."""
    now = [10.0, 20.0]  # seconds of the clock, and of the thread
    clock = SimpleNamespace(monotonic=lambda: now[0], thread_time=lambda: now[1])
    monkeypatch.setattr("ruvmlx.models.text.template_time.time", clock)
    limit = TimeLimit()
    now[:] = 12.0, 22.0
    limit.check()
    limit.check()
    now[:] = 12.2, 22.2
    with pytest.raises(SecurityError, match=r"ran for more than 1.5 seconds"):
        limit.check()


LONG = [Message("user", "<|x y" * 200_000)]  # two bytes a character, because of its marks
CONTENT = "{% set c = messages[0].content %}{% set n = namespace(k=[]) %}"


@pytest.mark.parametrize(
    "template",
    [
        "".join(f"{{% set a{i} = c * 7 %}}" for i in range(40)),
        "".join(f"{{% set a{i} = (c * 7).upper() %}}" for i in range(40)),
        "{% for i in range(40) %}{% set n.k = n.k + [c * 6] %}{% endfor %}",
        "{% for i in range(999) %}{% set x = {'a': c[i:]} %}{% endfor %}",
    ],
)
def test_what_a_template_holds_is_bounded(template):
    """Texts and lists made of a long message, in many variables."""
    before = peak_memory()
    with pytest.raises(UnsupportedModel, match=r"holds more than|makes a text of more than"):
        ChatTemplate(CONTENT + template, ["<|im_start|>"]).render(LONG)
    assert peak_memory() - before < 250 << 20


def test_what_a_template_lets_go_does_not_count():
    template = CONTENT + "{% for i in range(60) %}{% set n.k = c * 7 %}{% endfor %}{{ n.k | length }}"
    assert int(ChatTemplate(template, []).render(LONG)) == 7 * len(LONG[0].content)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (
            "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ m.role[0:2] }}{% endfor %}",
            "1/2us2/2as",
        ),
        ("{{ messages | selectattr('role', 'equalto', 'tool') and 'lazy' }}", "lazy"),
        ("{{ messages | map(attribute='role') | join(',') }}", "user,assistant"),
        (
            "{{ [1, 2] + [3] }}{{ (1, 2) }}{{ {'a': [1]} }}{{ 'a' ~ 1 ~ none }}",
            "[1, 2, 3](1, 2){'a': [1]}a1None",
        ),
        (
            "{{ [1, 2, 3] | sum }}{{ [{'n': 2}, {'n': 3}] | sum('n', 1) }}{{ [[1], [2]] | sum(start=[]) }}",
            "66[1, 2]",
        ),
        ("{{ '%s=%d' | format('a', 3) }}{{ '{:>4}'.format('b') }}{{ '%-3s|' % 'c' }}", "a=3   bc  |"),
        ("{{ [{'a': 1}] | tojson(indent=2) }}", '[\n  {\n    "a": 1\n  }\n]'),
        (
            "{% set n = namespace(x=1) %}{% for i in [1, 2] %}{% set n.x = n.x + i %}{% endfor %}{{ n.x }}",
            "4",
        ),
        (
            "{% for a, b in {'k': 1}.items() %}{{ a }}{{ b }}{% endfor %}{{ 'abc'[::-1] }}{{ 'abc'[-1] }}",
            "k1cbac",
        ),
        ("{% macro m(x, y=2) %}{{ x }}{{ caller() }}{% endmacro %}{% call m(3) %}{{ 4 }}{% endcall %}", "34"),
        ("{% for x in [[1, [2]]] recursive %}{{ x[0] }}{{ loop(x[1:]) if x[1:] else '' }}{% endfor %}", "12"),
    ],
)
def test_bounds_change_no_text(template, text):
    """What is put in a template's way renders as Jinja alone does."""
    chat = [Message("user", "a"), Message("assistant", "b")]
    assert ChatTemplate(template, []).render(chat) == text
    plain = jinja2.Environment().from_string(template)
    plain.environment.filters["tojson"] = lambda value, indent: json.dumps(value, indent=indent)
    assert plain.render(messages=[{"role": m.role, "content": m.content} for m in chat]) == text


def test_a_long_conversation_fits():
    """The bounds grow with the conversation: 1,000 turns can be gathered piece by piece."""
    gathered = (
        "{% set n = namespace(all='', kept=[]) %}{% for m in messages %}{% set n.all = n.all ~ m.content %}"
        "{% set n.kept = n.kept + [m] %}{% endfor %}{{ n.all }}{{ n.kept | length }}"
    )
    chat = [Message("user", "word " * 100) for _ in range(1000)]
    assert ChatTemplate(gathered, []).render(chat) == "word " * 100_000 + "1000"


def test_random_templates_stay_within_the_bounds(full):
    """2,000 with --full; each may take two seconds, and no memory to speak of."""
    assert template_mutants.campaign(2000 if full else 30) == []


def test_a_number_has_at_most_4096_bits():
    budget = Budget({}, TimeLimit())
    budget.spread(1 << 4095)
    with pytest.raises(SecurityError, match="4096 bits"):
        budget.spread(1 << 4096)


@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize("depth", [150, 900, 100_000])
def test_what_a_template_is_given_is_not_too_deep(kind, depth):
    """However deep: refused by name, before Python's own limit on calls is near."""
    value = kind()
    for _ in range(depth):
        value = [value] if kind is list else {"properties": value}
    with pytest.raises(SecurityError, match="more than 100 deep"):
        Budget({"tools": [value]}, TimeLimit())
