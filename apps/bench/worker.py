"""This module runs one player of a benchmark (players.py) in a separate process. The process reads a JSON
command from each line of stdin, and writes a JSON answer to a line of stdout.

{"kind": "llama.cpp", "settings": {...}}     -> makes the player, and answers with the player's facts
["decode", [1, 2, 3]]                        -> calls the player's method, and answers with the method's
result

The answer to a failed command is {"error": its message, "public": the message without text that possibly
quotes the user}. After a failed command, the player continues to run; if the player cannot be made, the
process ends.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from ruvmlx.platform import memory
from ruvmlx.platform.parent import end_with_parent

from ..privacy import public_error
from .players import KINDS


def main() -> None:
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # if a library prints text, send the text to stderr, because stdout has only answers
    first = json.loads(sys.stdin.readline())
    made: list[Any] = []

    def start() -> Any:
        made.append(KINDS[first["kind"]](**first["settings"]))
        return made[0].facts

    answer = _try_call(start)
    print(json.dumps(answer), file=answers, flush=True)
    for line in sys.stdin if made else ():
        method, *arguments = json.loads(line)
        of = OF_THE_PROCESS.get(method) or getattr(made[0], method)
        print(json.dumps(_try_call(partial(of, *arguments))), file=answers, flush=True)


def _try_call(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as e:  # noqa: BLE001 - the parent leaves this player out and gives the reason
        return {"error": f"{type(e).__name__}: {e}", "public": public_error(e)}


def _forget_peak() -> None:
    """Reset the peak memory of MLX. On Linux, also reset the peak memory of the process."""
    if mx := sys.modules.get("mlx.core"):
        mx.reset_peak_memory()
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as f:
        f.write("5")


def _memory_bytes() -> dict[str, int]:
    """Return the numbers of bytes that the process and MLX hold now, and their peaks. MLX's numbers include
    the buffers of a GPU."""
    held = {"resident": memory.resident(), "peak_resident": memory.peak()}
    if mx := sys.modules.get("mlx.core"):
        held |= {f"mlx_{kind}": getattr(mx, f"get_{kind}_memory")() for kind in ("peak", "active", "cache")}
    return held


OF_THE_PROCESS: dict[str, Callable[..., Any]] = {
    "resident": memory.resident,
    "peak": memory.peak,
    "forget_peak": _forget_peak,
    "held": _memory_bytes,
}


if __name__ == "__main__":
    main()
