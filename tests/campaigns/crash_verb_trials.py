"""All trials of one verb: kills, faults, images, clocks, places, and what is found.

What it does not know: the verbs (crash_verbs.py), and how a trial runs (crash_trial.py).
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .crash_images import Disk, Op, Replay, read_log
from .crash_places import PLACES, Place
from .crash_promises import CLIENT_FAILED, broken_promises
from .crash_row import Row
from .crash_sample import sample_calls
from .crash_trial import Bench, Mode, StartReport, TrialResult, is_half_fetched, left_over
from .crash_verbs import Verb

YEAR = 365 * 86400  # seconds
FAULTS = (Mode.IO_ERROR, Mode.NO_SPACE, Mode.SHORT_WRITE, Mode.DISK_FULL)
WORDS = {
    Mode.KILL_BEFORE: "killed before",
    Mode.IO_ERROR: "EIO at",
    Mode.NO_SPACE: "ENOSPC at",
    Mode.SHORT_WRITE: "half written at",
    Mode.DISK_FULL: "disk full from",
}
KINDS = {
    "C": "open", "T": "open", "W": "write", "Z": "ftruncate", "S": "fsync", "R": "rename", "X": "exchange",
    "L": "link", "K": "symlink", "U": "unlink", "M": "mkdir", "D": "rmdir", "O": "open", "Y": "msync",
}  # fmt: skip


@dataclass(frozen=True)
class Extent:
    """How much of a verb is tried. None: all calls; images: so many are made; compares: True if each kill is
    compared with a stop at the same call."""

    kills: int | None = None
    faults: int | None = None
    images: int = 1000
    seed: int = 0
    compares: bool = False


class Trials:
    """All trials of one verb."""

    def __init__(self, bench: Bench, verb: Verb):
        self._bench, self._verb, self._row = bench, verb, Row(verb.name)
        bench.reset(verb.base)
        self._old = bench.check()
        bench.reset(verb.base)
        self._run()
        bench.import_again()  # now: where the numbers lie in memory can decide the last bit of a sum
        bench.reset(verb.base)
        self._disk, inodes = Disk.of(bench.work)
        log = bench.folder / "log"
        log.unlink(missing_ok=True)
        self._clean = self._run(log=log)
        self._new = bench.check(then=verb.then)
        self._ops = read_log(log, bench.work)
        self._replay = Replay(self._disk, inodes, self._ops)
        self._between: list[StartReport] = []  # states between the first and the last, as they were found
        self._seen: dict[str, StartReport] = {}  # by the mark of the files
        self._row.calls = self._clean.calls
        if self._clean.code:
            self._finding("without any fault", f"exit {self._clean.code}: {self._clean.err.strip()[-300:]}")
        if CLIENT_FAILED in self._clean.err:
            self._finding("without any fault", self._clean.err.strip()[-300:])
        for found in (self._old, self._new):
            for fault in found.faults:
                self._finding("without any fault", fault)

    def _run(
        self, mode: Mode = Mode.COUNT, at: int = 0, log: Path | None = None, after: int = 50, below: str = ""
    ) -> TrialResult:
        return self._bench.run(lambda: self._verb.run(self._bench.work), mode, at, log, after, below)

    def all(self, extent: Extent) -> Row:
        begun = time.monotonic()
        rng = random.Random(extent.seed)
        if extent.compares:
            self.compare_stops()
        self.kill(self._sample(rng, extent.kills))
        self.fail(self._faults(rng, extent.faults))
        self.crash(extent.images, extent.seed)
        self.jump_clock()
        self.visit(PLACES)
        if (
            extent.kills is None
            and len(self._between) + 2 < len(self._verb.states)
            and self._old != self._new
        ):
            self._finding(
                "kills", f"found {len(self._between) + 2} states, the row names {self._verb.states}"
            )
        self._row.seconds = time.monotonic() - begun
        return self._row

    # -- kills and faults ----------------------------------------------------------------------------

    def _sample(self, rng: random.Random, count: int | None) -> list[int]:
        return sample_calls(rng, self._ops, self._clean.calls, count)

    def kill(self, calls: Sequence[int]) -> None:
        """Kill the process before each of these calls. Later kills find no earlier state."""
        last, has_stops = 0, self._verb.is_slow and not self._verb.has_promises
        if has_stops:
            self.stop(calls)
        for at in calls:
            where, ended = self._where(Mode.KILL_BEFORE, at), None
            if has_stops:
                self._bench.reset(_stop_name(at))
                self._bench.drop(_stop_name(at))
            else:
                ended = self._kill_at(at)
            place = self._judge(where, self._look())
            if ended is not None:
                self._check_killed(where, ended)
            if 0 <= place < last and not self._verb.has_threads:
                self._finding(where, f"an earlier state ({self._name(place)}) than after an earlier kill")
            last = max(last, place)
            self._row.kills += 1

    def _kill_at(self, at: int) -> TrialResult:
        self._bench.reset(self._verb.base)
        return self._run(Mode.KILL_BEFORE, at)

    def _check_killed(self, where: str, ended: TrialResult) -> None:
        if ended.code not in (-9, self._clean.code):
            self._finding(where, f"ended with {ended.code}: {ended.err.strip()[-200:]}")
        self._check_promises(where, ended)

    def stop(self, calls: Sequence[int]) -> None:
        """Run a slow verb once, and keep the folder as it is before each of these calls. A kill there leaves
        the same folder; `compare_stops` compares the two."""
        wanted = set(calls)

        def at_stop(at: int) -> None:
            if at in wanted:
                self._bench.keep(_stop_name(at))

        self._bench.reset(self._verb.base)
        ended = self._bench.run(lambda: self._verb.run(self._bench.work), Mode.STOP_BEFORE, at_stop=at_stop)
        if ended.code != self._clean.code:
            self._finding("a run with stops", f"ended with {ended.code}: {ended.err.strip()[-200:]}")
        for at in wanted:  # a run with fewer calls, which threads decide, ends as one without a fault
            if not self._bench.base(_stop_name(at)).exists():
                self._bench.keep(_stop_name(at))

    def compare_stops(self) -> None:
        """Note each call where the next start finds something else after a kill than after a stop. SQLite's
        logs have random numbers, so that no two of them are the same."""
        self.stop(range(self._clean.calls))
        for at in range(self._clean.calls):
            self._kill_at(at)
            killed = self._look()
            self._bench.reset(_stop_name(at))
            self._bench.drop(_stop_name(at))
            if (found := self._look()) != killed:
                differ = sorted(k for k, part in found.parts.items() if part != killed.parts.get(k))
                what = f"a stop has another state: {', '.join(differ)}; {killed.faults}, {found.faults}"
                self._finding(self._where(Mode.KILL_BEFORE, at), what)

    def _faults(self, rng: random.Random, count: int | None) -> list[tuple[Mode, int]]:
        """Return all faults of all calls, or one fault of each of `count` calls. Only a write has a half."""
        trials = list[tuple[Mode, int]]()
        for at in self._sample(rng, count):
            op = self._op(at)
            modes = [mode for mode in FAULTS if mode is not Mode.SHORT_WRITE or op is None or op.kind == b"W"]
            trials += [(mode, at) for mode in (modes if count is None else [rng.choice(modes)])]
        return trials

    def fail(self, trials: Sequence[tuple[Mode, int]]) -> None:
        """Let calls fail in these ways."""
        for mode, at in trials:
            self._bench.reset(self._verb.base)
            ended = self._run(mode, at)
            where = self._where(mode, at)
            for wrong in self._complaints(ended):
                self._finding(where, wrong)
            place = self._judge(where, self._look(), is_failed=True)
            self._check_promises(where, ended)
            if ended.code == self._clean.code == 0 and CLIENT_FAILED not in ended.err:
                self._check_done(where, place)
            self._row.faults += 1

    def _complaints(self, ended: TrialResult) -> list[str]:
        """What is wrong with how a verb ended after a fault."""
        if ended.code < 0:
            return [f"ended by signal {-ended.code}"]
        lines = [line for line in ended.err.splitlines() if line not in self._clean.err.splitlines()]
        wrong = [
            line for line in lines if "Traceback" in line or "internal error" in line or "Exception" in line
        ]
        if wrong or ended.code == 70:
            return [f"no readable error: {' | '.join(lines)[-400:]}"]
        count = sum(line.startswith("ruvmlx: ") for line in lines)
        few, many = self._verb.errors
        if ended.code not in (0, self._clean.code) and not few <= count <= many:
            return [f"exit {ended.code} with {count} lines of error: {' | '.join(lines)[-300:]}"]
        return []

    # -- images --------------------------------------------------------------------------------------

    def crash(self, count: int, seed: int) -> None:
        """Look at so many images; an image that was seen is not looked at again."""
        seen: set[tuple[bool, int]] = set()
        for is_done, disk in self._replay.images(count, seed) if len(self._replay) else ():
            mark = is_done, _content_hash(disk)
            if mark in seen:
                continue
            seen.add(mark)
            disk.write(self._bench.work)
            place = self._judge("image", self._look())
            if is_done:
                self._check_promises("image after the end", self._clean)
            if is_done and self._clean.code == 0:
                self._check_done("image after the end", place)
        self._row.images = len(seen)

    # -- the clock -----------------------------------------------------------------------------------

    def jump_clock(self) -> None:
        """Run the verb with a clock that is a year late, and then with a clock that is a year early. The next
        start has the right clock."""
        for jump in (-YEAR, YEAR):
            self._bench.reset(self._verb.base)
            ended = self._run(after=jump)
            where = f"a clock that jumped by {jump // 86400} days"
            if ended.code not in (self._clean.code, *self._verb.late):
                self._finding(where, f"exit {ended.code}: {ended.err.strip()[-300:]}")
            for fault in self._look().faults:
                self._finding(where, fault)
            self._row.clocks += 1

    # -- places --------------------------------------------------------------------------------------

    def visit(self, places: Sequence[Place]) -> None:
        """Run the verb in each of these places. The next start is on a usual disk."""
        for place in places:
            self._bench.reset(self._verb.base)
            ended = self._run(place.mode, below=place.below)
            complaints = self._complaints(ended)
            said = error_text(self._verb, ended)
            if ended.code not in (0, self._clean.code) and place.word not in said.casefold():
                complaints.append(f"the error says nothing of {place.word!r}: {said.strip()[-300:]}")
            for wrong in complaints:
                self._finding(place.name, wrong)
            state = self._judge(place.name, self._look(), is_failed=True)
            if ended.code == self._clean.code == 0 and CLIENT_FAILED not in ended.err:
                self._check_done(place.name, state)
            self._row.places += 1

    # -- what is found -------------------------------------------------------------------------------

    def _look(self) -> StartReport:
        """Start the program on the files after the crash, and return a report on this start. If the bench has
        examined the same files before, return the earlier report."""
        mark = self._bench.mark()
        if mark not in self._seen:
            out = self._bench.work / "out"
            goes_on = out.is_dir() and (left_over(out) or is_half_fetched(out))
            again = (lambda: self._verb.run(self._bench.work)) if goes_on else None
            self._seen[mark] = self._bench.check(again, self._verb.then)
        return self._seen[mark]

    def _judge(self, where: str, found: StartReport, is_failed: bool = False) -> int:
        """Add a finding for each fault. Return the index of the state in the list of the verb's states, or -1
        if the list does not have the state.

        is_failed: True if the log may have a row for what failed
        """
        for fault in found.faults:
            self._finding(where, fault)
        if not found.state or self._verb.has_promises:
            return -1
        last = len(self._verb.states) - 1
        known = [(last, self._new), (0, self._old), *enumerate(self._between, 1)]
        for place, state in known:
            if state.state == found.state or (is_failed and _without_log(state) == _without_log(found)):
                return place
        if len(self._between) + 2 > last:
            self._finding(where, f"neither the old nor the new state: {self._differences(found)}")
            return -1
        self._between.append(found)
        return len(self._between)

    def _check_done(self, where: str, place: int) -> None:
        """Note it if the state of this place is not the last one, although the verb was done."""
        if 0 <= place < len(self._verb.states) - 1:
            state = [self._old, *self._between][place]
            if self._without_caches(state) == self._without_caches(self._new):
                return
            differ = self._differences(state).rpartition("; ")[2]
            self._finding(where, f"the verb was done, but the state is {self._name(place)}: {differ}")

    def _without_caches(self, found: StartReport) -> dict[str, str]:
        return {name: part for name, part in found.parts.items() if not name.startswith(self._verb.caches)}

    def _check_promises(self, where: str, ended: TrialResult) -> None:
        for wrong in broken_promises(ended.out, self._bench.work / "home" / "ruvmlx.db"):
            self._finding(where, wrong)

    def _differences(self, found: StartReport) -> str:
        """What differs from the old and from the new state."""
        said = []
        for name, other in (("old", self._old), ("new", self._new)):
            parts = {*found.parts, *other.parts}
            differ = sorted(part for part in parts if found.parts.get(part) != other.parts.get(part))
            said.append(f"from the {name} one differ {', '.join(differ)}")
        return "; ".join(said)

    def _name(self, place: int) -> str:
        return repr(self._verb.states[place])

    def _op(self, at: int) -> Op | None:
        """The call of this number, where threads do not change the order."""
        return self._ops[at] if at < len(self._ops) == self._clean.calls else None

    def _where(self, mode: Mode, at: int) -> str:
        op = self._op(at)
        call = f" ({KINDS[op.kind.decode().upper()]} {op.path})" if op else ""
        return f"{WORDS[mode]} call {at}{call}"

    def _finding(self, where: str, what: str) -> None:
        self._row.findings.append(f"{self._verb.name}: {where}: {what}")


def error_text(verb: Verb, ended: TrialResult) -> str:
    """Return what the verb wrote where the user looks for what is wrong."""
    return ended.out + ended.err if verb.has_report else ended.err


def _stop_name(at: int) -> str:
    return f"stop-{at}"


def _without_log(found: StartReport) -> dict[str, str]:
    return {name: part for name, part in found.parts.items() if name != "table witness"}


def _content_hash(disk: Disk) -> int:
    contents = [
        (name, None if n is None else bytes(disk.contents.get(n, b""))) for name, n in disk.names.items()
    ]
    return hash(tuple(sorted(contents, key=lambda pair: pair[0])))
