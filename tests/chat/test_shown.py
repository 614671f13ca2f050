"""Commands act on what is shown: a table of states of a chat and of commands, in both modes.

In plain mode, what is shown is what was printed; in the app, the last reply on the screen.
"""

import contextlib
import io
import re
import shutil
import sqlite3
import threading
from pathlib import Path

import pytest
from ruvmlx.apps.chat.app import ChatApp
from ruvmlx.apps.chat.options import ChatOptions
from ruvmlx.apps.chat.plain import PlainChat

from ruvmlx.engine import Sampling
from ruvmlx.store import Store
from ruvmlx.text import sanitize

from .helpers import ask, until
from .test_every_command import type_in

QUESTION, OTHER, MINE = "Question one?", "Another question?", "My own words."
EARLIER = "An earlier question"  # of the other chat in the store

# State -> what is typed before the command.
STATES = {
    "one reply": [QUESTION],
    "written again": [QUESTION, "/again"],
    "back to the first": [QUESTION, "/again", "/prev"],
    "there and back": [QUESTION, "/again", "/prev", "/next"],
    "question edited": [QUESTION, f"/edit {OTHER}"],
    "rewritten": [QUESTION, f"/rewrite {MINE}"],
    "second question": [QUESTION, OTHER],
    "compared, first chosen": [QUESTION, "/compare", "/choose 1"],
    "compared, second chosen": [QUESTION, "/compare", "/choose 2"],
    "another chat opened": [QUESTION, "/open EARLIER"],
    "copy of the chat": [QUESTION, "/fork"],
    "deleted and restored": [QUESTION, "/delete", "/restore"],
    "new chat": [QUESTION, "/new"],
    "deleted": [QUESTION, "/delete"],
}
EMPTY = {"new chat", "deleted"}
ASKED = {"question edited": OTHER, "second question": OTHER, "another chat opened": EARLIER}


BETTER = "Better words."
TOKENS = 12  # each reply has so many: the random model never ends one, and none is empty


def rows(runtime, sql, *values):
    """Rows of the store, as another program reads them."""
    with contextlib.closing(sqlite3.connect(runtime.store.path)) as db, db:
        db.row_factory = sqlite3.Row
        return list(db.execute(sql, values))


def row(runtime, sql, *values):
    return rows(runtime, sql, *values)[0]


def value(runtime, sql, *values):
    return row(runtime, sql, *values)[0]


def newest(runtime, table, order="id"):
    return row(runtime, f"SELECT * FROM {table} ORDER BY {order} DESC LIMIT 1")


def text_of(runtime, reply_id):
    """A reply's words, as a message has them."""
    return value(runtime, "SELECT content FROM messages WHERE reply_id = ? LIMIT 1", reply_id)


def last_message(runtime, session):
    with contextlib.closing(Store(runtime.store.path, reading=True)) as store:
        branch = store.messages.branch(session)
    return branch[-1].content if branch else ""


def version(runtime):
    """Of what was learned."""
    return value(runtime, "SELECT version FROM adapter_heads")


def parent_of_newest(runtime, role):
    """The message before the one that was written last."""
    message = row(runtime, "SELECT * FROM messages WHERE role = ? ORDER BY id DESC LIMIT 1", role)
    return row(runtime, "SELECT * FROM messages WHERE id = ?", message["parent"])


def rated_text(runtime, _):
    return text_of(runtime, newest(runtime, "ratings")["reply_id"])


def rewritten(runtime, _):
    return text_of(runtime, newest(runtime, "preferences")["worse"])


def copied_text(_, clipboard):
    return clipboard[-1]


def continued_text(runtime, _):
    """The longer reply stands beside the one that it continues."""
    longer = newest(runtime, "messages")
    others = rows(
        runtime, "SELECT content FROM messages WHERE parent = ? AND id != ?", longer["parent"], longer["id"]
    )
    begun = [row["content"] for row in others if longer["content"].startswith(row["content"])]
    return max(begun, key=len, default="")


def copy_of_the_chat(runtime, _):
    return last_message(runtime, newest(runtime, "sessions", "created")["id"])


