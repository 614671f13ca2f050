"""The command line: one function for each verb, one file for each group of verbs.

Nothing heavy is imported here: `ruvmlx --help` answers in a fraction of a second.
"""

from importlib import import_module

import click

from ruvmlx import __version__

from .output import run_plainly


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="ruvmlx", message="%(prog)s %(version)s")
def cli() -> None:
    """Chat with a local model that learns from your ratings."""


FILES = [
    "adapters",
    "bench",
    "doctor",
    "generate",
    "learn",
    "models",
    "perplexity",
    "prove",
    "sessions",
    "settings",
]


def _add_verbs() -> None:
    for file in FILES:
        for verb in import_module(f".{file}", __package__).VERBS:
            cli.add_command(verb)


_add_verbs()


def run() -> int:
    """Run the command line; returns the exit code."""
    return run_plainly(cli)
