"""The command `ruvmlx completion` installs completion in bash, zsh and fish, so that the key Tab completes
verbs, options, models, adapters, chats and settings."""

import os
import sys
from pathlib import Path

import click

from ruvmlx.errors import RuvmlxError, UsageError
from ruvmlx.platform.files import make_folder, replacing
from ruvmlx.platform.files import remove as remove_file

from .output import json_option, print_json, show_whole
from .text_output import hint, say, short_path
from .verb import VerbGroup

SHELLS = ("bash", "zsh", "fish")
ANSWER = "_RUVMLX_COMPLETE"  # environment variable by which the shell asks click for completions
_shell = click.option("--shell", type=click.Choice(SHELLS), help="The shell; yours ($SHELL) by default.")


@click.group(cls=VerbGroup)
def completion() -> None:
    """Let the shell complete commands, options, models, adapters, chats and settings on Tab."""


@completion.command()
@_shell
@click.option("--print", "only_print", is_flag=True, help="Print the file, and write nothing.")
@json_option
def install(shell: str | None, only_print: bool, as_json: bool) -> None:
    """Write the completion file of a shell, where that shell looks for a user's own. Asks nothing."""
    shell = shell or _current_shell()
    if only_print:
        if as_json:
            print_json({"shell": shell, "script": script(shell)})
        else:
            click.echo(script(shell), nl=False)
        return
    path = place(shell)
    _write(path, script(shell))
    if as_json:
        print_json({"shell": shell, "path": str(path), "add": line_to_add(shell)})
        return
    say(f"Completion for {shell} is written to {short_path(path)}.")
    if line := line_to_add(shell):
        say(f"Add this line to {_startup(shell)}, if it is not there:")
        show_whole(f"    {line}")
    hint(f"Open a new {shell}, type `ruvmlx learn` and a space, and press Tab.")
    hint(f"`ruvmlx completion remove --shell {shell}` undoes it.")


@completion.command()
@_shell
@json_option
def remove(shell: str | None, as_json: bool) -> None:
    """Delete the file that `completion install` wrote."""
    shell = shell or _current_shell()
    path = place(shell)
    there = path.is_file()
    try:
        remove_file(path)
    except OSError as error:
        raise RuvmlxError(f"cannot delete {path}: {error.strerror}.") from None
    if as_json:
        print_json({"shell": shell, "path": str(path), "removed": there})
        return
    say(f"Deleted {short_path(path)}." if there else f"Nothing to delete: there is no {short_path(path)}.")
    if there and line_to_add(shell):
        hint(f"If you added a line to {_startup(shell)} for it, delete that, too.")


def _current_shell() -> str:
    name = Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        raise UsageError(
            f"your shell ({name or 'not known'}) is not one of {', '.join(SHELLS)}; give --shell."
        )
    return name


def place(shell: str) -> Path:
    """Return the path of the completion file. fish, and bash with the package bash-completion, read the
    user's completion files from the folder of this path. zsh, and bash without this package, need the line
    that `line_to_add` returns."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    if shell == "bash":
        own = os.environ.get("BASH_COMPLETION_USER_DIR") or str(data / "bash-completion")
        return Path(own) / "completions" / "ruvmlx"
    if shell == "zsh":
        return data / "zsh" / "site-functions" / "_ruvmlx"
    base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return base / "fish" / "completions" / "ruvmlx.fish"


def line_to_add(shell: str) -> str:
    """Return the line that lets the shell find the completion file, for the shell's start-up file. Return ""
    for fish, which finds the completion file without a line in the start-up file."""
    path = str(place(shell))
    if shell == "bash":  # without the package bash-completion, bash does not find the file
        return f'source "{path}"'
    if shell == "zsh":
        return f'fpath=("{Path(path).parent}" $fpath) && autoload -Uz compinit && compinit'
    return ""


def _startup(shell: str) -> str:
    # The terminal of macOS starts login shells, and a login bash does not read ~/.bashrc.
    bash = "~/.bash_profile" if sys.platform == "darwin" else "~/.bashrc"
    return {"bash": bash, "zsh": "~/.zshrc"}[shell]


def script(shell: str) -> str:
    """Return the text of the shell's completion file. The library click makes this text, and warns about a
    bash that is too old for it, such as the bash of macOS."""
    from click.shell_completion import get_completion_class

    from . import cli

    found = get_completion_class(shell)
    assert found is not None
    return found(cli, {}, "ruvmlx", ANSWER).source()


def _write(path: Path, text: str) -> None:
    """Replace the file `path` by the text in one step, so that a shell never reads an incomplete file."""
    try:
        make_folder(path.parent, 0o777)
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        hint_ = "`ruvmlx completion install --print` prints the file instead."
        raise RuvmlxError(f"cannot write {path}: {error.strerror}. {hint_}") from None


VERBS = [completion]
