"""Saved chats in the app and in plain mode, on a real store."""

import pytest
from ruvmlx.apps.chat import chat_files, chats_screen
from ruvmlx.apps.chat.app import ChatApp
from ruvmlx.apps.chat.chats_screen import ChatsScreen
from ruvmlx.apps.chat.messages import UserMessage
from ruvmlx.apps.chat.options import ChatOptions
from textual.events import Key, Paste
from textual.widgets import Input

from .helpers import WIDE, ask, screen_text, until
from .test_branches import BOTH_SIZES, chatting, run_plain, send, shown_texts  # noqa: F401


@pytest.fixture
def three(open_tiny):
    """Three chats; the newest first: ["lions", "zebras", "pelicans"]."""
    with open_tiny() as runtime:
        store, ids = runtime.store, []
        for title in ("pelicans", "zebras", "lions"):
            ids.insert(0, store.chats.new("m", f"of {title}"))
            store.messages.add_user(ids[0], f"Tell me of {title}\x1b]0;x\x07")
            store.messages.add_user(ids[0], f"and of the needle in {title}")
    return ids


def rows(app):
    return [entry.title for entry in app.screen._entries] if isinstance(app.screen, ChatsScreen) else None


@BOTH_SIZES
async def test_the_list_of_chats_opens_the_selected_one(chatting, three, size):  # noqa: F811
    """Ctrl+O lists them, the newest first; Enter opens the one under the bar, with its system prompt."""
    async with chatting(size) as (app, pilot):
        await pilot.press("ctrl+o")
        await until(pilot, lambda: rows(app) is not None and len(rows(app)) == 3)
        assert rows(app)[0] == "Tell me of lions"
        await pilot.press("down", "down", "enter")
        await until(pilot, lambda: app.chat.state.session == three[2] and len(app.query(UserMessage)) == 2)
        assert app.chat.state.system == "of pelicans" and "needle in pelicans" in screen_text(app)
        assert not isinstance(app.screen, ChatsScreen)


async def test_the_page_keys_of_macos_move_in_a_list(chatting, three):  # noqa: F811
    """The Terminal of macOS sends Page Down and Page Up only with Shift."""
    async with chatting() as (app, pilot):
        await pilot.press("ctrl+o")
        await until(pilot, lambda: rows(app))
        await pilot.press("shift+pagedown", "shift+pageup", "shift+pagedown", "enter")
        await until(pilot, lambda: app.chat.state.session == three[2])


async def test_typing_in_the_list_searches_all_messages(chatting, three):  # noqa: F811
    """What is typed is searched in all that was said; the place is shown."""
    async with chatting() as (app, pilot):
        await pilot.press("ctrl+o")
        await until(pilot, lambda: rows(app))
        await pilot.press(*"needle zeb")
        await until(pilot, lambda: rows(app) == ["Tell me of zebras"])
        assert "and of the needle in zebras" in screen_text(app)
        await pilot.press(*"qqq")
        await until(pilot, lambda: "No chat has these words" in screen_text(app))
        await pilot.press("enter", "escape")
        await until(pilot, lambda: not isinstance(app.screen, ChatsScreen))
        await send(app, pilot, "/chats pelic")
        await until(pilot, lambda: rows(app) == ["Tell me of pelicans"])


@pytest.mark.parametrize("keys", [("ctrl+o",), ("ctrl+p",)], ids=["chats", "palette"])
async def test_pasted_text_is_sanitised_in_every_input(chatting, keys):  # noqa: F811
    """Also where it is not the prompt that takes it."""
    async with chatting() as (app, pilot):
        await pilot.press(*keys)
        await until(pilot, lambda: app.screen.query(Input))
        app.post_message(Paste("\x1b]52;c;Zm9v\x07\x9b31mli\u202eon\x1b[2J"))
        await until(pilot, lambda: app.screen.query_one(Input).value == "lion")


