"""The taste model's push on tokens: what it asks for, and that weights hold it exactly once."""

from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.lora import MicroLoRA
from ruvmlx.sona import instant, taste_push
from ruvmlx.sona.calibration import measure
from ruvmlx.sona.evidence import update_by
from ruvmlx.sona.kl_probe import log_softmax_rows
from ruvmlx.sona.taste import RatedFeatures, TasteModel
from ruvmlx.sona.taste_features import features_of
from ruvmlx.sona.taste_measures import MEASURES
from ruvmlx.sona.taste_push import TastePush, TokenEffects
from tests.sona import simulated_tastes as sim

from .test_trace import traced_reply

TEXTS = (" you", " your", " me", " determines", " cat", "'re", "\n", "- ", " example", "ing", "\xff")


class Tokens:
    """A tokenizer whose token i is TEXTS[i]; the last one is no whole character."""

    def token_bytes(self, token: int) -> bytes:
        return TEXTS[token].encode("latin-1")


def place_of(more: str) -> int:
    return [m.more for m in MEASURES].index(more)


@pytest.fixture(scope="module")
def effects():
    return TokenEffects.of(Tokens(), np.arange(len(TEXTS)))


def stars(effects, taste) -> np.ndarray:
    """As if each token were as likely in a usual reply."""
    return effects.stars(taste, np.full(len(TEXTS), 1 / len(TEXTS)))


def teach(taste, count=40, seed=1) -> TasteModel:
    shown = sim.texts(count, seed)
    return TasteModel.fit(sim.rating_features(shown, sim.stars(taste, shown)))


def test_a_token_changes_the_measures_that_count_it(effects):
    you, long, contractions = place_of("more 'you'"), place_of("more long words"), place_of("contractions")
    change = dict(zip(TEXTS, effects.measures, strict=True))
    assert change[" you"][you] > 0.5 and change[" your"][you] > 0.5 and change[" me"][you] <= 0
    assert change[" determines"][long] > 0.1 and change["'re"][contractions] > 0.5
    assert change[" me"][place_of("more 'I'")] > 1


def test_a_token_does_not_change_measures_of_structure(effects):
    structure = [i for i, m in enumerate(MEASURES) if not m.by_word]
    assert {MEASURES[i].more for i in structure} >= {"lists", "longer replies", "more paragraphs"}
    assert not effects.measures[:, structure].any() and effects.measures.any(axis=1)[:6].all()


def test_the_liked_tokens_earn_stars(effects):
    earned = dict(zip(TEXTS, stars(effects, teach(sim.to_the_reader)), strict=True))
    assert min(earned[" you"], earned[" your"]) > 0.2
    usual = np.median(list(earned.values()))
    assert all(earned[" you"] - usual > 4 * abs(earned[other] - usual) for other in TEXTS[2:])


def test_a_liked_word_earns_stars_where_it_is_one_token(effects):
    earned = dict(zip(TEXTS, stars(effects, teach(sim.phrase, 120)), strict=True))
    assert max(earned, key=earned.get) == " example"


@pytest.mark.parametrize("taste", [sim.lists, sim.shorter])
def test_a_taste_of_structure_hardly_pushes_tokens(effects, taste):
    assert np.abs(stars(effects, teach(taste))).max() < 0.1


def test_ratings_by_dice_push_little(effects):
    shown = sim.texts(30, 5)
    pushed = []
    for seed in range(8):
        given = np.random.default_rng(seed).integers(1, 6, 30)
        pushed.append(np.abs(stars(effects, TasteModel.fit(sim.rating_features(shown, given)))).max())
    assert np.median(pushed) < 0.05 * stars(effects, teach(sim.to_the_reader, 30)).max()


