"""One trial of a campaign of crashes: a verb in a forked child, which crash_shim.c ends or fails at one call.

The process of the campaign imports ruvmlx once, with the shim loaded, and forks a child for each trial. All
files of a trial lie below one folder, `work`: the data folder (home/), and what a verb writes elsewhere
(out/). Ids, times and random numbers are the same in each child, so that states can be compared byte by byte.

What it does not know: the verbs (crash_verbs.py), and images of a machine's crash (crash_images.py).
"""

import ctypes
import gc
import hashlib
import importlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("crash_shim.c")
BEGIN = 1_795_000_000  # seconds since 1970: the clock of a trial stands still here
PULLED = "owner/tiny"  # the model that a trial of `pull` fetches, into out/hub
LONGEST = 60  # seconds of processor time; a trial that takes longer hangs
LONGEST_WAIT = 900  # seconds by the clock; the machine may do other work
# Columns that hold measured times and speeds, and what follows from them: {table: columns}.
MEASURED = {
    "replies": {"latency_ratio", "quality", "quality_parts"},
    "signals": {"latency_ratio", "quality", "reward"},
    "kv_observations": {"us_per_token", "pressure", "ttft_ms", "replies", "others", "level"},
    "kv_measured": {"us", "us_f16"},
    "kv_choices": {"report"},
    "witness": {"body", "previous", "hash"},
    "drafts": {"process", "reply"},
    "attempts": {"report"},
    "bases": {"report"},
    "deep_runs": {"report"},
    "routes": {"probability"},
}
_TEMPORARY = re.compile(r"\.\d+(\.\w{8})?\.new")
SHADOWS = "messages_text_"  # tables of the search index, whose inner form depends on the order of writes


class Mode(IntEnum):
    """The action of the shim at one call. The numbers are those of crash_shim.c."""

    COUNT = 0
    KILL_BEFORE = 1
    KILL_AFTER = 2
    IO_ERROR = 3
    NO_SPACE = 4
    SHORT_WRITE = 5
    DISK_FULL = 6  # from this call on
    READ_ONLY = 7  # this mode and the next ones concern all calls
    NO_LOCKS = 8  # ENOLCK
    LOCKS_UNKNOWN = 9  # EOPNOTSUPP
    STOP_BEFORE = 10  # each call: `at_stop` runs, and the process goes on


@dataclass(frozen=True)
class TrialResult:
    """The end of a trial. code: the exit code, or the negative number of the signal that ended the process;
    calls: the number of calls that the shim counted, or -1 after a kill."""

    code: int
    out: str
    err: str
    calls: int


@dataclass(frozen=True)
class StartReport:
    """What the next start found. state: a digest of all that the user can see; parts: the digest of each
    table and file; faults: one line each."""

    state: str
    parts: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = ()


