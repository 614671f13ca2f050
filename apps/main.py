"""Entry point of the `ruvmlx` command. Ctrl-C prints one line, even during imports."""

import sys


def main() -> None:
    try:
        from .cli import run

        code = run()
    except KeyboardInterrupt:
        print("ruvmlx: interrupted.", file=sys.stderr)
        code = 130
    sys.exit(code)
