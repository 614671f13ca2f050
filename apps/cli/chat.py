"""The command `ruvmlx chat` opens a chat with a model in this process, or with the model of a running
server."""

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ruvmlx.errors import UsageError
from ruvmlx.progress import Watch

from .completion_values import complete_chats
from .options import SERVER, model_options, open_runtime, resolve, sampling_options, setting_options
from .running_server import saved_key
from .verb import Verb

if TYPE_CHECKING:
    from ruvmlx.settings import Settings

# The options in this set apply with --server, too, because they select the server, the chat and its look. The
# program refuses all other options with --server.
_THE_CLIENTS = {"server", "api_key", "continue_", "session", "find", "system", "theme", "motion"}


@click.command(cls=Verb)
@model_options
@sampling_options
@click.option("--continue", "-c", "continue_", is_flag=True, help="Continue the last chat.")
@click.option(
    "--session",
    metavar="ID",
    help="Continue this chat; `sessions ls` lists them.",
    shell_complete=complete_chats,
)
@click.option(
    "--find",
    metavar="WORDS",
    help="Begin at the newest message with these words, of --session or of all chats.",
)
@click.option("--plain", is_flag=True, help="Line by line, for pipes and screen readers.")
@setting_options("learn_when_idle", "theme", "motion")
@click.option(
    "--server", is_flag=False, flag_value=SERVER, metavar="[URL]",
    help=f"Chat on a running `ruvmlx serve`, whose model it shares; without a URL: {SERVER}.",
)  # fmt: skip
@click.option("--api-key", envvar="RUVMLX_API_KEY", metavar="KEY", help="With --server: its key.")
@click.pass_context
def chat(
    context: click.Context,
    continue_: bool,
    session: str | None,
    find: str | None,
    plain: bool,
    server: str | None,
    api_key: str | None,
    **flags: Any,
) -> None:
    """Chat, and rate the replies: each rating changes the weights that write the next one."""
    if continue_ and session is not None:
        raise UsageError("--continue and --session do not go together; --session ID continues that chat.")
    settings = resolve(flags, selects=True)
    # the flag --system also changes an earlier chat; a setting is only for new chats
    replaces_system = context.get_parameter_source("system") is ParameterSource.COMMANDLINE
    if server is not None:
        _refuse_flags(context)
        place = session or ("continue" if continue_ else "new")
        sys.exit(_attach(server, api_key, settings, place, find, replaces_system))
    if context.get_parameter_source("api_key") is ParameterSource.COMMANDLINE:
        raise UsageError("--api-key is the key of a server; give --server, too.")
    sys.exit(_chat(settings, plain, continue_, session, find, replaces_system))


def _chat(
    settings: "Settings",
    plain: bool,
    continue_: bool,
    session: str | None,
    find: str | None,
    replaces_system: bool,
) -> int:
    """Run a chat with a model that this process opens. replaces_system: as in `ChatOptions`."""
    from ruvmlx.host.model_holder import Opener
    from ruvmlx.models.config.model import writes_nothing

    from ..chat import run_chat
    from ..progress import is_first_run

    def opens(model: str | None, adapter: str | None, watch: Watch) -> Any:
        runtime = open_runtime(replace(settings, model=model, adapter=adapter or "none"), watch)
        if not runtime.model.shape.writes:
            runtime.close()
            raise UsageError(writes_nothing(runtime.model.name))
        return runtime

    return run_chat(
        Opener(opens, settings.model, settings.adapter_name, is_first_run()),
        plain=plain,
        continue_=continue_,
        session=session,
        find=find or "",
        max_new_tokens=settings.max_tokens,
        system=settings.system,
        replaces_system=replaces_system,
        learn_when_idle=settings.learn_when_idle,
        theme=settings.theme,
        motion=settings.motion,
        keys=settings.keys,
    )


def _refuse_flags(context: click.Context) -> None:
    """Raise UsageError for a flag that cannot have an effect with --server: for --plain, and for the flags
    that the user must give to `ruvmlx serve`."""
    given = [
        parameter
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
    ]
    for parameter in given:
        if parameter.name == "plain":
            raise UsageError("--plain and --server do not go together; a script asks the server over HTTP.")
        if parameter.name not in _THE_CLIENTS:
            flag = max(parameter.opts, key=len)
            raise UsageError(f"{flag} and --server do not go together; give {flag} to `ruvmlx serve`.")


def _attach(
    url: str, key: str | None, settings: "Settings", session: str, find: str | None, replaces_system: bool
) -> int:
    """Run a chat with the model of a running server. replaces_system: as in `ChatOptions`."""
    from ..attach.client import attach

    if not (sys.stdin and sys.stdin.isatty() and sys.stdout and sys.stdout.isatty()):
        raise UsageError("chat --server needs a terminal; a script asks the server over HTTP.")
    if os.environ.get("TERM") == "dumb":
        raise UsageError(
            "chat --server draws a screen, and this terminal cannot (TERM=dumb). "
            "`ruvmlx chat` without --server runs line by line."
        )
    return attach(
        url,
        saved_key(url, key),
        session=session,
        find=find or "",
        system=settings.system,
        replaces_system=replaces_system,
        theme=settings.theme,
        motion=settings.motion,
        keys=settings.keys,
    )


VERBS = [chat]
