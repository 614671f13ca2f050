"""The background loop on a tiny model: it learns, refuses, stops, resumes and cleans up."""

# ruff: noqa: F811 - the fixtures of training_runs.py are parameters here

import threading
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.engine import Sampling
from ruvmlx.errors import RuvmlxError
from ruvmlx.lora.base_lora import BaseLoRA
from ruvmlx.sona import background, promotion, replay
from ruvmlx.sona.background import Background, coefficient
from ruvmlx.sona.instant import KL_CAP
from ruvmlx.sona.replay import RatedExample
from ruvmlx.store import RatedReply
from ruvmlx.training.adamw import Training, norm
from ruvmlx.training.slices import TrainingText

from .feedback import reply, weights
from .test_bases import answer_tokens, learned_state, slow_kl_at
from .training_runs import (  # noqa: F401 - fixtures
    QUICK,
    answer,
    buffer_of,
    consolidate,
    rated_runtime,
    steady,
    tiny_backend,
)


def test_progress_begins_before_the_first_step(rated_runtime):
    seen = []
    rated_runtime.learning.consolidate(
        lambda done, total, loss: seen.append((done, total, np.isnan(loss))), None, QUICK
    )
    assert seen == [(done, 4, done == 0) for done in range(5)]


def test_it_trains_and_promotes(rated_runtime, monkeypatch):
    """Held-out loss falls; the version stands on a base of its own; micro is folded; nothing is left over."""
    monkeypatch.setattr(promotion, "PPL_RISE", 1.0)
    before = weights(rated_runtime)
    report, losses = consolidate(rated_runtime)
    assert report["promoted"], report
    assert report["loss_after"] < report["loss_before"] and len(losses) == report["steps"] == 4
    assert report["held_out"] + len(buffer_of(rated_runtime).train) == report["examples"] == 14
    status, learner = rated_runtime.status(), rated_runtime.learner
    assert (status.pending, status.consolidations, status.adapter_version) == (0, 1, 15)
    assert status.kl == pytest.approx(report["kl"]) and status.kl <= KL_CAP
    assert ("lm_head", 0) in learner.base.pairs and learner.micro.norm < 1e-6
    assert rated_runtime.backend.lora is learner.base
    assert learner.history.training() is None and learner.history.new_and_missing()[1] > 0
    assert status.last.report == {k: report[k] for k in status.last.report}
    rated_runtime.rollback(14)
    assert weights(rated_runtime) == before and rated_runtime.backend.lora is None
    # the result is out of use, so it is no longer the last one
    assert rated_runtime.status().last is None and rated_runtime.rollback(15).last == status.last


def test_a_second_consolidation_goes_on_from_the_first(rated_runtime, monkeypatch):
    monkeypatch.setattr(promotion, "PPL_RISE", 1.0)
    report, _ = consolidate(rated_runtime)
    assert report["promoted"], report["reason"]
    first = rated_runtime.learner.base
    for i in range(14, 20):
        rated_runtime.rate(answer(rated_runtime, i), "up" if i % 2 else "down")
    assert rated_runtime.status().pending == 6
    report, _ = consolidate(rated_runtime)
    assert report["examples"] == 20
    assert report["promoted"], report["reason"]
    assert rated_runtime.status().consolidations == 2 and rated_runtime.learner.base is not first
    assert rated_runtime.learner.base.pairs["lm_head", 0][0].shape[1] <= background.HEAD_RANK


def test_a_rating_after_a_consolidation_keeps_the_push_of_the_taste(rated_runtime, monkeypatch):
    """The base LoRA does not have the push. Else its KL would leave the next push hardly any KL."""
    monkeypatch.setattr(promotion, "objection", lambda *_: "")
    learner = rated_runtime.learner
    for i in range(14, 16):
        rated_runtime.rate(answer(rated_runtime, i), "down", "too long")
    before, kl = learner.micro, learner.state.kl
    assert before.taste.any()
    assert consolidate(rated_runtime)[0]["promoted"]
    tokens = learner.active.probe.tokens
    np.testing.assert_allclose(learner.micro.lora_b[0, tokens], before.gain * before.taste, atol=1e-6)
    assert learner.active.probe.floor < 0.5 * kl
    rated_runtime.rate(answer(rated_runtime, 16), "up")
    now, ends = learner.micro, tokens[learner.active.probe.coordinates.ends]
    np.testing.assert_allclose(now.lora_b[0, tokens], now.gain * now.taste, atol=0.1)
    assert now.lora_b[0, ends].min() > 0.2


