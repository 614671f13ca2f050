"""SIGTERM and SIGHUP in the middle of each verb: it ends within two seconds and says at most one line, no
child is left, no unfinished file, and the store is sound."""

import json
import os
import signal
import subprocess
import sys
import time
import types
import urllib.request
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from ruvmlx.apps.cli import ending_signals

from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.store import Store
from ruvmlx.store.audit import disagreement

from ..models.fake_hub import FakeHub
from ..models.make_models import make_safetensors_model

SECONDS = 2.0  # from the signal to the end, on a machine that is not busy
PATIENCE = 120.0  # until a verb is in the middle of its work
CHILD_SECONDS = 2.0  # until the children of a verb that has ended are gone

# Tells of the first call of a function, which then waits where `waits` says so: the middle of the work.
VERB = """
import importlib, sys, time
place, waits = sys.argv.pop(1), sys.argv.pop(1)
if place:
    module, _, names = place.partition(":")
    owner = importlib.import_module(module)
    *path, name = names.split(".")
    for part in path:
        owner = getattr(owner, part)
    work = getattr(owner, name)
    def note_and_call(*args, **more):
        print("MIDDLE", file=sys.stderr, flush=True)
        time.sleep(float(waits))
        setattr(owner, name, work)
        return work(*args, **more)
    setattr(owner, name, note_and_call)
from ruvmlx.apps.main import main
main()
"""
# name -> (arguments, the function in the middle, whether it waits there)
TOLD = {
    "train": ("learn consolidate --steps 100000", "ruvmlx.sona.background:Background._accumulate", 0),
    "backup": ("backup {folder}/copy.db", "ruvmlx.store.backup:_check_copy", 60),
    "restore": ("restore {folder}/good.db", "ruvmlx.store.backup:_exchange", 60),
    "import": ("sessions import {folder}/chats.json", "ruvmlx.store.chats:Chats.add", 0),
}
COUNTED = {  # name -> (arguments, processes that work in the middle)
    "prove": ("prove --drawn 2 --jobs 2 --ratings 200 --questions 2", 3),
    "bench": ("bench model --quick", 2),
}
ENDS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
linux = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the processes of a data folder")


@pytest.fixture
def rated_store(open_tiny, home, tmp_path):
    """A data folder with twelve ratings, and a backup of it."""
    with open_tiny() as runtime:
        for i in range(12):
            request = GenerationRequest(
                prompt="question", max_new_tokens=6, sampling=Sampling(seed=i), ignore_eos=True
            )
            list(runtime.writer.generate(request))
            runtime.learning.settle()
            runtime.rate("last", "up" if i % 2 else "down")
    subprocess.run([sys.executable, "-m", "ruvmlx", "backup", tmp_path / "good.db"], check=True)
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]
    (tmp_path / "chats.json").write_text(json.dumps(messages * 10_000))
    return home


@dataclass
class Started:
    """A verb, and the file of its standard error."""

    process: subprocess.Popen[str]
    errors: Path

    def wait(self, has_come: Callable[[], object]) -> None:
        until = time.monotonic() + PATIENCE
        while not has_come():
            assert self.process.poll() is None and time.monotonic() < until, self.errors.read_text()
            time.sleep(0.02)


@pytest.fixture
def start(rated_store, tiny_folder, tmp_path):
    """Starts a verb. place: the function that tells when it is called; waits: seconds in it."""

    def start(words: str, place: str = "", waits: float = 0, **env: str) -> Started:
        command = [sys.executable, "-c", VERB, place, str(waits), *words.split()]
        if words.split()[0] in ("learn", "prove", "bench", "serve"):
            command += ["--model", str(tiny_folder)]
        errors = tmp_path / "errors"
        with open(errors, "w") as file:
            process = subprocess.Popen(
                command, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file,
                env={**os.environ, "TMPDIR": str(tmp_path), **env},
            )  # fmt: skip
        return Started(process, errors)

    return start


