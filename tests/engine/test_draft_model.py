"""A draft model changes no reply, and is left alone where it saves no time."""

import random
from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.engine import LLMInferenceEngine, Sampling
from ruvmlx.engine.draft_length import MARGIN, Acceptance, DraftChain, FixedLength, MeasuredLength
from ruvmlx.engine.draft_model import (
    CONFIDENCE_PRIOR,
    CONFIDENCES,
    LONGEST_REST,
    DraftModel,
    check_vocabulary,
)
from ruvmlx.errors import UsageError
from ruvmlx.kv.policy import F16
from ruvmlx.models.load import load_model
from tests.backends.exact_prompts import ExactPrompts
from tests.models.make_models import make_safetensors_model

from .test_drafts import DRAWN, POLICIES, TEXT, Trace
from .test_engine import GREEDY, request
from .test_scheduler import adapter_of, assert_equal


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """Another model with the same tokens."""
    return load_model(str(make_safetensors_model(tmp_path_factory.mktemp("small") / "small", seed=23)))


def drafts_of(model, packed):
    return DraftModel(ExactPrompts(model, threads=1), model.context, packed.config.vocab_size)


@pytest.fixture(scope="module", params=POLICIES)
def engines(request, packed_model, small_model):
    """Engines without drafts; with another model's guesses, which are mostly wrong; with the model's own."""
    policy, backend = POLICIES[request.param], ExactPrompts(packed_model, threads=2, chunk=64)
    return [
        LLMInferenceEngine(packed_model, backend, policy, speculate="off"),
        *(
            LLMInferenceEngine(
                packed_model, backend, policy, speculate="5", draft_model=drafts_of(model, packed_model)
            )
            for model in (small_model, packed_model)
        ),
    ]


@pytest.mark.parametrize("sampling", DRAWN)
@pytest.mark.parametrize("seed", [None, 3])
def test_a_reply_is_the_plain_one(engines, sampling, seed):
    """Tokens, traces and caches are equal, whatever the draft model guesses."""
    replies = []
    for engine in engines:
        adapter = adapter_of(engine.model.config, seed) if seed else None
        trace = Trace()
        asked = request(prompt=TEXT, sampling=sampling, max_new_tokens=150, ignore_eos=True, logprobs=2)
        replies.append((engine.generate(asked, adapter, trace), trace.rows))
    want, rows = replies[0]
    for got, drafted_rows in replies[1:]:
        assert_equal([got], [want])
        assert got.logprobs == want.logprobs and got.kv == want.kv
        for one, other in zip(rows, drafted_rows, strict=True):
            assert one[2] == other[2]
            np.testing.assert_array_equal(one[0], other[0])
            np.testing.assert_array_equal(one[1], other[1])


def test_a_model_guesses_itself(engines, packed_model, monkeypatch):
    """Greedy: all guesses of the same weights are right, but for those beyond the last token or a page."""
    monkeypatch.setattr("ruvmlx.engine.prompt_lookup.PromptLookup.draft", lambda *_: None)
    asked = request(prompt="one two three", sampling=GREEDY, max_new_tokens=120, ignore_eos=True)
    engine = engines[2]
    engine.draft_model = drafts_of(packed_model, packed_model)
    got = engine.generate(asked)
    assert got.accepted > 90 and got.accepted >= 0.95 * got.drafted


def test_guesses_follow_the_newest_tokens_of_any_reply(packed_model):
    """Two replies in turns, with wrong guesses to be taken back: each guess is that of a new draft model."""
    shared, length, rng = drafts_of(packed_model, packed_model), FixedLength(4), random.Random(3)
    replies = [[5, 6, 7], [5, 6, 9, 11]]
    for _ in range(12):
        tokens = replies[rng.randrange(2)]
        want = drafts_of(packed_model, packed_model).draft(tokens, 4, length)
        got = shared.draft(tokens, 4, length)
        assert got.tokens == want.tokens and len(got.tokens) == 4
        assert got.confidences == pytest.approx(want.confidences, rel=1e-4)
        tokens += [*got.tokens[: rng.randrange(4)], rng.randrange(3, 90)]


def test_a_long_prompt_is_read_in_pieces(packed_model, monkeypatch):
    monkeypatch.setattr("ruvmlx.engine.draft_model.PIECE", 16)
    model, length = drafts_of(packed_model, packed_model), FixedLength(2)
    tokens = [3 + i % 80 for i in range(50)]
    assert [bool(model.draft(tokens, 2, length).tokens) for _ in range(4)] == [False, False, False, True]


