"""The commands `pull`, `ls`, `models`, `show` and `rm` fetch, list, propose, show and delete models."""

import shlex
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ruvmlx.errors import UsageError
from ruvmlx.progress import parameters
from ruvmlx.text import one_line, size

from .completion_values import complete_fetched, complete_models
from .output import json_option, print_json
from .text_output import TableColumn, hint, say, short_path, table
from .text_output import facts as table_of_facts
from .verb import Verb

if TYPE_CHECKING:
    from ruvmlx.memory.load_plan import Fit
    from ruvmlx.memory.proposals import ModelOffer
    from ruvmlx.models.config.header_facts import Facts
    from ruvmlx.models.config.model import Model, ModelShape


def _facts(model: "Model | Facts") -> dict[str, Any]:
    return {
        "name": model.name,
        "path": str(model.path),
        "format": model.format,
        "bits": round(model.bits, 2),
        "parameters": model.parameters,
        "bytes": model.bytes,
    }


@click.command(cls=Verb)
@click.argument("name")
@json_option
def pull(name: str, as_json: bool) -> None:
    """Fetch a model from Hugging Face (owner/name) and check it. An interrupted download continues.

    Of GGUF files the one that suits this machine is taken; owner/name:Q5_K_M or owner/name/file.gguf names
    one.
    """
    from ruvmlx.models.find.resolve import REPO
    from ruvmlx.models.load import load_model

    from ..progress import watching

    if not REPO.fullmatch(name) and not Path(name).exists():
        raise UsageError(
            f"{name!r} is not of the form owner/name, which the models of huggingface.co have. An example: "
            "`ruvmlx pull mlx-community/Qwen3-0.6B-4bit`. `ruvmlx models` suggests models."
        )
    with watching(pull=True) as watch:
        model = load_model(name, watch)
    facts, fit = _facts(model), _fit(model)
    if as_json:
        print_json(facts | {"fit": _fit_facts(fit)})
    else:
        _show_model(facts, fit, whole="chat" if model.shape.writes else "text")
        say(f"Fetched {one_line(name)}." if watch.fetches else f"{one_line(name)} was here already.")
        use = (
            f"embed --model {shlex.quote(name)} TEXT" if model.embeds else f"chat --model {shlex.quote(name)}"
        )
        hint(f"`ruvmlx {use}` uses it.")


def _show_model(
    facts: dict[str, Any], fit: "Fit", more: Iterable[tuple[str, str]] = (), whole: str = "chat"
) -> None:
    """Print the facts of a model for people, as rounded numbers with units. fit: how the model fits into
    memory. more: other rows (name, value), which come after the size. whole: what the model reads, "chat" or
    "text"."""
    of = f"{parameters(facts['parameters'])} weights of {facts['bits']:.1f} bits on average"
    table_of_facts([
        ("model", facts["name"]),
        ("size", f"{size(facts['bytes'])}: {of}"),
        *more,
        ("memory", fit.words(whole)),
        ("format", facts["format"]),
        ("files", short_path(facts["path"])),
    ])  # fmt: skip


@click.command("ls", cls=Verb)
@json_option
def list_models(as_json: bool) -> None:
    """List the models on this machine, those of ollama and LM Studio included."""
    from ruvmlx.models.find.local import list_local_models

    rows = list_local_models()
    fits = _fits_by_name()
    if as_json:
        print_json([row | {"fit": _fit_facts(fits.get(row["name"]))} for row in rows])
        return
    columns = [
        TableColumn("MODEL", style="bold"),
        TableColumn("SIZE", right=True),
        TableColumn("CONTEXT", right=True),
        TableColumn("FILES", cut=True),
    ]
    table(
        columns,
        [(row["name"], size(row["bytes"]), _fit_word(row, fits), short_path(row["path"])) for row in rows],
    )
    hint("CONTEXT is the longest chat that the model and this machine's memory allow.")
    if any(row["embeds"] for row in rows):
        hint("A model that embeds makes vectors of texts (`ruvmlx embed`); CONTEXT is its longest text.")
    hint("A token is a word or a part of one. `ruvmlx show NAME` has the whole path.")
    hint("`ruvmlx chat --model NAME` uses one; `ruvmlx models` suggests others.")