async def test_a_chat_can_be_renamed_deleted_and_restored(chatting, three, open_tiny):  # noqa: F811
    async with chatting() as (app, pilot):
        await pilot.press("ctrl+o")
        await until(pilot, lambda: rows(app))
        await pilot.press("down", "ctrl+t")
        field = app.screen.query_one(Input)
        await until(pilot, lambda: field.value == "Tell me of zebras")
        field.value = "Stripes\x1b[2J"
        await pilot.press("enter")
        await until(pilot, lambda: rows(app)[1] == "Stripes" and app.screen.options.highlighted == 1)
        await pilot.press("ctrl+x")
        await until(pilot, lambda: len(rows(app)) == 2 and "Deleted: Stripes" in screen_text(app))
        assert app.screen.options.highlighted == 1  # the chat that follows
        await pilot.press("ctrl+x")
        await until(pilot, lambda: len(rows(app)) == 1 and app.screen.options.highlighted == 0)
        await pilot.press("ctrl+z")
        await until(pilot, lambda: len(rows(app)) == 2)
        await pilot.press("escape")
        await send(app, pilot, "/restore")
        await until(pilot, lambda: app.chat.state.session == three[1])
        await send(app, pilot, "/delete")
        await until(pilot, lambda: app.chat.state.session not in three)
        await send(app, pilot, "/restore")  # the line about the deletion is no longer true
        await until(pilot, lambda: "This chat is back" in screen_text(app))
        assert "Deleted" not in screen_text(app)
        await send(app, pilot, "/delete")
        await until(pilot, lambda: app.chat.state.session not in three)
    with open_tiny() as runtime:
        assert three[1] not in [s.id for s in runtime.store.chats.all()]
        assert three[1] in [s.id for s in runtime.store.chats.soft_deleted()]  # for a day


@pytest.mark.parametrize("keys", [["ctrl+t"], ["ctrl+x"], ["enter"], ["enter", "enter"]], ids="-".join)
async def test_an_action_waits_for_the_search_typed_before_it(chatting, three, keys):  # noqa: F811
    """An action is for what the words typed before it ask for, not for what was listed till then."""
    async with chatting() as (app, pilot):
        await pilot.press("ctrl+o")
        await until(pilot, lambda: rows(app) and app.screen.options.highlighted == 0)
        for letter in "zebras":
            app.post_message(Key(letter, letter))
        for key in keys:
            app.post_message(Key(key, None))
        if key == "ctrl+t":
            await until(pilot, lambda: app.screen.query_one(Input).value == "Tell me of zebras")
        elif key == "ctrl+x":
            await until(pilot, lambda: "Deleted: Tell me of zebras" in screen_text(app))
        else:
            await until(pilot, lambda: app.chat.state.session == three[1])


async def test_a_small_screen_shows_all_keys_of_the_list(chatting, three):  # noqa: F811
    async with chatting((50, 16)) as (app, pilot):
        await pilot.press("ctrl+o")
        await until(pilot, lambda: rows(app))
        await until(pilot, lambda: "esc Close" in screen_text(app))
        assert "Tell me of lions" in screen_text(app) and "^x Delete" in screen_text(app)


async def test_the_list_counts_the_messages_of_the_branch_that_opens(chatting):  # noqa: F811
    """The second reply to a question is no message more."""
    async with chatting() as (app, pilot):
        await ask(app, pilot, "Hello")
        await pilot.press("ctrl+g")
        await until(pilot, lambda: "‹ 2/2 ›" in screen_text(app) and app.phase == "idle")
        await pilot.press("ctrl+o")
        await until(pilot, lambda: rows(app))
        assert app.screen._entries[0].turns == 2


async def test_letters_after_enter_do_not_change_the_choice(chatting, three):  # noqa: F811
    async with chatting() as (app, pilot):
        await pilot.press("ctrl+o")
        await until(pilot, lambda: rows(app) and app.screen.options.highlighted == 0)
        for letter in "zebras":
            app.post_message(Key(letter, letter))
        app.post_message(Key("enter", None))
        for letter in "qqq":
            app.post_message(Key(letter, letter))
        await until(pilot, lambda: app.chat.state.session == three[1])


async def test_letters_after_enter_search_again_if_no_chat_had_the_words(chatting, three):  # noqa: F811
    async with chatting() as (app, pilot):
        await pilot.press("ctrl+o")
        await until(pilot, lambda: rows(app) and app.screen.options.highlighted == 0)
        for letter in "zebrasq":
            app.post_message(Key(letter, letter))
        app.post_message(Key("enter", None))
        app.post_message(Key("backspace", None))
        await until(pilot, lambda: rows(app) == ["Tell me of zebras"])


async def test_the_list_can_be_closed_before_its_last_rows_are_there(chatting, three, monkeypatch):  # noqa: F811
    """The rows after the first ones come a moment later, and only if the list still has its widgets."""

    async def close(screen):
        await screen.query_one("#chats").remove()

    async with chatting() as (app, pilot):
        monkeypatch.setattr(chats_screen, "FIRST_ROWS", 1)
        await pilot.press("ctrl+o")
        await until(pilot, lambda: rows(app) and app.screen.options.option_count == len(rows(app)) >= 3)
        await pilot.press("escape")
        monkeypatch.setattr(chats_screen, "wait_until_drawn", close)
        await pilot.press("ctrl+o")
        await until(pilot, lambda: rows(app))
        await pilot.pause(3 * chats_screen.PAUSE)
        assert not app.failure and app.is_running


