"""/as: system prompts under names, in both modes."""

import io

import pytest
from ruvmlx.apps.chat import roles
from ruvmlx.apps.chat.completion import suggestions
from ruvmlx.apps.chat.options import ChatOptions
from ruvmlx.apps.chat.plain import PlainChat
from ruvmlx.apps.chat.user_files import HERE

from ruvmlx.errors import NotFound, UsageError

from .helpers import ask, chatting, screen_text, until
from .scripted import ScriptedRuntime


def run_plain(runtime, *lines, **options):
    sink = io.StringIO()
    lines = io.StringIO("".join(f"{line}\n" for line in lines))
    code = PlainChat(runtime, ChatOptions(max_new_tokens=4, **options), lines, sink).run()
    return code, sink.getvalue()


def test_a_role_is_the_system_prompt_of_the_chat(open_tiny, home):
    """Listed, taken, replaced by none; the next chat has none."""
    with open_tiny() as runtime:
        code, said = run_plain(runtime, "/as", "/as reviewer", "Hello", "/prompt", "/as none", "/system")
    assert code == 0 and "reviewer    You review what you are given." in said
    assert said.count(roles.BUILT_IN["reviewer"]) == 2  # said, and in the prompt
    assert said.rstrip().endswith("No system prompt.")


def test_a_chats_own_prompt_becomes_a_role(open_tiny, home):
    """It is a file that only the user can read, and comes before a built-in role of its name."""
    with open_tiny() as runtime:
        code, said = run_plain(
            runtime, "/system Answer in rhymes.", "/as save brief", "/new", "/as brief", "/as"
        )
    assert code == 0 and said.count("Answer in rhymes.") == 3
    file = home / "roles" / "brief.md"
    assert file.read_text() == "Answer in rhymes.\n" and file.stat().st_mode & 0o077 == 0
    assert roles.names()[0] == "brief" and roles.names().count("brief") == 1
    assert [row.text for row in suggestions("/as br", True, HERE)] == ["brief"]


def test_a_role_that_is_saved_again_says_what_it_replaces(open_tiny, home):
    typed = "/system Answer in rhymes.", "/as save mine", "/system Answer in prose.", "/as save mine"
    with open_tiny() as runtime:
        code, said = run_plain(runtime, *typed)
    file = home / "roles" / "mine.md"
    assert code == 0 and f"Kept as the role mine, in {file}\n" in said
    assert f"Kept as the role mine, in {file}, in place of: Answer in rhymes.\n" in said


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("/as reviwer", "Did you mean 'reviewer'?"),
        ("/as ../../etc/passwd", "there is no role"),
        ("/as save none", "'none' is a word of /as and cannot be a role's name"),
        ("/as save save", "'save' is a word of /as and cannot be a role's name"),
        ("/as save mine", "has no system prompt to keep"),
        ("/as save ../mine", "a role's name has small letters"),
    ],
)
def test_a_wrong_role_is_one_line(open_tiny, home, capsys, typed, said):
    with open_tiny() as runtime:
        run_plain(runtime, typed)
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_a_damaged_role_is_told_and_does_not_hide_the_others(home):
    (home / "roles").mkdir(parents=True)
    (home / "roles" / "odd.md").write_bytes(b"\xff")
    (home / "roles" / "empty.md").write_text("\n")
    with pytest.raises(UsageError, match="not UTF-8"):
        roles.text("odd")
    with pytest.raises(UsageError, match="is empty"):
        roles.text("empty")
    with pytest.raises(NotFound):
        roles.text("nope")
    assert len(roles.lines()) == len(roles.BUILT_IN) + 3


def test_a_link_to_nothing_does_not_hide_the_other_roles(open_tiny, home):
    (home / "roles").mkdir(parents=True)
    (home / "roles" / "gone.md").symlink_to(home / "elsewhere.md")
    with open_tiny() as runtime:
        code, said = run_plain(runtime, "/as", "/as brief", "/as none")
    assert code == 0 and "brief       Answer in one or two short sentences." in said and "gone" not in said


async def test_the_app_answers_in_a_role(home):
    runtime = ScriptedRuntime(["Fine."])
    async with chatting(runtime) as (app, pilot):
        app.chat.prompt.text = "/as teacher"
        await pilot.press("enter")
        await until(pilot, lambda: "Explain step by step" in screen_text(app))
        await ask(app, pilot)
        assert runtime.turns(app.chat.state.session)[0].content == roles.BUILT_IN["teacher"]


def test_a_role_stays_in_its_chat(open_tiny, home):
    """After a restart in the chat with the role, a new chat has the user's own prompt."""
    with open_tiny() as runtime:
        run_plain(runtime, "/as reviewer", "Hello")
    with open_tiny() as runtime:
        _, said = run_plain(runtime, "/as", "/new", "/system", "/as", session="continue")
        assert said.count("reviewer    (in use) ") == 1 and "No system prompt." in said
        _, said = run_plain(runtime, "/as reviewer", "/new", "/system", system="Be kind.")
        assert said.startswith("Role: reviewer. System prompt: You review")
        assert said.rstrip().endswith("System prompt: Be kind.")


def test_the_end_of_a_role_brings_the_settings_prompt_back(open_tiny, home):
    """Where no role is in use, /as none leaves the chat's own prompt alone."""
    with open_tiny() as runtime:
        _, said = run_plain(runtime, "/as reviewer", "/as none", "Hi", "/prompt", system="Be kind.")
        assert said.splitlines()[1] == "System prompt: Be kind." and said.count("Be kind.") == 2
        _, said = run_plain(runtime, "/system Be odd.", "/as none", system="Be kind.")
        assert said.splitlines()[1] == "No role is in use. System prompt: Be odd."


@pytest.mark.parametrize("own", ["Be odd.", "none"])
def test_a_continued_chat_keeps_its_own_prompt(open_tiny, home, own):
    """The settings' prompt is for new chats. The flag --system replaces it."""
    with open_tiny() as runtime:
        run_plain(runtime, f"/system {own}", "Hi")
        _, said = run_plain(runtime, "/system", "/new", "/system", session="continue", system="Be kind.")
        kept = "No system prompt." if own == "none" else f"System prompt: {own}"
        assert said.splitlines() == [kept, "New chat.", "System prompt: Be kind."]
        chosen = {"session": "continue", "system": "Be brief.", "replaces_system": True}
        run_plain(runtime, "Hi", session="new")
        assert run_plain(runtime, "/system", **chosen)[1].strip() == "System prompt: Be brief."
