"""One player in a process of its own: a JSON command a line on stdin, a JSON answer a line on stdout.

{"kind": "llama.cpp", "settings": {...}}     -> its facts
["decode", [1, 2, 3]]                        -> the method's result
"""

import contextlib
import json
import os
import sys

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


def _resident() -> int:
    """Bytes of memory that this process holds now (Linux), or its peak elsewhere."""
    return _status("VmRSS")


def _peak() -> int:
    """Bytes that it held at most since `forget_peak` (Linux), or ever elsewhere."""
    return _status("VmHWM")


def _forget_peak() -> None:
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as f:
        f.write("5")


def _status(field: str) -> int:
    try:
        with open("/proc/self/status", encoding="ascii") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith(field))
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


OF_THE_PROCESS = {"resident": _resident, "peak": _peak, "forget_peak": _forget_peak}


if __name__ == "__main__":
    main()
