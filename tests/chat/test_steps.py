"""Steps of slash commands on a scripted runtime, without a front end."""

import threading
from types import SimpleNamespace

import pytest
from ruvmlx.apps.chat.commands import COMMANDS
from ruvmlx.apps.chat.options import ChatOptions
from ruvmlx.apps.chat.state import ChatState, Outcome
from ruvmlx.apps.chat.user_files import UserFiles

from ruvmlx.errors import NotFound, UsageError
from tests.store.test_store import a_reply

from .scripted import ScriptedRuntime


@pytest.fixture
def runtime():
    return ScriptedRuntime(["One."], ["Two."])


@pytest.fixture
def state(runtime):
    """A chat with one question and its reply."""
    state = ChatState(ChatOptions(system="Be brief."))
    state.session = runtime.chats.new_chat(state.system)
    list(runtime.chats.say(state.session, "Hi", **state.options.for_reply(threading.Event())))
    return state


def take(name, runtime, state, argument=""):
    return COMMANDS[name].step(runtime, state, argument)


def test_a_rating_is_reported_and_can_be_undone(runtime, state):
    """/undo changes what was learned, so the app shows the ratings anew; `flash` is its answer."""
    assert take("rate", runtime, state, "up so clear").words.startswith(
        "Rated good. Learned: more like this. /undo"
    )
    undone = take("undo", runtime, state)
    assert undone.learned and undone.flash == undone.words == "Rating taken back: “Hi”; 0 left, version 0."
    with pytest.raises(NotFound):
        take("undo", runtime, state)


def test_plain_mode_shows_the_question_of_what_was_taken_back(runtime, state):
    """The status line of a narrow terminal has room for a few words of it only."""
    question = "What is a good name for a small grey cat?"
    list(runtime.chats.say(state.session, question, **state.options.for_reply(threading.Event())))
    take("rate", runtime, state, "up")
    state.session = runtime.chats.new_chat(None)
    undone = take("undo", runtime, state)
    assert f"“{question}”" in undone.words
    assert "“What is a" in undone.flash and len(undone.flash) <= 76


def test_a_bad_rating_gets_its_reason(runtime, state):
    """Plain mode says how, what it learned, and that facts teach nothing."""
    assert "/why long|short|tone|facts says why." in take("rate", runtime, state, "down").words
    assert take("why", runtime, state, "too long").words.startswith("Rated bad, too long. Learned: less")
    assert take("why", runtime, state, "facts").words == (
        "Rated bad, wrong facts. Kept, but facts teach nothing: ratings change how the model writes, "
        "not what it knows. /undo takes it back."
    )
    with pytest.raises(UsageError, match="a reason is long, short, tone, facts, got 'dull'"):
        take("why", runtime, state, "dull")


def test_rating_an_empty_chat_is_refused(runtime, state):
    state.session = runtime.chats.new_chat()
    with pytest.raises(NotFound, match="no reply to rate yet"):
        take("rate", runtime, state, "up")
    with pytest.raises(UsageError, match="a rating is up, down or 1 to 5"):
        take("rate", runtime, state, "9")


def test_a_new_chat_keeps_the_system_prompt(runtime, state):
    outcome = take("new", runtime, state)
    assert outcome == Outcome("New chat.", opens=outcome.opens) and outcome.opens != state.session
    assert [turn.content for turn in runtime.chats.turns(outcome.opens)] == ["Be brief."]


def test_the_system_prompt_is_shown_changed_and_removed(runtime, state):
    assert take("system", runtime, state).words == "System prompt: Be brief."
    assert take("system", runtime, state, "Sing.").notice == "System prompt: Sing."
    assert runtime.chats.turns(state.session)[0].content == state.system == "Sing."
    assert take("system", runtime, state, "none").words == "No system prompt."
    assert state.system is None and runtime.chats.turns(state.session)[0].role == "user"


def test_restore_opens_the_deleted_chat_once(runtime, state):
    """/delete opens a new chat; /restore opens the one that was deleted last, and says if there is none."""
    deleted = []
    runtime.store = SimpleNamespace(
        chats=SimpleNamespace(
            get=lambda _: SimpleNamespace(title="Greeting"),
            soft_delete=deleted.append,
            soft_deleted=lambda: [SimpleNamespace(id=deleted[-1])] if deleted else [],
            restore=deleted.remove,
        )
    )
    first = state.session
    outcome = take("delete", runtime, state)
    assert deleted == [first] and outcome.opens not in ("", first) and "for a day" in outcome.words
    state.session = outcome.opens
    back = take("restore", runtime, state)
    assert back.opens == first and back.retell and back.words == "Chat: Greeting (this chat is back)"
    with pytest.raises(NotFound, match="last 24 hours"):
        take("restore", runtime, state)


def test_edit_shows_the_question_or_asks_for_a_reply_to_new_words(runtime, state):
    """Without words the question is shown; with words a reply to them is asked for."""
    assert take("edit", runtime, state).words.startswith("Your question: Hi\n")
    asked = {}
    runtime.chats.say = lambda session, text, **how: asked.update(how, text=text) or iter(())
    outcome = take("edit", runtime, state, "Hello?")
    list(outcome.reply(runtime, threading.Event()))
    assert asked["text"] == "Hello?" and asked["instead_of"] == 1 and asked["max_new_tokens"] == 1024


def test_quit_ends_the_chat(runtime, state):
    assert take("quit", runtime, state).leaves
    assert "/rate up|down|1-5 [NOTE]" in take("help", runtime, state).words


def test_a_chat_is_not_exported_in_a_form_that_its_name_does_not_say(open_tiny, tmp_path):
    with open_tiny() as runtime:
        state = ChatState(ChatOptions())
        state.session = runtime.chats.new_chat()
        with pytest.raises(UsageError, match=r"\.json.*\.md"):
            take("export", runtime, state, str(tmp_path / "talk.html"))
    assert not list(tmp_path.glob("*.html"))


@pytest.mark.parametrize("name, argument", [("export", "-"), ("import", "-"), ("save", "1 -")])
def test_no_command_takes_standard_input_or_output(open_tiny, tmp_path, name, argument):
    """`/export -` wrote a file with this name."""
    with open_tiny() as runtime:
        state = ChatState(ChatOptions(files=UserFiles(tmp_path)))
        state.session = runtime.chats.new_chat()
        runtime.store.messages.add_user(state.session, "hello")
        runtime.store.replies.add(a_reply("r1", text="```\nx = 1\n```"), state.session)
        with pytest.raises(UsageError, match=r"^a chat has no standard input or output \(-\)"):
            take(name, runtime, state, argument)
    assert not list(tmp_path.glob("-"))


def test_a_chat_that_is_there_already_is_opened_and_not_imported_again(open_tiny, tmp_path):
    file = tmp_path / "talk.json"
    file.write_text('[{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]')
    with open_tiny() as runtime:
        state = ChatState(ChatOptions())
        first, second = (take("import", runtime, state, str(file)) for _ in range(2))
        assert (
            first.opens == second.opens
            and second.words == "Chat: hello (nothing was imported: this chat was there already)"
        )
        with pytest.raises(UsageError, match="`ruvmlx sessions import` takes all files"):
            take("import", runtime, state, str(tmp_path))
