"""What belongs to one API key is not there for another: replies, ratings, the last requests, an adapter."""

from pathlib import Path

import click
import pytest
from ruvmlx.apps.cli import serve as serve_verb
from ruvmlx.apps.cli.running_server import answer_of, saved_key
from ruvmlx.apps.server.keys import own_adapters, saved_keys

from ruvmlx.errors import RuvmlxError, UsageError

ANNA, BEN, CARL = ("key-of-anna-12345", "key-of-ben-123456", "key-of-carl-12345")


def ask(running, key, method, path, body=None):
    return running.ask(method, path, body, x_api_key=key)


def chat(running, key, **fields):
    body = running.body(**{"messages": [{"role": "user", "content": "hello"}], **fields})
    return ask(running, key, "POST", "/v1/chat/completions", body)


def rate(running, key, id, **fields):
    return ask(running, key, "POST", "/v1/ratings", {"id": id, **(fields or {"rating": "up"})})


def test_a_reply_is_rated_with_the_key_that_asked_for_it(serve):
    """Another key gets the answer of an id that never was, whatever it asks."""
    running = serve([ANNA, BEN])
    id = chat(running, ANNA).json["id"]
    unknown = rate(running, BEN, "no-such-reply")
    for fields in ({"rating": "up"}, {"preferred": "Hi."}):
        refused = rate(running, BEN, id, **fields)
        assert (refused.status, refused.json) == (404, unknown.json)
    assert rate(running, ANNA, id).status == 200
    refused, never = (ask(running, BEN, "DELETE", f"/v1/ratings/{name}") for name in (id, "no-such-reply"))
    assert (refused.status, refused.json) == (404, never.json) == (404, unknown.json)
    assert ask(running, ANNA, "DELETE", f"/v1/ratings/{id}").status == 200
    assert rate(running, ANNA, chat(running, ANNA, user="u1").json["id"]).status == 200  # users share a key


def test_an_edited_reply_belongs_to_the_same_key(serve):
    running = serve([ANNA, BEN])
    id = chat(running, ANNA).json["id"]
    mine = rate(running, ANNA, id, preferred="A river.").json["preferred_id"]
    assert rate(running, BEN, mine).status == 404


def test_replies_stay_apart_after_a_restart_and_without_keys(serve):
    first = serve([ANNA, BEN])
    id = chat(first, ANNA).json["id"]
    first.stop()
    again = serve([ANNA, BEN])
    assert rate(again, BEN, id).status == 404 and rate(again, ANNA, id).status == 200
    again.stop()
    assert serve().ask("POST", "/v1/ratings", {"id": id, "rating": "up"}).status == 404


def test_each_key_sees_its_own_requests(serve):
    running = serve([ANNA, BEN])
    chat(running, ANNA)
    chat(running, BEN, max_tokens=3)
    chat(running, BEN, max_tokens=5)
    status = {key: ask(running, key, "GET", "/v1/status").json for key in (ANNA, BEN)}
    tokens = {key: [each["generated_tokens"] for each in status[key]["requests"]] for key in status}
    assert tokens == {ANNA: [8], BEN: [5, 3]}
    pace = status[ANNA]["requests"][0]["tokens_per_second"]
    assert status[ANNA]["tokens_per_second"] == pace


def test_a_key_writes_and_learns_with_its_own_adapter(serve):
    running = serve([ANNA, BEN, CARL], own={ANNA: "annas", BEN: "bens"})
    done = chat(running, ANNA)
    told = rate(running, ANNA, done.json["id"]).json
    assert told["applied"] and (told["adapter"], told["adapter_version"]) == ("annas", 1)
    for key, adapter in ((BEN, "bens"), (CARL, "default")):
        other = rate(running, key, chat(running, key).json["id"], rating="down").json
        assert (other["adapter"], other["adapter_version"]) == (adapter, 1)
    assert rate(running, ANNA, chat(running, ANNA, adapter="annas").json["id"]).json["adapter_version"] == 2


@pytest.mark.parametrize("adapter", ["bens", "default", "none", "other"])
def test_it_can_name_no_other(one, serve, adapter):
    running = one(lambda: serve([ANNA, BEN], own={ANNA: "annas", BEN: "bens"}))
    for fields in ({"adapter": adapter}, {"model": f"{running.model}@{adapter}"}):
        assert chat(running, ANNA, **fields).status == 404
    names = [each["id"] for each in ask(running, ANNA, "GET", "/v1/models").json["data"]]
    assert names == [running.model, f"{running.model}@annas"]


def test_others_cannot_name_it(serve):
    running = serve([ANNA, CARL], own={ANNA: "annas"})
    rate(running, ANNA, chat(running, ANNA).json["id"])
    assert chat(running, CARL, adapter="annas").error["code"] == "adapter_not_found"
    names = [each["id"] for each in ask(running, CARL, "GET", "/v1/models").json["data"]]
    assert names == [running.model, f"{running.model}@default", f"{running.model}@none"]


def test_the_key_file(home):
    home.mkdir(exist_ok=True)
    path = home / "api_keys"
    path.write_text(f"{ANNA} annas\n\n{BEN}\n")
    path.chmod(0o600)
    assert saved_keys() == [ANNA, BEN] and own_adapters() == {ANNA: "annas"}
    assert serve_verb._own_adapters([ANNA, BEN], "default") == {ANNA: "annas"}
    assert serve_verb._own_adapters([BEN], "annas") == serve_verb._own_adapters([], "annas") == {}
    with pytest.raises(UsageError, match="gives annas to one key; start with another --adapter"):
        serve_verb._own_adapters([ANNA], "annas")
    # a key with an adapter of its own opens no chats, so the chat app has another one
    assert serve_verb._chat_keys() == [BEN] == [saved_key("http://127.0.0.1:9", None)]
    assert serve_verb._keys("0.0.0.0", ()) == [BEN, ANNA]
    path.write_text(f"{ANNA} annas\n")
    assert saved_key("http://127.0.0.1:9", None) is None
    [made] = serve_verb._chat_keys()
    assert made != ANNA and saved_keys() == [ANNA, made] and own_adapters() == {ANNA: "annas"}
    wrong = {f"{ANNA} a b": "3 words", f"{ANNA} none": "not the name", f"{ANNA} a/b": "adapter"}
    for line, message in wrong.items():
        path.write_text(line)
        with pytest.raises(UsageError, match=message):
            saved_keys()
    path.write_text(f"{BEN}\nshort annas\n")
    with pytest.raises(UsageError, match=f"mend or remove line 2 of {path}"):
        saved_keys()


@pytest.mark.parametrize("place", ["serve --help", "docs/serve.md", "SECURITY.md"])
def test_every_place_says_what_such_a_key_opens(place):
    """The help and the two pages say the same of a key with an adapter of its own."""
    if place == "serve --help":
        said = serve_verb.serve.get_help(click.Context(serve_verb.serve))
    else:
        said = (Path(__file__).parents[2] / place).read_text(encoding="utf-8")
    said = " ".join(said.replace("`", "").split())
    assert "a key an adapter of its own; such a key opens no chats." in said and "line KEY ADAPTER" in said


def test_a_verb_whose_key_is_refused_says_so(serve):
    """With a key, the error does not ask for one; it names the address that the user gave."""
    at = f"http://127.0.0.1:{serve([ANNA]).port}"
    with pytest.raises(RuvmlxError, match=f"^the server at {at} asks for a key: give --api-key"):
        answer_of(at, "/v1/ps", None)
    with pytest.raises(RuvmlxError, match=f"^the server at {at} does not accept the key. Give another"):
        answer_of(at, "/v1/ps", BEN)
