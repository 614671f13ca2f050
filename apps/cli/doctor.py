"""The command `ruvmlx doctor` checks this installation of ruvmlx. The command can also write a report on the
machine and the checks, which the user can send to other people."""

import shlex
import shutil
import stat
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ruvmlx import __version__, settings
from ruvmlx.errors import RuvmlxError, UsageError
from ruvmlx.settings import Settings
from ruvmlx.text import backend_in_words, size

from .number_types import WholeNumber
from .options import require_new_file
from .output import json_option, log, print_json, show
from .path_types import NewPath
from .text_output import TableColumn, count, hint, short_paths, table
from .verb import Verb

if TYPE_CHECKING:
    from ruvmlx.store import Store

ENOUGH_DISK = 50_000_000  # bytes


def _settings() -> Settings:
    """Return the settings that apply. With the model `auto`, the largest of its models takes its place."""
    from ruvmlx.memory.candidates import single_model

    return single_model(settings.load())


def _python() -> str:
    return f"ruvmlx {__version__}, Python {sys.version.split()[0]}, {sys.platform}"


def _library() -> str:
    from ruvmlx.kernels import layers, matmul
    from ruvmlx.kernels.library import implementations, registry

    found = registry() | dict.fromkeys(layers.KERNELS, implementations()[0])
    found["matmul"] = matmul.implementations()[0]
    used = Counter(found.values()).most_common()
    kinds = ", ".join(f"{n} with {impl}" for impl, n in used)
    return f"{count(len(found), 'function')} in C, for this CPU: {kinds}"


def _backend() -> str:
    from ruvmlx.backends.select import describe

    choice = describe(settings.load().backend)
    return f"{backend_in_words(choice.name, choice.kernels)}: {choice.why}"


def _gpu_kernels() -> str:
    """Check the GPU kernels with the shapes of the model in use. If this model cannot be opened, use the
    shapes of the starter model (the small model for the first start)."""
    from ruvmlx.platform.gpu import gpu

    if not gpu.kind:
        return "no GPU: kernels not checked here"
    from ruvmlx.backends.mlx.gpu_check import check

    from ..progress import watching

    with watching() as watch:
        verdict = check(_shapes(), watch, fresh=True)
    words = "; ".join(result.words for result in verdict.results)
    if verdict.caveat:
        raise RuvmlxError(words)
    return words if verdict.kernels_work else f"{words}; there is no kernel of ours for this head size"


def _shapes() -> Any:
    from ruvmlx.backends.mlx.backend import shapes_of
    from ruvmlx.backends.mlx.check_results import STARTER
    from ruvmlx.models.load import load_model

    try:
        return shapes_of(load_model(_settings().model))
    except RuvmlxError:  # the check of the model reports this error
        return STARTER


def _with_store(check: Callable[["Store"], str]) -> Callable[[], str]:
    """Return a function that opens the store, runs the check on the store, and closes the store."""

    def run() -> str:
        from ruvmlx.store import Store

        with closing(Store(settings.store_file())) as store:
            return check(store)

    return run


@_with_store
def _store(store: "Store") -> str:
    found = store.integrity()
    if found != "ok":
        raise RuvmlxError(f"{store.path}: {found}")
    return f"{store.path}: {count(len(store.chats.all()), 'chat')}"


def _privacy() -> str:
    """Raise RuvmlxError if other users of the machine can read the data folder."""
    home = settings.home()
    mode = stat.S_IMODE(home.stat().st_mode) if home.exists() else 0o700
    if mode & 0o077:
        raise RuvmlxError(
            f"others can look into {home} (mode {mode:o}): `chmod 700 {shlex.quote(str(home))}`"
        )
    return f"only you can read {home}"


def _disk_space() -> str:
    """Raise RuvmlxError if the disk of the data folder is so full that chats can soon not be saved."""
    home = settings.home()
    free = shutil.disk_usage(next(p for p in (home, *home.parents) if p.exists())).free
    if free < ENOUGH_DISK:
        raise RuvmlxError(
            f"{size(free)} are free for {home}, less than {size(ENOUGH_DISK)}: chats and ratings can soon "
            "not be saved. Make room on this disk"
        )
    return f"{size(free)} free for {home}"


