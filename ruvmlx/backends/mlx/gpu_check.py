"""This module runs the GPU kernels' self-check in a child process and stores the result (verdict.py).

A bad kernel can hang, and an error of Metal can end the process that runs the kernel. The user's process must
not hang or end, so the check has its own process. The child (kernels/selfcheck.py) writes a line of JSON
before and after each kernel, so the parent knows which kernel did not return.
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
from itertools import dropwhile
from typing import IO, Any

from ...progress import QUIET, TICK, Progress, Watch
from .check_results import SKIPPED, CheckResult, KernelVerdict, Shapes
from .verdict import keep, key, stored_verdict

# -P: do not import a file of the user's working folder that has the name of one of ruvmlx's modules.
COMMAND = [sys.executable or "python3", "-P", "-m", "ruvmlx.backends.mlx.kernels.selfcheck"]
# the maximum seconds of the check, which mostly takes a few seconds; must be less than selfcheck.LIFETIME
TIME_LIMIT = 120.0
LEAVING = 5.0  # seconds to wait for the end of a killed child, because a hung GPU can delay the end
WHAT = "Checking the GPU kernels (once)"


def check(shapes: Shapes, watch: Watch = QUIET, fresh: bool = False) -> KernelVerdict:
    """Return the stored verdict for this machine and these shapes. If there is no stored verdict, or with
    `fresh`, run the check."""
    wanted = key(shapes)
    found = None if fresh else stored_verdict(wanted)
    if found is None:
        found = ask(shapes, watch)
        if found.told:
            keep(wanted, found)
    return found


def ask(shapes: Shapes, watch: Watch = QUIET) -> KernelVerdict:
    """Run the check and return its verdict. An error of the check becomes a verdict; only `watch` or a signal
    (Ctrl-C) makes this function raise an exception."""
    started = time.monotonic()
    try:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            ended = _run(shapes, out, err, watch)
            events, said = _events(out), _text(err)
    except OSError as error:
        events, ended, said = [], f"could not be started: {error}", ""
    return verdict(events, _why(ended, said), time.monotonic() - started)


def verdict(events: list[dict[str, Any]], ended: str, seconds: float) -> KernelVerdict:
    """Return the verdict from the child's JSON lines `events`. ended: why the child failed, with the child's
    error output; "": the child did not fail. seconds: the duration of the check."""
    names: list[str] = next((event["cases"] for event in events if "cases" in event), [])
    results = {
        event["result"]["name"]: CheckResult(**event["result"]) for event in events if "result" in event
    }
    if not names:
        return KernelVerdict(
            (CheckResult.of_error("the check", ended, "it said nothing"),), seconds, told=False
        )
    begun = [event["begun"] for event in events if "begun" in event]
    if begun and (begun[-1] not in results or ended):
        results[begun[-1]] = CheckResult.of_error(begun[-1], ended, "the check ended in the middle of it")
    return KernelVerdict(tuple(results.get(n, CheckResult(n, False, SKIPPED)) for n in names), seconds)


def _run(shapes: Shapes, out: IO[bytes], err: IO[bytes], watch: Watch) -> str:
    """Start the child and wait until it ends. Return why the child failed, or "". If the child still runs at
    the time limit, or after an exception, kill it."""
    child = subprocess.Popen(
        [*COMMAND, json.dumps(asdict(shapes))],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,  # so that Ctrl-C reaches only the parent, which kills the child
    )
    try:
        return _wait_for_child(child, watch)
    finally:
        _kill(child)


def _wait_for_child(child: subprocess.Popen, watch: Watch) -> str:
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
    """Return the reason `ended` with the child's error output `said`. If the output is a traceback, leave out
    all lines before the error's message."""
    lines = [line for line in said.splitlines() if line.strip()]
    if not ended or not lines:
        return ended
    if lines[0].startswith("Traceback"):
        lines = list(dropwhile(lambda line: line.startswith(" "), lines[1:]))
    return "\n".join([f"{ended}: {lines[0]}", *lines[1:]])


def _events(out: IO[bytes]) -> list[dict[str, Any]]:
    """Return the child's JSON lines. Lines that are no JSON object (output of libraries, an incomplete last
    line) are left out."""
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
