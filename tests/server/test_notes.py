"""Notes of a reply for the user: a client gets the reply, and the server's log has the note."""

import json

from ruvmlx.chats.learning import Learning
from ruvmlx.engine.best_of import FAILED
from ruvmlx.sona.judge import FailedJudge


def notes_in_log(running):
    lines = [json.loads(line) for line in running.log.getvalue().splitlines()]
    return [json.loads(line["note"]) for line in lines if line["event"] == "note"]


def test_a_judge_that_fails(serve, monkeypatch):
    """The client gets the first reply; the log has no text of a user."""
    monkeypatch.setattr(Learning, "judge", lambda *_: FailedJudge(ValueError("words of a user")))
    running = serve(best_of=2)
    done = running.chat(max_tokens=6, temperature=1.0, seed=1).json
    assert done["choices"][0]["message"]["content"]
    assert notes_in_log(running) == [FAILED.format("ValueError")]