def test_no_guess_beyond_the_context(packed_model):
    model = DraftModel(NativeBackend(packed_model, threads=1), 20, packed_model.config.vocab_size)
    assert model.draft(list(range(3, 20)), 3, FixedLength(3)).tokens
    assert not model.draft(list(range(3, 21)), 3, FixedLength(3)).tokens


def test_no_token_that_the_large_model_lacks(packed_model):
    model = DraftModel(NativeBackend(packed_model, threads=1), 500, 7)
    assert all(token < 7 for token in model.draft([3, 4, 5], 6, FixedLength(6)).tokens)


def test_no_guess_after_a_token_that_the_draft_model_lacks(packed_model):
    """Fine-tunes add tokens after those of their family, for example the marks of ChatML."""
    model, beyond = drafts_of(packed_model, packed_model), packed_model.config.vocab_size
    assert not model.draft([3, 4, beyond], 4, FixedLength(4)).tokens
    assert not model.draft([3, beyond, 5, 6], 4, FixedLength(4)).tokens
    assert model.draft([3, 4, 5], 4, FixedLength(4)).tokens


class Useless(DraftModel):
    """Always sure, always wrong; counts its guesses."""

    def __init__(self):
        self.acceptance = Acceptance(CONFIDENCES, CONFIDENCE_PRIOR)
        self._rest = self._pause = self.count = 0
        self.seconds = 0.01
        self._context = 10**6

    def _guesses(self, tokens, longest):
        while True:
            self.count += 1
            yield 999_999, 0.99


def test_a_useless_model_is_asked_less_and_less(packed_model):
    """After some wrong guesses nothing is checked any more, and one guess in LONGEST_REST tokens is made."""
    model, length, checked = Useless(), MeasuredLength(), []
    length.measure(0, 0.1)
    for _ in range(2000):
        draft = model.draft([1, 2, 3], 7, length)
        checked.append(len(draft.tokens) if draft.is_worth else 0)
        for confidence in draft.confidences[:1]:
            model.acceptance.count(confidence, False)
    assert sum(checked[:30]) <= 40 and not any(checked[30:])
    assert model.count < 60 + 2000 / LONGEST_REST


def test_a_model_that_becomes_right_is_used_again(packed_model):
    model, length = Useless(), MeasuredLength()
    length.measure(0, 0.1)
    length.slope = 0.1
    used = []
    for i in range(1500):
        draft = model.draft([1, 2, 3], 7, length)
        used.append(draft.is_worth)
        for confidence in draft.confidences[:1]:
            model.acceptance.count(confidence, i >= 300)
    assert not any(used[100:300]) and all(used[-100:])


def expected_gain(share, k, slope, step):
    """Tokens per plain step's time of a draft of k tokens: the slow, obvious sum over how many are right."""
    tokens = sum((share**n * (1 - share) if n < k else share**k) * (n + 1) for n in range(k + 1))
    return tokens / (1 + k * (slope + step))


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("slope, step", [(0.17, 0.05), (0.37, 0.1), (0.37, 0.6), (0.1, 0.0)])
def test_a_chain_is_as_long_as_it_pays(share, slope, step):
    gains = [expected_gain(share, k, slope, step) for k in range(8)]
    chain = DraftChain(7, slope, step)
    assert chain.is_worth(share) == (max(gains[1:]) > MARGIN)
    if chain.is_worth(share):
        while chain.goes_on(share) and chain.takes(share):
            chain.add(share)
        assert gains[chain.count] >= 0.97 * max(gains)


def test_other_tokens_are_refused(packed_model, small_model, tmp_path):
    check_vocabulary(packed_model, small_model)
    texts = {i: b"other" for i in (9,)}

    class Other:
        def __getattr__(self, name):
            return getattr(small_model.tokenizer, name)

        def token_bytes(self, token):
            return texts.get(token) or small_model.tokenizer.token_bytes(token)

    with pytest.raises(UsageError, match=r"number 9 is 'other' and not .*same family"):
        check_vocabulary(packed_model, replace(small_model, tokenizer=Other()))


def test_sampled_replies_have_the_plain_seed(engines):
    for seed in range(3):
        asked = request(prompt="x", sampling=Sampling(1.1, seed=seed), max_new_tokens=60, ignore_eos=True)
        plain, *drafted = [engine.generate(asked) for engine in engines]
        assert [reply.token_ids for reply in drafted] == [plain.token_ids] * 2


def test_the_policy_of_the_small_models_cache_is_16_bits(packed_model):
    assert (
        drafts_of(packed_model, packed_model)._cache.stats().policy
        == NativeBackend(packed_model, threads=1).new_cache(F16).stats().policy
    )
