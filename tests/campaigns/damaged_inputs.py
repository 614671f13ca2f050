"""Damaged inputs of each kind, with the time and the memory of each: one line of error at most, no signal, no
internal error, no stray line on the terminal.

    python -m tests.campaigns.damaged_inputs all --count 10000
    python -m tests.campaigns.damaged_inputs template schema --count 2000
    python -m tests.campaigns.damaged_inputs gguf --only 4711      one input again, in this process

The kind and the number of an input give its bytes, so that a run can be repeated. A worker process takes the
inputs in turn. If a worker crashes, another worker begins with the next input. The time of an input is the
smaller one of two times: the processor time of the worker and its children, and the time by the clock. So the
load of other programs does not count. The memory is the growth of the worker's peak during the input.
"""

import argparse
import json
import os
import random
import resource
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .fuzz import NAMES, is_accepted
from .fuzz_targets import TARGETS, Target

SLOWER = 2.0  # seconds that an input may take beyond the slowest good input of its kind
HANGS = 60.0  # seconds after which the worker is ended
MORE = 200.0  # MB that an input may take beyond twice its size
AT_ONCE = 2000  # inputs of one worker
WORKER = [sys.executable, "-m", "tests.campaigns.damaged_inputs"]  # the command of a worker


def damaged_input(target: Target, kind: str, number: int) -> bytes:
    """Return the input of a number: a seed with one to three rounds of damage."""
    rng = random.Random(f"{kind} {number}")
    data = rng.choice(target.seeds)
    for _ in range(rng.choice([1, 1, 2, 3])):
        data = target.mutant(data, rng)
    return data


# -- the worker --------------------------------------------------------------------------------------


def work(kind: str, numbers: range, out: int) -> None:
    """Take the inputs in turn. Write a line of JSON to the file descriptor `out` before and after each."""

    def tell(**facts: Any) -> None:
        os.write(out, (json.dumps(facts) + "\n").encode())

    with tempfile.TemporaryDirectory(prefix="ruvmlx-damaged-") as folder, tempfile.TemporaryFile() as said:
        target = TARGETS[kind](Path(folder))
        for seed in target.seeds * 2:
            watch = Watch()
            is_accepted(target.run, seed)
            tell(good=watch.seconds)
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
        for number in numbers:
            data = damaged_input(target, kind, number)
            tell(begins=number)
            tell(number=number, **_outcome(target, data), said=_drain(said))
        target.close()


class Watch:
    """The time since this object was made."""

    def __init__(self) -> None:
        self._begun = time.perf_counter(), _processor_seconds()

    @property
    def seconds(self) -> float:
        return min(time.perf_counter() - self._begun[0], _processor_seconds() - self._begun[1])


def _processor_seconds() -> float:
    """Return the processor time of this process and of its children, also of those that ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used) + sum(map(_seconds_of, _child_ids()))


def _child_ids() -> list[int]:
    return [
        int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()
    ]


def _seconds_of(pid: int) -> float:
    """Return the processor time of another process and of its ended children; 0 if it has ended."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, after_name[11:15])) / os.sysconf("SC_CLK_TCK")


def _outcome(target: Target, data: bytes) -> dict[str, Any]:
    before, watch, wrong, accepted = _reset_peak(), Watch(), "", False
    try:
        accepted = is_accepted(target.run, data)
    except BaseException as error:  # noqa: BLE001 - anything but a line of error is the finding
        wrong = f"{type(error).__name__}: {str(error)[:300]}"
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
    return {
        "seconds": watch.seconds,
        "mb": _status_mb("VmHWM") - before,
        "over": _status_mb("VmHWM") - before - 2 * len(data) / 1e6,
        "children": children,
        "accepted": accepted,
        "wrong": wrong,
    }


def _drain(file: Any) -> str:
    """Return what was written to the file, and empty the file."""
    sys.stdout.flush()
    sys.stderr.flush()
    file.seek(0)
    text = file.read().decode(errors="replace")
    file.seek(0)
    file.truncate()
    return text


