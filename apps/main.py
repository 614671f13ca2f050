"""Entry point of the `ruvmlx` command: Ctrl-C is one line from the first moment on."""

import sys


def main() -> None:
    try:
        from .cli import run

        code = run()
    except KeyboardInterrupt:
        print("ruvmlx: interrupted.", file=sys.stderr)
        code = 130
    sys.exit(code)
