"""Asks a short-lived child process which GPU kernels work here, and keeps what it said.

A bad kernel may hang, and an error of Metal may end its process: neither may happen to the user's own. The
child (kernels/selfcheck.py) writes a line of JSON before and after each kernel, so that the parent knows
which one it was that never came back.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from typing import IO, Any

from ...progress import QUIET, TICK, Progress, Watch
from .check_results import SKIPPED, CheckResult, KernelVerdict, Shapes, reason
from .verdict import keep, kept, key

# -P: a file in the user's working folder must not pass for one of ours.
COMMAND = [sys.executable or "python3", "-P", "-m", "ruvmlx.backends.mlx.kernels.selfcheck"]
TIME_LIMIT = 120.0  # seconds, less than selfcheck.LIFETIME; the check takes a few
LEAVING = 5.0  # seconds that a killed child may take to go: a hung GPU can hold it
WHAT = "Checking the GPU kernels (once)"


def check(shapes: Shapes, watch: Watch = QUIET, fresh: bool = False) -> KernelVerdict:
    """The kept verdict for this machine and these shapes; else, or if `fresh`, a new one."""
    wanted = key(shapes)
    found = None if fresh else kept(wanted)
    if found is None:
        found = ask(shapes, watch)
        if found.told:
            keep(wanted, found)
    return found


def ask(shapes: Shapes, watch: Watch = QUIET) -> KernelVerdict:
    """Run the check. Only what the watch raises comes out of here."""
    started = time.monotonic()
    try:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            ended = _run(shapes, out, err, watch)
            events, said = _events(out), _text(err)
    except OSError as error:
        events, ended, said = [], f"could not be started: {error}", ""
    return verdict(events, _why(ended, said), time.monotonic() - started)


def verdict(events: list[dict[str, Any]], ended: str, seconds: float) -> KernelVerdict:
    """What the child's lines say. ended: why it did not end well; "" where it did."""
    names: list[str] = next((event["cases"] for event in events if "cases" in event), [])
    results = {
        event["result"]["name"]: CheckResult(**event["result"]) for event in events if "result" in event
    }
    if not names:
        return KernelVerdict(
            (CheckResult("the check", False, ended or "it said nothing"),), seconds, told=False
        )
    begun = [event["begun"] for event in events if "begun" in event]
    if begun and (begun[-1] not in results or ended):
        results[begun[-1]] = CheckResult(begun[-1], False, ended or "the check ended in the middle of it")
    return KernelVerdict(tuple(results.get(n, CheckResult(n, False, SKIPPED)) for n in names), seconds)


def _run(shapes: Shapes, out: IO[bytes], err: IO[bytes], watch: Watch) -> str:
    """Until the child has ended; "" where it ended well. It never outlives this call."""
    child = subprocess.Popen(
        [*COMMAND, json.dumps(asdict(shapes))],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,  # Ctrl-C is the parent's to handle
    )
    try:
        return _waited(child, watch)
    finally:
        _kill(child)


def _waited(child: subprocess.Popen, watch: Watch) -> str:
    until = time.monotonic() + TIME_LIMIT
    while time.monotonic() < until:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = child.wait(TICK)
            if code < 0:
                return f"the process died of {_signal_name(-code)}"
            return f"the process ended with code {code}" if code else ""
        watch.progress(Progress(WHAT))
    return f"did not end within {TIME_LIMIT:g} s"


def _kill(child: subprocess.Popen) -> None:
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(LEAVING)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _why(ended: str, said: str) -> str:
    """How it ended, and what it said last if Python wrote a traceback, first if something else spoke."""
    lines = [line for line in said.splitlines() if line.strip()]
    if not ended or not lines:
        return ended
    told = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    return reason(f"{ended}: {told}")


def _events(out: IO[bytes]) -> list[dict[str, Any]]:
    """The child's lines; anything else that a library writes there is passed over, a torn last line too."""
    found = []
    for line in _text(out).splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict):
                found.append(event)
    return found


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", errors="replace")