def test_a_rating_that_teaches_nothing_takes_a_reason_back_after_a_consolidation(rated_runtime, monkeypatch):
    monkeypatch.setattr(promotion, "objection", lambda *_: "")
    learner, long = rated_runtime.learner, answer(rated_runtime, 14)
    rated_runtime.rate(long, "down", "too long")
    pushed = learner.micro.taste.max()
    assert pushed > 0 and consolidate(rated_runtime)[0]["promoted"]
    rated_runtime.rate(long, "down", "wrong facts")
    assert learner.micro.taste.max() < 0.5 * pushed


def test_a_chat_goes_on_after_a_consolidation(rated_runtime, monkeypatch):
    """Refused or stopped: its cache is still good. Promoted: it starts over, once."""
    chat = rated_runtime.chats.new_chat()

    def count_cached() -> int:
        given = {"sampling": Sampling(0.0), "max_new_tokens": 4, "cancel": threading.Event()}
        return [chunk.response for chunk in rated_runtime.chats.say(chat, "and now?", **given)][
            -1
        ].cached_tokens

    assert count_cached() == 0 and count_cached() > 0
    monkeypatch.setattr(promotion, "objection", lambda *_: "a test")
    assert not consolidate(rated_runtime)[0]["promoted"]
    assert count_cached() > 0
    monkeypatch.setattr(promotion, "objection", lambda *_: "")
    assert consolidate(rated_runtime)[0]["promoted"]
    assert count_cached() == 0 and count_cached() > 0


def test_the_fold_alone_changes_nothing(rated_runtime):
    """No training step counts: the model's words have the same probabilities, now from base alone."""
    learner, loop = rated_runtime.learner, Background(rated_runtime.learner, rated_runtime.model, QUICK)
    base, micro = background.fold_micro(
        loop._fresh(buffer_of(rated_runtime)).base, learner.micro, background.HEAD_RANK
    )
    every = slice(0, answer_tokens(rated_runtime))
    want = slow_kl_at(rated_runtime, None, learner.micro, every)
    assert learner.active.probe_base(base).probe.kl(micro) == pytest.approx(want, abs=1e-5)
    learner.active.install()


def test_too_few_ratings(open_tiny):
    with open_tiny() as runtime:
        for i in range(3):
            runtime.rate(reply(runtime, seed=i), "up")
        before = weights(runtime)
        report, _ = consolidate(runtime)
        assert not report["promoted"]
        assert report["reason"] == "training needs 10 ratings or preferences; there are 3"
        assert weights(runtime) == before and runtime.learner.history.attempts() == []


def test_all_count_a_preference_as_one(open_tiny):
    """`learn status`, the side panel and the training count alike."""
    with open_tiny() as runtime:
        ids = [answer(runtime, i) for i in range(4)]
        for reply_id in ids[:2]:
            runtime.rate(reply_id, "up")
        runtime.learner.prefer(ids[2], ids[3], "compare")
        report, _ = consolidate(runtime)
        assert report["reason"].endswith("there are 3") and report["examples"] == 4
        status = runtime.learner.history.status()
        assert status.ratings + status.preferences == 3
        assert runtime.learner.history.new_and_missing() == (3, 16 - 3)


def test_a_harmful_candidate_is_refused(rated_runtime, monkeypatch):
    """Trained the wrong way round: held-out ratings do not prefer it, all stays, the reason is kept."""
    before = learned_state(rated_runtime)
    monkeypatch.setattr(promotion, "PPL_RISE", 9.0)
    monkeypatch.setattr(background, "coefficient", lambda *a: -coefficient(*a))
    report, _ = consolidate(rated_runtime, replace(QUICK, nll=0.0, kl=0.0, lr=4e-3, steps=6))
    assert not report["promoted"] and "held-out" in report["reason"]
    assert report["loss_after"] >= report["loss_before"]
    assert learned_state(rated_runtime) == before
    assert (
        rated_runtime.status().last.report["reason"] == report["reason"]
        and rated_runtime.status().last.version is None
    )
    assert rated_runtime.status().adapter_version == 14 and rated_runtime.status().pending == 14


