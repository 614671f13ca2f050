"""This module measures the speed of ruvmlx and of mlx-lm's own loop on the same weights, within a time limit.
The runtimes (ruvmlx with a backend and a kind of KV cache, and mlx-lm) take turns.

In a turn, one runtime writes one greedy reply, starting with an empty KV cache. The seconds until the first
token are the prefill time, and the seconds for the tokens after the first token are the decode time. Each
runtime runs in a separate process, so a kernel that crashes ends only the measurement of this runtime, and
not the report.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any

from ruvmlx.errors import RuvmlxError
from ruvmlx.lora.base_lora import BaseLoRA
from ruvmlx.lora.fuse import fuse
from ruvmlx.models.config.model import Model
from ruvmlx.platform.cpu import total_memory
from ruvmlx.text import size

from ..bench.model import prompt
from ..bench.stage import OnStage, PlayerError

Log = Callable[[str], None]
PROMPTS, DECODED = (512, 2048), 96  # the numbers of tokens of the prompts, and of each reply
MIN_TOKENS = 128, 16  # `_fitting` halves the numbers of prompt and reply tokens down to about these numbers
SHORT = 32, 8  # the numbers of tokens of the prompt and of the reply that give an estimate of the speed
# The maximum number of rounds. Kernels compile in the first round, so the times of this round are used only
# if it is the only round.
ROUNDS = 7
PEER = "mlx-lm"


class Deadline:
    """A time limit. `seconds_left()` returns the number of seconds that are left. `share(f)` returns a new
    Deadline, which ends after the fraction `f` of the time that is left."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._until = time.monotonic() + seconds

    def seconds_left(self) -> float:
        return self._until - time.monotonic()

    def share(self, part: float) -> "Deadline":
        return Deadline(max(0.0, self.seconds_left() * part))


class _Timed(OnStage):
    """A player (a runtime in a separate process). If the player still works at the deadline, its process is
    killed."""

    def __init__(self, deadline: Deadline, kind: str, **settings: Any):
        self.deadline = deadline
        super().__init__(kind, **settings)

    def _ask(self, question: Any) -> Any:
        timer = Timer(max(0.1, self.deadline.seconds_left()), self._process.kill)
        timer.start()
        try:
            return super()._ask(question)
        except RuvmlxError:
            late = self.deadline.seconds_left() <= 0
            raise PlayerError("", "took too long" if late else "its process ended") from None
        finally:
            timer.cancel()


class PlayerProcess:
    """A runtime in a separate process. The first call starts the process. After an error, the next call
    starts a new process."""

    def __init__(self, kind: str, **settings: Any):
        self._kind, self._settings = kind, settings
        self._stage: _Timed | None = None

    def call(self, deadline: Deadline, method: str, *arguments: Any) -> Any:
        try:
            if self._stage is None:
                self._stage = _Timed(deadline, self._kind, **self._settings)
            self._stage.deadline = deadline
            return self._stage.call(method, *arguments)
        except PlayerError:
            self.leave()
            raise

    def facts(self, deadline: Deadline) -> dict[str, Any]:
        self.call(deadline, "resident")
        assert self._stage
        return self._stage.facts

    def leave(self) -> None:
        if self._stage:
            self._stage.leave()
        self._stage = None


@dataclass
class TimedRuntime:
    """One runtime with one kind of KV cache.

    rounds: (prefill seconds, median seconds per decoded token) of each round
    held: the memory that the runtime used in the last round
    reading, decoding: the estimated seconds per prompt token and per decoded token
    """

    name: str
    player: PlayerProcess
    kv: str
    rounds: list[tuple[float, float]] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)
    reading: float = 0.0  # a rough estimate, in seconds for each prompt token; 0: not estimated yet
    decoding: float = 0.0

    def play(self, deadline: Deadline, tokens: int, decoded: int) -> None:
        self.player.call(deadline, "forget_peak")
        first, others = self.player.call(deadline, "generate", prompt(tokens), decoded, self.kv)
        self.held = self.player.call(deadline, "held")
        self.rounds.append((first, statistics.median(others)))

    def estimate(self, deadline: Deadline) -> None:
        """Estimate the runtime's speed: let the runtime write two short replies, and use the times of the
        second reply, because kernels compile during the first reply."""
        for _ in range(2):
            self.play(deadline, *SHORT)
        self.reading, self.decoding = self.rounds[-1][0] / SHORT[0], self.rounds[-1][1]
        self.rounds = []

    def seconds(self, tokens: int, decoded: int) -> float:
        return self.reading * tokens + self.decoding * decoded

    def counted_rounds(self) -> list[tuple[float, float]]:
        return self.rounds[1:] or self.rounds


