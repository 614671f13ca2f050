"""Two terminals continue one chat: each message follows what its terminal shows."""

from contextlib import closing

import pytest
from ruvmlx.apps.chat.actions import write
from ruvmlx.apps.chat.messages import UserMessage
from ruvmlx.apps.chat.steps.write import GONE, IS_BACK

from ruvmlx.store import Store

from .helpers import ask, screen_text, until
from .test_branches import chatting  # noqa: F401


@pytest.fixture
def elsewhere(home):
    """Another terminal; call it to add a question to a chat, and its reply."""

    def go_on(session: str, question: str, reply: str = "") -> None:
        with closing(Store(home / "ruvmlx.db")) as store:
            asked = store.messages.add_user(session, question)
            if reply:
                store.messages.append(session, "assistant", reply, None, 0.0, asked)

    return go_on


def path_of(home, session: str) -> list[str]:
    """The words of the user on the current branch."""
    with closing(Store(home / "ruvmlx.db", reading=True)) as store:
        return [row.content for row in store.messages.branch(session) if row.role == "user"]


@pytest.mark.parametrize("reply", ["", "A rose."], ids=["still written", "written"])
async def test_a_message_follows_what_its_terminal_shows(chatting, elsewhere, home, reply):  # noqa: F811
    async with chatting() as (app, pilot):
        first = await ask(app, pilot, "Name a river.")
        session = app.chat.state.session
        elsewhere(session, "Tell me of a rose.", reply)
        second = await ask(app, pilot, "And now?")
        assert path_of(home, session) == ["Name a river.", "And now?"]
        assert first.message_id < second.message_id
        elsewhere(session, "Once more.", reply)
        await pilot.press("ctrl+g")  # the reply that is shown, not the other terminal's
        await until(pilot, lambda: app.phase == "idle" and app.chat.transcript.replies[-1] is not second)
        assert path_of(home, session) == ["Name a river.", "And now?"]
        assert app.chat.transcript.replies[-1].branch[1] > 1


async def test_a_reply_that_ends_after_the_other_terminals_is_the_one_on_the_screen(
    chatting,  # noqa: F811
    elsewhere,
    home,
    monkeypatch,
):
    """The other terminal's message comes while this reply is written."""
    async with chatting() as (app, pilot):
        session = app.chat.state.session
        found = write.turns_with

        def late(runtime, session, reply_id):
            elsewhere(session, "Tell me of a rose.", "A rose.")
            return found(runtime, session, reply_id)

        monkeypatch.setattr(write, "turns_with", late)
        reply = await ask(app, pilot, "Name a river.")
        assert reply.reply_id is not None
        assert path_of(home, session) == ["Name a river."]


@pytest.mark.parametrize("key", ["enter", "ctrl+g"])
async def test_a_chat_that_was_deleted_elsewhere_is_gone_or_comes_back(chatting, home, key):  # noqa: F811
    """The error named a command of the shell, and the deleted chat came back without a word."""
    async with chatting() as (app, pilot):
        await ask(app, pilot, "Name a river.")
        session, told = app.chat.state.session, []
        with closing(Store(home / "ruvmlx.db")) as store:
            for delete, line in ((store.chats.soft_delete, IS_BACK), (store.chats.delete, GONE)):
                delete(session)
                app.chat.prompt.text = "And now?" if key == "enter" else ""
                await pilot.press(key)
                await until(pilot, lambda line=line: app.phase == "idle" and line in screen_text(app))
                told.append(session in store.chats.ids() and not store.chats.deletion_times())
        assert told == [True, False]


async def test_the_arrows_switch_to_the_branch_of_the_other_terminal(chatting, elsewhere, home):  # noqa: F811
    """The arrows count from the reply on the screen. Before, they counted from the other terminal's reply,
    and the chat said that there is only one reply."""
    async with chatting() as (app, pilot):
        await ask(app, pilot, "Name a river.")
        session = app.chat.state.session
        elsewhere(session, "Tell me of a rose.", "Roses are red.")
        await ask(app, pilot, "And now?")
        assert app.query(UserMessage)[-1].branch == (2, 2)
        with closing(Store(home / "ruvmlx.db")) as store:
            red = next(row.id for row in store.messages.all(session) if row.content == "Roses are red.")
            store.messages.set_head(session, red)
        await pilot.press("tab", "left")
        await until(pilot, lambda: "Roses are red." in screen_text(app))
        assert "only reply" not in screen_text(app)