def titled_text(runtime, _):
    return last_message(runtime, value(runtime, "SELECT id FROM sessions WHERE title = 'A new title'"))


def deleted_text(runtime, _):
    return last_message(runtime, newest(runtime, "sessions", "deleted")["id"])


def exported_text(*_):
    return Path("out.md").read_text("utf-8").rstrip().rpartition("\n\n")[2]


def asked_again(runtime, _):
    return parent_of_newest(runtime, "assistant")["content"]


# Command -> what it acted on: (the reply that is shown, or its question; how to read that from the store).
ACTS = {
    "/rate 5": ("reply", rated_text),
    "/rate up a note": ("reply", rated_text),
    "/copy": ("reply", copied_text),
    f"/rewrite {BETTER}": ("reply", rewritten),
    "/more": ("reply", continued_text),
    "/fork": ("reply", copy_of_the_chat),
    "/title A new title": ("reply", titled_text),
    "/export out.md": ("reply", exported_text),
    "/delete": ("reply", deleted_text),
    "/again": ("question", asked_again),
    "/compare": ("question", asked_again),
}
OF_THE_CHAT = {"/fork", "/title A new title", "/export out.md", "/delete"}  # work without a reply, too
# These leave the shown reply as it is, so one after the other can be tried.
STAYS = ("/copy", "/rate 5", "/rate up a note", "/title A new title", "/export out.md")
LEAVES = tuple(act for act in ACTS if act not in STAYS)


@pytest.fixture
def copies(monkeypatch):
    """What was copied, the newest last."""
    found = []
    monkeypatch.setattr("ruvmlx.apps.chat.clipboard.copy", found.append)
    monkeypatch.setattr("ruvmlx.apps.chat.clipboard.copy_with_tool", lambda text: not found.append(text))
    return found


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """A copy of the store with the earlier chat, made by the first test that needs it."""
    return tmp_path_factory.mktemp("earlier") / "ruvmlx.db"


@pytest.fixture
def store(tmp_path, home, monkeypatch, open_tiny, earlier):
    """An earlier chat with a rating, so that a comparison is possible; returns its id."""
    monkeypatch.chdir(tmp_path)
    if not earlier.exists():
        with open_tiny() as runtime:
            for _ in runtime.chats.say(
                runtime.chats.new_chat(), EARLIER, max_new_tokens=TOKENS, cancel=threading.Event()
            ):
                pass
            runtime.rate("last", "down")
        shutil.copy(home / "ruvmlx.db", earlier)
    home.mkdir(exist_ok=True)
    shutil.copy(earlier, home / "ruvmlx.db")
    with contextlib.closing(Store(home / "ruvmlx.db")) as known:
        return known.chats.all()[0].id


def clear_earlier_acts(runtime):
    """No file, no title and no deletion of an earlier act is in the way."""
    Path("out.md").unlink(missing_ok=True)
    rows(runtime, "UPDATE sessions SET title = 'Old' WHERE title = 'A new title'")
    rows(runtime, "UPDATE sessions SET deleted = NULL")


def fault_of(runtime, state, act, shown, copies):
    """What the act did to something else than to the shown reply; "" if it did right."""
    what, target = ACTS[act]
    found = sanitize(target(runtime, copies)).strip()
    expected = ASKED.get(state, QUESTION) if what == "question" else shown
    return "" if found and found == expected.strip() else f"{state}: {act}: {found!r}, shown: {expected!r}"


def endless(model):
    """Draws anything but the end of a reply."""
    return Sampling(1.5, logit_bias=tuple((end, -100.0) for end in model.tokenizer.eos_ids))


class Person(io.StringIO):
    """Lines that a person types: earlier messages are printed when a chat opens."""

    def isatty(self):
        return True