@dataclass
class Beside:
    """The runtimes that take turns. left_out: {name of a runtime that is no longer measured: the reason}."""

    turns: list[TimedRuntime]
    left_out: dict[str, str]

    def each(self, act: Callable[[TimedRuntime], None], log: Log) -> None:
        """Run one round: call `act` for each runtime. If a runtime fails, leave this runtime out of all later
        rounds."""
        for turn in list(self.turns):
            try:
                act(turn)
            except PlayerError as e:
                self.leave_out(turn, e.public, log)

    def leave_out(self, turn: TimedRuntime, why: str, log: Log) -> None:
        log(f"{turn.name}: {why}")
        self.left_out[turn.name] = why
        self.turns.remove(turn)


def measure(
    model: Model, backends: Sequence[str], peer: bool, threads: int, deadline: Deadline, log: Log
) -> dict[str, Any]:
    """Return the tokens per second of each runtime for each prompt length, and the ratios to mlx-lm's speed.

    backends: the backends of ruvmlx to measure
    peer: True to measure mlx-lm, too
    threads: the number of threads of ruvmlx on a CPU
    """
    with _players(model, backends, peer, threads, deadline, log) as beside:
        beside.each(lambda turn: turn.estimate(deadline.share(0.4)), log)
        found: list[dict[str, Any]] = []
        for tokens, part in zip(_prompts(model), (0.3, 0.95), strict=False):
            share = deadline.share(part)
            size = _fitting(beside, (tokens, DECODED), share, log)
            if beside.turns and size not in [(f["prompt"], f["decoded"]) for f in found]:
                found.append(_length(beside, *size, share, deadline, log))
        return {"lengths": [f for f in found if f["rates"]], "left_out": beside.left_out}


def _prompts(model: Model) -> list[int]:
    """Return the lengths of prompts that fit the model's context with their reply; one short length if none
    fits."""
    room = model.shape.max_context - DECODED
    return [n for n in PROMPTS if n <= room] or [max(1, min(room, SHORT[0]))]


def _fitting(beside: Beside, size: tuple[int, int], deadline: Deadline, log: Log) -> tuple[int, int]:
    """Return `size` (prompt tokens, reply tokens), halved as often as necessary, so that three rounds fit
    into the time by the estimates. If even MIN_TOKENS do not fit, leave out the slowest runtime and try
    again. If only one runtime is left, return SHORT."""
    now = size
    while 3 * sum(turn.seconds(*now) for turn in beside.turns) > deadline.seconds_left():
        if now[0] > MIN_TOKENS[0]:
            now = now[0] // 2, max(MIN_TOKENS[1], now[1] // 2)
        elif len(beside.turns) > 1:
            slowest = max(beside.turns, key=lambda turn: turn.seconds(*MIN_TOKENS))
            reading, decoding = 1 / slowest.reading, 1 / slowest.decoding
            beside.leave_out(
                slowest, f"too slow: {reading:.1f} tokens a second read, {decoding:.1f} written", log
            )
            now = size
        else:
            return SHORT
    return now


def _length(
    beside: Beside, tokens: int, decoded: int, share: Deadline, deadline: Deadline, log: Log
) -> dict[str, Any]:
    """Run rounds with one length of the prompt, and return the results. Stop after ROUNDS rounds, or if a
    further round probably does not fit into `share`, which is this length's share of the time."""
    turns, longest = list(beside.turns), 0.0
    for turn in turns:
        turn.rounds = []
    for i in range(ROUNDS):
        if i and 1.2 * longest > share.seconds_left():
            break
        log(f"prompt of {tokens} tokens, reply of {decoded}: round {i + 1}")
        started = time.monotonic()
        beside.each(lambda turn: turn.play(deadline.share(0.6), tokens, decoded), log)
        longest = max(longest, time.monotonic() - started) if i > 1 else time.monotonic() - started
    return {"prompt": tokens, "decoded": decoded, **_summary([t for t in turns if t.rounds], tokens)}