async def test_deleting_the_open_chat_begins_a_new_one(chatting, three):  # noqa: F811
    """A new one begins."""
    async with chatting(session=three[0]) as (app, pilot):
        assert app.chat.state.session == three[0]
        await pilot.press("ctrl+o")
        await until(pilot, lambda: rows(app))
        assert "●" in screen_text(app)
        await pilot.press("ctrl+x")
        await until(pilot, lambda: len(rows(app)) == 2)
        await pilot.press("escape")
        await until(pilot, lambda: app.chat.state.session not in three and app.phase == "idle")
        assert not app.query(UserMessage)


async def test_title_fork_open_export_and_import_work_in_the_app(chatting, three, tmp_path):  # noqa: F811
    """/title, /fork, /open, /export and /import in the app."""
    async with chatting(WIDE) as (app, pilot):
        await ask(app, pilot, "Hello")
        first = app.chat.state.session
        await send(app, pilot, "/title My talk")
        await until(pilot, lambda: "Title: My talk" in screen_text(app))
        await send(app, pilot, "/fork")
        await until(pilot, lambda: app.chat.state.session != first and app.query(UserMessage))
        await ask(app, pilot, "Only here")
        await send(app, pilot, f"/export {tmp_path}/a.json")
        await until(pilot, lambda: (tmp_path / "a.json").exists())
        await send(app, pilot, f"/export {tmp_path}/a.json")
        await until(pilot, lambda: "exists already" in screen_text(app))
        await send(app, pilot, "/open 2")
        await until(pilot, lambda: app.chat.state.session == first)
        assert shown_texts(app)[0] == "Hello" and "Only here" not in screen_text(app)
        await send(app, pilot, f"/import {tmp_path}/a.json")
        await until(pilot, lambda: "Only here" in screen_text(app))
        assert app.chat.state.session != first
        await send(app, pilot, "/open 99")
        await until(pilot, lambda: "no chat number 99" in screen_text(app))
        for wrong in ("/open", "/export", "/import", "/title", f"/import {tmp_path}/none"):
            await send(app, pilot, wrong)
            await until(pilot, lambda: app.chat.prompt.text == "" and app.phase == "idle")
        assert app.is_running


async def test_a_chat_is_pinned_in_the_list_and_by_its_command(chatting, three):  # noqa: F811
    """It stands first, with a star; /open counts as the list does."""
    async with chatting() as (app, pilot):
        await pilot.press("ctrl+o")
        await until(pilot, lambda: rows(app))
        order = rows(app)
        await pilot.press("down", "down", "ctrl+f")
        await until(
            pilot, lambda: rows(app) == [order[2], *order[:2]] and app.screen.options.highlighted == 0
        )
        assert "★" in screen_text(app) and "Pinned: it stands first" in screen_text(app)
        await pilot.press("ctrl+f")
        await until(pilot, lambda: rows(app) == order and "No longer pinned" in screen_text(app))
        await pilot.press("escape")
        await send(app, pilot, "/open 3")
        await send(app, pilot, "/pin")
        await until(pilot, lambda: "stands first" in screen_text(app))
        opened = app.chat.state.session
        await send(app, pilot, "/open 2")
        await until(pilot, lambda: app.chat.state.session != opened)
        await send(app, pilot, "/open 1")
        await until(pilot, lambda: app.chat.state.session == opened)
        await pilot.press("ctrl+o")
        await until(pilot, lambda: "●★ " in screen_text(app))  # open, and pinned


async def test_an_unknown_session_is_an_error_with_its_exit_code(open_tiny):
    """`chat --session nope` says so, with the exit code of the error."""
    app = ChatApp(open_tiny, ChatOptions(session="nope"))
    async with app.run_test() as pilot:
        await until(pilot, lambda: app.failure is not None)
    assert app.return_value == 1 and "nope" in str(app.failure)


