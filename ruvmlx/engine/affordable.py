"""How many replies best of n writes when it is set to "auto": the most, up to 4, whose decode step takes at
most 1.5 times as long as that of one reply.

A step for n replies is timed beside a step for one, on the model that is open, and the times are kept in
DATA/batch_costs.json:

    {"format": 1, "seconds": {"<backend> <fingerprint>": [<step of 1 reply>, <of 2>, <of 3>, <of 4>]}}
"""

import json
import os
import statistics
import time
from contextlib import suppress
from pathlib import Path

from .. import settings
from ..backends.base import Backend
from .engine import LLMInferenceEngine

AUTO = "auto"  # a value of `best_of`
MAX_REPLIES, MAX_STEP_RATIO = 4, 1.5  # replies; time of a step, in those of a step for one reply
PROMPT = 32  # tokens
ROUNDS, LEAST_ROUNDS, SECONDS = (
    15,
    3,
    1.0,
)  # ROUNDS steps of each size; after SECONDS, LEAST_ROUNDS are enough
FORMAT, MAX_MODELS = 1, 32  # version of the file; models kept in it


def path() -> Path:
    return settings.home() / "batch_costs.json"


def affordable(engine: LLMInferenceEngine) -> int:
    """The most replies, up to MAX_REPLIES, whose step takes at most MAX_STEP_RATIO times as long as one's.

    The first call for a model on a machine measures for about a second, longer where a step takes more than
    50 ms; later ones read the file.
    """
    key = f"{engine.backend.kernels} {engine.model.fingerprint}"
    held = _read()
    if key not in held:
        held[key] = step_seconds(engine.backend)
        with suppress(OSError):  # if it cannot be written, the next question measures again
            _write(dict(list(held.items())[-MAX_MODELS:]))
    return most_within(held[key])


def most_within(seconds: list[float]) -> int:
    """seconds: of a step for 1, 2 ... replies."""
    return max(n for n, taken in enumerate(seconds, 1) if taken <= MAX_STEP_RATIO * seconds[0] or n == 1)


def step_seconds(backend: Backend) -> list[float]:
    """Median seconds of a decode step for 1, 2 .. MAX_REPLIES replies, in turns: a slow moment hits all."""
    cache = backend.new_cache()
    backend.prefill([1] * PROMPT, cache)
    caches = [[cache.fork() for _ in range(n)] for n in range(1, MAX_REPLIES + 1)]
    times: list[list[float]] = [[] for _ in caches]
    started = time.perf_counter()
    while len(times[0]) < ROUNDS:
        for some, taken in zip(caches, times, strict=True):
            begun = time.perf_counter()
            backend.decode_batch([1] * len(some), some)
            taken.append(time.perf_counter() - begun)
        if len(times[0]) >= LEAST_ROUNDS and time.perf_counter() - started > SECONDS:
            break
    return [statistics.median(taken) for taken in times]


def _read() -> dict[str, list[float]]:
    """Empty if there is no file, or if it is damaged."""
    try:
        whole = json.loads(path().read_text(encoding="utf-8"))
        right = whole["format"] == FORMAT
        held = {str(key): [float(s) for s in taken] for key, taken in whole["seconds"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {
        key: taken for key, taken in held.items() if right and len(taken) == MAX_REPLIES and min(taken) > 0
    }


def _write(held: dict[str, list[float]]) -> None:
    """Write beside the target, then rename: a reader sees the old file or the new one."""
    path().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path().with_suffix(f".{os.getpid()}.new")
    fresh.write_text(json.dumps({"format": FORMAT, "seconds": held}, indent=1), encoding="utf-8")
    os.replace(fresh, path())
