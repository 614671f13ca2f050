"""Thumbs at the chat's own settings."""

import json

import pytest
from click.testing import CliRunner
from ruvmlx.apps.cli import prove as command

from apps.prove import as_chat
from apps.prove.as_chat import ChatSetup, thumb
from ruvmlx.chats.learning import Learning

PROMPTS = [f"What is number {i}?" for i in range(7)]


@pytest.mark.parametrize(
    "rater,words,pressed",
    [
        ("both", 79, "up"),
        ("both", 80, None),
        ("both", 120, None),
        ("both", 121, "down"),
        ("down", 79, None),
        ("down", 121, "down"),
        ("up", 79, "up"),
        ("up", 121, None),
    ],
)
def test_each_rater_presses_only_what_annoys_or_pleases(rater, words, pressed):
    assert thumb(rater, "word " * words) == pressed


def test_people_take_turns_and_each_has_weights_of_their_own(bench, monkeypatch):
    """Who presses learns; who finds nothing to press keeps the untouched model and runs out of patience."""
    monkeypatch.setattr(as_chat, "LONG", 0)
    monkeypatch.setattr(as_chat, "SHORT", 0)
    setup = ChatSetup(PROMPTS, PROMPTS[:2], [1, 2], max_tokens=6)
    found = as_chat.run(bench, setup, ["down", "up"], 2, lambda line: None)
    assert [(r.rater, r.seed, r.presses) for r in found] == [
        (rater, seed, presses) for seed in (0, 1) for rater in ("down", "up") for presses in (1, 2)
    ]
    for r in found:
        silent = r.rater == "up"
        assert r.pressed == (0 if silent else r.presses)
        assert r.read == (as_chat.PATIENCE * r.presses if silent else r.read) >= r.pressed
        assert not silent or (r.change == 0 and all(old == new for old, new in r.faults.values()))
        assert r.faults["endless"][0] == 2  # six tokens end no reply of the tiny model
    downs = {r.seed: r.words_base for r in found}
    assert len(as_chat.table(found).splitlines()) == 3 + 4 and len(downs) == 2


@pytest.mark.parametrize("learn", ["style", "instant"])
def test_with_the_style_loop_each_person_reads_alone_and_the_loop_runs(bench, monkeypatch, learn):
    monkeypatch.setattr(as_chat, "LONG", 0)
    setup, at_once, ran = ChatSetup(PROMPTS, PROMPTS[:2], [1], max_tokens=6), [], set()
    read = as_chat.replies_to

    def replies_to(people, *more):
        at_once.append(len(people))
        return read(people, *more)

    monkeypatch.setattr(as_chat, "replies_to", replies_to)
    monkeypatch.setattr(Learning, "is_due", lambda self: True)
    monkeypatch.setattr(Learning, "consolidate", lambda self, *_: ran.add(id(self)))
    found = as_chat.run(bench, setup, ["down"], 2, lambda line: None, learn)
    assert [r.seed for r in found] == [0, 1]
    assert (set(at_once), len(ran)) == (({1}, 2) if learn == "style" else ({2}, 0))


def test_a_reply_of_a_batch_is_rated_as_one_of_the_chat(bench, monkeypatch):
    """The trace that the batch recorded is the stored reply's: rating it again later changes nothing."""
    monkeypatch.setattr(as_chat, "LONG", 0)
    monkeypatch.setattr(as_chat, "SHORT", 0)
    setup = ChatSetup(PROMPTS, PROMPTS[:1], [1], max_tokens=6)
    with bench.runtime() as runtime:
        person = as_chat._Person("down", 0, runtime, as_chat._answers(runtime, setup, 0, None))
        while not person.pressed:
            as_chat._round(bench, setup, [person])
        learner, (row,) = runtime.learner, runtime.store.ratings.labels(bench.model.fingerprint, "prove")
        reply = runtime.store.replies.get(row[0])
        assert reply.prompt in PROMPTS and reply.adapter_version == 0
        before = learner.active.load(0)
        kept, replayed = learner.traces.of(reply, before), learner.traces.replay(reply, before)
        assert kept.tokens == replayed.tokens and abs(kept.logprob - replayed.logprob) < 1e-3
        assert learner.micro.norm > 0
        runtime.undo()
        learner.sync()
        assert learner.micro.norm == 0


def test_the_command_uses_the_chats_settings_unless_told_otherwise(bench, monkeypatch, tmp_path):
    seen = []

    def run(bench, setup, raters, seeds, log, learn):
        seen.append((setup, raters, seeds, learn))
        return [as_chat.ChatResult("down", 0, 5, 5, 6, 100.0, 200.0, 0.01, 0.002)]

    monkeypatch.setattr(command, "open_bench", lambda settings, say: bench)
    monkeypatch.setattr("ruvmlx.apps.prove.as_chat.run", run)
    done = CliRunner().invoke(command.prove, ["--as-chat", "--json"])
    assert json.loads(done.stdout)["results"][0]["change"] == -0.5
    done = CliRunner().invoke(
        command.prove, ["--as-chat", "--thumbs", "down", "--ratings", "7", "--max-tokens", "9", "--temp", "1"]
    )
    assert done.exit_code == 0 and "-50%" in done.output
    (first, raters, seeds, learn), (second, some, *_) = seen
    assert (first.max_tokens, first.temperature, list(first.presses)) == (512, None, [5, 10, 20, 30])
    assert raters == ["both", "down", "up"] and seeds == 1 and len(first.heldout) == 24
    assert learn == "instant"  # the tiny model has no style basis
    assert (second.max_tokens, second.temperature, list(second.presses)) == (9, 1.0, [5, 7])
    assert some == ["down"]