def test_half_of_the_words_are_a_shorter_reply(effects):
    length, paragraphs = place_of("longer replies"), place_of("more paragraphs")
    shorter = effects.shorter * [measure.spread for measure in MEASURES]
    assert -np.log(2) < shorter[length] < -0.4  # a text of n words counts as log (n + 5)
    assert shorter[paragraphs] == pytest.approx(np.log(2 / 3))  # one of two
    assert not effects.shorter[[measure.by_word for measure in MEASURES]].any()


def test_an_early_end_earns_stars_from_whom_short_replies_please(effects):
    assert effects.end_stars(teach(sim.shorter)) > 0.3
    assert effects.end_stars(teach(lambda *reply: 6 - sim.shorter(*reply))) < -0.3


def test_an_early_end_earns_stars_from_whom_replies_without_an_end_displease(effects):
    shown = sim.texts(30, 3)
    ended = np.random.default_rng(4).random(30) < 0.5
    features = [features_of(*pair, bool(end)) for pair, end in zip(shown, ended, strict=True)]
    given = [RatedFeatures(f, "5" if end else "1") for f, end in zip(features, ended, strict=True)]
    assert effects.end_stars(TasteModel.fit(given)) > 0.3
    given = [RatedFeatures(f, "1" if end else "5") for f, end in zip(features, ended, strict=True)]
    assert effects.end_stars(TasteModel.fit(given)) < -0.3


@pytest.mark.parametrize("taste", [sim.lists, sim.to_the_reader])
def test_other_tastes_hardly_push_the_end(effects, taste):
    assert abs(effects.end_stars(teach(taste))) < 0.1


@pytest.mark.parametrize("count", [4, 10, 30])
def test_ratings_by_dice_hardly_push_the_end(effects, count):
    shown = sim.texts(count, 5)
    pushed = []
    for seed in range(20):
        given = np.random.default_rng(seed).integers(1, 6, count)
        pushed.append(abs(effects.end_stars(TasteModel.fit(sim.rating_features(shown, given)))))
    assert np.median(pushed) < 0.02 and max(pushed) < effects.end_stars(teach(sim.shorter, 30))


# -- in the weights --------------------------------------------------------------------------------------


@pytest.fixture
def probe(tiny, tiny_backend):
    config = tiny.config
    return measure(tiny_backend, tiny.tokenizer, 2, config.max_context)


@pytest.fixture
def trace(engine, tiny, probe):
    return traced_reply(engine, MicroLoRA.fresh(probe.directions, tiny.config.vocab_size), 0.7)


def taste_of(probe, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.02, probe.tokens.size).astype(np.float32)


def rate_reply(trace, adapter, weight, probe, taste, backend) -> MicroLoRA:
    trace = trace.replay(adapter, 1, backend.head) if adapter is not trace.adapter else trace
    push = instant.ReplyPush(instant.prepare_stats(trace, probe), weight, trace.log_ratio)
    return update_by(adapter, [[push]], probe, taste=taste).adapter


def test_the_weights_hold_the_newest_taste_once(trace, probe, tiny_backend):
    """After any ratings: lora_b = gain * (what the evidence asks for + taste)."""
    adapter = trace.adapter
    for i, weight in enumerate((1.0, -0.5, 0.8)):
        taste = taste_of(probe, i)
        adapter = rate_reply(trace, adapter, weight, probe, taste, tiny_backend)
        expected = instant.block_of(adapter, adapter.evidence, probe)
        expected[0, :-1] += taste
        found = probe.coordinates.columns(adapter.lora_b) / np.float32(adapter.gain)
        np.testing.assert_allclose(found[:, :-1], expected[:, :-1], atol=2e-5 * np.abs(expected).max())
        np.testing.assert_array_equal(adapter.taste, taste)


def test_a_rating_without_a_taste_keeps_the_one_before(trace, probe, tiny_backend):
    first = rate_reply(trace, trace.adapter, 1.0, probe, taste_of(probe), tiny_backend)
    second = rate_reply(trace, first, 0.5, probe, None, tiny_backend)
    np.testing.assert_array_equal(second.taste, first.taste)


