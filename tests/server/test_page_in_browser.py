"""The page in a headless Chromium: the chat, the thumbs, the key."""

import asyncio
import base64
import threading
from dataclasses import replace

import pytest

from ruvmlx.store import MessageRow

from . import browser
from .conftest import CHAT_KEY

pytestmark = pytest.mark.skipif(not browser.is_found(), reason="chromium and chromedriver are not installed")


@pytest.fixture
def window(tmp_path):
    opened = browser.Browser(tmp_path)
    yield opened
    opened.close()


def texts(window):
    """All turns of the chat."""
    return window.run("return [...document.querySelectorAll('.turn .text')].map((e) => e.textContent)")


def ask_runtime(running, work):
    return asyncio.run_coroutine_threadsafe(running.serving.host.call_between(work), running.loop).result(20)


def version(running):
    """The version of the adapter in use."""
    return ask_runtime(running, lambda runtime: runtime.learner.history.status().adapter_version)


def test_chat_and_rate(window, serve, tmp_path):
    """A message, its reply, a thumb that changes the weights, the same taken back; nothing is blocked."""
    running = serve(max_tokens=12)
    window.open(f"http://127.0.0.1:{running.port}/")
    window.wait(lambda: window.sees("#ask"))
    assert window.text("#model") == running.model and not window.sees("#login")
    names = window.run("return [...document.querySelectorAll('#names option')].map((o) => o.textContent)")
    assert names == [running.model, f"{running.model}@default", f"{running.model}@none"]

    window.type("#ask", "hello\n")
    window.wait(lambda: window.sees(".turn .up"))
    assert texts(window)[0] == "hello" and texts(window)[1]
    window.wait(lambda: "/v1/chat/completions" in window.text("#requests"))

    before = version(running)
    window.click(".turn .up")
    window.wait(
        lambda: window.text(".turn .said").startswith("learned: more like this. Of the allowed change, ")
    )
    after = version(running)
    assert after == before + 1 and f"version {after}" in window.text(".turn .said")
    window.click(".turn .undo")
    window.wait(lambda: window.text(".turn .said") == "taken back")
    assert version(running) != after

    window.type("#ask", "more\n")
    window.wait(lambda: window.run("return document.querySelectorAll('.turn .up').length") == 2)
    image = base64.b64decode(window.screenshot())
    (tmp_path / "page.png").write_bytes(image)
    assert image.startswith(b"\x89PNG") and not window.sees("#wrong")
    window.click("#fresh")
    assert window.text("#turns") == ""
    assert [line for line in window.log() if "favicon" not in line] == []


def test_the_key_is_asked_for(window, serve):
    """A wrong key is asked for again; the right one is kept for this tab alone."""
    running = serve(keys=["a" * 20])
    window.open(f"http://127.0.0.1:{running.port}/")
    window.wait(lambda: window.sees("#login"))
    assert not window.sees("#ask")
    window.type("#key", "b" * 20 + "\n")
    window.wait(lambda: "not valid" in window.text("#state"))
    window.run("document.getElementById('key').value = ''")
    window.type("#key", "a" * 20 + "\n")
    window.wait(lambda: window.sees("#ask"))
    assert not window.sees("#login") and window.text("#model") == running.model
    assert window.run("return localStorage.length") == 0


def test_stop_and_errors(window, serve):
    """Stop keeps what was written, and the server ends the reply; an error shows the server's own line."""
    running = serve()
    window.open(f"http://127.0.0.1:{running.port}/")
    window.wait(lambda: window.sees("#ask"))
    window.type("#ask", "long " * 300 + "\n")
    window.wait(lambda: "reads at most" in window.text("#wrong"))
    assert texts(window) == [] and window.run("return document.getElementById('ask').value").startswith(
        "long"
    )
    window.run("document.getElementById('ask').value = ''")
    running.slow_down()
    window.type("#ask", "hello\n")
    window.wait(lambda: window.sees("#stop") and texts(window)[1])
    window.click("#stop")
    window.wait(lambda: not window.sees("#stop"))
    window.wait(lambda: running.serving.waiting == 0)
    assert texts(window)[1]
    assert not window.sees("#wrong") and window.sees(".turn .up")


def open_with_key(window, running, key=CHAT_KEY):
    """As from the address that `ruvmlx serve` prints."""
    window.open(f"http://127.0.0.1:{running.port}/#key={key}")
    window.wait(lambda: window.sees("#ask"))


def titles(window):
    return window.run("return [...document.querySelectorAll('#chats .open')].map((e) => e.textContent)")


def test_chats_are_kept_and_shared(window, serve):
    """A chat of the terminal is there, opens, goes on with its system prompt, and can be deleted."""
    running = serve(max_tokens=6)

    def from_terminal(runtime):
        chat = runtime.chats.new_chat("Be brief.")
        list(runtime.chats.say(chat, "a *zebra*", max_new_tokens=4, cancel=threading.Event()))

    ask_runtime(running, from_terminal)
    open_with_key(window, running)
    assert window.run("return location.hash") == "" and not window.sees("#unlock")
    window.wait(lambda: titles(window) == ["a *zebra*"])
    window.click("#chats .open")
    window.wait(lambda: len(texts(window)) == 2)
    assert window.run("return document.getElementById('system').value") == "Be brief."
    window.type("#ask", "and you?\n")
    window.wait(lambda: len(texts(window)) == 4 and window.sees(".turn:last-child .up"))
    shown = ask_runtime(running, lambda runtime: runtime.chats.turns(runtime.chats.last_chat()))
    assert [turn.role for turn in shown] == ["system", "user", "assistant", "user", "assistant"]
    assert shown[3].content == "and you?"
    window.click(".turn:last-child .up")
    window.wait(lambda: window.text(".turn:last-child .said").startswith("learned: "))
    window.click("[data-tab=learned]")
    window.wait(lambda: "Learned from 1 rating" in window.text("#sentences"))
    assert not window.sees("#ask") and window.sees("#sentences")
    window.click("[data-tab=status]")
    assert window.sees("#facts") and not window.sees("#sentences")
    window.click("[data-tab=chat]")
    window.click("#fresh")
    window.type("#ask", "another one\n")
    window.wait(lambda: titles(window) == ["another one", "a *zebra*"])
    window.click("#chats li:last-child .drop")
    window.wait(lambda: titles(window) == ["another one"])
    assert [line for line in window.log() if "favicon" not in line] == []


