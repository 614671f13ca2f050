"""The user's chats over HTTP: the same as the terminal's, for whoever has a key of the chat app."""

import asyncio
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from ruvmlx.apps.server.limits import ServerLimits

from ruvmlx.errors import MemoryBusy

from .conftest import CHAT_KEY

KEY = {"authorization": f"Bearer {CHAT_KEY}"}


def say(running, text, **fields):
    """The events of one reply."""
    asked = {"model": running.model, "content": text, "max_tokens": 6, "temperature": 0, **fields}
    answer = running.ask("POST", "/v1/chats", asked, **KEY)
    assert answer.status == 200, answer.body
    lines = [line.removeprefix("data: ") for line in answer.body.decode().strip().split("\n\n")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def get(running, path):
    return running.ask("GET", path, None, **KEY)


def in_runtime(running, work):
    return asyncio.run_coroutine_threadsafe(running.serving.host.call_between(work), running.loop).result(20)


def test_a_chat_is_kept_and_goes_on(serve):
    """It is one of the terminal's chats; the next message is answered behind the earlier ones."""
    running = serve()
    first = say(running, "hello", system="Be brief.")
    chat, text = first[0]["chat"], "".join(event["text"] for event in first)
    assert first[-1]["done"] is True and {event["chat"] for event in first} == {chat}
    second = say(running, "and you?", chat=chat)
    shown = get(running, f"/v1/chats/{chat}").json
    assert [message["role"] for message in shown["messages"]] == ["user", "assistant"] * 2
    assert shown["messages"][1]["content"] == text and shown["system"] == "Be brief."
    assert shown["messages"][3]["reply_id"] == second[0]["reply_id"]
    turns = in_runtime(running, lambda runtime: runtime.chats.turns(chat))
    assert [turn.role for turn in turns] == ["system", "user", "assistant", "user", "assistant"]
    [card] = get(running, "/v1/chats").json["chats"]
    assert (card["id"], card["turns"], card["title"]) == (chat, 4, "hello")
    whole = [{"role": "system", "content": "Be brief."}, *shown["messages"][:3]]
    messages = [{"role": m["role"], "content": m["content"]} for m in whole]
    same = running.chat(messages=messages, max_tokens=6).json["choices"][0]["message"]["content"]
    assert "".join(event["text"] for event in second) == same


def test_a_rating_of_its_reply(serve):
    """Thumbs under a reply of the page: the weights change, and the chat shows it."""
    running = serve()
    first = say(running, "hello")
    rated = running.ask("POST", "/v1/ratings", {"id": first[0]["reply_id"], "rating": "up"})
    assert rated.json["applied"]
    messages = get(running, f"/v1/chats/{first[0]['chat']}").json["messages"]
    assert [message["rating"] for message in messages] == [None, "up"]
    learned = get(running, "/v1/learned").json
    assert learned["adapter"] == "default" and "Learned from 1 rating" in learned["sentences"][0]


def test_search_and_deletion(serve):
    """A deleted chat is hidden, and can come back as one that the terminal deleted."""
    running = serve()
    chat = say(running, "a rare zebra")[0]["chat"]
    say(running, "a common dog")
    found = running.ask("POST", "/v1/chats/search", {"words": "zebra rare"}, **KEY).json["hits"]
    assert {hit["chat"] for hit in found} == {chat} and "user" in {hit["role"] for hit in found}
    assert running.ask("DELETE", f"/v1/chats/{chat}", None, **KEY).json == {"id": chat, "deleted": True}
    assert running.ask("POST", "/v1/chats/search", {"words": "zebra"}, **KEY).json == {"hits": []}
    assert [card["title"] for card in get(running, "/v1/chats").json["chats"]] == ["a common dog"]
    assert get(running, f"/v1/chats/{chat}").status == 404
    assert in_runtime(running, lambda runtime: runtime.store.chats.soft_deleted())[0].id == chat


PRIVATE = [
    ("GET", "/v1/chats"), ("GET", "/v1/chats/x"), ("DELETE", "/v1/chats/x"), ("POST", "/v1/chats"),
    ("POST", "/v1/chats/search"), ("GET", "/v1/learned"), ("HEAD", "/v1/chats"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), PRIVATE)
def test_who_may_see_them(shared, method, path):
    """Not without a key of the chat app, although this server asks for none; and no other web page."""
    assert shared.ask(method, path).status == 401
    assert shared.ask(method, path, authorization="Bearer " + "x" * 20).status == 401
    other = {"origin": "http://localhost:3000", **KEY}
    assert shared.ask(method, path, None, **other).status == 403
    own = {"origin": f"http://127.0.0.1:{shared.port}", **KEY}
    assert shared.ask(method, path, None, **own).status in (200, 400, 404)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"content": " "}, 400, "content"),
        ({"content": "a" * 262_145}, 400, "content"),
        ({"chat": "nonsense"}, 404, "chat"),
        ({"model": "nonsense"}, 404, "model"),
        ({"adapter": "nonsense"}, 404, "adapter"),
        ({"nonsense": 1}, 400, "nonsense"),
    ],
)
def test_wrong_bodies(shared, fields, status, param):
    body = {"model": shared.model, "content": "hello", "max_tokens": 2, **fields}
    answer = shared.ask("POST", "/v1/chats", body, **KEY)
    assert answer.status == status and answer.error["param"] == param


