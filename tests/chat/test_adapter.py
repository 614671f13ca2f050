"""/adapter: switching adapters within a chat."""

import io

import pytest
from ruvmlx.apps.chat import models
from ruvmlx.apps.chat.options import ChatOptions
from ruvmlx.apps.chat.plain import PlainChat
from ruvmlx.apps.chat.state import ChatState
from ruvmlx.apps.chat.steps.models import use_adapter
from ruvmlx.apps.chat.view_model import Standing

from ruvmlx import settings as config
from ruvmlx.errors import UsageError

from ..lora.test_residency import with_two_adapters
from ..sona.feedback import chat_with_reply
from ..test_runtime import say
from .helpers import ask, chatting, screen_text, until
from .scripted import ScriptedRuntime


def test_plain_mode_swaps_a_real_adapter_and_the_chat_goes_on(open_tiny, tiny, capsys):
    runtime, sink = with_two_adapters(open_tiny, tiny), io.StringIO()
    lines = io.StringIO("hi\n/adapter\n/adapter other\nmore\n/adapter none\n/adapter a b\n")
    PlainChat(runtime, ChatOptions(max_new_tokens=3), lines, sink).run()
    said = sink.getvalue()
    assert "Adapter: default@0. Others: other@1." in said and "Adapter: other@1." in said
    assert "No adapter: this chat does not learn. Others: other@1." in said
    assert capsys.readouterr().err.count("ruvmlx: ") == 1
    (chat,) = runtime.store.chats.all()
    replies = [runtime.store.replies.get(t.reply_id) for t in runtime.chats.turns(chat.id) if t.reply_id]
    assert [(r.adapter, r.adapter_version) for r in replies] == [("default", 0), ("other", 1)]


def test_the_chosen_adapter_is_that_of_the_next_start(open_tiny, tiny, monkeypatch):
    """It is saved as `ruvmlx adapters use` does; a variable that is in the way is told."""
    runtime = with_two_adapters(open_tiny, tiny)
    use = lambda name: use_adapter(runtime, ChatState(ChatOptions()), name).words  # noqa: E731
    assert use("other").endswith("The next start uses it, too.") and config.load().adapter == "other"
    assert "next start" not in use("")
    monkeypatch.setenv("RUVMLX_ADAPTER", "mine")
    assert use("default").endswith("The next start uses mine, which environment names.")
    monkeypatch.delenv("RUVMLX_ADAPTER")
    assert use("none").endswith("The next start uses none either.") and config.load().adapter_name is None
    attached = ChatState(ChatOptions(keeps_adapter=False))
    assert "next start" not in use_adapter(runtime, attached, "other").words
    assert config.load().adapter == "none"
    runtime.close()


def test_a_reply_shows_its_rating_of_the_adapter_in_use(open_tiny):
    """If the user takes a rating back after the copy of the adapter, the copy keeps the rating."""
    with open_tiny() as runtime:
        chat, _ = chat_with_reply(runtime)
        reply_id = runtime.chats.turns(chat)[-1].reply_id

        def shown():
            turn = runtime.chats.turns(chat)[-1]
            return Standing.of(runtime, chat, 9).ratings[reply_id], turn.rating

        runtime.rate(reply_id, "up")
        runtime.store.adapters.copy(runtime.model.fingerprint, "default", "other")
        runtime.undo()
        assert shown() == (None, None)
        runtime.learning.use("other")
        assert shown() == ("up", "up")
        runtime.rate(reply_id, "down")
        runtime.learning.use("default")
        assert shown() == (None, None)
        runtime.learning.use(None)  # without an adapter, the newest rating of any
        assert shown() == ("down", "down")


async def test_the_app_swaps_and_shows_it():
    runtime = ScriptedRuntime(["One."], ["Two."])
    async with chatting(runtime) as (app, pilot):
        await ask(app, pilot)
        app.chat.prompt.text = "/adapter work"
        await pilot.press("enter")
        await until(pilot, lambda: "Adapter: work@0" in screen_text(app))
        assert runtime.adapter == "work" and "Others: work@3" in screen_text(app)
        reply = await ask(app, pilot)
        assert reply.text == "Two."


@pytest.mark.parametrize("word", ["/adapter work new", "two words", "none", "", "a/b", "x" * 300])
def test_words_that_are_no_name_begin_no_adapter(word):
    """F4 offers no new adapter for them: the list then says that nothing matches."""
    assert models.new_adapter_line(word) == ""
    assert models.new_adapter_line("work") == "Start a new one: work"


def test_a_new_adapter_is_listed_before_it_learns(open_tiny, capsys):
    """It is found again after a switch to another one, and an import can still take its name."""
    with open_tiny() as runtime:
        state = ChatState(ChatOptions())
        use_adapter(runtime, state, "home new")
        use_adapter(runtime, state, "default")
        assert [row.name for row in runtime.adapters()] == ["home"] and runtime.adapters()[0].version == 0
        assert "home@0" in use_adapter(runtime, state, "home").words
        use_adapter(runtime, state, "home new")  # once more changes nothing
        assert len(runtime.adapters()) == 1
        say(runtime, runtime.chats.new_chat(), "hello")
        runtime.rate("last", "down")
        assert [(row.name, row.version) for row in runtime.adapters()] == [("home", 1)]


@pytest.mark.parametrize("name", ["a/b", "x" * 65])
def test_an_error_about_a_name_gives_the_rule(open_tiny, name):
    """Before, the error said "from the request", but there was no request."""
    with open_tiny() as runtime, pytest.raises(UsageError) as refused:
        use_adapter(runtime, ChatState(ChatOptions()), f"{name} new")
    rule = "the name of an adapter has 1 to 64 letters, digits, - and _, got"
    assert str(refused.value) == f"{rule} {name!r}. Choose another name."
