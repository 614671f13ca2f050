"""Random chat templates that try to run long or to take memory: made of what templates can do at all.

    python -m tests.models.template_mutants 2000

Each runs in a process with limits, and must end within the template's two seconds, in little memory, with a
text or one of our errors.
"""

import multiprocessing
import random
import re
import resource
import sys
import time
from dataclasses import dataclass

from tests.limits import limit_memory, peak_memory

SECONDS = 3.0  # 2 for the template, and what a check is late
COMPILED = 3.0  # more, to compile
BYTES = 200 << 20
NUMBERS = ["0", "1", "2", "3", "7", "100", "1000", "1024", "99999", "1000000000", "-1", "1.5", "1e308", "n.i"]
TEXTS = ["''", "'a'", "'ab '", "'\\n'", "'<a>'", "messages[0].content", "'é😀'", "n.t", "n.t", "n.t", "g"]
# {t} is a text, {n} a number, {s} a list, {e} anything.
TEXT = [
    "({t} + {t})",
    "({t} ~ {e})",
    "({t} * {n})",
    "('%s%s' % ({e}, {e}))",
    "'{0}{0}'.format({e})",
    "({t} | upper)",
    "({t} | title)",
    "({t} | trim({t}))",
    "({t} | replace({t}, {t}))",
    "({t} | center({n}))",
    "({t} | indent({n}))",
    "({t} | indent({t}))",
    "({t} | truncate({n}))",
    "({t} | escape)",
    "({t} | urlencode)",
    "({e} | string)",
    "('%s-%s' | format({e}, {t}))",
    "({s} | join({t}))",
    "({e} | tojson)",
    "({e} | tojson(indent={n}))",
    "{t}.replace({t}, {t})",
    "{t}.join([{t}, {t}])",
    "{t}.ljust({n})",
    "{t}.zfill({n})",
    "{t}.strip({t})",
    "{t}[::-1]",
    "{t}[1:]",
    "('%' ~ {n} ~ 'd') % {n}",
    "('{:' ~ {n} ~ '}').format({e})",
    "m({t})",
    "{t}.upper()",
    "({t} if {e} else {t})",
    "({e} | safe)",
    "({s} | map('string') | join)",
]
NUMBER = [
    "({t} | length)",
    "({s} | length)",
    "({n} + {n})",
    "({n} * {n})",
    "({n} - {n})",
    "({n} ** {n})",
    "({n} // 3)",
    "{t}.count({t})",
    "{t}.find({t})",
    "({n} | round({n}))",
    "({n} | round({n}, 'ceil'))",
    "({t} | int(0, 16))",
    "({n} | int)",
    "({n} | abs)",
    "(1 if {e} == {e} else 2)",
    "(1 if {t} in {t} else 2)",
    "({t} | wordcount)",
    "(({s} | map('length')) | sum)",
]
LIST = [
    "[{e}, {e}]",
    "({e}, {e})",
    "[n.s, n.s]",
    "(range({n}) | list)",
    "({s} + {s})",
    "({s} * {n})",
    "({s} | list)",
    "({s} | unique | list)",
    "({s} | reverse | list)",
    "({s} | batch({n}) | list)",
    "({s} | batch(2, {e}) | list)",
    "({s} | slice({n}, {e}) | list)",
    "({s} | map('string') | list)",
    "({s} | map('string') | sort)",
    "({t} | list)",
    "{t}.split({t})",
    "{t}.splitlines()",
    "{s}[1:]",
    "{s}[::-1]",
    "messages",
    "({'a': {e}, 'b': {e}}.items() | list)",
    "(dict(a={e}, b={e}) | dictsort)",
    "({s} | map('list') | sum(start=[]))",
    "[{s}] * {n}",
    "({s} | select | list)",
    "([{s}, {s}] | groupby(0) | list)",
    "({s} | map(attribute='x', default={e}) | list)",
]


