"""The commands `ruvmlx serve --install` and `serve --uninstall` write or remove a service file. With this
file, launchd or systemd starts the server at each login."""

import os
import plistlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from click.core import ParameterSource

from ruvmlx.errors import RuvmlxError, UsageError
from ruvmlx.platform.files import make_folder, remove, replacing

from .output import log, show, show_whole

LABEL = "ruvmlx.serve"
SECRET = "RUVMLX_API_KEY"
# variables beside RUVMLX_* that say where the data and the models are
PLACES = (
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "OLLAMA_MODELS", "LMSTUDIO_MODELS",
    "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME",
)  # fmt: skip


@dataclass(frozen=True)
class Service:
    """The service file, and the commands with which the user starts and stops the service."""

    path: Path
    text: str
    start: str
    stop: str


def command_of(context: click.Context) -> list[str]:
    """Return the words of the present command line, without the flags --install and --uninstall."""
    words = [sys.executable, "-m", "ruvmlx", "serve"]
    for param in context.command.params:
        name = param.name or ""
        given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if isinstance(param, click.Option) and given and name not in ("install", "uninstall"):
            words += _flag(param, context.params.get(name))
    return words


def _flag(option: click.Option, value: object) -> list[str]:
    """Return an option and its value as words of a command line."""
    name = max(option.opts, key=len)
    if option.is_flag:
        return [name if value else max(option.secondary_opts, key=len)]
    values = value if isinstance(value, tuple) else (value,)
    return [word for each in values for word in (name, str(each))]


def service(words: Sequence[str], environment: Mapping[str, str], folder: Path) -> Service:
    """Return the service file for this operating system. words: the command line of the service. environment:
    environment variables; the service gets those that change `ruvmlx serve`, except the API key. folder: the
    working folder of the service."""
    variables = _own_variables(environment)
    if sys.platform == "darwin":
        return _launchd(words, variables, folder)
    return _systemd(words, variables, folder)


def _own_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the service gets, in the order of their names."""
    ours = {name for name in environment if name in PLACES or name.startswith("RUVMLX_")} - {SECRET}
    return {name: environment[name] for name in sorted(ours)}


def _launchd(words: Sequence[str], environment: Mapping[str, str], folder: Path) -> Service:
    path = Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    facts = {
        "Label": LABEL,
        "ProgramArguments": [*words],
        "EnvironmentVariables": dict(environment),
        "WorkingDirectory": str(folder),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ProcessType": "Interactive",
        "StandardOutPath": "/dev/null",  # stdout begins with the API key, which must not be in a log
        "StandardErrorPath": str(Path.home() / "Library" / "Logs" / f"{LABEL}.log"),
    }
    domain = f"gui/{os.getuid()}"
    start = f"launchctl bootstrap {domain} {shlex.quote(str(path))}"
    return Service(path, plistlib.dumps(facts).decode(), start, f"launchctl bootout {domain}/{LABEL}")


def _systemd(words: Sequence[str], environment: Mapping[str, str], folder: Path) -> Service:
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    path = Path(base) / "systemd" / "user" / f"{LABEL}.service"
    lines = [
        "[Unit]",
        "Description=ruvmlx serve",
        "",
        "[Service]",
        "ExecStart=" + " ".join(_quote(word) for word in words),
        *(f"Environment={_quote(f'{name}={value}', dollar='$')}" for name, value in environment.items()),
        # systemd reads this path without unquoting it, so the path must not have quotes.
        "WorkingDirectory=" + str(folder).replace("%", "%%"),
        "StandardOutput=null",  # stdout begins with the API key, which must not be in a log
        "Restart=on-failure",
        "",
        "[Install]",
        "WantedBy=default.target",
        "",
    ]
    unit = f"{LABEL}.service"
    start = f"systemctl --user daemon-reload && systemctl --user enable --now {unit}"
    stop = f"systemctl --user disable --now {unit}"
    return Service(path, "\n".join(lines), start, stop)


def _quote(word: str, dollar: str = "$$") -> str:
    """Return a word of the command line, quoted for systemd. dollar: the text that stands for a dollar sign
    at this place of the file."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", dollar)
    return f'"{escaped}"'


def install(context: click.Context) -> None:
    """Show the service file, ask the user, write the file, and say how to start the service."""
    if (
        context.params.get("api_key")
        and context.get_parameter_source("api_key") is ParameterSource.COMMANDLINE
    ):
        raise UsageError(
            "--install: an API key does not go into a file that starts programs. Leave --api-key out: "
            "beyond this machine, the service makes and keeps a key of its own."
        )
    words = command_of(context)
    if _has_line_end(words):
        raise UsageError("--install: a flag or a variable of the service has a line end in it; remove it.")
    found = service(words, os.environ, Path.cwd())
    show(f"{found.path} will have this:")
    click.echo(found.text)
    if not _agrees("Write it?"):
        log("nothing was written.")
        return
    _write(found)
    show_whole(f"written. To start the server now, and at every login:\n  {found.start}")
    show("To remove it: `ruvmlx serve --uninstall`")


def _agrees(question: str) -> bool:
    """Ask the user, and return the answer. Raise UsageError if standard input ends before the answer."""
    try:
        return click.confirm(question, default=False)
    except click.Abort as error:
        if not isinstance(error.__context__, EOFError):
            raise
        click.echo(err=True)
        raise UsageError(
            "standard input ended before the answer, so nothing was changed. To agree without a keyboard, "
            "write `echo y |` before the command."
        ) from None


def _has_line_end(words: Sequence[str]) -> bool:
    return any("\n" in text for text in (*words, *_own_variables(os.environ).values()))


def _write(found: Service) -> None:
    try:
        make_folder(found.path.parent, 0o777)
        with replacing(found.path) as file:
            file.write(found.text.encode())
    except OSError as error:
        raise RuvmlxError(f"cannot write {found.path}: {error.strerror}. Nothing was changed.") from None


def uninstall() -> None:
    """Say how to stop the service, ask the user, and remove the service file."""
    found = service([], {}, Path.cwd())
    if not found.path.exists():
        show(f"nothing to remove: there is no {found.path}.")
        return
    show_whole(f"To stop the server first:\n  {found.stop}")
    if not _agrees(f"Remove {found.path}?"):
        log("nothing was removed.")
        return
    try:
        remove(found.path)
    except OSError as error:
        raise RuvmlxError(f"cannot remove {found.path}: {error.strerror}.") from None
    show("removed.")