@click.command("models", cls=Verb)
@json_option
def propose_models(as_json: bool) -> None:
    """Show what this machine can run well: the models that are on it, then the best ones to fetch.

    Memory is that with 8,192 tokens of context. The speed is computed from this machine's memory bandwidth.
    """
    from ruvmlx.memory.proposals import installed_offers, proposals

    here, offers = installed_offers(), proposals()
    if as_json:
        print_json([asdict(offer) for offer in (*here, *offers)])
        return
    columns = [
        TableColumn("MODEL", style="bold", keep=False),
        *(TableColumn(name, right=True) for name in ("SIZE", "MEMORY", "TOKENS/S")),
        TableColumn("WHERE"),
        TableColumn("LICENCE"),
    ]
    table(columns, map(_offer_row, (*here, *offers)))
    hint("MEMORY includes a chat of 8,192 tokens. A token is a word or a part of one.")
    hint("TOKENS/S is the speed of writing, computed for this machine.")
    if any(":" in offer.name for offer in offers):
        hint("GGUF is a format of models. What follows the colon says how numbers are stored: Q4 is 4 bits.")
    if offers:
        hint("Of the models to fetch, the one that should write the best replies stands first.")
        hint("A smaller one writes faster.")
        hint(f"`ruvmlx pull {offers[0].name}` fetches the first one.")


def _offer_row(offer: "ModelOffer") -> tuple[str, ...]:
    from ruvmlx.models.find.starter import LICENCE, STARTER_NAMES

    of_installed = LICENCE if offer.name in STARTER_NAMES else "not known"
    where = ("here", of_installed) if offer.installed else ("to fetch", offer.licence)
    speed = float(f"{offer.tps_expected:.2g}")  # the speed is an estimate, so show two digits
    return offer.name, size(offer.size), size(offer.memory_at_8k), f"about {speed:,.0f}", *where


def _fit(model: "Model | Facts", backend: str = "auto") -> "Fit":
    """Return how a model fits into this machine's memory. backend: the name of the backend that would run the
    model."""
    from ruvmlx.backends.select import describe, for_model
    from ruvmlx.memory.load_plan import Fit
    from ruvmlx.models.config.header_facts import Facts

    facts = model if isinstance(model, Facts) else Facts.of(model)
    return Fit.of(facts, for_model(describe(backend), backend, facts.shape))


def fit_words(name: str | None, backend: str = "auto") -> str:
    """Return one line that says how a model fits into this machine's memory. The line is an estimate; the
    verb `show --memory` opens the model and measures its memory. backend: as in `_fit`."""
    from ruvmlx.models.load import load_model

    model = load_model(name)
    return _fit(model, backend).words("chat" if model.shape.writes else "text")


def _fits_by_name() -> "dict[str, Fit]":
    from ruvmlx.models.find.local import readable_models

    return {facts.name: _fit(facts) for facts in readable_models()}


def _fit_word(row: dict[str, Any], fits: "dict[str, Fit]") -> str:
    fit = fits.get(row["name"])
    if row["problem"]:
        return "cannot run"
    if fit is None:
        return ""
    if not fit.fits:
        return "too large"
    return f"{'embeds, ' if row['embeds'] else ''}{fit.longest_context:,} tokens"


def _fit_facts(fit: "Fit | None") -> dict[str, Any] | None:
    return None if fit is None else asdict(fit) | {"fits": fit.fits}