def _summary(turns: Sequence[TimedRuntime], tokens: int) -> dict[str, Any]:
    peer = next((turn for turn in turns if turn.name == PEER), None)
    return {
        "rates": {turn.name: _rates(turn, tokens) for turn in turns},
        "ratios": {turn.name: _ratios(turn, peer) for turn in turns if peer and turn is not peer},
        "memory": {turn.name: turn.held for turn in turns},
    }


def _rates(turn: TimedRuntime, tokens: int) -> dict[str, Any]:
    """Return a runtime's tokens per second of prefill and of decode: the median, the minimum and the maximum
    over the rounds, without the first round if there are more."""
    prefill = [tokens / first for first, _ in turn.counted_rounds()]
    decode = [1 / each for _, each in turn.counted_rounds()]
    return {"rounds": len(prefill), "prefill": _spread_facts(prefill), "decode": _spread_facts(decode)}


def _spread_facts(values: Sequence[float]) -> dict[str, float]:
    parts = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {name: float(f"{value:.4g}") for name, value in parts.items()}


def _ratios(turn: TimedRuntime, peer: TimedRuntime) -> dict[str, float]:
    """Return a runtime's speed divided by the speed of mlx-lm (the peer). The result is the median over the
    rounds that both runtimes ran, without the first round if there are more."""
    pairs = list(zip(turn.rounds, peer.rounds, strict=False))
    pairs = pairs[1:] or pairs
    prefill = statistics.median(theirs[0] / ours[0] for ours, theirs in pairs)
    decode = statistics.median(theirs[1] / ours[1] for ours, theirs in pairs)
    return {"prefill": round(prefill, 3), "decode": round(decode, 3)}


@contextmanager
def _players(
    model: Model, backends: Sequence[str], peer: bool, threads: int, deadline: Deadline, log: Log
) -> Iterator[Beside]:
    beside, players = Beside([], {}), []
    with TemporaryDirectory(prefix="ruvmlx-report-") as folder:
        try:
            for backend in backends:
                ours = PlayerProcess("ruvmlx", model=str(model.path), backend=backend, threads=threads)
                players.append(ours)
                beside.turns += [TimedRuntime(f"ruvmlx {backend} {kv}", ours, kv) for kv in ("tiered", "f16")]
            spread = "native" in backends and 4 * model.parameters < total_memory() / 8
            if peer and (why := _no_peer(model, len(backends), deadline)):
                beside.left_out[PEER] = why
            elif peer:
                log("mlx-lm: writing the weights to a folder for it")
                mlx_lm = PlayerProcess(PEER, model=_for_mlx_lm(model, spread, Path(folder)), patience=None)
                players.append(mlx_lm)
                beside.turns.append(TimedRuntime(PEER, mlx_lm, ""))
            yield beside
        finally:
            for player in players:
                player.leave()


def _no_peer(model: Model, ours: int, deadline: Deadline) -> str:
    """Return the reason why mlx-lm cannot be measured, or "" if it can be measured."""
    if (needed := round(model.bytes * (1.2 + ours))) > 0.8 * total_memory():
        return f"all at once would need {size(needed)} of {size(total_memory())}"
    if not model.path.is_dir() and model.bytes / _WRITING > 0.3 * deadline.seconds_left():
        return "it reads only folders, and writing one would take most of the time"
    return ""


_WRITING = 200e6  # a low estimate of the speed of writing to the disk, bytes per second


def _for_mlx_lm(model: Model, spread: bool, folder: Path) -> str:
    """Return the path of a model folder for mlx-lm, which reads only folders. If the model is a GGUF file, or
    with `spread`, write the weights to a new folder.

    spread: True to unpack the weights to float32, for a CPU. On a CPU, MLX's product with packed weights and
        16-bit scales would be 40 times slower, and ruvmlx's own MLX backend unpacks the weights, too.
    """
    if model.path.is_dir() and not spread:
        return str(model.path)
    fuse(model, BaseLoRA({}, 1.0), folder / PEER, "float32" if spread else None, spread)
    return str(folder / PEER)
