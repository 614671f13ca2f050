"""This module defines the click classes for verbs (commands of `ruvmlx`). The help of a verb has groups of
options, examples and exit codes. The texts of the help are in help_pages.py."""

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import SequenceMatcher

import click

from ruvmlx.text import did_you_mean

from .help_pages import EXIT_CODES, PAGES, HelpPage
from .options import MODEL_SETTINGS, REPLY_SETTINGS

_REPLY = (*REPLY_SETTINGS, "seed", "stop", "raw", "ignore_eos", "logprobs")
_SERVER = ("host", "port", "api_key", "allow_host", "allow_origin", "server", "install", "uninstall")
_DRAWN = ("drawn", "held_out", "rater", "as_chat", "thumbs", "questions")
_FLAWED = ("shuffle", "flip", "reverse", "oracle")
GROUPS = {  # heading of the help -> names of options; the first group has all other options
    "Options": (),
    "Server": _SERVER,
    "Other kinds of trial": _DRAWN,
    "Compare with": _FLAWED,
    "Reply": _REPLY,
    "Model and machine": MODEL_SETTINGS,
    "Output and help": ("as_json",),
}

# verb -> the reason why it has no option --json
WITHOUT_JSON = {
    "chat": "it is for people. `ruvmlx generate --json` prints one reply",
    "mcp": "all that it prints are messages of MCP, in JSON",
}


def page_of(context: click.Context) -> HelpPage | None:
    """Return the help page of the verb of this context. The key of the page is the verb's words after
    `ruvmlx`."""
    return PAGES.get(context.command_path.partition(" ")[2])


_NEAR = 0.6  # the least similarity, from 0 to 1, of an option that an error proposes


@contextmanager
def _proposing_near_options() -> Iterator[None]:
    """Where the block raises NoSuchOption, keep only proposals that are similar without their dashes. click
    compares the dashes, too, and proposes --out for --bogus."""
    try:
        yield
    except click.NoSuchOption as error:
        word = error.option_name.lstrip("-")
        found = [
            option
            for option in error.possibilities or ()
            if SequenceMatcher(None, word, option.lstrip("-")).ratio() >= _NEAR
        ]
        raise click.NoSuchOption(error.option_name, error.message, found, error.ctx) from None


class ChoiceArgument(click.Argument):
    """An argument with few allowed values. The usage lists the values. The start of an error names the
    argument, because the rest of the error lists the values."""

    def get_error_hint(self, ctx: click.Context | None) -> str:
        return f"'{self.human_readable_name}'"


class Verb(click.Command):
    """A command whose help has groups of options, examples and exit codes."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            with _proposing_near_options():
                return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name == "--json" and self.name in WITHOUT_JSON:
                message = f"`{ctx.command_path}` has no --json: {WITHOUT_JSON[self.name]}"
                raise click.NoSuchOption("--json", message, ctx=ctx) from None
            raise
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # with a context, the error ends with a line about the help
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, records in option_groups(self, ctx):
            with formatter.section(heading):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_examples(page_of(ctx), formatter)


class VerbGroup(click.Group):
    """A verb with verbs below it, for example `learn` with `learn undo`. The decorator `@group.command` makes
    a Verb."""

    command_class = Verb

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands and not args[0].startswith("-"):
            names = self.list_commands(ctx)
            known = did_you_mean(args[0], names, 0.7) or f" It has: {', '.join(names)}."
            raise click.UsageError(f"`{ctx.command_path}` has no command {args[0]!r}.{known}", ctx)
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        for heading, records in option_groups(self, ctx):
            with formatter.section(heading):
                formatter.write_dl(records)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        path = ctx.command_path.partition(" ")[2]
        with formatter.section("Commands"):
            formatter.write_dl([(name, PAGES[f"{path} {name}"].short) for name in self.list_commands(ctx)])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_examples(page_of(ctx), formatter)


def option_groups(command: click.Command, ctx: click.Context) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Return (heading, [(flag, help text)]) for each group of options that is not empty."""
    found: dict[str, list[tuple[str, str]]] = {heading: [] for heading in GROUPS}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record and isinstance(parameter, click.Option):
            found[_group(parameter)].append(record)
    return ((heading, records) for heading, records in found.items() if records)


def _group(option: click.Option) -> str:
    if "--help" in option.opts:
        return "Output and help"
    return next((heading for heading, names in GROUPS.items() if option.name in names), "Options")


def write_examples(page: HelpPage | None, formatter: click.HelpFormatter) -> None:
    """Write the examples of a help page, each with its effect, and then the exit codes."""
    if page:
        with formatter.section("Examples"):
            formatter.write_dl([(f"ruvmlx {words}", does) for words, does in page.examples], col_max=44)
    formatter.write_paragraph()
    codes = ", ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES)
    formatter.write_text(f"Exit codes: {codes}.")