@_with_store
def _deleted_chats(store: "Store") -> str:
    """Erase deleted chats that nobody can restore any more, as each start of ruvmlx does."""
    from ruvmlx.chats import soft_delete

    if failed := soft_delete.delete_older(store):
        raise RuvmlxError("; ".join(failed))
    waiting = len(store.chats.soft_deleted())
    return f"{waiting} can be restored" if waiting else "none waits to be erased"


def _kv_caches() -> str:
    from ruvmlx.kv.disk import CacheFolder

    folder, limit = CacheFolder.of_store(settings.store_file()), settings.load().kv_disk or 0
    chats, nbytes = folder.contents()
    return f"{folder.path}: caches of {count(chats, 'chat')}, {size(nbytes)} of {size(limit << 20)}"


def _memory() -> str:
    from .models import fit_words

    try:
        chosen = _settings()
        return fit_words(chosen.model, chosen.backend)
    except RuvmlxError:  # the check of the model reports this error
        return "not known without the model"


def _model() -> str:
    from ruvmlx.models.load import load_model

    model = load_model(_settings().model)
    return f"{model.name} ({size(model.bytes)}) at {model.path}"


@_with_store
def _adapter(store: "Store") -> str:
    from ruvmlx.engine.model_identity import identify
    from ruvmlx.lora import MicroLoRA
    from ruvmlx.lora.layer_lora import unpack_layers
    from ruvmlx.models.load import load_model
    from ruvmlx.sona.adapter_history import AdapterHistory

    name = settings.load().adapter
    model = identify(store, load_model(_settings().model), claim=False)
    history = AdapterHistory(store, model.fingerprint, name)
    if version := history.version():
        row = history.adapter(version)
        MicroLoRA.from_bytes(row.state, model.shape.hidden_size, model.shape.vocab_size)
        unpack_layers(row.state, model.shape)
        if row.base:
            history.base(row.base).check(model.shape)
    if not version:
        return f"{name}: nothing is learned yet"
    return f"{name}, version {version}, {count(len(history.ratings()), 'rating')}"


@_with_store
def _witness(store: "Store") -> str:
    from ruvmlx.store.audit import disagreement

    chain = store.witness.check()
    if chain.broken is not None:
        raise RuvmlxError(f"the witness log breaks at row {chain.broken}: {chain.why}")
    if wrong := disagreement(store):
        raise RuvmlxError(f"the store and its witness log disagree: {wrong}")
    return (
        f"{count(chain.rows, 'row')}, unbroken: nobody changed a row afterwards; the last row's hash begins "
        f"with {chain.head[:16]}"
    )


def _sides() -> str:
    """Open both sides of the hybrid backend. Return which side does which work at which cost, or which layers
    each side has."""
    from ruvmlx.backends.hybrid.backend import HybridBackend
    from ruvmlx.backends.hybrid.placement import plan_words
    from ruvmlx.backends.select import open_backend
    from ruvmlx.models.load import load_model

    chosen = _settings()
    backend = open_backend("hybrid", load_model(chosen.model), chosen.threads)
    if not isinstance(backend, HybridBackend):
        return f"two copies of the model do not fit, so its layers are divided: {backend.kernels}"
    if failures := backend.take_failures():
        raise RuvmlxError("; ".join(failure.line for failure in failures))
    return plan_words(backend.placement)


_CHECKS: dict[str, Callable[[], str]] = {
    "installation": _python,
    "native library": _library,
    "backend": _backend,
    "GPU kernels": _gpu_kernels,
    "store": _store,
    "privacy": _privacy,
    "disk space": _disk_space,
    "deleted chats": _deleted_chats,
    "witness log": _witness,
    "KV caches": _kv_caches,
    "model": _model,
    "memory": _memory,
    "adapter": _adapter,
}


_LABELS = {"witness log": "log"}  # names of checks in JSON -> words for people


