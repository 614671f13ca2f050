"""The commands `ruvmlx ps` and `stop` list and close the open models of a running `ruvmlx serve`."""

from typing import Any

import click

from ruvmlx.text import size

from . import text_output
from .output import json_option, log, print_json
from .running_server import answer_of, saved_key, server_options
from .text_output import TableColumn
from .verb import Verb

STOP_SECONDS = 3600.0  # seconds to wait; the server first ends the model's last reply


@click.command(cls=Verb)
@server_options
@json_option
def ps(server: str, api_key: str | None, as_json: bool) -> None:
    """List the models that the running server has open: their memory, and what they do."""
    found = answer_of(server, "/v1/ps", saved_key(server, api_key))
    if as_json:
        print_json(found | {"models": [model | _facts(model) for model in found["models"]]})
        return
    columns = [TableColumn(name) for name in ("MODEL", "ADAPTER", "MEMORY", "CHAT LIMIT", "NOW")]
    text_output.table(columns, [_row(model) for model in found["models"]])
    planned, taken = size(found["planned_bytes"]), size(found["resident_bytes"])
    text_output.hint("MEMORY is what the model and its chats take; the program itself comes on top.")
    text_output.hint(
        "CHAT LIMIT: all chats of the model together (their KV cache) never take more than this."
    )
    most = found["limit_bytes"]
    limit = f" All models and chats together never take more than {size(most)}." if most else ""
    log(
        f"The whole server takes {taken} now. While it answers and learns in short chats, it can take "
        f"{planned}. A longer chat takes more: `ruvmlx show` says how much.{limit}"
    )


def _facts(model: dict[str, Any]) -> dict[str, Any]:
    """Return a model's name, memory and idle time by the names that scripts use. The answer of /v1/ps has its
    own names."""
    taken = model["model_bytes"] + model["kv_bytes"]
    return {"name": model["model"], "bytes": taken, "idle_s": model["idle_seconds"]}


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    taken, limit = size(_facts(model)["bytes"]), model["kv_limit_bytes"]
    if model["replies"]:
        now = f"writes {text_output.count(model['replies'], 'reply', 'replies')}"
    elif model["requests"]:
        now = f"answers {text_output.count(model['requests'], 'request')}"
    else:
        now = f"idle for {model['idle_seconds']:.0f} s"
    adapter = (model["adapter"] or "none").replace("@", ", version ")
    return model["model"], adapter, taken, size(limit) if limit else "-", now


@click.command(cls=Verb)
@click.argument("model", required=False)
@server_options
@json_option
def stop(model: str | None, server: str, api_key: str | None, as_json: bool) -> None:
    """Close a model of the running server when nobody uses it any more; without MODEL, end the server."""
    key = saved_key(server, api_key)
    advice = "There is nothing to stop."
    done = answer_of(server, "/v1/stop", key, {"model": model}, STOP_SECONDS, advice=advice)
    if as_json:
        print_json(done)
    elif done["model"] is None:
        log("The server stops.")
    else:
        log(f"{done['model']} is closed." if done["was_open"] else f"{done['model']} was not open.")


VERBS = [ps, stop]
