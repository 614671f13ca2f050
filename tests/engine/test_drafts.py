"""Drafted replies: the same tokens, traces and caches as without drafts, and no draft that does not pay."""

import random
from typing import ClassVar

import numpy as np
import pytest

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.engine import LLMInferenceEngine, Sampling
from ruvmlx.engine.constraint import Constraint
from ruvmlx.engine.draft_length import MARGIN, Acceptance, Certainty, FixedLength, MeasuredLength
from ruvmlx.engine.drafts import DraftedSteps
from ruvmlx.engine.prompt_lookup import GRAM, LONGEST_MATCH, Draft, PromptLookup
from ruvmlx.kv.policy import F16, TierPolicy

from .test_engine import GREEDY, request
from .test_penalties import CHANGED
from .test_scheduler import adapter_of, assert_equal, serve_randomly, some_requests

POLICIES = {"f16": F16, "tiered": TierPolicy("tiered", (64, 128))}
TEXT = "the sea and the ship and the sea and the shop; " * 4
DRAWN = [GREEDY, Sampling(0.9, seed=1), Sampling(1.0, top_p=0.8, seed=2), *CHANGED]


class Trace:
    """A recorder that keeps what it receives."""

    def __init__(self):
        self.rows = []

    def add(self, hidden, logits, token):
        self.rows.append((hidden.copy(), logits.copy(), token))


class KnownReply(PromptLookup):
    """Guesses the reply to a prompt that was written before. Every fifth token is wrong."""

    replies: ClassVar = {}

    def __init__(self, tokens, predicted):
        super().__init__(tokens)
        self._rng, self._read, self._reply = random.Random(7), 0, self.replies.get(tuple(tokens), [])

    def add(self, token):
        self._read += 1

    def draft(self, n):
        guess = [t if self._rng.random() < 0.8 else (t + 1) % 200 for t in self._reply[self._read :][:n]]
        return Draft(guess, GRAM) if guess else None


@pytest.fixture(scope="module", params=POLICIES)
def engines(request, packed_model):
    """An engine without drafts, and one that drafts every guess at full length, whatever it costs."""
    backend, policy = NativeBackend(packed_model, threads=2, chunk=64), POLICIES[request.param]
    return LLMInferenceEngine(packed_model, backend, policy, speculate="off"), LLMInferenceEngine(
        packed_model, backend, policy, speculate="7"
    )


@pytest.fixture
def known_replies(monkeypatch):
    """Replies by their prompts, for guesses."""
    monkeypatch.setattr("ruvmlx.engine.drafts.PromptLookup", KnownReply)
    monkeypatch.setattr(KnownReply, "replies", replies := {})
    return replies


@pytest.fixture
def counts(monkeypatch):
    """The counts of every reply."""
    kept = []

    class CountedSteps(DraftedSteps):
        def __init__(self, *args):
            super().__init__(*args)
            kept.append(self.counts)

    monkeypatch.setattr("ruvmlx.engine.drafts.DraftedSteps", CountedSteps)
    return kept


@pytest.mark.parametrize("sampling", DRAWN)
@pytest.mark.parametrize("seed", [None, 3])
def test_a_drafted_reply_is_the_plain_one(engines, sampling, seed, counts, known_replies):
    """Tokens, traces and caches are equal: greedy, sampled, with penalties, with and without an adapter."""
    replies = []
    for engine in engines:
        adapter = adapter_of(engine.model.config, seed) if seed else None
        asked = request(prompt=TEXT, sampling=sampling, max_new_tokens=150, ignore_eos=True, logprobs=2)
        trace = Trace()
        replies.append((engine.generate(asked, adapter, trace), trace.rows))
        known_replies[tuple(engine.prompt_ids(asked))] = replies[0][0].token_ids
    (one, rows), (other, drafted_rows) = replies
    assert_equal([other], [one])
    assert other.logprobs == one.logprobs and other.kv == one.kv
    for want, got in zip(rows, drafted_rows, strict=True):
        assert got[2] == want[2]
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1], want[1])
    (counted,) = counts
    assert (other.drafted, other.accepted) == (counted.drafted, counted.accepted)
    assert 0.4 * counted.drafted < counted.accepted < 0.9 * counted.drafted and counted.accepted > 80


@pytest.mark.parametrize("seed", range(4))
def test_drafted_replies_join_others_at_random_moments(engines, seed, counts, known_replies):
    """A reply that is alone drafts. When another one joins, it first uses up the steps that are computed."""
    plain, drafting = engines
    some = some_requests(seed=seed)
    want = [plain.generate(r) for r in some]
    known_replies.update(
        {tuple(plain.prompt_ids(r)): reply.token_ids for r, reply in zip(some, want, strict=True)}
    )
    assert_equal(serve_randomly(drafting, some, seed=seed, width=3), want)
    assert sum(c.accepted for c in counts) > 0


def test_a_turn_goes_on_from_a_drafted_reply(engines):
    """The next prompt of a session finds the same cache, wherever the reply was stopped."""
    for stop in range(1, 40, 3):
        texts = []
        for engine in engines:
            session = f"drafts-{stop}"
            first = engine.generate(request(prompt=TEXT, session_id=session, max_new_tokens=stop))
            second = engine.generate(
                request(prompt=TEXT + first.text + " and", session_id=session, max_new_tokens=30)
            )
            texts.append((first.text, second.text, second.cached_tokens, second.kv))
        assert texts[0] == texts[1]


def test_a_constraint_holds_in_a_drafted_reply(engines, counts):
    rule = Constraint.regex("(the sea and the ship[,;] ){1,9}")
    plain, drafted = (
        engine.generate(
            request(prompt=TEXT, constraint=rule, sampling=Sampling(0.9, seed=4), max_new_tokens=120)
        )
        for engine in engines
    )
    assert drafted.token_ids == plain.token_ids and counts[-1].accepted > 10