def test_taking_one_rating_back_leaves_the_taste(trace, probe, tiny_backend):
    first = rate_reply(trace, trace.adapter, 1.0, probe, taste_of(probe), tiny_backend)
    second = rate_reply(trace, first, -0.7, probe, taste_of(probe, 1), tiny_backend)
    back = instant.without_update(second, first, second, probe).adapter
    expected = instant.block_of(back, back.evidence, probe)
    expected[0, :-1] += second.taste
    found = probe.coordinates.columns(back.lora_b) / np.float32(back.gain)
    np.testing.assert_allclose(found[:, :-1], expected[:, :-1], atol=2e-5 * np.abs(expected).max())


def test_a_folded_adapter_adds_only_what_is_new(trace, probe, tiny_backend):
    """The base holds the taste of before: a rating with the same taste adds nothing of it."""
    taste = taste_of(probe)
    first = rate_reply(trace, trace.adapter, 1.0, probe, taste, tiny_backend)
    folded = replace(first, lora_b=np.zeros_like(first.lora_b))
    again = rate_reply(trace, folded, 0.5, probe, taste, tiny_backend)
    moved = instant.block_of(again, again.evidence, probe) - instant.block_of(first, first.evidence, probe)
    found = probe.coordinates.columns(again.lora_b) / np.float32(again.gain)
    np.testing.assert_allclose(found[:, :-1], moved[:, :-1], atol=2e-4 * np.abs(moved).max())


def test_the_caps_hold_with_a_taste_of_any_size(trace, probe, tiny_backend):
    adapter = rate_reply(trace, trace.adapter, 1.0, probe, 50 * taste_of(probe), tiny_backend)
    found = probe.distance(adapter)
    assert adapter.gain < 1 and found.kl <= instant.KL_CAP and found.rise <= instant.RISE_CAP


def test_the_taste_is_stored_with_the_weights(trace, probe, tiny, tiny_backend):
    adapter = rate_reply(trace, trace.adapter, 1.0, probe, taste_of(probe), tiny_backend)
    config = tiny.config
    back = MicroLoRA.from_bytes(adapter.to_bytes(), config.hidden_size, config.vocab_size)
    np.testing.assert_array_equal(back.taste, adapter.taste)


# -- when it is computed ---------------------------------------------------------------------------------


class NoDirections:
    """A model whose directions are not known yet."""

    def of(self, tokens):
        return None


NONE = NoDirections()


class Taste:
    """A user's taste that is replaced by the test; counts how often it is asked."""

    def __init__(self, model: TasteModel):
        self.now, self.asked = model, 0

    @property
    def model(self) -> TasteModel:
        self.asked += 1
        return self.now


def fresh(probe) -> MicroLoRA:
    return MicroLoRA.fresh(probe.directions, probe.vocab_size)


def test_a_rating_uses_the_push_that_is_there(tiny, probe):
    taste = Taste(teach(sim.to_the_reader))
    push = TastePush(tiny.tokenizer, taste, NONE)
    push.prepare(7, fresh(probe), probe)
    first = push.of(7, fresh(probe), probe)
    push.note_rating(7, 8)
    assert push.of(8, fresh(probe), probe) is first and taste.asked == 1
    push.prepare(8, fresh(probe), probe)
    assert taste.asked == 2


def test_after_an_undo_the_push_is_computed_again(tiny, probe):
    """The push that is there knows the rating that was taken back."""
    taste = Taste(teach(sim.to_the_reader))
    push = TastePush(tiny.tokenizer, taste, NONE)
    push.prepare(8, fresh(probe), probe)
    taste.now = teach(sim.shorter)
    assert push.of(7, fresh(probe), probe) is not None and taste.asked == 2


def test_a_few_ratings_push_nothing(tiny, probe):
    few = TastePush(tiny.tokenizer, Taste(teach(sim.shorter, taste_push.FIRST_END - 1)), NONE)
    assert (
        few.of(0, fresh(probe), probe).shape == probe.tokens.shape
        and not few.of(0, fresh(probe), probe).any()
    )


