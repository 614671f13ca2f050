"""The model auto in a chat: chosen in the list or by name, told for each reply, and the chat goes on."""

import io

import pytest
from ruvmlx.apps.chat import compare, models
from ruvmlx.apps.chat.app import ChatApp
from ruvmlx.apps.chat.options import ChatOptions
from ruvmlx.apps.chat.plain import PlainChat

from ruvmlx.auto_runtime import AutoRuntime, open_auto
from ruvmlx.engine import Sampling
from ruvmlx.host.model_holder import ModelHolder, Opener
from ruvmlx.runtime import Runtime
from ruvmlx.settings import AUTO, Settings, load
from ruvmlx.sona.optional.selector import ModelSelector

from .helpers import WIDE, ask, screen_text, until
from .test_branches import shown_texts
from .test_models import ONE, TWO, cache, listed_names, wait_for_model  # noqa: F401 - cache is a fixture

OPTIONS = {"sampling": Sampling(1.5), "max_new_tokens": 5, "learn_when_idle": False}


def opener(first=AUTO):
    def opens(model, adapter, watch):
        settings = Settings(
            model=model, auto_models=f"{ONE},{TWO}", backend="native", adapter=adapter or "none", threads=1,
            kv_disk=0,
        )  # fmt: skip
        return open_auto(settings, watch) if model == AUTO else Runtime.open(settings, watch=watch)

    return Opener(opens, first, "default")


@pytest.fixture
def alternate(monkeypatch):
    """The selector takes the smaller model first, then the larger one, and so on."""
    count = 0

    def draw(self, turns, arms, seed=None):
        nonlocal count
        count += 1
        return self.arms[(count - 1) % 2], dict.fromkeys(self.arms, 0.5)

    monkeypatch.setattr(ModelSelector, "draw", draw)
    monkeypatch.setattr("ruvmlx.sona.optional.selector.UNSURE_LOGPROB", None)  # random models are unsure
    monkeypatch.setattr(ModelSelector, "has_ratings", True)


async def test_auto_is_chosen_in_the_list_and_switches_while_the_chat_goes_on(cache, alternate):  # noqa: F811
    app = ChatApp(opener(ONE), ChatOptions(**OPTIONS))
    async with app.run_test(size=WIDE) as pilot:
        await until(pilot, lambda: app.phase == "idle" or app.failure)
        await ask(app, pilot, "Hello there")
        session, first = app.chat.state.session, app.chat.transcript.replies[0].text
        await pilot.press("f3")
        await until(pilot, lambda: listed_names(app) is not None and AUTO in listed_names(app))
        await pilot.press(*AUTO)
        await until(pilot, lambda: listed_names(app)[:1] == [AUTO])
        await pilot.press("enter")
        await wait_for_model(app, pilot, TWO)
        assert app.chat.state.session == session and shown_texts(app) == ["Hello there", first]
        assert load().model == AUTO
        for name in (TWO, ONE):
            reply = await ask(app, pilot, "And you?")
            await until(pilot, lambda name=name: app.chat.model == app.chat.prompt.heading == name)
            line = f"{name}: it answers such questions better, 50% sure"
            assert reply.chosen == line
            await until(pilot, lambda line=line: line in screen_text(app))
        await pilot.press("ctrl+y")
        await until(pilot, lambda: app.chat.transcript.replies[-1].rating == "up")
        wrote = await app.host.call(
            lambda r: [r.store.replies.get(t.reply_id).model for t in r.chats.turns(session)[1::2]]
        )
        assert wrote == [ONE, TWO, ONE]
        await app.actions.models.use_as_typed(TWO)  # the user's own choice wins
        await until(pilot, lambda: app.phase == "idle" and app.chat.model == TWO)
        assert not await app.host.call(lambda runtime: isinstance(runtime, AutoRuntime))
        app.host.close_now()


def test_plain_mode_says_which_model_writes_and_keeps_the_chat(cache, alternate, capsys):  # noqa: F811
    sink, holder = io.StringIO(), ModelHolder(opener())
    holder.open()
    lines = ["Hi", "And then?", "/up", "/models", f"/model {ONE}", "More", f"/model {AUTO}", "Again"]
    try:
        source = io.StringIO("\n".join(lines) + "\n")
        code = PlainChat(holder, ChatOptions(**OPTIONS), source, sink).run()
        runtime = holder.opened_runtime
        session = runtime.chats.last_chat()
        wrote = [runtime.store.replies.get(t.reply_id).model for t in runtime.chats.turns(session)[1::2]]
    finally:
        holder.close()
    said = sink.getvalue()
    assert code == 0 and wrote == [TWO, ONE, ONE, TWO]
    notes = capsys.readouterr().err
    assert notes.count(": it answers such questions better, 50% sure") == 3
    assert notes.index(f"{TWO}: it") < notes.index(f"Opening {ONE} ...") < notes.index(f"{ONE}: it")
    assert "auto, in use, chooses one for each question" in said and "Model: auto." in said
    assert said.count("Rated good") == 1


@pytest.mark.parametrize("sides", [[True, False], [False, True]])
def test_both_replies_of_a_comparison_are_of_one_model_and_no_line_tells_which(
    cache,  # noqa: F811
    alternate,
    monkeypatch,
    capsys,
    sides,
):
    """The selector chooses no model for a comparison."""
    monkeypatch.setattr(compare, "order", lambda: list(sides))
    sink, holder = io.StringIO(), ModelHolder(opener())
    holder.open()
    try:
        source = io.StringIO("Hi\n/up\n/compare Which way?\n/effect\n")
        code = PlainChat(holder, ChatOptions(**OPTIONS), source, sink).run()
        runtime = holder.opened_runtime
        rows = runtime.store.messages.all(runtime.chats.last_chat())
        replies = [runtime.store.replies.get(row.reply_id) for row in rows if row.reply_id]
    finally:
        holder.close()
    assert code == 0 and "Reply 2." in sink.getvalue()
    assert [reply.model for reply in replies] == [TWO] * 5
    assert [reply.adapter_version > 0 for reply in replies[1:]] == [*sides, False, True]
    notes = capsys.readouterr().err
    assert notes.count(": it answers such questions better") == 1 and f"Opening {ONE}" not in notes


def test_the_word_auto_is_no_file(cache, tiny, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    (tmp_path / AUTO).mkdir()
    assert models.find_model(AUTO, tiny) == AUTO
    models.remember(AUTO)
    assert load().model == AUTO
    assert AUTO not in [entry.name for entry in models.models(tiny)]
    assert [e.name for e in models.models(tiny, auto=True) if e.in_use] == [AUTO]