@click.command("show", cls=Verb)
@click.argument("name", default="starter", shell_complete=complete_models)
@click.option(
    "--memory", is_flag=True, help="Open it, and show its memory by purpose: planned, in use, limit."
)
@click.option("--details", is_flag=True, help="Also the family, the layers, and the types of the matrices.")
@json_option
def show_model(name: str, memory: bool, details: bool, as_json: bool) -> None:
    """Show one model's files and whether it fits this machine, or the plan of its memory."""
    if memory:
        _show_memory(name, as_json)
        return
    from ruvmlx.backends.matrix_types import matrix_types
    from ruvmlx.models.config.model import missing_features
    from ruvmlx.models.load import load_model

    model = load_model(name)
    fit, types = _fit(model), matrix_types(model)
    facts = _facts(model) | {"fingerprint": model.fingerprint}
    note = {} if model.is_own else {"note": missing_features(model.shape)}
    if as_json:
        facts |= {"config": _config_facts(model.shape)} | note
        print_json(facts | {"fit": _fit_facts(fit), "matrix_types": [vars(kind) for kind in types]})
        return
    more = [*_shape_rows(model.shape), *((kind.type, str(kind)) for kind in types)] if details else []
    whole = "chat" if model.shape.writes else "text"
    _show_model(facts, fit, [*note.items(), *more], whole)
    if not details:
        more_facts = f"`ruvmlx show {shlex.quote(name)} --details`"
        hint(f"{more_facts} also shows its layers and the types of its numbers.")


def _show_memory(name: str, as_json: bool) -> None:
    from ruvmlx.memory import memory_plan

    from .options import open_runtime, resolve

    with open_runtime(resolve({"model": name})) as runtime:
        rows = runtime.memory_purposes()
    if as_json:
        print_json({"name": runtime.model.name, "memory": memory_plan.facts(rows)})
        return
    columns = [
        TableColumn("WHAT FOR"),
        *(TableColumn(name, right=True) for name in ("PLANNED", "NOW", "LIMIT")),
    ]
    table(columns, memory_plan.table(rows))


def _config_facts(shape: "ModelShape") -> dict[str, Any]:
    """Return the fields of the model's shape (the sizes and kinds of its layers). Scripts still use older
    names of some fields, so the dict has the older names, too."""
    from ruvmlx.models.config.model import ModelConfig
    from ruvmlx.models.config.rope_scaling import LinearRope

    if not isinstance(shape, ModelConfig):
        return asdict(shape)
    linear = shape.rope_scaling.factor if isinstance(shape.rope_scaling, LinearRope) else 1.0
    return asdict(shape) | {
        "attention_bias": "q_proj" in shape.biases,
        "mlp_bias": "up_proj" in shape.biases,
        "rope_linear_factor": linear,
    }


def _shape_rows(shape: "ModelShape") -> list[tuple[str, str]]:
    """Return rows (name, value) about the model's layers, for people who compare models."""
    from ruvmlx.models.config.model import ModelConfig

    rows = [
        ("family", shape.model_type),
        ("layers", f"{shape.n_layers}, which pass on {shape.hidden_size:,} numbers for each token"),
        ("vocabulary", f"{shape.vocab_size:,} tokens (words and parts of words)"),
        ("context", f"{shape.max_context:,} tokens at most, as its makers trained it"),
    ]
    if not isinstance(shape, ModelConfig):
        return rows
    heads = f"{shape.n_heads} that look back (query), {shape.n_kv_heads} that are looked at (key and value)"
    return [*rows, ("heads", f"{heads}, of {shape.head_dim} numbers, in each layer")]


@click.command("rm", cls=Verb)
@click.argument("name", shell_complete=complete_fetched)
@json_option
def remove_model(name: str, as_json: bool) -> None:
    """Delete a fetched model (owner/name) from the Hugging Face cache."""
    from ruvmlx.models.find.hub import repo_folder
    from ruvmlx.models.find.resolve import REPO

    asked = REPO.fullmatch(name)
    if asked and asked["repo"] != name:
        raise UsageError(f"rm deletes a repository with all its files: `ruvmlx rm {asked['repo']}`.")
    folder = repo_folder(name)
    if "/" not in name or not folder.is_dir():
        raise UsageError(
            f"there is no {name} among the models that `ruvmlx pull` fetched, so there is nothing to delete. "
            "`ruvmlx ls` lists all models."
        )
    freed = sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())
    shutil.rmtree(folder)
    if as_json:
        print_json({"name": name, "bytes": freed})
    else:
        say(f"Deleted {name} with all its files: {size(freed)} are free again.")


VERBS = [pull, list_models, propose_models, show_model, remove_model]
