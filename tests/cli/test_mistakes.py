"""Mistakes that people make: each answer says what is wrong, what is there, and what to do."""

import json
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from ruvmlx.apps.chat.models import find_adapter
from ruvmlx.apps.cli import options
from ruvmlx.apps.cli.options import unknown_adapter

from ruvmlx import settings
from ruvmlx.chats.chat_file import read_bytes
from ruvmlx.errors import StoreError, UsageError, unreadable
from ruvmlx.progress import QUIET
from ruvmlx.settings import Settings
from ruvmlx.store.database import Database

from .test_adapters import tiny_cli  # noqa: F401 - a fixture
from .verbs import one_line


@pytest.fixture
def learned(open_tiny):
    """The default adapter with two versions, and a copy of it called work."""
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        for _ in runtime.chats.say(chat, "Hello", max_new_tokens=4, cancel=threading.Event()):
            pass
        for rating in ("up", "down"):
            runtime.rate("last", rating)
        runtime.store.adapters.copy(runtime.model.fingerprint, "default", "work")
        return chat


def tiny(tiny_folder):
    return ("--model", str(tiny_folder))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("connect codxe", "Invalid value for 'CLIENT': 'codxe' is not one of 'claude', "),
        ("connect", "Missing argument 'CLIENT'. Choose from: claude, "),
        ("bench mdel", "Invalid value for 'SUITE': 'mdel' is not one of 'all', "),
        ("doctor --report", "Option '--report' requires an argument."),
        ("log show --kind", "Option '--kind' requires an argument."),
        ("log show --json=x", "Option '--json' does not take a value."),
    ],
)
def test_an_error_of_the_words_lists_values_once_and_says_where_the_help_is(run, words, said):
    code, out, err = run(*words.split())
    verb = words.split(" -")[0] if " -" in words else words.split()[0]
    assert (code, out) == (2, "") and one_line(err) and err.startswith(f"ruvmlx: {said}"), err
    assert err.endswith(f"`ruvmlx {verb} --help` has more.\n") and err.count("claude") <= 1


