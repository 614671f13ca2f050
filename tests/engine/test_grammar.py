"""Schemas and grammars that take hours or all memory to compile are refused; this process pays nothing."""

import threading

import pytest

from ruvmlx.engine import grammar
from ruvmlx.engine.grammar import Constraint, Vocabulary, compiled_matcher
from ruvmlx.errors import Interrupted, UsageError
from ruvmlx.platform.bounded_process import stop_requests
from tests.limits import peak_memory

PRIMES = [9973, 9967, 9949, 9941, 9931, 9929, 9923]


def multiple(*numbers: int) -> dict:
    return {"type": "integer", "allOf": [{"multipleOf": n} for n in numbers]}


RUNAWAY = {
    "two multiples": Constraint.json_schema(multiple(*PRIMES[:2])),
    "seven multiples": Constraint.json_schema(multiple(*PRIMES)),
    "one large multiple": Constraint.json_schema({"type": "integer", "multipleOf": 999983}),
    "many properties": Constraint.json_schema(
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(16_000)}}
    ),
    "in a grammar": Constraint.lark('start: %json {"type": "integer", "multipleOf": 999983}'),
}

REFUSED = r"^the (JSON schema|grammar) (takes more than 1 seconds|cannot be used: fuel)"


@pytest.fixture
def vocabulary():
    from llguidance import LLTokenizer

    special = {"<|end|>": 3}
    tokens = LLTokenizer(grammar._Bytes(300, special), slices=LLTokenizer.json_slices())
    return Vocabulary(tokens, 300, special)


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch):
    monkeypatch.setattr(grammar, "_refusals", type(grammar._refusals)())
    monkeypatch.setattr(grammar, "SECONDS", 1.0)
    compiled_matcher.cache_clear()


@pytest.mark.parametrize("name", RUNAWAY)
def test_what_runs_away_is_refused(name, vocabulary, capfd, monkeypatch):
    """In one line, with no memory taken here; the verdict is remembered, and others are compiled."""
    before = peak_memory()
    with pytest.raises(UsageError, match=REFUSED) as refused:
        compiled_matcher(vocabulary, RUNAWAY[name])
    after = peak_memory()
    assert "\n" not in str(refused.value) and capfd.readouterr() == ("", "")
    assert after - before < 30 << 20
    assert compiled_matcher(vocabulary, Constraint.json_schema({"type": "object", "properties": {"a": {}}}))
    monkeypatch.setattr(grammar, "_children", None)
    with pytest.raises(UsageError, match=REFUSED):
        compiled_matcher(vocabulary, RUNAWAY[name])


def test_special_tokens_in_grammars(vocabulary):
    """By id or by name, as the model has them; others are refused."""
    assert compiled_matcher(vocabulary, Constraint.lark('start: <[299]> "a" <|end|>'))
    for source in ("start: <[777]>", "start: <|other|>"):
        with pytest.raises(UsageError, match="the grammar cannot be used"):
            compiled_matcher(vocabulary, Constraint.lark(source))


def test_refusals_that_are_remembered_are_bounded(vocabulary, monkeypatch):
    monkeypatch.setattr(grammar, "KNOWN", 3)
    for i in range(5):
        with pytest.raises(UsageError, match="cannot be used"):
            compiled_matcher(vocabulary, Constraint("json", f'{{"type": "strin{i}"}}'))
    assert len(grammar._refusals) == 3


def test_compiling_can_be_stopped(vocabulary, monkeypatch):
    """As Ctrl+C and SIGTERM do it; that is no verdict."""
    monkeypatch.setattr(grammar, "SECONDS", 1e5)
    ended = threading.Event()

    def compile_it() -> None:
        with pytest.raises(Interrupted, match="was stopped"):
            compiled_matcher(vocabulary, RUNAWAY["one large multiple"])
        ended.set()

    thread = threading.Thread(target=compile_it)
    thread.start()
    while not ended.wait(0.05):
        stop_requests()
    thread.join()
    assert not grammar._refusals