def family(home: Path) -> list[int]:
    """Processes whose data folder is this one."""
    wanted, found = f"RUVMLX_HOME={home}".encode(), []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            has_ended = (place / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if wanted in (place / "environ").read_bytes().split(b"\0") and not has_ended:
                found.append(int(place.name))
    return [process for process in found if process != os.getpid()]


def end(verb: Started, number: int, home: Path) -> None:
    """Send the signal; fail unless the verb ends as it should."""
    before, begun = verb.errors.stat().st_size, time.monotonic()
    verb.process.send_signal(number)
    try:
        verb.process.wait(timeout=600)
        took = time.monotonic() - begun
    finally:
        verb.process.kill()
    assert took < SECONDS * busyness(), took
    until = time.monotonic() + CHILD_SECONDS
    while left := family(home) if sys.platform == "linux" else []:
        assert time.monotonic() < until, left
        time.sleep(0.02)
    said = verb.errors.read_bytes()[before:].decode().splitlines()
    lines = [line for line in said if not line.startswith("{")]  # the server's log is JSON
    assert len(lines) <= 1 and not any("Traceback" in line for line in lines), lines
    assert verb.process.returncode in (0, 128 + number)
    with closing(Store(home / "ruvmlx.db")) as store:
        assert store.integrity() == "ok"
        assert store.witness.check().broken is None and disagreement(store) == ""
        assert len(store.db.rows("SELECT reply_id FROM ratings")) == 12


def busyness() -> float:
    """Processes that want a core, for each core; at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def names(*folders: Path) -> set[str]:
    return {path.name for folder in folders for path in folder.iterdir() if "ruvmlx.db-" not in path.name}


@ENDS
@pytest.mark.parametrize("name", TOLD)
def test_in_the_middle(rated_store, start, tmp_path, name, number):
    words, place, waits = TOLD[name]
    verb = start(words.format(folder=tmp_path), place, waits)
    before = names(tmp_path, rated_store)
    verb.wait(lambda: "MIDDLE" in verb.errors.read_text())
    end(verb, number, rated_store)
    assert names(tmp_path, rated_store) <= before


@linux
@ENDS
@pytest.mark.parametrize("name", COUNTED)
def test_with_children(rated_store, start, tmp_path, name, number):
    words, processes = COUNTED[name]
    verb = start(words)
    verb.wait(lambda: len(family(rated_store)) >= processes)
    end(verb, number, rated_store)
    assert list(tmp_path.glob("ruvmlx-*")) == []


@ENDS
def test_pull(rated_store, start, tmp_path, number):
    hub = FakeHub(make_safetensors_model(tmp_path / "served", hidden_size=256), "owner/tiny")
    hub.pace = 0.5
    try:
        verb = start(
            "pull owner/tiny", HF_ENDPOINT=hub.url, HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_OFFLINE="0"
        )
        verb.wait(lambda: hub.ranges)
        end(verb, number, rated_store)
    finally:
        hub.close()


@ENDS
def test_serve(rated_store, start, number):
    """A reply is being written."""
    verb = start("serve --json --port 0")
    ready = json.loads(verb.process.stdout.readline())
    asked = {"model": ready["model"], "prompt": "Hello", "max_tokens": 400, "stream": True}
    request = urllib.request.Request(
        f"{ready['base_url']}/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        assert answer.readline().startswith(b"data")
        end(verb, number, rated_store)
    assert verb.process.returncode == 0  # in order: what was read is on disk for the next start


LONG = """
import hashlib
from ruvmlx.apps.cli.ending_signals import end_on_signals
end_on_signals()
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes, in C
"""


@ENDS
def test_a_library_that_computes_for_long(number):
    with subprocess.Popen([sys.executable, "-c", LONG], text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == "ready\n"
        begun = time.monotonic()
        process.send_signal(number)
        assert process.wait(timeout=600) == 128 + number and time.monotonic() - begun < SECONDS * busyness()


def test_a_hangup_that_is_ignored_stays_ignored():
    program = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)" + LONG.replace("10**9", "1")
    program += "signal.raise_signal(signal.SIGHUP); print('on')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "ready\non\n"


def test_a_signal_while_the_child_processes_module_is_imported(monkeypatch):
    """The verb ended by an internal error, because the module had no `ending` yet."""
    monkeypatch.setitem(sys.modules, "ruvmlx.platform.bounded_process", types.ModuleType("unfinished"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        ending_signals._unwind(signal.SIGTERM, None)
    assert ended.value.code == 128 + signal.SIGTERM


# Ctrl+C comes during the import of click, while Python runs a destructor.
CTRL_C_IN_IMPORT = """
import os, signal, sys
class Late:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(9))
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            Late()
sys.meta_path.insert(0, Finder())
sys.argv = ["ruvmlx", "--version"]
from ruvmlx.apps.main import main
main()
"""


def test_ctrl_c_during_the_imports_is_one_line():
    """Python printed the traceback, and the command went on."""
    done = subprocess.run(
        [sys.executable, "-c", CTRL_C_IN_IMPORT], capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "ruvmlx: interrupted.\n")


CTRL_C_AT_THE_END = """
import gc, os, signal
gc.freeze = lambda: os.kill(os.getpid(), signal.SIGINT)
from ruvmlx.apps import main
def interrupt():
    raise KeyboardInterrupt
main._run = interrupt
main.main()
"""


def test_a_second_ctrl_c_at_the_end_is_one_line():
    """Python printed the traceback."""
    run = [sys.executable, "-c", CTRL_C_AT_THE_END]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "ruvmlx: interrupted.\n")


def test_nothing_slow_is_imported_before_ctrl_c_is_handled():
    """During such an import, Ctrl+C would print a Python traceback."""
    code = "import sys; import ruvmlx.apps.main; print({'typing', 're', 'enum', 'signal'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