def test_a_client_that_leaves_keeps_its_text(serve):
    """What was written until then is in the chat."""
    running = serve()
    running.slow_down()
    with begun(running, "hello") as connection:
        read = b""
        while not re.search(rb'"text":"[^"]', read):  # an event can come in two pieces
            piece = connection.recv(4096)
            assert piece, read
            read += piece
    running.wait_until(lambda: running.serving.writing == 0)
    running.wait_until(lambda: get(running, "/v1/chats").json["chats"][0]["turns"] == 2)


def begun(running, text, **fields):
    """A connection that has said something in a chat and has read nothing yet."""
    data = json.dumps({"model": running.model, "content": text, "temperature": 0, **fields}).encode()
    head = (
        "POST /v1/chats HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {CHAT_KEY}\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    connection = running.connect()
    connection.sendall(head.encode() + data)
    return connection


def test_a_question_whose_client_leaves_before_the_reply_is_not_stored(serve, monkeypatch):
    """The page takes it back. Neither the question nor its empty reply is left, in no table."""
    running = serve()
    chat = say(running, "hello")[0]["chat"]
    submit = running.serving.host.submit

    async def submit_later(request, session_id=None):
        while not request.cancel.is_set():
            await asyncio.sleep(0.01)
        async for chunks in submit(request, session_id):
            yield chunks

    with monkeypatch.context() as patch:
        patch.setattr(running.serving.host, "submit", submit_later)
        for known in (chat, None):
            with begun(running, "a zebra", chat=known):
                running.wait_until(lambda: running.serving.writing == 1)
            running.wait_until(lambda: running.serving.writing == 0)
    assert running.ask("POST", "/v1/chats/search", {"words": "zebra"}, **KEY).json == {"hits": []}
    assert [card["id"] for card in get(running, "/v1/chats").json["chats"]] == [chat]
    say(running, "and you?", chat=chat)
    messages = get(running, f"/v1/chats/{chat}").json["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    count = "SELECT count(*) FROM replies"
    assert in_runtime(running, lambda runtime: runtime.store.db.value(count)) == 2


def test_a_client_that_leaves_while_its_question_is_saved_leaves_none(serve):
    """The runtime saves the question after its client has left."""
    running = serve()
    leave_now, saved = threading.Event(), threading.Event()

    def block_model(runtime):
        leave_now.set()
        saved.wait(20)

    waiting = asyncio.run_coroutine_threadsafe(running.serving.host.call_between(block_model), running.loop)
    leave_now.wait(20)
    with begun(running, "a zebra"):
        running.wait_until(lambda: running.serving.waiting == 1)
    running.wait_until(lambda: running.serving.calls == 0)
    saved.set()
    waiting.result(20)
    running.wait_until(lambda: running.serving.waiting == 0)
    assert running.ask("POST", "/v1/chats/search", {"words": "zebra"}, **KEY).json == {"hits": []}


def test_a_refused_message_is_not_stored(serve):
    """Of messages that come at once to a server for one reply, only the one that is answered is in a chat."""
    running = serve(limits=ServerLimits(replies=1))
    running.slow_down(0.1)
    asked = {"model": running.model, "content": "hello", "max_tokens": 6, "system": "Be brief."}
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(running.ask, "POST", "/v1/chats", asked, **KEY) for _ in range(6)]
    statuses = [answer.result().status for answer in answers]
    assert statuses.count(200) + statuses.count(429) == 6 and 429 in statuses
    assert len(get(running, "/v1/chats").json["chats"]) == statuses.count(200)
    chat = get(running, "/v1/chats").json["chats"][0]["id"]
    with running.send_chat(max_tokens=100):
        running.wait_until(lambda: running.serving.waiting)
        refused = running.ask("POST", "/v1/chats", {**asked, "chat": chat, "system": "New."}, **KEY)
    shown = get(running, f"/v1/chats/{chat}").json
    assert refused.status == 429 and len(shown["messages"]) == 2 and shown["system"] == "Be brief."


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(MemoryBusy(4, 1, 2), 503, "memory_busy"), (ValueError("a fault"), 500, "internal_error")],
)
def test_a_message_without_a_reply_is_not_stored(serve, monkeypatch, error, status, code):
    """The page takes it back, so it must not be in the chat beside the next one."""
    running = serve()
    chat = say(running, "hello")[0]["chat"]

    async def fail(request, session_id=None):
        raise error
        yield

    with monkeypatch.context() as patch:
        patch.setattr(running.serving.host, "submit", fail)
        for known in (chat, None):
            asked = {"model": running.model, "content": "a zebra", "chat": known}
            refused = running.ask("POST", "/v1/chats", asked, **KEY)
            assert refused.status == status and refused.error["code"] == code
    assert running.ask("POST", "/v1/chats/search", {"words": "zebra"}, **KEY).json == {"hits": []}
    [card] = get(running, "/v1/chats").json["chats"]
    assert card["id"] == chat
    say(running, "and you?", chat=chat)
    messages = get(running, f"/v1/chats/{chat}").json["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2


def test_a_refused_message_changes_no_chat(serve):
    """Neither the system prompt that came with it, nor a new chat for it."""
    running = serve()
    chat = say(running, "hello", system="Be brief.")[0]["chat"]
    for fields in ({"chat": chat, "system": "Be long."}, {}):
        asked = {"model": running.model, "content": "word " * 3000, "max_tokens": 6, **fields}
        assert running.ask("POST", "/v1/chats", asked, **KEY).status == 400
    assert get(running, f"/v1/chats/{chat}").json["system"] == "Be brief."
    assert in_runtime(running, lambda runtime: runtime.store.chats.ids()) == {chat}


def test_markdown(shared):
    """Typed HTML stays text, no picture is loaded, no script is a link."""
    text = "**bold** <b>x</b>\n\n![p](http://a/b.png) [l](javascript:alert(1))\n\n```py\nx < 1\n```\n"
    [html] = shared.ask("POST", "/v1/markdown", {"texts": [text]}).json["html"]
    assert (
        "<strong>bold</strong> &lt;b&gt;x&lt;/b&gt;" in html and "<pre><code" in html and "x &lt; 1" in html
    )
    assert "<img" not in html and 'href="javascript' not in html
    refused = shared.ask("POST", "/v1/markdown", {"texts": ["a" * 200_000] * 2})
    assert refused.status == 400 and refused.error["param"] == "texts"