@pytest.mark.parametrize(
    "words",
    [
        ("backup",), ("adapters", "export"), ("adapters", "fuse"), ("doctor", "--report"),
        ("doctor", "--export-metal"), ("embed", "x", "--out"), ("learn", "chart", "--svg"),
        ("bench", "--report"), ("prove", "--suite"), ("prove", "--report"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_text_does_not_go_to_standard_output(run, words, tmp_path, monkeypatch):
    """The command wrote a file with the name "-"."""
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*words, "-")
    assert code == 2 and out == "" and one_line(err) and "standard output" in err and "./-" in err
    assert not list(tmp_path.iterdir())


def test_lines_and_texts_go_to_standard_output(run, learned, tiny_folder, tmp_path, monkeypatch):
    """With the name "-" for the file, as without a file."""
    monkeypatch.chdir(tmp_path)
    for words in (("log", "export"), ("sessions", "export", "last")):
        assert run(*words, "--out", "-")[:2] == run(*words)[:2]
    (tmp_path / "p.jsonl").write_text('{"id": 1, "prompt": "Hello"}\n')
    some = ("generate", "--prompts", "p.jsonl", "--max-tokens", "2", *tiny(tiny_folder))
    code, out, _ = run(*some, "--out", "-")
    assert code == 0 and json.loads(out)["id"] == 1
    assert not (tmp_path / "-").exists()


def test_a_mistyped_adapter_is_not_begun(run, learned, tiny_folder):
    """`adapters use` switches to nothing new without --new."""
    code, out, err = run("adapters", "use", "wrok", *tiny(tiny_folder))
    assert code == 2 and one_line(err) and "Did you mean 'work'?" in err and "--new" in err
    assert settings.load().adapter == "default" and out == ""
    assert run("adapters", "use", "work", *tiny(tiny_folder))[0] == 0
    assert run("adapters", "use", "fresh", "--new", *tiny(tiny_folder))[0] == 0
    assert settings.load().adapter == "fresh"
    code, out, _ = run("adapters", "use", "none", *tiny(tiny_folder))
    assert code == 0
    assert out == "No adapter is in use now: the original model answers, and nothing is learned.\n"


def test_none_which_turns_learning_off_is_proposed_only_for_a_very_similar_name():
    """A guess that the user takes over must not end the learning."""
    assert "Did you mean" not in unknown_adapter("nope", []) + unknown_adapter("nine", ["work"])
    assert "Did you mean 'none'?" in unknown_adapter("nonne", []) and "'none'?" in unknown_adapter("None", [])
    assert "Did you mean 'note'?" in unknown_adapter("nope", ["note"])
    of_a_new_user = SimpleNamespace(adapters=list)
    with pytest.raises(UsageError) as refused:
        find_adapter("nope", of_a_new_user)
    assert "Did you mean" not in str(refused.value) and find_adapter("none", of_a_new_user) is None


def test_a_mistyped_adapter_is_told(run, learned, tiny_folder, tmp_path):
    """The reply comes from the original model. Only a name that is like another one brings a proposal."""
    asked = ("generate", "hi", "--max-tokens", "2", "--temp", "0", *tiny(tiny_folder))
    code, out, err = run(*asked, "--adapter", "wrok")
    assert code == 0 and out and err.startswith("note: adapter 'wrok' has learned nothing")
    assert "Did you mean 'work'?" in err
    code, _, err = run(*asked, "--adapter", "zebra")
    assert (
        code == 0 and err == "note: adapter 'zebra' has learned nothing: replies are the original model's.\n"
    )
    for name in ("work", "default", "none"):
        assert run(*asked, "--adapter", name)[2] == ""
    folder = str(tmp_path / "out")
    run("adapters", "export", folder, "--adapter", "work", *tiny(tiny_folder))
    code, out, err = run("adapters", "import", folder, "imported", *tiny(tiny_folder))
    assert (code, err) == (0, "") and "`ruvmlx adapters use imported`" in out


def test_the_note_comes_after_the_line_of_progress(monkeypatch, learned, tiny_folder):
    """The terminal erases the line of progress first."""
    said = []

    @contextmanager
    def watching():
        yield QUIET
        said.append("erased")

    monkeypatch.setattr("ruvmlx.apps.progress.watching", watching)
    monkeypatch.setattr(options, "log", said.append)
    settings = Settings(model=str(tiny_folder), backend="reference", adapter="zebra")
    options.open_runtime(settings).close()
    assert said[0] == "erased" and said[1].startswith("note: adapter 'zebra'")


def test_status_says_where_the_ratings_are(run, learned, tiny_folder):
    """A new adapter has none; the others are named, as nothing is lost. A mistyped one is refused."""
    run("adapters", "use", "fresh", "--new", *tiny(tiny_folder))
    _, out, _ = run("learn", "status", *tiny(tiny_folder))
    assert "adapter 'fresh'" in out and "default" in out and "`ruvmlx adapters use default`" in out
    code, _, err = run("learn", "status", "--adapter", "defualt", *tiny(tiny_folder))
    assert code == 2 and "Did you mean 'default'?" in err


@pytest.mark.parametrize("version", ["99", "3"])
def test_a_version_that_is_not_there_names_those_that_are(version, run, learned, tiny_folder):
    """In the error itself; no list has to be looked up elsewhere."""
    code, _, err = run("learn", "rollback", version, *tiny(tiny_folder))
    assert code == 1 and one_line(err)
    assert "it has 2 versions, 1 to 2, and version 0, the original model" in err


def test_a_mistyped_model_brings_a_similar_one(run):
    code, _, err = run("generate", "hi", "-m", "startr")
    assert code == 3 and one_line(err) and "Did you mean 'starter'?" in err


@pytest.mark.parametrize("name", ["qwen", "Qwen3 4B", "qwen:latest"])
def test_pull_says_what_it_fetches(name, run):
    code, _, err = run("pull", name)
    assert code == 2 and one_line(err)
    assert "owner/name" in err and "`ruvmlx pull mlx-community/" in err and "on this machine" not in err


@pytest.mark.parametrize("name", ["chat.html", "chat.pdf", "chat.MD2"])
def test_a_chat_is_not_written_in_a_form_that_its_name_does_not_say(name, run, learned, tmp_path):
    file = tmp_path / name
    code, _, err = run("sessions", "export", "last", "--out", str(file))
    assert code == 2 and one_line(err) and ".md" in err and ".json" in err and not file.exists()


@pytest.mark.parametrize("name", ["chat.md", "chat.JSON", "chat.txt", "chat"])
def test_a_chat_is_written_in_the_form_that_its_name_says(name, run, learned, tmp_path):
    assert run("sessions", "export", "last", "--out", str(tmp_path / name))[0] == 0
    text = (tmp_path / name).read_text("utf-8")
    assert (name == "chat.JSON") == text.startswith("{")
    if name == "chat.JSON":
        assert json.loads(text)["format"] == "ruvmlx-chat"


def test_a_deleted_chat_can_be_deleted_for_good(run, learned):
    """Also one that was deleted before, and waits for its day."""
    assert run("sessions", "rm", learned)[0] == 0
    assert run("sessions", "rm", learned)[0] == 1
    assert run("sessions", "rm", learned, "--now")[0] == 0
    assert json.loads(run("sessions", "restore", "--json")[1]) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("generate", "hi", "--seed", "x"), "'x' is not a whole number."),
        (("generate", "hi", "--seed", "1.5"), "'1.5' is not a whole number."),
        (("learn", "rollback", "--before", "monday"), "'monday' is not a date, as in 2026-11-20 or"),
        (("log", "show", "--since", "2026-13-01"), "'2026-13-01' is not a date, as in 2026-11-20 or"),
        (("learn", "consolidate", "--ewc", "much"), "'much' is not a number."),
    ],
)
def test_what_is_no_number_is_told_in_plain_words(run, flags, words):
    code, _, err = run(*flags)
    assert code == 2 and one_line(err) and words in err and "range" not in err


