"""The command line: one function for each verb, one file for each group of verbs.

Nothing heavy is imported here: `ruvmlx --help` answers in a fraction of a second.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

import click

from ruvmlx import __version__

from .output import run_plainly


class Verbs(click.Group):
    """Imports the file that has a verb's name for that verb alone; for any other, and for help, all files."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands:
            self._add([cmd_name] if cmd_name in FILES else FILES)
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        self._add(FILES)
        return super().list_commands(ctx)

    def _add(self, files: Sequence[str]) -> None:
        for file in files:
            for verb in import_module(f".{file}", __package__).VERBS:
                self.add_command(verb)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="ruvmlx", message="%(prog)s %(version)s")
def cli() -> None:
    """Chat with a local model that learns from your ratings."""


FILES = [
    "adapters",
    "backup",
    "bench",
    "chat",
    "doctor",
    "generate",
    "learn",
    "models",
    "perplexity",
    "prove",
    "rate",
    "serve",
    "sessions",
    "settings",
]


def run() -> int:
    """Run the command line; returns the exit code."""
    if len(sys.argv) > 1:  # import its file here: where Ctrl-C meets click, click prints an empty line
        cli.get_command(click.Context(cli), sys.argv[1])
    return run_plainly(cli)
