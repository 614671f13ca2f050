"""This module runs one player in a process of its own. stdin has a JSON command on each line, and stdout has
a JSON answer on each line.

{"kind": "llama.cpp", "settings": {...}}     -> its facts
["decode", [1, 2, 3]]                        -> the method's result

The answer to a failed command is {"error": its message, "public": the message without text that may quote the
user}. The player continues to run.
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
    os.dup2(2, 1)  # text that a library prints must not look like an answer
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
    """Reset the peak memory of MLX, and that of the process if the system can do so (Linux)."""
    if mx := sys.modules.get("mlx.core"):
        mx.reset_peak_memory()
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as f:
        f.write("5")


def _held() -> dict[str, int]:
    """Return the bytes that the process and MLX hold now, and their peaks. MLX also counts the buffers of a
    GPU."""
    held = {"resident": memory.resident(), "peak_resident": memory.peak()}
    if mx := sys.modules.get("mlx.core"):
        held |= {f"mlx_{kind}": getattr(mx, f"get_{kind}_memory")() for kind in ("peak", "active", "cache")}
    return held


OF_THE_PROCESS: dict[str, Callable[..., Any]] = {
    "resident": memory.resident,
    "peak": memory.peak,
    "forget_peak": _forget_peak,
    "held": _held,
}


if __name__ == "__main__":
    main()