@click.command(cls=Verb)
@click.option(
    "--report",
    "file",
    type=NewPath(dir_okay=False, path_type=Path),
    help="Also measure, and write a report for others, without your words, names or paths.",
)
@click.option(
    "--seconds",
    type=WholeNumber(10, 3600),
    default=150,
    show_default=True,
    help="Longest time that --report may measure.",
)
@click.option(
    "--export-metal",
    type=NewPath(path_type=Path),
    metavar="DIR",
    help="Write the Metal source of every GPU kernel to DIR instead.",
)
@json_option
def doctor(file: Path | None, seconds: int, export_metal: Path | None, as_json: bool) -> None:
    """Check the installation, the store, the model and the kernels."""
    if export_metal is not None and file:
        raise UsageError("--export-metal and --report do not go together; run one command for each.")
    if export_metal is not None:
        _export_metal(export_metal, as_json)
        return
    if file:
        require_new_file("--report", file)
    wanted = _CHECKS | ({"sides": _sides} if settings.load().backend == "hybrid" else {})
    checks = [_run_check(name, check) for name, check in wanted.items()]
    if file:
        _report(checks, file, seconds, as_json)
    elif as_json:
        print_json({"checks": [{k: v for k, v in c.items() if k != "error"} for c in checks]})
    if not as_json:
        columns = [TableColumn(""), TableColumn("CHECK", style="bold"), TableColumn("FOUND", keep=False)]
        shown = _without_repeats(checks)
        table(columns, [(_mark(c), _label(c), short_paths(c["detail"])) for c in shown])
        hint(_summary(sum(not c["ok"] for c in shown)))
    if not all(c["ok"] for c in checks):
        raise click.exceptions.Exit(1)


def _summary(failed: int) -> str:
    """Return the line below the checks. failed: the number of checks that failed."""
    if not failed:
        return "All is well."
    where = "its line says" if failed == 1 else "their lines say"
    return f"{count(failed, 'check')} failed; {where} what to do."


def _label(check: dict[str, Any]) -> str:
    return _LABELS.get(check["name"], check["name"])


def _without_repeats(checks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the checks for people. A check that failed with the same words as an earlier check counts as not
    checked, and names the earlier check."""
    first: dict[str, str] = {}
    shown = []
    for check in checks:
        before = None if check["ok"] else first.get(check["detail"])
        if not check["ok"]:
            first.setdefault(check["detail"], _label(check))
        shown.append(check | {"ok": True, "detail": f"not checked: see {before}"} if before else check)
    return shown


def _mark(check: dict[str, Any]) -> str:
    """Return the mark of a check for people: "ok", "FAIL", or "-" if nothing was checked."""
    if not check["ok"]:
        return "FAIL"
    return "-" if "not checked" in check["detail"] or check["detail"].startswith("not known") else "ok"


def _report(checks: list[dict[str, Any]], file: Path, seconds: int, as_json: bool) -> None:
    from ruvmlx.chats.chat_file import write_new
    from ruvmlx.models.load import load_model

    from ..report.make import make
    from ..report.page import markdown

    report = make(checks, lambda: load_model(_settings().model), seconds, log)
    write_new(file, markdown(report))
    log(f"wrote {file}; read it before you send it")
    if as_json:
        print_json(report)


def _export_metal(folder: Path, as_json: bool) -> None:
    from ruvmlx.backends.mlx.kernels.export import export

    files = export(folder)
    if as_json:
        print_json({"folder": folder, "files": [file.name for file in files]})
    else:
        show(f"{len(files)} Metal sources in {folder}")


def _run_check(name: str, check: Callable[[], str]) -> dict[str, Any]:
    """Run one check of the installation. If the check raises an exception, return it as the result of the
    check, so that the other checks still run."""
    try:
        return {"name": name, "ok": True, "detail": check()}
    except Exception as e:  # noqa: BLE001 - see the docstring
        return {"name": name, "ok": False, "detail": " ".join(str(e).split()) or type(e).__name__, "error": e}


VERBS = [doctor]
