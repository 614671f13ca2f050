"""A rating over HTTP is a rating: the weights change at once, for every client and for the terminal."""

import threading
from contextlib import closing

import pytest
from ruvmlx.apps.server.access import Access
from ruvmlx.apps.server.limits import ServerLimits

from ruvmlx.backends.select import open_backend
from ruvmlx.chats import learning
from ruvmlx.engine.run import Run
from ruvmlx.host import host
from ruvmlx.models.load import load_model
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.sona.adapter_history import AdapterHistory
from ruvmlx.store import Store
from tests.models.make_models import make_safetensors_model

from .conftest import run_server


def rate(running, id, rating="up", **more):
    return running.ask("POST", "/v1/ratings", {"id": id, "rating": rating, **more})


def logprob(running, **fields) -> float:
    """Log-probability of the greedy reply's first 8 tokens. The prompt is cached first: reading all of it
    rounds differently."""
    running.chat(max_tokens=1, **fields)
    done = running.chat(logprobs=True, **fields).json
    return sum(token["logprob"] for token in done["choices"][0]["logprobs"]["content"])


@pytest.fixture
def history(home, tiny):
    """The adapter as `ruvmlx learn status` sees it, from outside of the server."""
    return lambda name="default": AdapterHistory(Store(home / "ruvmlx.db"), tiny.fingerprint, name)


@pytest.fixture
def never_measured(tmp_path):
    """A server with a model that no data folder knows."""
    model = load_model(str(make_safetensors_model(tmp_path / "new", seed=11, max_context=1024)))
    backend, settings = open_backend("native", model), Settings(kv_disk=None)
    running = run_server(
        lambda: Runtime(Store(tmp_path / "ruvmlx.db"), model, backend, settings), Access(), ServerLimits()
    )
    yield running
    running.stop()
    assert "Traceback" not in running.log.getvalue()


def test_a_rating_changes_the_next_reply(running, history):
    """And the version that the terminal shows; the answer says what was done."""
    before = logprob(running)
    done = running.chat().json
    told = rate(running, done["id"], "up", note="short")
    assert told.status == 200
    fact = told.json
    assert (
        fact["object"] == "rating" and fact["id"] == done["id"] and fact["rating"] == "up" and fact["applied"]
    )
    assert fact["logprob_after"] > fact["logprob_before"] and 0 < fact["kl"] <= fact["kl_cap"]
    assert fact["adapter"] == "default" and fact["adapter_version"] == history().version() == 1
    assert logprob(running) > before + 1e-4
    assert [(r.reply_id, r.note) for r in history().ratings()] == [(done["id"], "short")]


CALL = {"id": "abc", "type": "function", "function": {"name": "time", "arguments": "{}"}}
AFTER_RESULT = {
    "messages": [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abc", "content": "noon"},
    ]
}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
TIME = {"type": "function", "function": {"name": "time", "parameters": NO_ARGUMENTS}}


@pytest.mark.parametrize(
    "fields", [AFTER_RESULT, {"tools": [TIME], "tool_choice": "required", "max_tokens": 200}]
)
def test_the_words_of_a_tool_teach_nothing(never_measured, tmp_path, fields):
    """As in the chat app: the rating of a reply that reads a tool's result or calls a tool is kept, and
    changes no weights."""
    id = never_measured.chat(**fields).json["id"]
    told = rate(never_measured, id)
    assert told.status == 200 and not told.json["applied"]
    with closing(Store(tmp_path / "ruvmlx.db")) as store:
        assert store.replies.get(id).prompt == fields.get("messages", [{"content": "hello"}])[0]["content"]
        assert [row["rating"] for row in store.db.rows("SELECT rating FROM ratings")] == ["up"]


def test_taking_it_back_is_exact(running, history):
    before = logprob(running)
    id = running.chat().json["id"]
    rate(running, id, 1)
    assert logprob(running) < before - 1e-4
    told = running.ask("DELETE", f"/v1/ratings/{id}")
    assert told.status == 200 and told.json == {
        "object": "rating.deleted", "id": id, "deleted": True, "adapter": "default", "adapter_version": 0
    }  # fmt: skip
    assert logprob(running) == before and history().version() == 0
    again = running.ask("DELETE", f"/v1/ratings/{id}")
    assert again.status == 404