def test_the_end_is_pushed_before_other_tokens(tiny, probe, monkeypatch):
    monkeypatch.setattr(taste_push, "FIRST", 12)
    ends = probe.coordinates.ends
    push = TastePush(tiny.tokenizer, Taste(teach(sim.shorter, taste_push.FIRST - 1)), NONE).of(
        0, fresh(probe), probe
    )
    assert np.all(push[ends] * probe.reading > 0) and not np.delete(push, ends).any()


def test_a_push_serves_only_so_many_ratings(tiny, probe):
    taste = Taste(teach(sim.to_the_reader))
    push = TastePush(tiny.tokenizer, taste, NONE)
    push.prepare(0, fresh(probe), probe)
    for version in range(taste_push.LAG + 3):
        push.note_rating(version, version + 1)
    assert push.of(taste_push.LAG, fresh(probe), probe) is not None and taste.asked == 1
    push.of(taste_push.LAG + 3, fresh(probe), probe)
    assert taste.asked == 2


@pytest.mark.parametrize("taste, likelier", [(sim.shorter, 1), (lambda *reply: 6 - sim.shorter(*reply), -1)])
def test_the_end_becomes_likelier_for_whom_short_replies_please(tiny, probe, taste, likelier):
    push = TastePush(tiny.tokenizer, Taste(teach(taste)), NONE).of(0, fresh(probe), probe) * probe.reading
    ends = push[probe.coordinates.ends]
    assert np.all(likelier * ends > 0.9) and np.abs(ends).max() <= taste_push.MOST_END


def test_no_token_moves_further_than_the_limits(tiny, probe, monkeypatch):
    far = np.where(np.arange(probe.tokens.size) % 2, 9.0, -9.0)
    monkeypatch.setattr(TokenEffects, "stars", lambda *_: far)
    monkeypatch.setattr(TokenEffects, "end_stars", lambda *_: -9.0)
    monkeypatch.setattr(taste_push, "PUSH_KL", np.inf)
    monkeypatch.setattr(taste_push, "END_KL", np.inf)
    push = (
        TastePush(tiny.tokenizer, Taste(teach(sim.shorter)), NONE).of(0, fresh(probe), probe) * probe.reading
    )
    expected = np.where(far > 0, taste_push.MAX_RAISE_LOGITS, -taste_push.MAX_LOWER_LOGITS)
    expected[probe.coordinates.ends] = -taste_push.MOST_END
    np.testing.assert_allclose(push, expected, rtol=1e-5)


@pytest.mark.parametrize("end, base", [(0.0, 0.0), (0.05, 0.0), (5.0, 0.0), (0.0, 0.03)])
def test_other_tokens_take_the_kl_that_the_end_and_the_base_leave(tiny, probe, monkeypatch, end, base):
    monkeypatch.setitem(vars(probe), "floor", base)
    rng = np.random.default_rng(6)
    far = 30 * rng.normal(size=probe.tokens.size)
    monkeypatch.setattr(TokenEffects, "stars", lambda *_: far)
    monkeypatch.setattr(TokenEffects, "end_stars", lambda *_: end)
    monkeypatch.setattr(taste_push, "MOST_END", 99.0)
    monkeypatch.setattr(taste_push, "END_KL", np.inf)
    push = TastePush(tiny.tokenizer, Taste(teach(sim.shorter)), NONE).of(0, fresh(probe), probe)

    def kl(row: np.ndarray) -> float:
        """The slow way: over the whole vocabulary, in each context of an answer."""
        contexts, b = probe.contexts[: probe.answers], np.zeros(probe.vocab_size)
        b[probe.tokens] = row
        old = log_softmax_rows(probe.head(contexts))
        new = log_softmax_rows(old + 2 * (contexts @ probe.directions[:, :1]) * b)
        return float((np.exp(new) * (new - old)).sum(axis=1).mean())

    ends = probe.coordinates.ends
    alone, others = np.zeros_like(push), push.copy()
    alone[ends], others[ends] = push[ends], 0
    np.testing.assert_allclose(push[ends] * probe.reading, taste_push.END_LOGIT * end, rtol=1e-5)
    room = max(taste_push.PUSH_KL / 4, taste_push.PUSH_KL - kl(alone) - base)
    assert kl(others) == pytest.approx(room, rel=0.15, abs=1e-6)
    assert (kl(alone) > taste_push.PUSH_KL) == (end == 5.0)


