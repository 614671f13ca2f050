"""After ten ratings, the chat says once in words what they show, or asks."""

import io
from contextlib import ExitStack, closing

import pytest
from ruvmlx.apps.chat import describe
from ruvmlx.apps.chat.messages import Notice
from ruvmlx.apps.chat.options import ChatOptions
from ruvmlx.apps.chat.plain import PlainChat

from ruvmlx.chats import learning
from ruvmlx.chats.learning import FirstSummary
from ruvmlx.engine import Sampling
from ruvmlx.store import Store, database

from .helpers import ask, chatting, screen_text, until
from .scripted import ScriptedRuntime


def test_what_is_clear_is_said_and_what_is_not_is_asked():
    assert describe.first_summary(FirstSummary(10, "shorter replies", "shorter replies")).startswith(
        "After 10 ratings, you seem to like: shorter replies. "
    )
    unsure = describe.first_summary(FirstSummary(10, "", "shorter replies"))
    assert "not clear yet what you like. Could it be shorter replies? After a bad rating, /why" in unsure
    assert "Could it be" not in describe.first_summary(FirstSummary(10, "", ""))
    assert describe.first_summary(None) == ""


@pytest.mark.parametrize("at", [2, 3])
def test_plain_mode_tells_it_once_for_each_adapter(at, open_tiny, monkeypatch):
    """A chat that is opened again shows no second summary. Another adapter has its own."""
    monkeypatch.setattr(learning, "SUMMED_UP_AT", at)

    def summary_lines(*lines):
        sink, options = io.StringIO(), ChatOptions(sampling=Sampling(1.5), max_new_tokens=4)
        with open_tiny() as runtime:
            PlainChat(runtime, options, io.StringIO("".join(f"{line}\n" for line in lines)), sink).run()
        return [line.split(",")[0] for line in sink.getvalue().splitlines() if "After " in line]

    assert summary_lines(*["Hello", "/up"] * (at - 1)) == []
    assert summary_lines(*["Hello", "/down"] * 2) == [f"After {at} ratings"]
    assert summary_lines("Hello", "/up", "/undo", "Hello", "/up") == []
    assert summary_lines("/adapter other new", *["Hello", "/up"] * at) == [f"After {at} ratings"]


def test_a_locked_store_hides_neither_the_summary_nor_the_rating(open_tiny, monkeypatch, capsys):
    """Another process locks the store after the rating is in it."""
    monkeypatch.setattr(learning, "SUMMED_UP_AT", 1)
    monkeypatch.setattr(database, "_BUSY_SECONDS", 0.0)
    sink, options = io.StringIO(), ChatOptions(sampling=Sampling(1.5), max_new_tokens=4)
    with open_tiny() as runtime, closing(Store(runtime.store.path)) as other, ExitStack() as locked:
        rate = runtime.rate

        def rate_and_lock(*args, **kwargs):
            rated = rate(*args, **kwargs)
            locked.enter_context(other.transaction())
            return rated

        monkeypatch.setattr(runtime, "rate", rate_and_lock)
        PlainChat(runtime, options, io.StringIO("Hello\n/up\n"), sink).run()
    assert "After 1 rating" in sink.getvalue() and not capsys.readouterr().err


async def test_the_app_says_it_in_the_conversation_and_opens_no_screen():
    runtime = ScriptedRuntime(["One."], ["Two."])
    found = [FirstSummary(10, "", "shorter replies"), None]
    runtime.first_summary = lambda: found.pop(0)
    async with chatting(runtime) as (app, pilot):
        for left in (1, 0):
            await ask(app, pilot)
            await pilot.press("ctrl+y")
            await until(pilot, lambda left=left: len(found) == left and len(app.query(Notice)) == 1)
            assert left == 0 or "After 10 ratings" in screen_text(app)
        assert len(app.screen_stack) == 1