def test_plain_mode_has_the_same_chat_commands(open_tiny, three, tmp_path, capsys):
    """The same by commands; the list is numbered."""
    with open_tiny() as runtime:
        code, said = run_plain(
            runtime,
            "/chats",
            "/chats needle zeb",
            "/open 2",
            "/title Stripes",
            "/fork",
            f"/export {tmp_path}/a.md",
            "/delete",
            "/restore",
            "/open 99",
            f"/import {tmp_path}/a.md",
            "/copy",
        )
    lines = said.splitlines()
    assert [line.partition(",")[0] for line in lines[:3]] == [
        "1. Tell me of lions",
        "2. Tell me of zebras",
        "3. Tell me of pelicans",
    ]
    assert lines[3].startswith("2. Tell me of zebras, 2 messages") and "needle in zebras" in lines[3]
    assert "Chat: Tell me of zebras" in said and "Title: Stripes" in said
    assert "Chat: Stripes (fork)" in said and "\x1b" not in said
    assert (tmp_path / "a.md").read_text().startswith("# Stripes (fork)\n")
    errors = capsys.readouterr().err
    assert code == 1 and errors.count("ruvmlx: ") == 3 and "is not JSON" in errors


def test_plain_mode_pins_a_chat(open_tiny, three):
    with open_tiny() as runtime:
        code, said = run_plain(runtime, "/chats", "/open 3", "/pin", "/chats", "/pin", "/chats")
    assert code == 0
    assert said.count("1. Tell me of zebras") + said.count("pinned") >= 2
    pinned = next(line for line in said.splitlines() if line.endswith(", pinned"))
    assert pinned.startswith("1. ") and "No longer pinned" in said


async def test_folders_stand_together_the_one_used_last_first(chatting, three):  # noqa: F811
    """Chats of no folder are one group; a folder's name finds its chats."""
    async with chatting() as (app, pilot):
        for number, folder in ((1, "Work"), (3, "Work")):  # lions and pelicans; then zebras are alone
            await send(app, pilot, f"/open {number}")
            await until(pilot, lambda: app.chat.state.session in three and app.phase == "idle")
            await send(app, pilot, f"/folder {folder}")
            await until(pilot, lambda: "In the folder Work" in screen_text(app))
        await send(app, pilot, "/folder")
        await until(pilot, lambda: "Folders: Work (2)" in screen_text(app))
        await pilot.press("ctrl+o")
        await until(
            pilot, lambda: rows(app) == ["Tell me of lions", "Tell me of pelicans", "Tell me of zebras"]
        )
        assert "Work › Tell me of pelicans" in screen_text(app)
        await pilot.press(*"work")
        await until(pilot, lambda: rows(app) == ["Tell me of lions", "Tell me of pelicans"])


async def test_a_long_folder_leaves_room_for_the_title(chatting, three, open_tiny):  # noqa: F811
    with open_tiny() as runtime:
        runtime.store.chats.set_folder(three[0], "recipes and all that can be cooked on a rainy day at home")
    async with chatting() as (app, pilot):
        await pilot.press("ctrl+o")
        await until(pilot, lambda: rows(app) and "Tell me of lions" in screen_text(app))
        assert "recipes and" in screen_text(app) and "… › Tell me of lions" in screen_text(app)


def test_plain_mode_takes_a_chat_out_of_its_folder(open_tiny, three):
    with open_tiny() as runtime:
        said = run_plain(runtime, "/open 1", "/folder A\tB", "/chats", "/folder none", "/chats", "/folder")[1]
    assert (
        "1. A B › Tell me of lions" in said and "No longer in a folder" in said and said.count("A B ›") == 1
    )
    assert said.endswith("No folders yet; /folder NAME puts this chat into one.\n")


def test_plain_mode_opens_by_id(open_tiny, three):
    with open_tiny() as runtime:
        _, said = run_plain(runtime, f"/open {three[1][:10]}", "/system", session=three[0])
    assert "System prompt: of zebras" in said


def test_pinned_chats_are_in_the_order_of_their_last_use(open_tiny):
    """As in `sessions ls`, whatever their folders are."""
    with open_tiny() as runtime:
        older, newer, plain = (runtime.chats.new_chat() for _ in range(3))
        for at, chat in enumerate((older, newer, plain)):
            runtime.store.messages.add_user(chat, f"message {at}")
            runtime.store.db.execute("UPDATE sessions SET updated = ? WHERE id = ?", 100.0 + at, chat)
        runtime.store.chats.set_folder(newer, "travel")
        for chat in (older, newer):
            runtime.store.chats.pin(chat)
        assert [entry.id for entry in chat_files.entries(runtime)] == [newer, older, plain]


async def test_the_list_begins_at_the_open_chat(chatting, three):  # noqa: F811
    """A pinned chat stands above it; Delete acts on the open one."""
    async with chatting(session=three[0]) as (app, pilot):
        await app.host.call(lambda runtime: runtime.store.chats.pin(three[1]))
        await pilot.press("ctrl+o")
        await until(pilot, lambda: len(rows(app)) == 3)
        assert app.screen.highlighted_chat.id == three[0] and app.screen.options.highlighted > 0
