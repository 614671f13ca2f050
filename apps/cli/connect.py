"""`connect`: the configuration with which another program uses a running `ruvmlx serve`."""

import json
import urllib.error
import urllib.request
from typing import Any

import click

from ruvmlx import settings as config
from ruvmlx.errors import RuvmlxError, UsageError

from .client_files import ClientFile, Served, client_of, names
from .options import SERVER
from .output import json_option, log, print_json, show
from .verb import Verb
from .written_files import put_back, write_over


@click.command(cls=Verb)
@click.argument("client", type=click.Choice(names()))
@click.option(
    "--server", default=SERVER, show_default=True, metavar="URL", help="Where `ruvmlx serve` answers."
)
@click.option(
    "--api-key", envvar="RUVMLX_API_KEY", metavar="KEY", help="The server's key, if it asks for one."
)
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
    record = config.home() / "connected" / f"{client}.json"
    if undo:
        show(f"Put back: {put_back(record)}")
        return
    made = client_of(client, served(server.rstrip("/"), api_key, name))
    if write:
        if made.path is None:
            raise UsageError(f"{client} has no file to write; set what `ruvmlx connect {client}` prints.")
        write_over(made.path, made.merged(), record)
    _tell(made, write, as_json)


def _tell(made: ClientFile, written: bool, as_json: bool) -> None:
    if as_json:
        print_json({"path": made.path, "text": made.text, "written": written})
        return
    log(f"# {'written to ' if written else ''}{made.path or 'environment variables'}. {made.use}")
    click.echo(made.text.rstrip("\n"))


def served(server: str, api_key: str | None, name: str | None) -> Served:
    """The server's model; RuvmlxError if nothing answers, or if it has no model of this name."""
    models: list[dict[str, Any]] = _get_json(f"{server}/v1/models", api_key)["data"]
    found = next((model for model in models if name in (None, model["id"])), None)
    if found is None:
        known = ", ".join(model["id"] for model in models)
        raise UsageError(f"the server has no model {name!r}; it has {known}.")
    return Served(server, api_key or "none-needed", found["id"], int(found["max_input_tokens"]))


def _get_json(url: str, api_key: str | None) -> Any:
    headers = {"anthropic-version": "2023-06-01"} | ({"x-api-key": api_key} if api_key else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        reason = "it asks for a key: give --api-key" if error.code == 401 else f"it answers {error.code}"
        raise RuvmlxError(f"the server at {url} cannot be used: {reason}.") from None
    except (OSError, ValueError):
        raise RuvmlxError(f"no ruvmlx answers at {url}; start `ruvmlx serve`, or give --server.") from None


VERBS = [connect]
