"""The optimizer's figures and actions where people look: side panel, `learn status --details`, /metrics."""

from ruvmlx.apps.chat.overview import speed_rows
from ruvmlx.apps.optimizer_words import action_line, optimizer_rows, trigger_line, tuning_line
from ruvmlx.apps.server.memory_look import TuningLook, look_at_runtime, sum_tuning

from ruvmlx.optimizer.status import optimizer_facts
from ruvmlx.sona.adapter_history import AdapterHistory

from .test_optimizer import rest, rows, write_some


def facts_of(runtime) -> dict:
    history = runtime.learning.require_learner().history
    settings = runtime.settings
    return optimizer_facts(
        runtime.store, history, runtime.backend.name, settings.optimizer, settings.slow_loop
    )


def test_a_kept_value_is_seen_everywhere(open_tiny, speed):
    speed.seconds = {4: 0.04, 2: 0.025}
    with open_tiny() as runtime:
        assert speed_rows(runtime.optimizer) == []
        assert dict(optimizer_rows(facts_of(runtime)))["replies"] == "none on this machine yet"
        write_some(runtime)
        rest(runtime)
        panel = dict(speed_rows(runtime.optimizer))
        assert panel["speed"] == "26 tokens a second" and panel["quality"].endswith("% by estimate")
        assert panel["tuned"] == "cores that compute: 2" and panel["action"] == "cores that compute: kept"
        facts = facts_of(runtime)
        assert facts["in_force"] == {"threads": "2"}
        assert [action["n"] for action in facts["actions"]] == [row.seq for row in rows(runtime)]
        lines = optimizer_rows(facts)
        assert dict(lines)["optimizer"].endswith("in force: cores that compute 2")
        assert any("cores that compute 4 to 2, kept (25." in text for _, text in lines)
        look = look_at_runtime(runtime).tuning
        assert look.actions == {("speculate", "put back"): 1, ("threads", "kept"): 1}
        assert 25 < look.tokens_per_second < 27 and look.kv_level == 0


def test_each_condition_says_how_far_it_is(open_tiny, speed):
    with open_tiny() as runtime:
        triggers = {trigger["action"]: trigger for trigger in facts_of(runtime)["triggers"]}
        assert triggers.keys() == {"merge", "router", "rebalance", "tune"}
        assert (triggers["merge"]["at"], triggers["merge"]["now"]) == (16, 0)
        assert triggers["tune"]["now"] is None
        said = trigger_line(triggers["tune"])
        assert said == (
            "when replies are slower than 50 tokens a second, ruvmlx tries faster settings (now not known)"
        )
        said = trigger_line(triggers["rebalance"] | {"now": 0.0965})
        assert said == "the KV cache gets fewer bits when 90% of the machine's memory is in use (now 10%)"


def test_other_changes_by_itself_are_actions_too(open_tiny, speed):
    """A choice of KV tiers, a training that was not used, a training of the router."""
    with open_tiny() as runtime:
        model = {"model": runtime.model.fingerprint}
        for kind, body in (
            ("kv_choice", {"hot": 64, "warm": 512, "before": None, "reason": "the fastest"}),
            ("consolidation", {"parent": 3, "version": None}),
            ("router", {"state": None, "reason": "no better"}),
        ):
            runtime.store.witness.note(kind, model | body)
        runtime.store.witness.note("kv_choice", {"model": "another", "reason": "not mine"})
        said = [
            text.partition(": ")[2] for label, text in optimizer_rows(facts_of(runtime)) if label == "action"
        ]
    assert said == [
        "bits of new KV caches None to [64, 512], kept: the fastest",
        "version, by background training, 3 to 3, put back: enough new ratings, or a command",
        "router, put back: no better",
    ]


def test_words_for_what_was_undone_and_not_tried():
    action = {"knob": "threads", "before": "2", "after": "4", "outcome": "undone", "measured_before": None,
              "measured_after": None, "undoes": 7, "why": "slower"}  # fmt: skip
    assert action_line(action) == "cores that compute 2 to 4, undone, takes back row 7: slower"
    report = {"knob": "batch", "outcome": "none", "reason": "memory is short"}
    assert tuning_line(report) == "replies at a time: not tried, memory is short"


def test_metrics_of_several_models_are_summed():
    one, other = TuningLook(30.0, 1, {("batch", "kept"): 2}), TuningLook(40.0, 3, {("batch", "kept"): 1})
    assert sum_tuning([one, other]) == (30.0, 3, {("batch", "kept"): 3})
    assert sum_tuning([]) == (0.0, 0, {})


def test_the_count_of_new_ratings_is_not_cut(open_tiny, speed, monkeypatch):
    """With 12 ratings and a background learning that is due from 8 on, the status said "now 8"."""
    with open_tiny() as runtime:
        monkeypatch.setattr(AdapterHistory, "new_and_missing", lambda self, due: (due + 4, 0))
        (merge,) = (trigger for trigger in facts_of(runtime)["triggers"] if trigger["action"] == "merge")
        assert merge["now"] == merge["at"] + 4
