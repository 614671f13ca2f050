"""Templates that try to get out, or to never end."""

import resource

import pytest

from ruvmlx.errors import RuvmlxError, UnsupportedModel
from ruvmlx.models.chat_template import ChatTemplate
from ruvmlx.models.model import Message

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


def nested(body: str) -> str:
    """Ten thousand million turns of two loops."""
    return f"{{% for a in range(99999) %}}{{% for b in range(99999) %}}{body}{{% endfor %}}{{% endfor %}}"


RUNAWAYS = [
    nested(""),
    nested("{{ a }}"),
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


@pytest.mark.parametrize("template", RUNAWAYS)
def test_runaway_templates_are_stopped(template, monkeypatch):
    """Loops, repetitions, doublings and widths end within the bounds, in little memory."""
    monkeypatch.setattr("ruvmlx.models.sandbox_bounds.MAX_SECONDS", 0.3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UnsupportedModel, match=r"template (fails|cannot be read)"):
        ChatTemplate(template, []).render([Message("user", "x")])
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 300 * 1024
