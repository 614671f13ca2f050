"""The page in a headless Chromium: the chat, the thumbs, the key."""

import asyncio
import base64

import pytest

from . import browser

pytestmark = pytest.mark.skipif(not browser.found(), reason="chromium and chromedriver are not installed")


@pytest.fixture
def window(tmp_path):
    opened = browser.Browser(tmp_path)
    yield opened
    opened.close()


def texts(window):
    """All turns of the chat."""
    return window.run("return [...document.querySelectorAll('.turn .text')].map((e) => e.textContent)")


def version(running):
    """The version of the adapter in use."""
    asked = running.serving.host.call_between(
        lambda runtime: runtime.learner.history.status().adapter_version
    )
    return asyncio.run_coroutine_threadsafe(asked, running.loop).result(20)


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
    window.wait(lambda: window.text(".turn .said").startswith("learned: "))
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