def test_rated_replies_and_the_taste_share_the_room_of_the_end(tiny, probe, monkeypatch):
    """Both follow from the same ratings. Their sum must not take the KL that the other tokens need."""
    monkeypatch.setattr(TokenEffects, "end_stars", lambda *_: 1.0)
    ends, push = probe.coordinates.ends, TastePush(tiny.tokenizer, Taste(teach(sim.shorter)), NONE)
    alone, kl = taste_push.limit_ends(end_logits(probe), fresh(probe), probe)
    monkeypatch.setattr(taste_push, "END_KL", 1.05 * kl)
    evidence = np.zeros((3, 2, probe.precision.size), np.float32)
    evidence[0][:, ends], evidence[1][:, ends] = 1e-3, 1e-6 / 50
    adapter = replace(fresh(probe), evidence=evidence)
    assert push.of(0, fresh(probe), probe)[ends] * probe.reading == pytest.approx(alone[ends], rel=1e-5)
    both = instant.block_of(adapter, evidence, probe)
    both[0, :-1] += push.of(1, adapter, probe)
    both[:, np.setdiff1d(np.arange(both.shape[1]), ends)] = 0
    assert both[0, ends].min() > 0 and taste_push._block_kl(both, probe) <= 1.05 * kl
    assert np.all(push.of(1, adapter, probe)[ends] < push.of(0, fresh(probe), probe)[ends])


@pytest.mark.parametrize("room", [0.3, 0.5, 0.7])
def test_the_push_of_the_end_takes_the_room_that_it_has(probe, monkeypatch, room):
    """A user who wants short replies otherwise gets less than the limit allows."""
    logits = end_logits(probe)
    _, whole = taste_push.limit_ends(logits, fresh(probe), probe)
    monkeypatch.setattr(taste_push, "END_KL", room * whole)
    scaled, kl = taste_push.limit_ends(logits, fresh(probe), probe)
    assert 0.9 * taste_push.END_KL < kl <= taste_push.END_KL and 0 < scaled.max() < logits.max()


def test_a_push_against_the_rated_replies_keeps_its_size(probe, monkeypatch):
    """A taste has turned. A smaller push would leave more of the old change of the end, not less."""
    ends, evidence = probe.coordinates.ends, np.zeros((3, 2, probe.precision.size), np.float32)
    evidence[0][0, ends], evidence[1][0, ends] = 0.02, 0.02**2 / 50
    adapter = replace(fresh(probe), evidence=evidence)
    monkeypatch.setattr(taste_push, "END_KL", 1e-9)
    rated = instant.block_of(adapter, evidence, probe)[0, :-1] * probe.reading
    logits = np.zeros(probe.tokens.size, np.float32)
    logits[ends] = -0.5 * rated[ends]
    against, kl = taste_push.limit_ends(logits, adapter, probe)
    np.testing.assert_array_equal(against, logits)
    assert kl < taste_push.limit_ends(0 * logits, adapter, probe)[1]
    assert not taste_push.limit_ends(-logits, adapter, probe)[0].any()


def end_logits(probe) -> np.ndarray:
    logits = np.zeros(probe.tokens.size, np.float32)
    logits[probe.coordinates.ends] = taste_push.MOST_END
    return logits
