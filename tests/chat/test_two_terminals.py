"""Two terminals continue one chat: each message follows what its terminal shows."""

from contextlib import closing

import pytest
from ruvmlx.apps.chat.actions import write

from ruvmlx.store import Store

from .helpers import ask, until
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
