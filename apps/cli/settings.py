"""`config` and `doctor`: how this installation is set up, and whether it is sound."""

import sys
from collections.abc import Callable
from typing import Any

import click

from ruvmlx import __version__
from ruvmlx import config as settings
from ruvmlx.errors import RuvmlxError

from .output import json_option, print_json, show, show_facts


@click.group()
def config() -> None:
    """Settings."""


@config.command("show")
@click.option("--origin", is_flag=True, help="Say where each value comes from.")
@json_option
def show_settings(origin: bool, as_json: bool) -> None:
    """All settings as they are in force here."""
    found = settings.load()
    if as_json:
        print_json({k: {"value": s.value, "origin": s.origin} for k, s in found.items()})
        return
    show_facts({k: f"{s.value}  ({s.origin})" if origin else s.value for k, s in found.items()})


@config.command("set")
@click.argument("name")
@click.argument("value")
def set_setting(name: str, value: str) -> None:
    """Write one value to the user's file."""
    show(f"{name} = {value} in {settings.save(name, value)}")


@config.command("path")
def paths() -> None:
    """Where data and settings lie."""
    show_facts({"data": settings.home(), "settings": settings.user_file(), "store": settings.store_file()})


def _python() -> str:
    return f"ruvmlx {__version__}, Python {sys.version.split()[0]}, {sys.platform}"


def _library() -> str:
    from ruvmlx.kernels.library import registry

    return ", ".join(sorted({f"{name}: {impl}" for name, impl in registry().items()}))


def _backend() -> str:
    from ruvmlx.backends.select import describe

    choice = describe(settings.load()["backend"].value)
    named = choice.kernels.startswith(choice.name)  # "native avx512vnni, 2 threads" says it already
    return f"{choice.kernels if named else f'{choice.name} on {choice.kernels}'}: {choice.why}"


def _store() -> str:
    from ruvmlx.store import Store

    store = Store(settings.store_file())
    found = store.integrity()
    if found != "ok":
        raise RuvmlxError(f"{store.path}: {found}")
    return f"{store.path}: {len(store.sessions())} chats"


def _model() -> str:
    from ruvmlx.models.load import load_model

    model = load_model(settings.load()["model"].value)
    return f"{model.name} ({model.parameters / 1e6:.0f} M parameters, {model.bits:.1f} bits) at {model.path}"


_CHECKS: dict[str, Callable[[], str]] = {
    "installation": _python,
    "native library": _library,
    "backend": _backend,
    "store": _store,
    "model": _model,
}


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Check the installation, the store, the model and the kernels."""
    checks = [_checked(name, check) for name, check in _CHECKS.items()]
    if as_json:
        print_json({"checks": checks})
    else:
        for c in checks:
            show(f"{'ok  ' if c['ok'] else 'FAIL'}  {c['name']:<14}  {c['detail']}")
    if not all(c["ok"] for c in checks):
        raise click.exceptions.Exit(1)


def _checked(name: str, check: Callable[[], str]) -> dict[str, Any]:
    """A broken part must not hide the state of the others: whatever it raises is its result."""
    try:
        return {"name": name, "ok": True, "detail": check()}
    except Exception as e:  # noqa: BLE001 - see above
        return {"name": name, "ok": False, "detail": " ".join(str(e).split()) or type(e).__name__}


VERBS = [config, doctor]