def test_the_terminal_and_the_server_see_each_other(running, open_tiny, history):
    """The terminal rates a reply of the server, and takes back a rating of the server."""
    before = logprob(running)
    id = running.chat().json["id"]
    with open_tiny() as terminal:
        terminal.rate(id, "up")
    raised = logprob(running)
    assert raised > before + 1e-4
    rate(running, running.chat("another").json["id"], "down")
    with open_tiny() as terminal:
        assert terminal.status().adapter_version == 2
        terminal.undo()
        assert terminal.status().adapter_version == 1
    assert logprob(running) == raised
    assert running.ask("DELETE", f"/v1/ratings/{id}").json["adapter_version"] == 0
    with open_tiny() as terminal:
        assert terminal.status().ratings == 0


def test_all_ratings_of_a_reply_are_taken_back(running, history):
    """After that, the reply has no rating; the OpenAPI document says so."""
    before = logprob(running)
    id = running.chat().json["id"]
    rate(running, id, "up")
    rate(running, id, "down")
    assert running.ask("DELETE", f"/v1/ratings/{id}").status == 200
    assert logprob(running) == before and history().ratings() == [] and history().version() == 0
    assert running.ask("DELETE", f"/v1/ratings/{id}").status == 404
    told = running.ask("GET", "/openapi.json").json["paths"]["/v1/ratings/{id}"]["delete"]["summary"]
    assert told == "Take all ratings of a reply back."


def test_an_older_rating_is_taken_back(running, history):
    """The later one stays in force."""
    first, second = (running.chat(word).json["id"] for word in ("one", "two"))
    rate(running, first)
    rate(running, second, "down")
    assert running.ask("DELETE", f"/v1/ratings/{first}").status == 200
    assert [(r.reply_id, r.rating) for r in history().ratings()] == [(second, "down")]
    assert running.ask("DELETE", f"/v1/ratings/{first}").status == 404
    assert running.ask("DELETE", f"/v1/ratings/{second}").status == 200


def test_only_the_newest_preference_is_taken_back(running):
    first, second = (running.chat(word).json["id"] for word in ("one", "two"))
    running.ask("POST", "/v1/ratings", {"id": first, "preferred": "a better answer"})
    rate(running, second)
    refused = running.ask("DELETE", f"/v1/ratings/{first}")
    assert refused.status == 409 and refused.error["code"] == "not_the_newest"
    assert running.ask("DELETE", f"/v1/ratings/{second}").status == 200
    assert running.ask("DELETE", f"/v1/ratings/{first}").status == 200


def test_a_preferred_text(running, history):
    id = running.chat().json["id"]
    told = running.ask("POST", "/v1/ratings", {"id": id, "preferred": "a better answer"})
    fact = told.json
    assert told.status == 200 and fact["object"] == "preference" and fact["id"] == id
    assert fact["preferred_id"] != id and fact["margin_after"] > fact["margin_before"] and fact["applied"]
    assert history().version() == fact["adapter_version"] == 1
    refused = running.ask("POST", "/v1/ratings", {"id": id, "preferred": " "})
    assert refused.status == 400
    assert running.ask("DELETE", f"/v1/ratings/{id}").json["adapter_version"] == 0


def test_each_of_several_replies_can_be_rated(running):
    done = running.chat(n=3, temperature=1.5, seed=5).json
    ids = [choice["reply_id"] for choice in done["choices"]]
    assert done["id"] == ids[0] and len(set(ids)) == 3
    for number, id in enumerate(ids):
        assert rate(running, id, "down").json["adapter_version"] == number + 1


@pytest.mark.parametrize("id", ["nothing", "last", "", "%", "a" * 500])
def test_unknown_replies(shared, id):
    """Also beginnings of ids, and "last": of many clients each means another."""
    reply = shared.chat().json["id"]
    for name in (id, reply[:6]):
        refused = rate(shared, name)
        assert refused.status == 404 and refused.error["param"] == "id"
    assert shared.ask("DELETE", f"/v1/ratings/{reply[:6]}").status == 404
    assert shared.ask("DELETE", f"/v1/ratings/{reply}").status == 404  # not rated


def test_the_field_of_the_reply_is_named(shared):
    """`ruvmlx rate --json` prints the field `reply_id`, so a client can send this name. The error says that
    the server's name for this field is `id`."""
    refused = shared.ask("POST", "/v1/ratings", {"reply_id": "x", "rating": "up"})
    assert refused.status == 400 and refused.error["param"] == "reply_id"
    assert refused.error["message"].endswith("give it as id.")


