"""This module is the load suite of `ruvmlx bench`. The suite measures the time to load a model, and the
memory of the loaded model. For a large random model, the suite also measures the decode speed."""

import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ruvmlx.platform.cpu import total_memory

from . import random_model
from .model import decode_turn, prompt, ratios
from .peers import peers
from .rows import Row, at_most, left_out, median_row
from .stage import OnStage, take_turns

LOADS = 3  # the number of times that the user's model is loaded
CONTEXT = 256  # the number of tokens of llama.cpp's context
TARGET_SPEED_RATIO = 1.2  # the target for ruvmlx's speed / llama.cpp's speed, for the large model
LARGE = "7B-shaped random model, 4 bits"
# needed memory / model size, with the file in the page cache; llama.cpp needs the model size once more
ROOM = 2.5


def run(
    model: str, backend: str, threads: int, large: bool, wanted: Sequence[str], log: Callable[[str], None]
) -> list[Row]:
    """Run the suite, and return its rows of the report.

    large: True to measure also a random model of Mistral-7B's shape (about 5 GB of disk; 10 GB of memory, or
        14 GB with llama.cpp), with ruvmlx, and with llama.cpp if llama.cpp is in `wanted`
    wanted: the names of the other runtimes to measure
    """
    rows = _rows(
        "this model", lambda: OnStage("ruvmlx", model=model, backend=backend, threads=threads), LOADS
    )
    log("load: measured")
    if not large:
        return [*rows, left_out(f"{LARGE}: load", "s", "not in a quick run", 30)]
    # leave out mlx-lm, because it would need another copy of the weights
    beside = [name for name in wanted if name == "llama.cpp"]
    with tempfile.TemporaryDirectory(prefix="ruvmlx-bench-") as folder:
        size = random_model.nbytes("mistral-7b")
        room = (ROOM + len(beside)) * size
        free, memory = shutil.disk_usage(folder).free, total_memory()
        if free < 1.2 * size or memory < room:
            need = f"it needs {1.2 * size / 1e9:.0f} GB of disk and {room / 1e9:.0f} GB of memory"
            return [*rows, left_out(f"{LARGE}: load", "s", need, 30)]
        log("making a model of Mistral-7B's shape")
        path = str(random_model.make("mistral-7b", Path(folder) / "m.gguf"))
        return rows + _large(path, backend, threads, beside, log)


def _rows(name: str, load: Callable[[], OnStage], times: int) -> list[Row]:
    seconds, peak, resident, weights = [], 0, 0, 0
    for _ in range(times):
        player = load()
        seconds.append(player.facts["load_s"])
        player.call("prefill", prompt(16))
        peak, resident, weights = player.call("peak"), player.call("resident"), player.facts["weights_bytes"]
        player.leave()
    note = f"weights {weights / 1e6:.0f} MB"
    return [
        median_row(f"{name}: load", seconds, "s", 30, better="lower"),
        Row(f"{name}: resident", round(resident / 1e6), "MB", note=note, better="lower"),
        Row(f"{name}: peak", round(peak / 1e6), "MB", note=note, better="lower"),
    ]


def _large(
    path: str, backend: str, threads: int, wanted: Sequence[str], log: Callable[[str], None]
) -> list[Row]:
    ours = OnStage("ruvmlx", model=path, backend=backend, threads=threads)
    memory = OnStage("memory", nbytes=ours.facts["weights_bytes"], threads=threads)
    log("7B: loaded")
    try:
        with peers(wanted, path, threads) as beside, beside.on_stage(CONTEXT) as others:
            for player in (ours, *others.values()):
                player.call("fill", prompt(32))
            turns = take_turns({"ours": ours, "memory": memory} | others, decode_turn, 5)
        held, loaded = ours.call("resident"), ours.facts["load_s"]
    finally:
        ours.leave()
        memory.leave()
    rates = {name: [1 / s for s in seconds] for name, seconds in turns.items()}
    reading = tuple(rates.pop("memory"))
    note = f"weights {ours.facts['weights_bytes'] / 1e9:.2f} GB"
    return [
        at_most(f"{LARGE}: load", loaded, "s", 30),
        at_most(f"{LARGE}: resident", held / 1e9, "GB", 5.0, note),
        median_row(
            f"{LARGE}: decode", rates["ours"], "tok/s", 100, limit=statistics.median(reading),
            condition="one reply at a time, no speculation", reference=reading,
        ),
        *(median_row(f"{LARGE}: decode: {name}", rates[name], "tok/s") for name in others),
        *ratios(f"{LARGE}: decode", rates, TARGET_SPEED_RATIO),
    ]  # fmt: skip