def test_a_rollback_that_changes_nothing_says_so(run, tiny_folder, open_tiny):
    back = ("learn", "rollback", "--before", "2020-01-01", *tiny(tiny_folder))
    with open_tiny():
        pass
    code, out, _ = run(*back)
    assert code == 0 and "There is nothing to go back from" in out and "went back" not in out
    code, out, _ = run("learn", "rollback", "0", *tiny(tiny_folder))
    assert code == 0 and "Nothing changed: the adapter is the original model already." in out


def test_a_rollback_says_whether_the_version_changed(run, learned, tiny_folder):
    again = ("learn", "rollback", "2", *tiny(tiny_folder))
    assert "Nothing changed: the adapter is at version 2 already." in run(*again)[1]
    out = run("learn", "rollback", "1", *tiny(tiny_folder))[1]
    assert "The adapter is at version 1. Before, it was at version 2. `ruvmlx learn rollback 2 --model" in out
    assert "goes back to it." in out


@pytest.mark.parametrize(
    "words",
    [
        "learn status --details --router on", "learn router",
        "prove --drawn 2 --jobs 2 --ratings 1 --questions 1 --max-tokens 2",
    ],
)  # fmt: skip
def test_a_note_about_the_settings_is_printed_once(words, run, learned, tiny_folder, tmp_path, monkeypatch):
    """The model that takes the place of auto, and the file in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ruvmlx.toml").write_text("top_p = 0.5\n")
    monkeypatch.setenv("RUVMLX_AUTO_MODELS", str(tiny_folder))
    code, _, err = run(*words.split(), "--model", "auto")
    assert code == 0 and err.count("this command uses one model") == 1, err
    assert err.count("in this folder sets top_p") == 1


READERS = (
    "learn status --router on", "learn export", "learn chart", "learn kv", "learn router", "adapters ls",
    "adapters export out", "adapters fuse out", "sessions restore --json",
)  # fmt: skip


def refuse(database):
    raise StoreError(f"cannot write {database.path}: the disk is read-only.")


@pytest.mark.parametrize("words", READERS)
def test_a_command_that_only_reads_works_on_a_disk_that_takes_nothing(
    words, run, learned, tiny_folder, tmp_path, monkeypatch
):
    """The store opens for reading alone, as on a read-only disk."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Database, "_open", refuse)
    flags = tiny(tiny_folder) if words.startswith(("learn", "adapters export", "adapters fuse")) else ()
    code, out, err = run(*words.split(), *flags)
    assert code == 0 and out, err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("sessions import there/no.json", "cannot read there/no.json: No such file or directory. Check"),
        ("sessions import a.json/b.json", "cannot read a.json/b.json: Not a directory. Name another file."),
        ("learn check --questions there", "cannot read there: it is a folder. Name another file."),
        ("learn check --questions a.json", "a.json is not UTF-8 text (byte 1). Convert it to UTF-8."),
        ("generate --prompts there", "cannot read there: it is a folder. Name another file."),
        ("perplexity there", "cannot read there: Is a directory. Name another file."),
        ("perplexity a.json", "a.json is not UTF-8 text (byte 1). Convert it to UTF-8."),
        ("prove --prompts a.json", "a.json is not UTF-8 text (byte 1). Convert it to UTF-8."),
        ("bench compare there there", "cannot read there: Is a directory. Name another file."),
        ("restore there", "name one that `ruvmlx backup` wrote."),
    ],
)
def test_an_error_of_a_file_says_what_to_do(words, said, run, tmp_path, monkeypatch):
    """The line says what failed, and ends with the next step."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "a.json").write_bytes(b"a\xff")
    code, _, err = run(*words.split())
    assert code != 0 and said in err and len(err.splitlines()) == 1, err


def test_an_error_of_a_file_that_is_denied_or_too_long_says_what_to_do(tmp_path):
    denied = unreadable("a.txt", PermissionError(13, "Permission denied"))
    assert str(denied).endswith("denied. Change its access rights, or name another file.")
    (tmp_path / "a.txt").write_bytes(b"abc")
    with pytest.raises(UsageError, match=r"a\.txt is over 2 B, which is too long to read\. Shorten it\.$"):
        read_bytes(tmp_path / "a.txt", 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("generate hi --logprobs 2", "--logprobs needs --json"),
        ("chat -c --session last", "--continue and --session do not go together"),
        ("chat --server -c --session last", "--continue and --session do not go together"),
    ],
)
def test_options_that_do_not_go_together_are_an_error(words, said, run):
    """Before, the program ignored one of the two options."""
    code, out, err = run(*words.split())
    assert code == 2 and not out and said in err and one_line(err)
