"""This module is the entry point of the command `ruvmlx`. Ctrl-C prints one line, also during imports."""

import sys


def main() -> None:
    try:
        from .cli import run

        code = run()
    except KeyboardInterrupt:
        print("ruvmlx: interrupted.", file=sys.stderr)
        code = 130
    sys.exit(code)