def test_without_the_key_nothing_is_kept(window, serve):
    """The chat works, says that it is not kept, and a key opens the others."""
    running = serve(max_tokens=4)
    window.open(f"http://127.0.0.1:{running.port}/")
    window.wait(lambda: window.sees("#ask"))
    assert window.sees("#unlock") and "not kept" in window.text("#unlock")
    window.type("#ask", "hello\n")
    window.wait(lambda: window.sees(".turn .up"))
    assert ask_runtime(running, lambda runtime: runtime.chats.last_chat()) is None
    window.type("#chatkey", CHAT_KEY + "\n")
    window.wait(lambda: not window.sees("#unlock"))
    assert texts(window) == []


def test_markdown_and_settings(window, serve):
    """A reply's Markdown is shown as such and its HTML as text; what is set reaches the model."""
    running = serve(max_tokens=12)
    open_with_key(window, running)
    seen, submit = [], running.serving.host.submit

    async def submit_marked(request, session_id=None):
        seen.append(request)
        async for chunks in submit(request, session_id):
            ends = chunks[-1].response is not None
            texts = ["**so** <i>it</i>" if ends and chunk is chunks[-1] else "" for chunk in chunks]
            yield [replace(chunk, text=text) for chunk, text in zip(chunks, texts, strict=True)]

    running.serving.host.submit = submit_marked
    window.click("#options summary")
    window.type("#system", "Be kind.")
    window.type("#temperature", "0.3")
    window.type("#topp", "0.5")
    window.type("#longest", "3")
    window.type("#ask", "hello\n")
    window.wait(lambda: window.run("return !!document.querySelector('.turn.assistant strong')"))
    assert window.text(".turn.assistant .text").strip() == "so <i>it</i>"
    assert (seen[0].sampling.temperature, seen[0].sampling.top_p, seen[0].max_new_tokens) == (0.3, 0.5, 3)
    assert seen[0].messages[0].content == "Be kind."


@pytest.mark.parametrize("width", [360, 1000])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_and_dark(window, serve, one, width, scheme):
    """Nothing is wider than the screen; the message box is in sight; text has its colour from the system."""
    running = one(lambda: serve(max_tokens=6))
    window.emulate(width, 700, scheme)
    open_with_key(window, running)
    window.type("#ask", "hello\n")
    window.wait(lambda: window.sees(".turn .up"))
    assert window.run("return document.documentElement.scrollWidth <= innerWidth")
    box = window.run(
        "const b = document.getElementById('ask').getBoundingClientRect(); return [b.top, b.bottom]"
    )
    assert 0 <= box[0] < box[1] <= 700
    colour = window.run("return getComputedStyle(document.body).color")
    assert (colour == "rgb(255, 255, 255)") == (scheme == "dark")


def test_a_long_reply_is_followed(window, serve):
    """The page stays at its end while a reply grows, unless the reader has scrolled up."""
    running = serve(max_tokens=4)
    window.emulate(400, 500, "light")
    open_with_key(window, running)
    submit = running.serving.host.submit

    async def submit_long(request, session_id=None):
        async for chunks in submit(request, session_id):
            yield [replace(chunk, text="word\n\n" * 40 if chunk.generated else "") for chunk in chunks]

    running.serving.host.submit = submit_long
    window.type("#ask", "hello\n")
    window.wait(lambda: window.sees(".turn .up"))
    at_end = "return innerHeight + scrollY > document.body.scrollHeight - 40"
    window.wait(lambda: window.run(at_end))
    assert window.run("return document.body.scrollHeight") > 2000
    window.run("scrollTo(0, 0)")
    window.run("follow(() => at('turns').append(make('p', '', 'more')))")
    assert window.run("return scrollY") == 0


@pytest.mark.parametrize(("replies", "letters"), [(600, 10), (3, 100_000)])
def test_a_long_chat_is_shown_as_markdown(window, serve, replies, letters):
    """Of more texts, or of more letters, than one request to /v1/markdown may have."""
    running = serve()

    def fill(runtime):
        rows = [
            MessageRow(role, text, None, None, None, 2 * i + at, 2 * i + at - 1 or None)
            for i in range(replies)
            for at, (role, text) in enumerate((("user", "q"), ("assistant", f"**a** {'b' * letters}")), 1)
        ]
        runtime.store.chats.add("m", None, "long", rows, rows[-1].id)

    ask_runtime(running, fill)
    open_with_key(window, running)
    window.wait(lambda: titles(window) == ["long"])
    window.click("#chats .open")
    window.wait(lambda: len(texts(window)) == 2 * replies)
    window.wait(lambda: window.run("return document.querySelectorAll('.text strong').length") == replies)
