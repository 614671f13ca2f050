"""`completion`: the file that a real shell reads, and the values that it completes."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ruvmlx.apps.cli import completion
from ruvmlx.apps.cli.completion_values import cached_names

from ruvmlx.models.find.hub import hub_cache

SHELLS = ("bash", "zsh", "fish")


@pytest.fixture
def own_home(tmp_path, monkeypatch):
    """A home folder without any start-up file, and no other place for completions."""
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "BASH_COMPLETION_USER_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME"])
def test_the_completed_models_are_those_of_the_cache_in_use(name, tmp_path, monkeypatch):
    for other in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(name, "~/moved" if name != "HOME" else str(tmp_path))
    (hub_cache() / "models--me--small").mkdir(parents=True)
    assert cached_names() == ["me/small"]


@pytest.mark.parametrize("shell", SHELLS)
def test_install_writes_the_shells_file_and_remove_deletes_it(shell, own_home, run):
    code, out, _ = run("completion", "install", "--shell", shell, "--json")
    facts = json.loads(out)
    assert code == 0 and facts["shell"] == shell
    path = Path(facts["path"])
    assert own_home in path.parents and "_RUVMLX_COMPLETE" in path.read_text()
    assert run("completion", "install", "--shell", shell)[0] == 0  # again: nothing breaks
    code, out, _ = run("completion", "remove", "--shell", shell)
    assert code == 0 and not path.exists() and "Deleted ~/" in out
    assert "Nothing to delete" in run("completion", "remove", "--shell", shell)[1]


def test_the_shell_is_the_users_own_and_an_unknown_one_is_an_error(own_home, run, monkeypatch):
    monkeypatch.setenv("SHELL", "/usr/bin/zsh")
    assert json.loads(run("completion", "install", "--json")[1])["shell"] == "zsh"
    monkeypatch.setenv("SHELL", "/usr/bin/nu")
    code, _, err = run("completion", "install")
    assert code == 2 and "nu" in err and "--shell" in err


def test_the_bash_of_macos_is_too_old_and_reads_another_file(own_home, run, tmp_path, monkeypatch):
    """Its version is 3.2, which does not know `complete -o nosort`. Its terminal starts login shells."""
    old = tmp_path / "old" / "bash"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho '3.2.57(1)-release'\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{old.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "platform", "darwin")
    _, out, err = run("completion", "install", "--shell", "bash")
    assert "older than 4.4" in err and "~/.bash_profile" in out


def test_print_writes_nothing(own_home, run):
    code, out, _ = run("completion", "install", "--shell", "bash", "--print")
    assert code == 0 and "complete" in out and not list(own_home.rglob("*"))
    facts = json.loads(run("completion", "install", "--shell", "bash", "--print", "--json")[1])
    assert facts == {"shell": "bash", "script": out} and not list(own_home.rglob("*"))


def test_a_folder_that_cannot_be_written_is_one_line(own_home, run):
    (own_home / ".local").write_text("a file")
    code, _, err = run("completion", "install", "--shell", "bash")
    assert code == 1 and err.startswith("ruvmlx: cannot write ") and "--print" in err


def completed(*words: str) -> list[str]:
    """What Tab offers after these words; the last one is the beginning that is typed."""
    line = " ".join(["ruvmlx", *words])
    env = os.environ | {"COMP_WORDS": line, "COMP_CWORD": str(len(words)), completion.ANSWER: "bash_complete"}
    code = "import sys; sys.argv = ['ruvmlx']\nfrom ruvmlx.apps.main import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600)
    assert not done.stderr, done.stderr
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_verbs_settings_and_their_values_are_completed():
    assert completed("gen") == ["generate"]
    assert completed("learn", "rol") == ["rollback"]
    assert "max_tokens" in completed("config", "set", "max_")
    assert completed("config", "set", "backend", "na") == ["native"]
    assert completed("rate", "last", "u") == ["up"]
    assert "--max-tokens" in completed("generate", "--max-t")


def test_adapters_and_chats_of_the_store_are_completed(home, open_tiny):
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        runtime.chats.set_system(chat, "Be brief.")
        runtime.store.chats.set_title(chat, "Trip to Paris")
        for _ in runtime.chats.say(chat, "Hello", max_new_tokens=4, cancel=threading.Event()):
            pass
        runtime.rate("last", "up")
        runtime.store.adapters.copy(runtime.model.fingerprint, "default", "work")
    assert completed("adapters", "use", "wo") == ["work"]
    assert completed("generate", "hi", "--adapter", "wo") == ["work"]
    assert completed("sessions", "show", chat[:4]) == [chat]
    assert completed("sessions", "show", "la") == ["last"]


def test_without_a_store_nothing_is_completed_and_none_is_made(home):
    assert completed("sessions", "show", "x") == []
    assert not home.exists()


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash here")
def test_bash_completes_with_the_installed_file(own_home, run, tmp_path):
    """A real bash sources the file that `install` wrote, and its function offers the verbs."""
    path = json.loads(run("completion", "install", "--shell", "bash", "--json")[1])["path"]
    tool = tmp_path / "bin" / "ruvmlx"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ruvmlx "$@"\n')
    tool.chmod(0o755)
    script = f'source "{path}"; COMP_WORDS=(ruvmlx comp); COMP_CWORD=1; _ruvmlx_completion ruvmlx comp ruvmlx'
    script += '; printf "%s\\n" "${COMPREPLY[@]}"'
    env = os.environ | {"PATH": f"{tool.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc", "-c", script], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.stdout.split() == ["completion"], done.stderr