def test_a_candidate_that_is_too_far_off_is_shrunk(rated_runtime, monkeypatch):
    monkeypatch.setattr(promotion, "PPL_RISE", 9.0)
    report, _ = consolidate(rated_runtime, replace(QUICK, lr=5e-2, kl=0.0))
    shares = [t["share"] for t in report["tries"]]
    assert shares == sorted(shares, reverse=True) and len(shares) > 1
    assert report["tries"][0]["kl"] > KL_CAP >= report["kl"]


def test_perplexity_on_plain_text_is_a_limit_too(rated_runtime, monkeypatch):
    """As if every base made plain text less likely by a tenth of a nat per token."""
    backend = rated_runtime.backend
    nll = lambda gate, name, micro: 1.0 + 0.1 * (backend.lora is not None)  # noqa: E731
    monkeypatch.setattr(promotion.PromotionTest, "_nll", nll)
    before = rated_runtime.learner.history.version()
    report, _ = consolidate(rated_runtime)
    assert not report["promoted"] and rated_runtime.learner.history.version() == before
    assert report["ppl_change"] > promotion.PPL_RISE


def test_a_promoted_base_is_not_read_again(rated_runtime, monkeypatch):
    """The gate has read the reference text under it; read again, as after a restart, it is the same."""
    monkeypatch.setattr(promotion, "PPL_RISE", 1.0)
    grounds, plain = [], rated_runtime.learner.active.probe_base
    monkeypatch.setattr(
        rated_runtime.learner.active, "probe_base", lambda *a: grounds.append(plain(*a)) or grounds[-1]
    )
    report, _ = consolidate(rated_runtime)
    assert report["promoted"] and len(grounds) == len(report["tries"])
    learner = rated_runtime.learner
    assert learner.base is grounds[-1].lora and learner.probe is grounds[-1].probe
    again = plain(learner.history.base(learner.state.base))
    assert again.lora.scale == learner.base.scale and again.lora.to_bytes() == learner.base.to_bytes()
    np.testing.assert_allclose(again.probe.packed_probs, learner.probe.packed_probs, atol=1e-6)
    learner.active.install()


def test_due_after_sixteen_new_ratings(open_tiny):
    with open_tiny() as runtime:
        for i in range(17):
            assert runtime.learning.is_due() == (i >= 16)
            runtime.rate(reply(runtime, seed=i), "up" if i % 2 else "down")
        history = runtime.learner.history
        history.refuse(history.version(), {"promoted": False})
        assert not runtime.learning.is_due()  # the same ratings would give the same answer
    with open_tiny(adapter=None) as runtime:
        assert not runtime.learning.is_due()


def test_not_a_number_never_gets_in(rated_runtime, monkeypatch):
    before = learned_state(rated_runtime)
    monkeypatch.setattr(background, "coefficient", lambda *a: float("nan"))
    with pytest.raises(RuvmlxError, match="not finite"):
        consolidate(rated_runtime)
    assert learned_state(rated_runtime) == before


def test_batches_are_half_new_and_the_same_again():
    def example(i, version):
        return RatedExample(f"r{i}", "up", b"", 1, 1.0 if i % 2 else -1.0, 0.0, version, None)

    train = [example(i, i) for i in range(1, 41)]
    buffer = replay.Buffer(train, [], [TrainingText((1, i), 1) for i in (2, 3, 4)], [], since=30)
    for step in range(20):
        examples, texts = buffer.batch(7, step)
        assert buffer.batch(7, step) == (examples, texts) != buffer.batch(7, step + 1)
        new, old = examples[:4], examples[4:]
        assert len(examples) == 6 and len(texts) == 2 and len(set(e.reply_id for e in new)) == 4
        assert all(e.version > 30 for e in new) and all(e.version <= 30 for e in old)
        assert sorted(e.reward for e in old) == [-1.0, 1.0]


def test_the_examples_of_many_ratings_take_four_bytes_for_a_token():
    """10,000 ratings of long replies must not take hundreds of megabytes."""
    prompt, said = np.arange(300, 500, dtype="<i4"), np.arange(1000, 1300, dtype="<i4")
    row = RatedReply("r", "up", 1, prompt.tobytes(), said.tobytes(), -30.0, 0, reward=1.0)
    tracemalloc.start()
    try:
        examples = replay._examples([row] * 300, None, lambda: None)
        taken = tracemalloc.get_traced_memory()[0] / (300 * 500)
    finally:
        tracemalloc.stop()
    assert examples[7].text == TrainingText((*prompt.tolist(), *said.tolist()), 200)
    assert taken < 6  # tuples of Python's numbers take 40


