"""This module prints the output of a verb (a command of `ruvmlx`). The verb's result goes to stdout, and
errors, remarks and progress go to stderr. An error sets the exit code. The text of an error is one line; if
stderr is a terminal, the line is wrapped at the terminal's width."""

import json
import os
import sys
import traceback
from dataclasses import asdict, is_dataclass
from typing import Any

import click

from ruvmlx.errors import RuvmlxError
from ruvmlx.text import SUSPECT, sanitize

from ..wrapping import width, wrap, wrap_for

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON value and nothing else.")


def print_json(value: Any) -> None:
    """Print a JSON value on one line. Characters that could control the terminal are escaped."""
    text = json.dumps(value, default=_plain, ensure_ascii=False)
    click.echo(SUSPECT.sub(lambda c: json.dumps(c[0])[1:-1], text))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, frozenset):
        return sorted(value)
    return str(value)


def show(text: str) -> None:
    """Print a sentence for people to stdout, without the characters that could control the terminal."""
    click.echo(wrap(sanitize(text), width(sys.stdout)))


def show_whole(text: str) -> None:
    """Print text to stdout without new line breaks, because its line breaks have a meaning: a command to
    copy, a chart, or a message of a chat."""
    click.echo(sanitize(text))


def log(text: str) -> None:
    """Print a sentence about progress, or a remark, to stderr. If stderr is a terminal, wrap the sentence at
    the terminal's width; otherwise it stays one line of up to 2,000 columns."""
    click.echo(wrap_for(sanitize(text), sys.stderr), err=True)


def run_plainly(command: click.Command) -> int:
    """Run a click command and return the exit code. If the command fails, print the error to stderr."""
    try:
        _check_arguments()
        return command.main(prog_name="ruvmlx", standalone_mode=False) or 0
    except click.exceptions.NoArgsIsHelpError as e:
        click.echo(e.format_message())
        return 2
    except click.exceptions.Exit as e:
        return e.exit_code
    except click.UsageError as e:
        return _fail(_sentence(e.format_message()) + _where_help_is(e), 2)
    except click.ClickException as e:
        return _fail(e.format_message(), e.exit_code)
    except RuvmlxError as e:
        return _fail(str(e), e.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted.", 130)
    except BrokenPipeError:
        # The program at the other end of the pipe (head, less) has closed the pipe, so this program can print
        # nothing more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as e:
        return _fail(f"cannot read or write: {e.strerror or e}.", 1)
    except Exception as e:  # noqa: BLE001 - the last resort: a user never sees a traceback
        if os.environ.get("RUVMLX_DEBUG"):
            traceback.print_exc()
        return _fail(
            f"internal error: {type(e).__name__}: {e}. Report what RUVMLX_DEBUG=1 prints.",
            1,
        )


def _sentence(text: str) -> str:
    """Return the text with a full stop at its end. Some texts of the library click have none."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _where_help_is(error: click.UsageError) -> str:
    return f" `{error.ctx.command_path} --help` has more." if error.ctx else ""


def _check_arguments() -> None:
    """Raise UsageError for command-line arguments that are not UTF-8. Python reads the bytes that are not
    UTF-8 as lone surrogates, and text with lone surrogates cannot be stored or printed."""
    for argument in sys.argv[1:]:
        if any("\ud800" <= c <= "\udfff" for c in argument):
            raise click.UsageError(f"an argument is not UTF-8 text: {argument!a}.")


def _fail(message: str, code: int) -> int:
    log("ruvmlx: " + " ".join(message.split()))
    return code
