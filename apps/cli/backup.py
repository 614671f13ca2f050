"""The commands `ruvmlx backup` and `restore` copy all chats, ratings and adapters to a file, and read them
back."""

from dataclasses import asdict
from pathlib import Path

import click

from ruvmlx import settings as config
from ruvmlx.text import size

from .output import json_option, print_json
from .path_types import NewPath
from .text_output import count, hint, say, shell_path, short_path
from .verb import Verb


@click.command(cls=Verb)
@click.argument("file", type=NewPath(path_type=Path))
@click.option("--replace", is_flag=True, help="FILE may exist: it is replaced when the new one is checked.")
@json_option
def backup(file: Path, replace: bool, as_json: bool) -> None:
    """Copy all chats, ratings and adapters to FILE, also while ruvmlx runs, and check the copy.

    Models, settings, API keys and the roles that you saved are not in it. Keep it as private as the data
    folder.
    """
    from ruvmlx.store.backup import back_up

    facts = back_up(config.store_file(), file.absolute(), replace)
    if as_json:
        print_json(facts)
    else:
        say(f"{_contents_text(facts)} are in {file} ({size(facts.bytes)}).")
        say("The log is in it, too. Models, settings, API keys and the roles that you saved are not.")
        say("The copy was read again and has no fault.")
        hint(f"`ruvmlx restore {shell_path(file)}` replaces your data with it, here or on another computer.")


@click.command(cls=Verb)
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def restore(file: Path, as_json: bool) -> None:
    """Use a backup FILE from now on. What was there before is kept beside it; no other ruvmlx may run."""
    from ruvmlx.store.backup import restore as restored

    facts, kept = restored(config.store_file(), file.absolute())
    if as_json:
        print_json(asdict(facts) | {"kept": str(kept) if kept else None})
        return
    say(f"Your data is now that of {short_path(file)}: {_contents_text(facts)}.")
    if kept:
        say(f"Your earlier data is in {short_path(kept)}. You may delete this file.")
        hint(f"`ruvmlx restore {shell_path(kept)}` brings your earlier data back.")


def _contents_text(facts) -> str:
    """Return the contents of a backup in words, for example "3 chats, 12 ratings and 1 adapter"."""
    words = [count(facts.chats, "chat"), count(facts.ratings, "rating"), count(facts.adapters, "adapter")]
    return f"{', '.join(words[:-1])} and {words[-1]}"


VERBS = [backup, restore]
