"""The command `ruvmlx connect` prints or writes the configuration with which another program uses a running
`ruvmlx serve`."""

import hashlib
import os
from pathlib import Path

import click

from ruvmlx import settings as config
from ruvmlx.errors import RuvmlxError, UsageError
from ruvmlx.text import sanitize

from .client_files import ClientFile, Served, client_of, names, path_of
from .output import json_option, log, print_json, show
from .running_server import answer_of, root_of, server_options
from .verb import ChoiceArgument, Verb
from .written_files import put_back, write_over

MOST_NAMES = 1000  # the largest page of the server's list of models


@click.command(cls=Verb)
@click.argument("client", cls=ChoiceArgument, type=click.Choice(names()))
@server_options
@click.option("--name", metavar="NAME", help="A name that GET /v1/models lists; without it, the first one.")
@click.option("--write", is_flag=True, help="Write the client's file; what it replaces is kept.")
@click.option("--undo", is_flag=True, help="Put the client's file back as it was before --write.")
@json_option
def connect(
    client: str, server: str, api_key: str | None, name: str | None, write: bool, undo: bool, as_json: bool
) -> None:
    """Print the configuration with which another program uses a running `ruvmlx serve`, or write it."""
    if write and undo:
        raise UsageError("--write and --undo exclude each other; give one of them.")
    if undo:
        _undo(client, as_json)
        return
    made = client_of(client, ask_server(server.rstrip("/"), api_key, name))
    if write:
        if made.path is None:
            raise UsageError(f"{client} has no file to write; set what `ruvmlx connect {client}` prints.")
        write_over(made.path, made.merged_text(), _record_of(client, made.path))
    _tell(client, made, write, as_json)


def _undo(client: str, as_json: bool) -> None:
    path, older = path_of(client), config.home() / "connected" / f"{client}.json"
    record = _record_of(client, path) if path else older
    # An older program had one record for each client.
    path = put_back(record if record.exists() else older)
    if as_json:
        print_json({"client": client, "path": path, "put_back": True})
    else:
        show(f"Put back: {path}")


def _record_of(client: str, path: Path) -> Path:
    """Return the file with the old content of the client's file `path`. An environment variable can move a
    client's file, so each path has its own record."""
    digest = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:16]
    return config.home() / "connected" / f"{client}-{digest}.json"


def _tell(client: str, made: ClientFile, written: bool, as_json: bool) -> None:
    if as_json:
        facts = {"path": made.path, "written": written, "text": made.text}  # text: an older name of settings
        print_json({"client": client, "settings": made.text, **facts})
        return
    where = f"Written to {made.path}:" if written else f"Put into {made.path}:"
    heading = where if made.path else "Environment variables:"
    # One line, so that the user can paste the heading with the text into the file.
    click.echo(f"# {sanitize(heading)}", err=True)
    click.echo(made.text.rstrip("\n"))
    log(f"# {made.use}")


def ask_server(server: str, api_key: str | None, name: str | None) -> Served:
    """Return the server and its model. name: the name of the model, or None for the server's first model.
    Raise RuvmlxError if the server does not answer, or has no model of this name."""
    form = {"anthropic-version": "2023-06-01"}
    answer = answer_of(server, f"/v1/models?limit={MOST_NAMES}", api_key, headers=form)
    try:
        known = {str(model["id"]): int(model["max_input_tokens"]) for model in answer["data"]}
    except (KeyError, TypeError, ValueError):
        raise RuvmlxError(f"the server at {server} is no `ruvmlx serve`; give its address.") from None
    found = next((model for model in known if name in (None, model)), None)
    if found is None:
        raise UsageError(f"the server has no model {name!r}; it has {', '.join(known)}.")
    return Served(root_of(server), api_key or "none-needed", found, known[found])


VERBS = [connect]
