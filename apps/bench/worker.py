"""One player in a process of its own: a JSON command a line on stdin, a JSON answer a line on stdout.

{"kind": "llama.cpp", "settings": {...}}     -> its facts
["decode", [1, 2, 3]]                        -> the method's result
"""

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
        result = _resident() if method == "resident" else getattr(player, method)(*arguments)
        print(json.dumps(result), file=answers, flush=True)


def _resident() -> int:
    """Bytes of memory that this process holds now (Linux), or its peak elsewhere."""
    try:
        with open("/proc/self/status", encoding="ascii") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmRSS"))
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