class PlainSession:
    """Plain mode with a new chat, and what it printed."""

    def __init__(self, runtime, lines):
        self.sink = io.StringIO()
        options = ChatOptions(sampling=endless(runtime.model), max_new_tokens=TOKENS)
        self.chat = PlainChat(runtime, options, Person(), self.sink)
        self.chat._begin()
        for line in lines:
            self.chat._handle(line)

    def type(self, line):
        self.chat._attempt(lambda: self.chat._handle(line))

    def shown_reply(self, state):
        """The reply that was printed last, or chosen last."""
        said = self.sink.getvalue()
        if state == "rewritten":
            return MINE
        if state == "compared, first chosen":
            said = said.partition("Reply 1.")[2].partition("Reply 2.")[0]
        _, label, last = said.rpartition("Assistant: ")
        next_line = r"\n(?:\([A-Za-z0-9][A-Za-z0-9 ]|Learned|Which|New chat|This is|Title)"
        return re.split(next_line, last)[0].strip() if label else ""


@pytest.mark.parametrize("state", [s for s in STATES if s not in EMPTY])
def test_plain_mode_acts_on_what_was_printed(state, open_tiny, store, copies, capsys):
    lines = [line.replace("EARLIER", store) for line in STATES[state]]
    found = []
    with open_tiny() as runtime:
        for acts in (STAYS, *((act,) for act in LEAVES)):
            clear_earlier_acts(runtime)
            chat = PlainSession(runtime, lines)
            shown = chat.shown_reply(state)
            for act in acts:
                clear_earlier_acts(runtime)
                chat.type(act)
                if act != "/more" or shown not in (MINE, BETTER):  # those are complete
                    found.append(fault_of(runtime, state, act, shown, copies))
    assert not any(found), "\n".join(filter(None, found))


@pytest.mark.parametrize("state", sorted(EMPTY))
def test_plain_mode_acts_on_nothing_where_nothing_is_shown(state, open_tiny, store, copies, capsys):
    """No earlier reply, of another chat, is rated, copied or rewritten."""
    with open_tiny() as runtime:
        chat = PlainSession(runtime, STATES[state])
        before = version(runtime), len(rows(runtime, "SELECT id FROM messages"))
        for act in ACTS:
            if act not in OF_THE_CHAT:
                chat.type(act)
                assert capsys.readouterr().err.startswith("ruvmlx: "), act
        after = version(runtime), len(rows(runtime, "SELECT id FROM messages"))
        assert after == before and not copies


@pytest.mark.parametrize("state", list(STATES))
async def test_the_app_acts_on_what_is_on_the_screen(state, tiny, open_tiny, store, copies):
    options = ChatOptions(sampling=endless(tiny), max_new_tokens=TOKENS, learn_when_idle=False)
    app, found = ChatApp(open_tiny, options), []
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.phase == "idle" or app.failure)
        await ask(app, pilot, QUESTION)
        for line in STATES[state][1:]:
            await type_in(app, pilot, line.replace("EARLIER", store))
        replies, runtime = app.chat.transcript.replies, app.host.holder.opened_runtime
        shown = replies[-1].answer.strip() if replies else ""
        assert bool(shown) == (state not in EMPTY)
        before = version(runtime)
        for act in (*STAYS, f"/rewrite {BETTER}"):
            clear_earlier_acts(runtime)
            await type_in(app, pilot, act)
            found.append(fault_of(runtime, state, act, shown, copies) if shown else "")
        if not shown:
            assert version(runtime) == before and not copies
        app.host.close_now()
    assert not any(found), "\n".join(filter(None, found))


def test_numbers_are_those_of_the_list_that_was_printed(open_tiny, store, capsys):
    """Who writes in a chat moves it to the top; the numbers on the screen stay valid."""
    with open_tiny() as runtime:
        chat = PlainSession(runtime, [QUESTION, "/new", OTHER, "/open 2", "/chats"])
        listed = chat.sink.getvalue()
        assert re.search(r"^1\. Another", listed, re.MULTILINE)
        chat.type("One more question")  # in the chat that was second
        chat.type("/open 1")
        assert runtime.store.messages.branch(chat.chat._state.session)[0].content == OTHER


def test_a_choice_is_of_the_comparison_on_the_screen(open_tiny, store, capsys):
    """Not of one in the chat that was open before."""
    with open_tiny() as runtime:
        chat = PlainSession(runtime, [QUESTION, "/compare", "/new"])
        before = version(runtime)
        chat.type("/choose 1")
        assert "for the two replies of /compare" in capsys.readouterr().err
        assert version(runtime) == before