@dataclass
class Maker:
    """Makes one template. Its variables: a namespace n with a text t, a number i, a list s; a text g."""

    rng: random.Random

    def make_expression(self, kind: str, depth: int = 2) -> str:
        kind = self.rng.choice("tns") if kind == "e" else kind
        if depth <= 0 or self.rng.random() < 0.2:
            return self.rng.choice(
                {"t": TEXTS, "n": NUMBERS, "s": ["n.s", "n.s", "[1, 'a']", "messages"]}[kind]
            )
        form = self.rng.choice({"t": TEXT, "n": NUMBER, "s": LIST}[kind])
        return re.sub(r"\{([tnse])\}", lambda found: self.make_expression(found[1], depth - 1), form)

    def statement(self, depth: int = 3) -> str:
        pick = self.rng.random()
        if depth <= 0 or pick < 0.2:
            return f"{{{{ {self.make_expression('e')} }}}}"
        if pick < 0.6:
            name, kind = self.rng.choice([("t", "t"), ("t", "t"), ("s", "s"), ("s", "s"), ("i", "n")])
            return f"{{% set n.{name} = {self.make_expression(kind)} %}}"
        inner = "".join(self.statement(depth - 1) for _ in range(self.rng.randint(1, 3)))
        if pick < 0.88:
            over = self.rng.choice(["range(60)", "range(60)", "range(99999)", "messages", "n.s", "n.t"])
            return f"{{% for i in {over} %}}{inner}{{% endfor %}}"
        if pick < 0.94:
            return f"{{% set g %}}{inner}{{% endset %}}"
        return f"{{% filter replace('a', {self.make_expression('t')}) %}}{inner}{{% endfilter %}}"

    def template(self) -> str:
        head = "{% set n = namespace(t='aa', i=2, s=[1]) %}{% set g = 'text' %}"
        macro = "{% macro m(x) %}{{ x }}{{ m(x) if x | length > 1000 }}{% endmacro %}"
        body = "".join(self.statement() for _ in range(self.rng.randint(1, 4)))
        return (head + macro + body) * self.rng.choice([1, 1, 1, 1, 30])


def run(seed: int) -> str:
    """Render the template of a seed; "" or what is wrong with it."""
    from ruvmlx.errors import RuvmlxError
    from ruvmlx.models.config.model import Message
    from ruvmlx.models.text.chat_template import ChatTemplate

    source = Maker(random.Random(seed)).template()
    before, started, said = peak_memory(), time.process_time(), ""
    try:
        ChatTemplate(source, []).render([Message("user", "Where is it?"), Message("assistant", "There.")])
    except RuvmlxError as error:
        said = str(error)
    taken = time.process_time() - started
    grown = peak_memory() - before
    limit = SECONDS + COMPILED * len(source) / 100_000
    if "\n" in said or taken > limit or grown > BYTES:
        return f"seed {seed}: {taken:.1f} s, {grown >> 20} MB, {said[:100]!r}: {source[:300]}"
    return ""


def _child(seeds: range, out: "multiprocessing.Queue[tuple[int, str]]") -> None:
    limit_memory(4 << 30)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for seed in seeds:
        out.put((seed, run(seed)))


def campaign(count: int, first: int = 0, patience: float = 60.0) -> list[str]:
    """What is wrong with `count` templates; a child that dies or hangs is what is wrong with its seed."""
    context, wrong, seed = multiprocessing.get_context("fork"), [], first
    while seed < first + count:
        out: multiprocessing.Queue[tuple[int, str]] = context.Queue()
        child = context.Process(target=_child, args=(range(seed, min(seed + 100, first + count)), out))
        child.start()
        end = min(seed + 100, first + count)
        while seed < end:
            try:
                done, said = out.get(timeout=patience)
            except Exception:  # noqa: BLE001 - Empty: it hangs, or it is gone
                child.kill()
                wrong.append(f"seed {seed}: no answer: {Maker(random.Random(seed)).template()[:300]}")
                seed += 1
                break
            seed = done + 1
            wrong += [said] if said else []
        child.kill()
        child.join()
    return wrong


if __name__ == "__main__":
    found = campaign(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print("\n".join([*found, f"{len(found)} of {sys.argv[1]} templates broke a bound"]))
