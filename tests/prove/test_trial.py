"""A trial's held-out replies, several at a time."""

import pytest

from apps.cli.prove import open_bench
from apps.prove import trial
from apps.prove.trial import Arm, Bench, TrialSetup, _first, heldout_replies, within_reach
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.sona import active_adapter, embedding

PROMPTS = [f"What is number {i}?" + " Say more." * (i % 3) for i in range(19)]


def setting(scorer=lambda prompt, reply, finished: 1, prompts=PROMPTS) -> TrialSetup:
    return TrialSetup(scorer, prompts, prompts, ratings=1, checkpoints=[1], max_tokens=9)


@pytest.fixture
def bench(tiny, tiny_backend, monkeypatch):
    monkeypatch.setattr("apps.prove.trial.NeutralText", lambda *_: None)
    return Bench(tiny, tiny_backend)


def test_replies_are_in_the_prompts_order_and_depend_on_their_own_prompt_and_seed(bench):
    with bench.runtime() as runtime:
        every = _first(heldout_replies(runtime, setting(), Arm(), 3))
        some = _first(heldout_replies(runtime, setting(prompts=PROMPTS[:2]), Arm(), 3))
        other = _first(heldout_replies(runtime, setting(), Arm(), 4))
    assert [r.prompt for r in every] == PROMPTS
    assert [r.token_ids for r in every[:2]] == [r.token_ids for r in some]
    assert [r.token_ids for r in every] != [r.token_ids for r in other]
    assert bench.base_replies(setting(), 3)[5].text == every[5].text


def test_trials_learn_where_the_settings_say(tiny_folder):
    wanted = {"kv": "f16", "learn_targets": "attention", "base_targets": "ffn", "adapter_bits": 4}
    bench = open_bench(Settings(model=str(tiny_folder), backend="native", **wanted), lambda _: None)
    with bench.runtime(Arm("off")) as runtime:
        assert wanted == {name: getattr(runtime.settings, name) for name in wanted}


def test_the_first_of_several_replies_is_the_single_one(bench):
    with bench.runtime() as runtime:
        alone = heldout_replies(runtime, setting(prompts=PROMPTS[:3]), Arm(), 3)
        several = heldout_replies(runtime, setting(prompts=PROMPTS[:3]), Arm(), 3, 4)
    assert [of[0].token_ids for of in several] == [of[0].token_ids for of in alone]
    assert all(len({tuple(r.token_ids) for r in of}) == 4 for of in several)


def test_the_pick_is_the_taste_models_best(bench, monkeypatch):
    """A judge that likes late replies picks the last one of each prompt."""
    monkeypatch.setattr(trial.TasteJudge, "score", lambda self, replies: range(len(replies)))
    with bench.runtime() as runtime:
        runtime.learner.sync()
        every = heldout_replies(runtime, setting(prompts=PROMPTS[:3]), Arm(), 3, 4)
        assert trial._picked_replies(runtime, every) == [of[-1] for of in every]


@pytest.mark.parametrize("wanted,reached", [(3, True), (2, False)])
def test_within_reach_looks_at_what_each_prompt_was_answered(bench, wanted, reached):
    asked = []

    def scorer(prompt, reply, finished):
        asked.append(prompt)
        return wanted if prompt == PROMPTS[6] else 1

    assert within_reach(bench, setting(scorer), 0) is reached
    assert set(asked) <= set(PROMPTS[:8]) and (reached or len(asked) == 64)


class NoText:
    """Stands in for the neutral text, which the tiny model would read for seconds."""

    def compare(self, adapter):
        return 0.0, 0.0


@pytest.mark.parametrize(
    "arm,asked", [(Arm("off", system="Be brief."), False), (Arm("off", examples=1), True), (Arm(), True)]
)
def test_only_what_learns_or_remembers_is_rated(bench, monkeypatch, arm, asked):
    rated, plain = [], Runtime.rate
    monkeypatch.setattr(Runtime, "rate", lambda *args: rated.append(args[-1]) or plain(*args))
    bench.neutral = NoText()
    (point,) = trial.run(bench, setting(prompts=PROMPTS[:3]), arm, 0, lambda line: None)
    assert len(rated) == (1 if asked else 0)
    assert point.ratings == 1 and len(point.scores) == 3


def test_a_model_is_measured_once_for_all_trials(bench, monkeypatch):
    """Also a model whose KL probe is in the package, so that no store gets it."""
    with bench.runtime() as runtime:
        runtime.learner.active.measure()
        probe = runtime.learner.active.frozen_probe.to_bytes()
    bench.measured = None
    monkeypatch.setattr(active_adapter, "shipped_bytes", lambda kind, _: probe)
    with bench.runtime() as runtime:
        first = runtime.learner.rating_index.whitening
    monkeypatch.setattr(embedding.ReadQuestions, "read", lambda *_: pytest.fail("it was measured again"))
    with bench.runtime() as runtime:
        assert (runtime.learner.rating_index.whitening.mean == first.mean).all()