def compile_shim(folder: Path) -> Path:
    """Compile the shim into this folder. Raises CalledProcessError, and FileNotFoundError without gcc."""
    made = folder / "crash_shim.so"
    command = ["gcc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(made), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return made


def is_loaded() -> bool:
    """Is the shim in this process?"""
    return hasattr(ctypes.CDLL(None), "crash_arm")


def start_with_shim(folder: Path) -> None:
    """Start this program again with the shim loaded, and with one thread for matrix products: the split of a
    sum decides its last bit, and other threads outlive no fork. Does not return."""
    more = {"LD_PRELOAD": str(compile_shim(folder)), "OPENBLAS_NUM_THREADS": "1"}
    arguments = [sys.executable, "-m", "tests.campaigns.crashes", *sys.argv[1:]]
    os.execve(sys.executable, arguments, os.environ | more)


class Bench:
    """A place for trials: the folder `work`, beside it `bases` with the folders that trials start from."""

    def __init__(self, folder: Path):
        self.folder, self.work = folder.resolve(), folder.resolve() / "work"
        self._said = folder / "said"
        self._said.mkdir(exist_ok=True)
        self._shim = ctypes.CDLL(None)

    def base(self, name: str) -> Path:
        return self.folder / "bases" / name

    def reset(self, base: str) -> None:
        """Put a copy of a base in place of `work`."""
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.base(base), self.work, symlinks=True)

    def keep(self, base: str) -> None:
        """Keep `work` as a base."""
        shutil.rmtree(self.base(base), ignore_errors=True)
        shutil.copytree(self.work, self.base(base), symlinks=True)

    def drop(self, base: str) -> None:
        shutil.rmtree(self.base(base))

    def mark(self) -> str:
        """A digest of all files of `work`. Of temporary names the numbers do not count."""
        found = hashlib.sha256()
        for path in sorted(self.work.rglob("*")):
            found.update(_TEMPORARY.sub(".*.new", str(path)).encode() + b"\0")
            if path.is_file():
                found.update(path.read_bytes() + b"\0")
        return found.hexdigest()

    def run(
        self,
        call: Callable[[], int],
        mode: Mode = Mode.COUNT,
        at: int = 0,
        log: Path | None = None,
        after: int = 50,
        below: str = "",
        at_stop: Callable[[int], None] | None = None,
    ) -> TrialResult:
        """Run `call` in a child with the shim armed. after: seconds that the clock is past BEGIN; other ids
        and random numbers belong to other seconds. below: the folder inside `work` whose calls the shim
        counts; "" for all of `work`. at_stop: what runs at each stop of Mode.STOP_BEFORE, with the number of
        the call."""
        for old in self._said.iterdir():
            old.unlink()
        if child := os.fork():
            return self._result(os.waitstatus_to_exitcode(_wait(child, at_stop)))
        try:
            signal.setitimer(signal.ITIMER_PROF, LONGEST)
            signal.alarm(LONGEST_WAIT)
            self._redirect()
            make_even(self._shim, BEGIN + after)
            self._shim.crash_arm(
                os.fsencode(self.work / below),
                int(mode),
                ctypes.c_long(at),
                os.fsencode(log) if log else None,
            )
            code = call()
            gc.collect()  # closes what the verb left open, as the end of its process does
            sys.stdout.flush()
            sys.stderr.flush()
            (self._said / "calls").write_text(str(self._shim.crash_count()))
            (self._said / "modules").write_text(" ".join(sys.modules))
            os._exit(code)
        except BaseException:  # noqa: BLE001 - the parent reads it
            with suppress(BaseException):
                os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(70)

    def import_again(self) -> None:
        """Import what the last child has imported, so that the next children need not. The import of MLX
        starts no thread; the first computation does."""
        for name in self._read("modules").split():
            with suppress(Exception):
                importlib.import_module(name)
        assert len(os.listdir("/proc/self/task")) == 1, "threads outlive no fork"
        gc.collect()
        gc.freeze()  # collections in the children pass by what the parent has made

    def _redirect(self) -> None:
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        for number, name in ((1, "out"), (2, "err")):
            handle = os.open(self._said / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(handle, number)
            os.close(handle)
        sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115 - for the child's whole life
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115

    def _result(self, code: int) -> TrialResult:
        said = {name: self._read(name) for name in ("out", "err", "calls")}
        return TrialResult(code, said["out"], said["err"], int(said["calls"] or -1))

    def _read(self, name: str) -> str:
        try:
            return (self._said / name).read_text("utf-8", "replace")
        except FileNotFoundError:
            return ""

    def check(
        self, again: Callable[[], int] | None = None, then: Callable[[Path], list[str]] | None = None
    ) -> StartReport:
        """Look at `work` as the next start does. again: the verb, which is then run once more, to see what it
        leaves behind in out/. then: what the next start does besides; it returns what is wrong."""
        answer = self._said / "found"

        def look() -> int:
            answer.write_text(json.dumps(examine(self.work, again, then)))
            return 0

        ended = self.run(look, after=99)
        if ended.code or not answer.exists():
            return StartReport("", {}, (f"the next start fails: {ended.code} {ended.err.strip()[-300:]}",))
        found = json.loads(answer.read_text())
        return StartReport(digest(found["parts"]), found["parts"], tuple(found["faults"]))


def _wait(child: int, at_stop: Callable[[int], None] | None) -> int:
    """Wait for the child's end, and return its status. Let the child go on after each stop."""
    for stop in itertools.count():
        _, status = os.waitpid(child, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            break
        if at_stop is not None:
            at_stop(stop)
        os.kill(child, signal.SIGCONT)
    return status


def make_even(shim: ctypes.CDLL, now: int) -> None:
    """Give this process the clock, the random numbers and the ids that every trial has."""
    shim.crash_clock(ctypes.c_long(now))
    even = random.Random(now)
    random.seed(now)
    os.urandom = even.randbytes
    random._urandom = even.randbytes
    tempfile._name_sequence = None  # names of temporary files are not the parent's
    tempfile.tempdir = None  # TMPDIR is read again


# -- the next start ----------------------------------------------------------------------------------


def examine(
    work: Path, again: Callable[[], int] | None, then: Callable[[Path], list[str]] | None
) -> dict[str, Any]:
    """{"parts": {table or file: digest}, "faults": lines} of a folder `work` after a crash.

    Starts as a chat does (recovers drafts, erases what is due), runs the data's checks of `doctor`, starts
    again, and looks for files that no start removed.
    """
    os.environ["RUVMLX_HOME"] = str(work / "home")
    faults = start(work) + doctor()
    gc.collect()  # the checks leave their stores to the end of the process
    faults += start(work)
    faults += [f"left behind after the next start: {name}" for name in left_over(work / "home")]
    parts = store_parts(work / "home" / "ruvmlx.db") | file_parts(work) | hub_parts(work / "out")
    faults += then(work) if then else []
    if again is not None and (work / "out").is_dir():
        again()
        faults += ["`pull` does not go on"] * is_half_fetched(work / "out")
        faults += [f"left behind after the verb ran again: {name}" for name in left_over(work / "out")]
    return {"parts": parts, "faults": faults}


def start(work: Path) -> list[str]:
    from ruvmlx.chats import soft_delete
    from ruvmlx.kv.disk import CacheFolder
    from ruvmlx.store import Store

    path = work / "home" / "ruvmlx.db"
    try:
        with closing(Store(path)) as store:
            soft_delete.tidy(store, CacheFolder.of_store(path, 1 << 20))
    except Exception as error:  # noqa: BLE001 - a finding
        return [f"the store does not open: {type(error).__name__}: {error}"]
    return [
        f"{path.name}{ending} is left" for ending in ("-wal", "-shm", "-journal") if _is_there(path, ending)
    ]


def _is_there(path: Path, ending: str) -> bool:
    return os.path.lexists(f"{path}{ending}")


def doctor() -> list[str]:
    """What the checks of `ruvmlx doctor` that concern the data complain of."""
    from ruvmlx.apps.cli.doctor import _CHECKS, _run_check

    names = ("store", "privacy", "deleted chats", "witness log", "KV caches", "adapter")
    checks = [_run_check(name, _CHECKS[name]) for name in names]
    return [f"doctor, {check['name']}: {check['detail']}" for check in checks if not check["ok"]]


def store_parts(path: Path) -> dict[str, str]:
    """A digest of each table's rows, without MEASURED columns."""
    parts = {}
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as db:
        tables = db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
        for (table,) in tables:
            if table.startswith(("sqlite_", SHADOWS)):
                continue
            names = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            wanted = ", ".join(name for name in names if name not in MEASURED.get(table, ()))
            rows = sorted(map(repr, db.execute(f"SELECT {wanted} FROM {table}")))
            parts[f"table {table}"] = digest(rows)
    return parts


def file_parts(work: Path) -> dict[str, str]:
    """A digest of each file that is no part of the store, of its page store, which may lose anything, of the
    folder of temporary files, or of the hub's cache (`hub_parts`). An unfinished file is none of them:
    `left_over` finds it."""
    parts = {}
    for path in sorted(work.rglob("*")):
        name = str(path.relative_to(work))
        others = ("home/kv/", "home/ruvmlx.db", "tmp/", "out/hub/")
        is_other = name.startswith(others) and ".before-restore" not in name
        if path.is_file() and not is_other and not is_unfinished(name):
            parts[name] = _file_digest(path)
    return parts


def hub_parts(out: Path) -> dict[str, str]:
    """A digest of the fetched model, if the program takes it as whole."""
    folder = _model_folder(out)
    files = [] if folder is None else sorted(path for path in folder.rglob("*") if path.is_file())
    return {f"fetched {path.name}": _file_digest(path) for path in files}


def is_half_fetched(out: Path) -> bool:
    return (out / "hub").is_dir() and _model_folder(out) is None


def _model_folder(out: Path) -> Path | None:
    from ruvmlx.models.find import hub

    os.environ["HF_HUB_CACHE"] = str(out / "hub")
    return hub.cached_folder(PULLED)


def _file_digest(path: Path) -> str:
    """Of a database its rows, of results (`generate --prompts`) whole lines' texts, of others the bytes."""
    if path.name == "replies.jsonl":
        return digest(repr(re.findall(rb'"text": *"[^"]*".*\n', path.read_bytes())))
    with suppress(sqlite3.Error):
        if path.open("rb").read(16) == b"SQLite format 3\0":
            return digest(store_parts(path))
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def is_unfinished(name: str) -> bool:
    """Is it a file, or in a folder, that was to get another name later, or a log of a database?"""
    return any(part.endswith((".new", ".part", "-wal", "-shm", "-journal")) for part in Path(name).parts)


def left_over(folder: Path) -> list[str]:
    """Unfinished files that a killed process left."""
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*"))]
    return [name for name in names if is_unfinished(name) and ".before-restore-" not in name]


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def wait_for(happened: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Wait until `happened()` is true; False after so many seconds."""
    end = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True