def test_adapters_per_request(running, open_tiny, history):
    """Each request writes with the adapter it names, and a rating goes to the one that wrote the reply."""
    plain = logprob(running)
    rate(running, running.chat().json["id"])
    with open_tiny() as terminal:
        terminal.store.adapters.copy(terminal.model.fingerprint, "default", "work")
    rated = logprob(running)
    names = [card["id"] for card in running.ask("GET", "/v1/models").json["data"]]
    assert names == [running.model, *(f"{running.model}@{name}" for name in ("default", "work", "none"))]
    assert logprob(running, model=f"{running.model}@none") == plain == logprob(running, adapter="none")
    assert logprob(running, adapter="work") == logprob(running) == rated != plain
    reply = running.chat("more", model=f"{running.model}@work").json["id"]
    assert rate(running, reply, "down").json["adapter"] == "work"
    assert (history().version(), history("work").version()) == (1, 2)
    assert logprob(running, adapter="work") != rated == logprob(running)
    assert running.ask("DELETE", f"/v1/ratings/{reply}").json == {
        "object": "rating.deleted", "id": reply, "deleted": True, "adapter": "work", "adapter_version": 1
    }  # fmt: skip


def test_a_reply_of_the_untouched_model(running):
    """No adapter learns from its rating, or from a text that is preferred to it; and it says so."""
    id = running.chat(adapter="none").json["id"]
    before = logprob(running, adapter="default")
    for feedback in ({"rating": "down"}, {"preferred": "Better."}):
        refused = running.ask("POST", "/v1/ratings", {"id": id, **feedback})
        assert refused.status == 409 and refused.error["code"] == "no_adapter"
    assert logprob(running, adapter="default") == before


def test_without_an_adapter(serve):
    """Ratings have nothing to change, and say so."""
    running = serve(adapter=None)
    reply = running.chat().json["id"]
    refused = rate(running, reply)
    assert refused.status == 404 and "no adapter" in refused.error["message"]
    assert running.ask("DELETE", f"/v1/ratings/{reply}").status == 404
    names = [card["id"] for card in running.ask("GET", "/v1/models").json["data"]]
    assert names == [running.model, f"{running.model}@none"]


def test_a_rating_does_not_wait_for_a_reply(running, monkeypatch):
    """It is applied between two tokens of another client's reply."""
    import time

    from ruvmlx.engine.run import Run

    id = running.chat().json["id"]
    draw = Run.draw

    def slowly(run, record=True):
        time.sleep(0.03)
        run.request.ignore_eos = True
        return draw(run, record)

    monkeypatch.setattr(Run, "draw", slowly)
    busy = running.send_chat(max_tokens=300)
    running.wait_until(lambda: running.serving.waiting == 1)
    time.sleep(0.2)
    assert rate(running, id).status == 200 and running.serving.waiting == 1
    busy.close()


@pytest.mark.parametrize("field", ["rating", "preferred"])
def test_replies_go_on_while_the_first_rating_measures_the_model(never_measured, field, endless, monkeypatch):
    """The rating waits for the measurement. Another client's stream gets tokens in the meantime, and a new
    request begins."""
    during = []  # the tokens of all replies, at the end of each slice
    slice_of, written = host._slice, []
    monkeypatch.setattr(learning, "SLICE", 0.002)
    monkeypatch.setattr(host, "_slice", lambda work: (slice_of(work), during.append(len(written)))[0])
    draw = Run.draw
    monkeypatch.setattr(Run, "draw", lambda run, record=True: (written.append(run), draw(run, record))[1])
    first = never_measured.chat().json["id"]
    streams = [never_measured.send_chat(max_tokens=400)]
    never_measured.wait_until(lambda: never_measured.serving.waiting == 1)
    body = {"id": first, field: "up" if field == "rating" else "other words"}
    answers = []
    rating = threading.Thread(target=lambda: answers.append(never_measured.ask("POST", "/v1/ratings", body)))
    rating.start()
    never_measured.wait_until(lambda: during)
    streams.append(never_measured.send_chat(max_tokens=400))
    rating.join(60)
    for stream in streams:
        stream.close()
    assert answers[0].status == 200, answers[0].json
    assert answers[0].json["applied"]
    assert len(during) > 8 and during[-1] > during[0] + len(during) / 4
    assert len(set(map(id, written[during[0] : during[-1]]))) == 2  # both replies go on


def test_counts(running):
    rate(running, running.chat().json["id"])
    text = running.ask("GET", "/metrics").body.decode()
    assert 'ruvmlx_ratings_total{kind="rating"} 1' in text
    assert 'ruvmlx_requests_total{endpoint="/v1/ratings",method="POST",status="200"} 1' in text
    assert "ruvmlx_generated_tokens_total 8" in text