def test_the_newest_held_out_ratings_test_the_result(rated_runtime, monkeypatch):
    """With thousands of ratings, the test reads a part of those that no run trains on."""
    every = buffer_of(rated_runtime)
    monkeypatch.setattr(replay, "TEST_LIMIT", 2)
    buffer = buffer_of(rated_runtime)
    assert len(every.held_out) > 2 and buffer.held_out == every.held_out[-2:]
    assert buffer.train == every.train


def test_a_fifth_is_held_out_by_id():
    share = np.mean([RatedExample(f"reply-{i}", "up", b"", 1, 1, 0, 1, None).held_out for i in range(2000)])
    assert 0.16 < share < 0.24


@pytest.mark.parametrize(("rating", "reward"), [("up", 1.0), ("down", -1.0)])
def test_the_push_fades_with_the_log_ratio(rating, reward):
    """DRO: full at the frozen model, none when the reply is far enough on its way."""
    example = RatedExample("a", rating, b"", 1, reward, 0.0, 1, None)
    pushes = [coefficient(example, -2.0, 0.0, -2.0 + reward * moved) * reward for moved in (0, 1, 2, 4.5)]
    assert pushes[0] == pytest.approx(1.0) and pushes[-1] == pytest.approx(0.0, abs=1e-6)
    assert pushes == sorted(pushes, reverse=True)


def test_adamw_against_the_formula():
    rng, place = np.random.default_rng(0), ("q_proj", 0)
    pair = tuple(rng.normal(0, 1, shape).astype(np.float32) for shape in ((5, 3), (3, 7)))
    run = Training({place: tuple(w.copy() for w in pair)}, 2.0)
    w, m, v = [x.astype(np.float64) for x in pair], [0.0, 0.0], [0.0, 0.0]
    for t in range(1, 6):
        grads = {place: tuple(rng.normal(0, 3, x.shape).astype(np.float32) for x in pair)}
        run.update(grads, 0.01, clip=1.0)
        cut = min(1.0, 1.0 / norm(grads))
        for i, g in enumerate(grads[place]):
            m[i] = 0.9 * m[i] + 0.1 * cut * g
            v[i] = 0.999 * v[i] + 0.001 * (cut * g) ** 2
            w[i] -= 0.01 * (m[i] / (1 - 0.9**t) / (np.sqrt(v[i] / (1 - 0.999**t)) + 1e-8) + 0.01 * w[i])
    for got, want in zip(run.pairs[place], w, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    before = run.to_bytes()
    with pytest.raises(ZeroDivisionError):
        run.update(grads, 0.01, 1.0, lambda: 1 / 0)
    assert run.to_bytes() == before  # all or nothing
    back = Training.from_bytes(run.to_bytes())
    assert back.to_bytes() == run.to_bytes() and back.step == 5
    assert isinstance(back.base, BaseLoRA) and Training.from_bytes(b"junk") is None


def test_preferences_are_training_examples(open_tiny):
    """Each reply once, with the preference's reward; a rating of its own wins, and V(x) falls out."""
    with open_tiny() as runtime:
        ids = [answer(runtime, i) for i in range(4)]
        learner = runtime.learner
        learner.prefer(ids[0], ids[1], "edit")
        learner.prefer(ids[2], ids[3], "regenerated", 0.3)
        runtime.rate(ids[3], "up")
        tokenizer, context = runtime.model.tokenizer, runtime.model.context
        buffer = replay.load(learner.history, learner.rating_index, tokenizer, context)
        found = {e.reply_id: e for e in (*buffer.train, *buffer.held_out)}
        assert len(found) == len(buffer.train) + len(buffer.held_out) == 4
        given = [(found[i].rating, found[i].reward, found[i].value) for i in ids[:3]]
        assert given == [("up", 1.0, 0.0), ("down", -1.0, 0.0), ("up", 0.3, 0.0)]
        assert found[ids[3]].rating == "up" and found[ids[3]].reward == 1.0
        assert [coefficient(found[i], 0.0, 0.0, 0.0) for i in ids[:3]] == [1.0, -1.0, 0.3]
        assert runtime.learner.history.new_and_missing() == (3, 16 - 3)
        runtime.undo()
        runtime.undo()
        left = replay.load(learner.history, learner.rating_index, tokenizer, context)
        assert {e.reply_id for e in (*left.train, *left.held_out)} == set(ids[:2])
