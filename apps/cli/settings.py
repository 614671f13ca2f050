"""`config` and `doctor`: how this installation is set up, and whether it is sound."""

import sys
from collections.abc import Callable
from typing import Any

import click

from ruvmlx import __version__
from ruvmlx import config as settings
from ruvmlx.errors import RuvmlxError

from .output import json_option, log, print_json, show, show_facts

_WITNESSED = (
    "adapter", "kv", "kv_tiers", "kv_limit", "kv_budget", "implicit_feedback", "learn_when_idle", "examples",
    "router", "learn_targets",
)  # fmt: skip


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
    shown = {k: "-" if s.value is None else s.value for k, s in found.items()}
    show_facts({k: f"{v}  ({found[k].origin})" if origin else v for k, v in shown.items()})


@config.command("set", context_settings={"ignore_unknown_options": True})  # -1 is a value
@click.argument("name")
@click.argument("value")
def set_setting(name: str, value: str) -> None:
    """Write one value to the user's file."""
    show(f"{name} = {value} in {settings.save(name, value)}")
    note_setting(name, value)


def note_setting(name: str, value: str) -> None:
    """Settings that decide what is learned, or how caches are kept, go into the witness log."""
    from ruvmlx.store import Store

    if name not in _WITNESSED:
        return
    try:
        Store(settings.store_file()).note("setting", {"name": name, "value": value})
    except RuvmlxError as e:  # the setting is saved already
        log(f"note: the witness log could not be written: {e}")


@config.command("path")
@json_option
def paths(as_json: bool) -> None:
    """Where data and settings lie."""
    facts = {"data": settings.home(), "settings": settings.user_file(), "store": settings.store_file()}
    if as_json:
        print_json(facts)
    else:
        show_facts(facts)


def _python() -> str:
    return f"ruvmlx {__version__}, Python {sys.version.split()[0]}, {sys.platform}"


def _library() -> str:
    from ruvmlx.kernels import decoder, layers
    from ruvmlx.kernels.library import implementations, registry

    found = registry() | dict.fromkeys(layers.KERNELS, implementations()[0])
    found["matmul"] = decoder.matmul_implementations()[0]
    return ", ".join(sorted({f"{name}: {impl}" for name, impl in found.items()}))


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


def _kv_caches() -> str:
    from ruvmlx.kv.disk import CacheFolder
    from ruvmlx.memory import size

    folder, limit = CacheFolder.beside(settings.store_file()), settings.load()["kv_disk"].value
    chats, nbytes = folder.contents()
    return f"{folder.path}: {chats} chat{'s' * (chats != 1)}, {size(nbytes)} of {size(limit << 20)}"


def _model() -> str:
    from ruvmlx.models.load import load_model

    model = load_model(settings.load()["model"].value)
    return f"{model.name} ({model.parameters / 1e6:.0f} M parameters, {model.bits:.1f} bits) at {model.path}"


def _adapter() -> str:
    from ruvmlx.lora import MicroLoRA
    from ruvmlx.lora.body import unpacked_body
    from ruvmlx.models.load import load_model
    from ruvmlx.sona.ledger import Ledger
    from ruvmlx.store import Store

    name = settings.load()["adapter"].value
    model = load_model(settings.load()["model"].value)
    ledger = Ledger(Store(settings.store_file()), model.fingerprint, name)
    if version := ledger.version():
        row = ledger.adapter(version)
        MicroLoRA.from_bytes(row.state, model.config.hidden_size, model.config.vocab_size)
        unpacked_body(row.state, model.config)
        if row.base:
            ledger.base(row.base).check(model.config)
    return f"{name}, version {version}, {len(ledger.ratings())} ratings"


def _witness() -> str:
    from ruvmlx.store import Store
    from ruvmlx.store.audit import disagreement

    store = Store(settings.store_file())
    chain = store.check_chain()
    if chain.broken is not None:
        raise RuvmlxError(f"the witness log breaks at row {chain.broken}: {chain.why}")
    if wrong := disagreement(store):
        raise RuvmlxError(f"the store and its witness log disagree: {wrong}")
    return f"{chain.rows} rows, unbroken; the last hash begins with {chain.head[:16]}"


_CHECKS: dict[str, Callable[[], str]] = {
    "installation": _python,
    "native library": _library,
    "backend": _backend,
    "store": _store,
    "witness log": _witness,
    "KV caches": _kv_caches,
    "model": _model,
    "adapter": _adapter,
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
