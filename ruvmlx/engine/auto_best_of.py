"""This module chooses the number of replies for best of n if the setting `best_of` is "auto". The module
chooses the largest number of replies, up to 4, for which a decode step takes at most 1.5 times as long as a
decode step for one reply.

The module measures the decode steps of the loaded model, and tries to keep the times in the file
batch_costs.json of the data folder:

    {"format": 1, "seconds": {"<backend> <fingerprint>": [<step of 1 reply>, <of 2>, <of 3>, <of 4>]}}
"""

import json
import statistics
import time
from contextlib import suppress
from pathlib import Path

from .. import settings
from ..backends.base import Backend
from ..platform import files
from .engine import LLMInferenceEngine

AUTO = "auto"  # with this value of the setting `best_of`, the module chooses the number of replies
# the maximum number of replies; the maximum time of a step divided by the time of a step for one reply
MAX_REPLIES, MAX_STEP_RATIO = 4, 1.5
PROMPT = 32  # the number of prompt tokens in the caches with which the steps are measured
# The decode step for each number of replies is measured ROUNDS times. After SECONDS (of all measurements
# together), the loop stops as soon as each step was measured LEAST_ROUNDS times.
ROUNDS, LEAST_ROUNDS, SECONDS = 15, 3, 1.0
FORMAT, MAX_MODELS = 1, 32  # version of the file batch_costs.json; maximum number of models in the file


def path() -> Path:
    return settings.home() / "batch_costs.json"


def affordable(engine: LLMInferenceEngine) -> int:
    """Return the largest number of replies, up to MAX_REPLIES, whose step takes at most MAX_STEP_RATIO times
    as long as a step for one reply.

    The first call for a model on a machine measures decode steps: for about a second at most, or longer if
    LEAST_ROUNDS rounds of steps take longer. Later calls read the times from batch_costs.json.
    """
    key = f"{engine.backend.kernels} {engine.model.fingerprint}"
    held = _read()
    if key not in held:
        held[key] = step_seconds(engine.backend)
        with suppress(OSError):  # if the file cannot be written, the next call measures again
            _write(dict(list(held.items())[-MAX_MODELS:]))
    return most_within(held[key])


def most_within(seconds: list[float]) -> int:
    """Return the largest number of replies whose step takes at most MAX_STEP_RATIO times as long as a step
    for one reply. seconds: the times of a step for 1, 2 .. replies."""
    return max(n for n, taken in enumerate(seconds, 1) if taken <= MAX_STEP_RATIO * seconds[0] or n == 1)


def step_seconds(backend: Backend) -> list[float]:
    """Return the median times (seconds) of a decode step for 1, 2 .. MAX_REPLIES replies. The loop measures
    all numbers of replies in turn, so that a slow moment of the machine does not affect only one number of
    replies."""
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
    """Return the stored times of all models, without entries that are not MAX_REPLIES positive times. Return
    {} if there is no file, or if the file is damaged or has another format."""
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
    """Replace batch_costs.json by a file with these times. A program that reads the file meanwhile gets the
    old times or the new times."""
    files.make_folder(path().parent)
    with files.replacing(path()) as file:
        file.write(json.dumps({"format": FORMAT, "seconds": held}, indent=1).encode())