def _reset_peak() -> float:
    """Let the peak of this process's memory begin here, and return it in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_mb("VmHWM")


def _status_mb(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1e3
    raise RuntimeError(f"/proc/self/status has no {name}")


# -- the campaign ------------------------------------------------------------------------------------


@dataclass
class Row:
    """The results of one kind. seconds: beyond the slowest good input. over: MB beyond twice the input."""

    kind: str
    inputs: int = 0
    accepted: int = 0
    good: float = 0.0
    seconds: float = 0.0
    over: float = 0.0
    children: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def add(self, facts: dict[str, Any]) -> None:
        self.inputs, self.accepted = self.inputs + 1, self.accepted + facts["accepted"]
        slower = facts["seconds"] - self.good
        self.seconds, self.over = max(self.seconds, slower), max(self.over, facts["over"])
        self.children = max(self.children, facts["children"])
        name = f"{self.kind} {facts['number']}"
        if facts["wrong"]:
            self.wrong.append(f"{name}: {facts['wrong']}")
        if facts["said"]:
            self.wrong.append(f"{name}: a stray line: {facts['said'][:200]!r}")
        if slower > SLOWER:
            self.wrong.append(f"{name}: {facts['seconds']:.1f} s, a good input {self.good:.1f} s")
        if facts["over"] > MORE:
            self.wrong.append(f"{name}: {facts['mb']:.0f} MB, {facts['over']:.0f} beyond twice the input")

    def line(self) -> str:
        refused = self.inputs - self.accepted
        times = f"{self.good * 1e3:.0f} ms | {max(0.0, self.seconds):.2f} s"
        memory = f"{self.over:.0f} MB | {self.children:.0f} MB"
        return f"| {self.kind} | {self.inputs:,} | {refused:,} | {times} | {memory} | {len(self.wrong)} |"


def campaign(kind: str, numbers: range) -> Row:
    """Give the inputs of these numbers to workers. A worker that dies is replaced."""
    row, at = Row(kind), numbers.start
    while at < numbers.stop:
        part, died = range(at, min(at + AT_ONCE, numbers.stop)), ""
        for facts in _lines(kind, part):
            if "good" in facts:
                row.good = max(row.good, facts["good"])
            elif "begins" in facts:
                at, died = facts["begins"] + 1, f"{kind} {facts['begins']}: the process ended or hung"
            elif "ended" in facts:
                row.wrong += [f"{died} ({facts['ended']})"] if facts["ended"] else []
                if facts["ended"] and not died:
                    raise SystemExit(f"{kind}: the worker ended before its first input: {facts['ended']}")
            else:
                died = ""
                row.add(facts)
    return row


def _lines(kind: str, numbers: range) -> Iterator[dict[str, Any]]:
    """Yield what a worker tells, at last how it ended."""
    out, into = os.pipe()
    given = ["--worker", str(into), "--first", str(numbers.start), "--count", str(len(numbers)), kind]
    process = subprocess.Popen([*WORKER, *given], pass_fds=[into])
    os.close(into)
    waiting, hangs, limit = b"", False, 10 * HANGS  # the start has more time than an input
    while not hangs:
        hangs = not select.select([out], [], [], limit)[0]
        data = b"" if hangs else os.read(out, 1 << 16)
        if not data:
            break
        *lines, waiting = (waiting + data).split(b"\n")
        for facts in map(json.loads, lines):
            limit = HANGS if "begins" in facts else limit
            yield facts
    os.close(out)
    if hangs:
        process.kill()
    code = process.wait()
    yield {"ended": f"it hung for {HANGS:.0f} s" if hangs else f"exit {code}" if code else ""}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("kinds", nargs="+", choices=[*TARGETS, "all"])
    parser.add_argument("--count", type=int, default=200, help="the number of inputs of each kind")
    parser.add_argument("--first", type=int, default=0, help="the number of the first input")
    parser.add_argument("--only", type=int, help="the number of one input, which this process takes")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    numbers = range(given.first, given.first + given.count)
    if given.worker is not None:
        work(given.kinds[0], numbers, given.worker)
        return
    if given.only is not None:
        with tempfile.TemporaryDirectory() as folder:
            target = TARGETS[given.kinds[0]](Path(folder))
            data = damaged_input(target, given.kinds[0], given.only)
            print(data[:2000], is_accepted(target.run, data))
            target.close()
        return
    print("| kind | inputs | refused | good input | slower at most | over at most | child | wrong |")
    print("|---|---|---|---|---|---|---|---|")
    wrong = []
    for kind in NAMES if "all" in given.kinds else given.kinds:
        row = campaign(kind, numbers)
        wrong += row.wrong
        print(row.line(), flush=True)
    print(*wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
