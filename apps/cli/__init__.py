"""This package has the command line of ruvmlx. A verb is a command of `ruvmlx`. Each verb is a function in a
file of this package; related verbs share a file.

This file imports no large module, so `ruvmlx --help` answers in a fraction of a second.
"""

import sys
from importlib import import_module

import click
from click.shell_completion import CompletionItem

from ruvmlx import __version__
from ruvmlx.text import did_you_mean

from .ending_signals import end_on_signals
from .help_pages import PAGES, SECTIONS
from .output import run_plainly


class Verbs(click.Group):
    """A group of verbs that imports the file of a verb only when the user calls the verb. The help and the
    completion take the names of the verbs from a table."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands and cmd_name in FILES:
            for verb in import_module(f".{FILES[cmd_name]}", __package__).VERBS:
                self.add_command(verb)
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in FILES and not args[0].startswith("-"):
            raise click.UsageError(f"there is no command {args[0]!r}.{did_you_mean(args[0], FILES)}", ctx)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(FILES)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, verbs in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(verb, PAGES[verb].short) for verb in verbs], col_max=12)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_paragraph()
        formatter.write_text("`ruvmlx COMMAND --help` has examples and all options of a command.")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the names of verbs from the table. Complete options as click does."""
        verbs = [
            CompletionItem(verb, help=PAGES[verb].short) for verb in FILES if verb.startswith(incomplete)
        ]
        return verbs + click.Command.shell_complete(self, ctx, incomplete)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="ruvmlx", message="%(prog)s %(version)s")
def cli() -> None:
    """Chat with a local model that learns from your ratings.

    Start with `ruvmlx chat`.
    """


_OWN_FILE = (
    "adapters bench chat completion connect doctor embed "
    "generate launch learn log perplexity prove rate serve sessions"
)
FILES = {verb: verb for verb in _OWN_FILE.split()} | {  # maps each verb to its module
    "backup": "backup",
    "restore": "backup",
    "config": "settings",
    "ls": "models",
    "mcp": "agent_tools",
    "models": "models",
    "ps": "open_models",
    "stop": "open_models",
    "pull": "models",
    "rm": "models",
    "show": "models",
}


def import_verb() -> None:
    """Import the module of the verb that the command line names."""
    if len(sys.argv) > 1:
        cli.get_command(click.Context(cli), sys.argv[1])


def run() -> int:
    """Run the verb that the command line names, and return the exit code."""
    end_on_signals()
    return run_plainly(cli)
