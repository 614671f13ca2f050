"""The command `ruvmlx serve` starts the HTTP server through which other programs use the model."""

import asyncio
import contextlib
import json
import os
import re
import resource
import shlex
import signal
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from ruvmlx import settings as config
from ruvmlx.errors import UsageError
from ruvmlx.platform.bounded_process import ending
from ruvmlx.platform.memory import limit_unused_memory
from ruvmlx.progress import Watch

from . import service
from .number_types import WholeNumber
from .options import GUESSES, SERVER, model_options, open_runtime, resolve, setting_options
from .output import json_option, log, print_json, show, show_whole
from .text_output import is_terminal
from .verb import Verb

if TYPE_CHECKING:
    from ruvmlx.settings import Settings

    from ..server.access import Access
    from ..server.model_pool import ModelPool
    from ..server.serving import Serving
    from ..server.web import WebServer

PORT = int(SERVER.rpartition(":")[2])
OPEN_FILES = 1024  # with more open files, `select` of the C library fails


@click.command(cls=Verb)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=WholeNumber(0, 65535), default=PORT, show_default=True, help="0: any free one.")
@click.option(
    "--api-key", multiple=True, envvar="RUVMLX_API_KEY", metavar="KEY",
    help="Ask for this key; may be given several times. Beyond this machine, a key is always asked for. "
    "A line KEY ADAPTER in the file api_keys gives a key an adapter of its own; such a key opens no chats.",
)  # fmt: skip
@click.option("--allow-host", multiple=True, metavar="NAME", help="A name of this machine that clients use.")
@click.option("--allow-origin", multiple=True, metavar="ORIGIN", help="A web page that may ask, or *.")
@click.option("--install", is_flag=True, help="Write a service that starts this at login; asks first.")
@click.option("--uninstall", is_flag=True, help="Remove that service; asks first.")
@model_options
@setting_options("max_tokens", "best_of", *config.SAMPLING, "thinking", "examples", *GUESSES)
@json_option
@click.pass_context
def serve(
    context: click.Context,
    host: str,
    port: int,
    api_key: tuple[str, ...],
    allow_host: tuple[str, ...],
    allow_origin: tuple[str, ...],
    install: bool,
    uninstall: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Answer other programs over HTTP, in OpenAI's and Anthropic's form. Ratings there change the weights.

    Only this machine can connect, unless --host says otherwise.
    """
    from ..server.access import Access
    from ..server.web import listening

    settings = resolve(flags)
    if install and uninstall:
        raise UsageError("--install and --uninstall do not go together; give one of them.")
    if install:
        service.install(context)
        return
    if uninstall:
        service.uninstall()
        return
    for origin in allow_origin:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise UsageError(
                f"--allow-origin {origin!r} is no origin: it has a scheme and a host, as in "
                "https://chat.example, or is *."
            )
    keys = _keys(host, api_key)
    hosts = [host.lower(), *(name.lower() for name in allow_host)]
    own = _own_adapters(keys, settings.adapter_name)
    chat_keys = [key for key in keys or _chat_keys() if key not in own]
    access = Access(keys, hosts, allow_origin, chat_keys)
    limit_unused_memory()
    _allow_open_files()
    with listening(host, port) as sock:
        asyncio.run(_serve(settings, _longest(settings, flags), sock, host, access, own, as_json))


def _allow_open_files() -> None:
    """Let this process have OPEN_FILES open files and connections, if the system allows it. macOS starts
    programs with a limit of 256, and the server has more connections (ServerLimits)."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _keys(host: str, given: Sequence[str]) -> list[str]:
    """Return the API keys that the server accepts: the keys that the user gave, or else the saved keys, or
    else a new key. Return no keys if the user gave none and only programs on this machine can connect. A key
    of the chat app is the first."""
    from ..server.access import is_loopback
    from ..server.keys import check_key, saved_keys

    if given:
        return [check_key(key) for key in given]
    return [] if is_loopback(host) else [*dict.fromkeys([*_chat_keys(), *saved_keys()])]


def _own_adapters(keys: Sequence[str], in_use: str | None) -> dict[str, str]:
    """Return a mapping from a key to the adapter that only this key uses. Raise UsageError if the adapter in
    use, which serves all keys, belongs to one key alone."""
    from ..server.keys import key_file, own_adapters

    own = {key: adapter for key, adapter in own_adapters().items() if key in keys} if keys else {}
    if in_use in own.values():
        raise UsageError(f"{key_file()} gives {in_use} to one key; start with another --adapter, or none.")
    return own


def _chat_keys() -> list[str]:
    """Return the keys of the chat app in the data folder, where `chat --server` finds them. If the folder has
    no key, make a key."""
    from ..server.keys import new_key, saved_chat_keys

    return saved_chat_keys() or [new_key()]


async def _serve(
    settings: "Settings",
    longest: int | None,
    sock: socket.socket,
    host: str,
    access: "Access",
    own: dict[str, str],
    as_json: bool,
) -> None:
    from ruvmlx.host.host import Host
    from ruvmlx.host.model_holder import Opener

    from ..attach.route import Terminals
    from ..progress import watching
    from ..server.access import is_loopback
    from ..server.app import make_app
    from ..server.idle import IdleWork
    from ..server.installed import InstalledModels
    from ..server.keys import salt_digest
    from ..server.memory_looks import look_at
    from ..server.model_pool import ModelPool
    from ..server.requestlog import RequestLog
    from ..server.serving import Serving
    from ..server.spare_memory import spare_memory_returned
    from ..server.web import web_server

    def opens(model: str | None, adapter: str | None, watch: Watch) -> Any:
        return open_runtime(replace(settings, model=model, adapter=adapter or "none"), watch)

    opener = Opener(opens, settings.model, settings.adapter_name)
    model_host, installed = Host(opener), InstalledModels(settings)
    alias = settings.model or "starter"
    by_salt = {salt_digest(key): adapter for key, adapter in own.items()}
    serving = Serving(model_host, alias, longest, log=RequestLog(as_json=as_json), own_adapters=by_salt)
    unload, share = 60 * settings.server_unload, installed.share()
    models = ModelPool(serving, opener, installed, share, unload, settings.learn_when_idle)
    terminals = Terminals(models, is_loopback(host), settings.max_tokens)
    server = web_server(make_app(models, access, [terminals.route]), serving.limits, serving.log)
    with _signals(models, server):
        try:
            with watching() as watch:
                await model_host.open(watch)
            idle_work = IdleWork(serving, settings.learn_when_idle)
            async with models.running(), idle_work.running(), spare_memory_returned():
                adapter = (await look_at(models)).adapter
                _announce(serving, adapter, _url(host, sock), access, as_json, host in ("0.0.0.0", "::"))
                await server.serve(sockets=[sock])
        finally:
            await model_host.close()
    if not as_json:
        log("stopped.")


def _longest(settings: "Settings", flags: dict[str, Any]) -> int | None:
    """Return the maximum number of tokens of a reply, for requests without a limit. If the user did not set
    the limit, return None, and a reply can take all free tokens of the context."""
    return None if config.resolve(flags)["max_tokens"].origin == "default" else settings.max_tokens


@contextlib.contextmanager
def _signals(models: "ModelPool", server: "WebServer"):
    """In the `with` block, let Ctrl-C, SIGTERM, SIGHUP and `ruvmlx stop` end the server in order. After a
    second signal, the server does not wait for open connections. Under nohup, the server ignores SIGHUP."""

    def stop() -> None:
        server.force_exit = server.should_exit
        server.should_exit = True
        ending.set()
        models.stop()

    models.end = stop
    loop = asyncio.get_running_loop()
    taken = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        taken.append(signal.SIGHUP)
    for number in taken:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        ending.clear()
        for number in taken:
            loop.remove_signal_handler(number)


def _url(host: str, sock: socket.socket) -> str:
    """Return the server's address for programs on this machine."""
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{sock.getsockname()[1]}/v1"


def _announce(
    serving: "Serving",
    adapter: str | None,
    url: str,
    access: "Access",
    as_json: bool,
    is_open_to_all: bool = False,
) -> None:
    """Print the server's address and key once the model is ready. Only if the output is a terminal, the
    address of the page includes a key of the chat app. Another output can be a log that keeps the key, so it
    says where the keys are. is_open_to_all: True if the server listens on all addresses of this machine."""
    from ..server.keys import key_file

    keys = access.keys
    model = serving.model_name
    if as_json:
        key = keys[0] if keys else None
        facts = {"base_url": url, "api_key": key, "model": model, "adapter": adapter, "pid": os.getpid()}
        print_json(facts)
        return
    if caveat := serving.runtime.backend.caveat:
        log(f"note: {caveat}")
    learned = f"the adapter {adapter.replace('@', ', version ')}" if adapter else "nothing that was learned"
    show(f"{model} is ready at {url} with {learned}. Ctrl+C stops it.")
    if is_open_to_all:
        show("From another machine, put this machine's address in place of the one above.")
    # zsh, the shell of macOS, takes a comment as a command, so a ' in it would take the next lines as a text.
    show("# For a program with the API of OpenAI:")
    show_whole(f"export OPENAI_BASE_URL={url}")
    show_whole(f"export OPENAI_API_KEY={keys[0] if keys else 'none-needed'}")
    messages = json.dumps([{"role": "user", "content": "Hi"}])
    body = f'{{"model": {json.dumps(model)},\n       "messages": {messages}}}'
    key = '  -H "Authorization: Bearer $OPENAI_API_KEY" \\\n' if keys else ""
    show("# A first request:")
    show_whole(f"curl {url}/chat/completions \\\n{key}  -d {shlex.quote(body)}")
    where = "" if url == f"{SERVER}/v1" else f" {url.removesuffix('/v1')}"
    show("# A chat in another terminal:")
    show_whole(f"ruvmlx chat --server{where}")
    page = f"{url.removesuffix('/v1')}/"
    if not access.chat_keys:
        show(f"Your chats in a browser: {page}")
    elif is_terminal():
        key = quote(access.chat_keys[0])
        show(f"Your chats in a browser (the key in the address opens them): {page}#key={key}")
    else:
        where = f"one of --api-key, else one of {key_file()}"
        show(f"Your chats in a browser: {page}#key=KEY, with an API key in place of KEY: {where}.")


VERBS = [serve]
