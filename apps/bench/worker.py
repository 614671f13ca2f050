"""One player in a process of its own: a JSON command a line on stdin, a JSON answer a line on stdout.

{"kind": "llama.cpp", "settings": {...}}     -> its facts
["decode", [1, 2, 3]]                        -> the method's result
"""

import contextlib
import json
import os
import sys

from ruvmlx import memory

from .players import KINDS


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not be taken for an answer
    first = json.loads(sys.stdin.readline())
    try:
        player = KINDS[first["kind"]](**first["settings"])
        answer: object = player.facts
    except Exception as e:  # noqa: BLE001 - the parent leaves this player out, with the reason
        print(json.dumps({"error": f"{type(e).__name__}: {e}"}), file=answers, flush=True)
        return
    print(json.dumps(answer), file=answers, flush=True)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        result = OF_THE_PROCESS[method]() if method in OF_THE_PROCESS else getattr(player, method)(*arguments)
        print(json.dumps(result), file=answers, flush=True)


def _forget_peak() -> None:
    """`peak` counts from here on, where the system can do that (Linux)."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as f:
        f.write("5")


OF_THE_PROCESS = {"resident": memory.resident, "peak": memory.peak, "forget_peak": _forget_peak}


if __name__ == "__main__":
    main()