def test_tokens_that_a_constraint_forces_are_drafted(engines, counts):
    """All of them are right. A choice is guessed from the chat only."""
    rule = Constraint.regex("a long beginning that must come (x|y|z){3} and the end[.]")
    plain, drafted = (
        engine.generate(
            request(prompt="hi", constraint=rule, sampling=Sampling(0.9, seed=4), max_new_tokens=80)
        )
        for engine in engines
    )
    assert drafted.token_ids == plain.token_ids and drafted.text.endswith(" and the end.")
    assert drafted.drafted - 3 * 7 <= drafted.accepted and drafted.accepted > 0.6 * len(drafted.token_ids)


def test_a_stopped_draft_leaves_the_tokens_that_were_drawn(engines):
    """The cache holds all tokens of the reply except the last one."""
    asked = request(prompt=TEXT, max_new_tokens=100, ignore_eos=True)
    run = engines[1].run(asked)
    list(run.prefill())
    for _ in range(40):
        run.draw()
        assert run.session.cache.offset in (
            len(run.prompt) + len(run.ids) - 1,
            len(run.prompt) + len(run.ids),
        )
    run.sync()
    assert run.session.cache.offset == len(run.prompt) + len(run.ids) - 1


# Guesses ----------------------------------------------------------------------------------------


def slow_draft(tokens, n):
    """The tokens after the newest earlier place where the last GRAM tokens stood, by a plain search."""
    for at in range(len(tokens) - 1, GRAM - 1, -1):
        if tokens[at - GRAM : at] == tokens[-GRAM:]:
            return [tokens[at + i % (len(tokens) - at)] for i in range(n)]
    return None


def test_a_guess_is_what_followed_the_newest_tokens_before():
    rng = random.Random(2)
    for _ in range(200):
        tokens = rng.choices(range(4), k=rng.randint(0, 40))
        draft = PromptLookup(tokens).draft(5)
        assert (draft.tokens if draft else None) == slow_draft(tokens, 5)


def test_a_guess_follows_its_place_while_it_is_right():
    """The text goes on as at the first place, although the newest tokens stood elsewhere since."""
    lookup = PromptLookup([1, 2, 3, 4, 5, 6, 7, 3, 4, 9, 9, 1, 2])
    assert lookup.draft(3).tokens == [3, 4, 5]
    for token in (3, 4):
        lookup.add(token)
    assert lookup.draft(2).tokens == [5, 6] and lookup.draft(2).match == 4
    lookup.add(9)
    assert lookup.draft(1).tokens == [9]


def test_a_long_match_is_counted_up_to_its_limit():
    lookup = PromptLookup([*range(100), 7, *range(60)])
    assert lookup.draft(1).match == LONGEST_MATCH


def test_a_predicted_text_is_guessed_from():
    lookup = PromptLookup([1, 2, 8, 9], predicted=[8, 9, 5, 6, 7])
    assert lookup.draft(3).tokens == [5, 6, 7]


# How many tokens to draft ---------------------------------------------------------------------------


def test_a_costly_check_is_not_made():
    length = MeasuredLength()
    length.slope = 1.0
    assert length.choose(32, 7, Acceptance()) == 0
    assert length.choose(2, 7, Certainty()) == 0
    length.slope = 0.15
    assert length.choose(32, 7, Acceptance()) == 7
    length.slope = 0.8
    assert length.choose(2, 7, Certainty()) == 7 and length.choose(32, 7, Acceptance()) < 7
    assert FixedLength(3).choose(2, 7, Acceptance()) == 3 and FixedLength(7).choose(2, 5, Acceptance()) == 5


def test_wrong_drafts_end_the_drafting_and_right_ones_begin_it_again():
    acceptance, length = Acceptance(), MeasuredLength()
    length.slope = 0.3
    assert length.choose(10, 7, acceptance) > 2
    for _ in range(20):
        acceptance.count(10, False)
    assert length.choose(10, 7, acceptance) == 0
    for _ in range(40):
        acceptance.count(10, True)
    assert length.choose(10, 7, acceptance) > 2


def test_the_length_is_the_one_with_the_most_tokens_per_second():
    """Against a search over all lengths."""
    rng = random.Random(1)
    for _ in range(300):
        acceptance, length = Acceptance(), MeasuredLength()
        length.slope = rng.uniform(0.02, 0.8)
        for _ in range(rng.randint(0, 60)):
            acceptance.count(rng.randint(GRAM, 32), rng.random() < 0.7)
        match, gains = rng.randint(GRAM, 32), []
        for k in range(8):
            shares = [acceptance.share(match + i) for i in range(k)]
            gains.append(sum(np.prod(shares[:i]) for i in range(k + 1)) / length.cost(k))
        best = int(np.argmax(gains))
        assert length.choose(match, 7, acceptance) == (best if gains[best] > MARGIN else 0)


def test_the_cost_is_measured_and_one_interrupted_check_hardly_counts():
    length = MeasuredLength()
    for _ in range(100):
        length.measure(0, 0.01)
        length.measure(5, 0.02)
    assert abs(length.slope - 0.2) < 0.01
    length.measure(5, 3.0)
    assert length.slope < 0.3


def test_an_engine_decides_from_its_own_measurements(engines, counts):
    """With `auto`, checks that take as long as their tokens one by one are not made."""
    engine = LLMInferenceEngine(engines[0].model, engines[0].backend)
    engine.draft_length.slope = 2.0
    engine.draft_length.measure = lambda *_: None
    engine.generate(request(prompt=TEXT, max_new_tokens=60))
    assert counts[-1].drafted == 0
