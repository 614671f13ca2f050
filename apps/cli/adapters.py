"""The command `ruvmlx adapters` lists, switches, copies, exports, imports and deletes adapters. An adapter is
a named set of weights that the model learned from ratings."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ruvmlx import settings as config
from ruvmlx.errors import NotFound, StoreError, UsageError
from ruvmlx.settings import settings_file
from ruvmlx.text import one_line, size

from ..learning_words import share_text
from .completion_values import complete_adapters
from .options import BUILT_IN, load_model, resolve, setting_option, unknown_adapter
from .output import json_option, log, print_json, show
from .path_types import NewPath
from .settings import note_setting
from .text_output import TableColumn, count, hint, say, shell_path, table
from .verb import VerbGroup

_model = setting_option("model", "Model that the adapter belongs to; the starter model by default.")
_adapter = setting_option("adapter", "Use this adapter instead of the one in use.")


@click.group(cls=VerbGroup)
def adapters() -> None:
    """What was learned, kept under names: adapters."""


class _Open:
    """The chosen model and adapter, and the store. An object of this class loads no weights of the model."""

    def __init__(self, flags: dict[str, Any], reading: bool = False):
        """reading: True if the command changes nothing in the store, so that a read-only folder is no
        error."""
        from ruvmlx.engine.model_identity import identify
        from ruvmlx.store import Store

        settings = resolve(flags)
        self.store = Store(config.store_file(), reading)
        self.model = identify(self.store, load_model(settings.model), not reading)
        self.name = settings.adapter_name

    def require_name(self) -> str:
        """Return the name of the chosen adapter. Raise UsageError if the user chose no adapter (--adapter
        none)."""
        if self.name is None:
            raise UsageError(
                "--adapter none is the original model, which has learned nothing; name an adapter."
            )
        return self.name

    def change(self):
        """Return one BaseLoRA with the whole change that the adapter makes to the model's weights: the sum of
        the base LoRA, the layer LoRA and the micro LoRA of the adapter version in use."""
        from ruvmlx.lora import MicroLoRA
        from ruvmlx.lora.interchange import combine_adapter
        from ruvmlx.lora.layer_lora import combine_loras, unpack_layers
        from ruvmlx.sona.adapter_history import AdapterHistory

        name = self.require_name()
        row = self.row(name)
        if row.version == 0:
            raise UsageError(_empty(name))
        history, shape = AdapterHistory(self.store, self.model.fingerprint, name), self.model.shape
        found = history.adapter(row.version)
        base = history.base(found.base) if found.base else None
        base = combine_loras(base, unpack_layers(found.state, shape))
        return combine_adapter(base, MicroLoRA.from_bytes(found.state, shape.hidden_size, shape.vocab_size))

    def row(self, name: str) -> Any:
        """Return the stored row of an adapter. Raise NotFound if there is none. The adapter in use has no row
        until it learns something."""
        known = {row.name for row in self.store.adapters.all(self.model.fingerprint)}
        if name not in known and name == config.load().adapter:
            raise NotFound(_empty(name))
        return self.store.adapters.get(self.model.fingerprint, name)

    def facts(self, name: str) -> dict[str, Any]:
        return _facts(self.store, replace(self.row(name), model=self.model.name))


def _empty(name: str) -> str:
    return f"adapter {name!r} is empty: it has learned nothing yet. Rate some replies first."


def _facts(store: Any, row: Any) -> dict[str, Any]:
    in_use = row.name == config.load().adapter
    known = {"name": row.name, "base": row.model or row.fingerprint, "rank": _rank(store, row)}
    return known | {"version": row.version, "bytes": row.bytes, "in_use": in_use}


def _rank(store: Any, row: Any) -> int:
    """Return the larger of two ranks of the adapter version that the adapter `row` uses now: the rank of the
    micro LoRA, and the largest rank of the base LoRA. Return 0 for version 0."""
    from ruvmlx.lora.base_lora import BaseLoRA
    from ruvmlx.lora.micro_lora import stored_rank

    if row.version == 0:
        return 0
    found = store.versions.get(row.fingerprint, row.name, row.version)
    rank = stored_rank(found.state)
    if found.base:
        rank = max(rank, BaseLoRA.from_bytes(store.bases.get(row.fingerprint, row.name, found.base)).rank)
    return rank


def _stands_at(version: int) -> str:
    return f"version {version}" if version else "new, nothing learned yet"


NO_ADAPTER = "No adapter is in use now: the original model answers, and nothing is learned."
_PROGRAMS = {"peft": "PEFT, a library of Hugging Face", "mlx-lm": "the program mlx-lm"}


def _report(facts: dict[str, Any], as_json: bool, line: str) -> None:
    if as_json:
        print_json(facts)
    else:
        show(line)


@adapters.command("ls")
@json_option
def list_adapters(as_json: bool) -> None:
    """List the adapters of all models; * marks the one in use."""
    from ruvmlx.store import Store

    store = Store(config.store_file(), reading=True)
    rows = [_facts(store, row) for row in store.adapters.all()]
    if as_json:
        print_json(rows)
        return
    if not rows:
        say("No adapter has learned anything yet. An adapter keeps what the model learns from your ratings.")
        hint("Rate a reply in `ruvmlx chat`: the adapter in use, at first `default`, learns from it.")
        return
    columns = [
        TableColumn(""),
        TableColumn("ADAPTER", style="bold"),
        TableColumn("VERSION", right=True),
        TableColumn("SIZE", right=True),
        TableColumn("MODEL", cut=True),
    ]
    table(columns, [_row(row) for row in rows])
    star = "* is in use." if any(row["in_use"] for row in rows) else "None of these is in use."
    hint(f"{star} `ruvmlx adapters use NAME` switches. VERSION is the one in use.")
    hint("SIZE is that of all kept versions: most are differences, which are small. A copy begins with one.")


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    star = "*" if row["in_use"] else ""
    return (star, row["name"], str(row["version"]), size(row["bytes"]), one_line(row["base"]))


@adapters.command("use")
@click.argument("name", shell_complete=complete_adapters)
@click.option("--new", is_flag=True, help="NAME may be new: it starts from the original model.")
@_model
@json_option
def use_adapter(name: str, new: bool, as_json: bool, **flags: Any) -> None:
    """Use adapter NAME from now on; with none, nothing is learned."""
    config.parse("adapter", name, "the command line")
    opened = _Open({**flags, "adapter": name})
    known = [row.name for row in opened.store.adapters.all(opened.model.fingerprint)]
    if not new and name not in (*known, *BUILT_IN):
        raise UsageError(
            f"{unknown_adapter(name, known)} `ruvmlx adapters use {name} --new` creates it "
            "and uses it from then on."
        )
    if name not in (*known, *BUILT_IN):
        opened.store.adapters.begin(opened.model.fingerprint, name)
    path = settings_file.save("adapter", name)
    note_setting("adapter", name)
    setting = config.resolve_one("adapter")
    if setting.value != name:
        log(f"note: {setting.origin} says adapter = {setting.value}, which overrides {path}.")
    if name in known:
        facts = opened.facts(name)
    else:
        facts = {"name": name, "base": opened.model.name, "rank": 0, "version": 0, "bytes": 0}
    line = f"Adapter {name!r} is in use now: {_stands_at(facts['version'])}."
    _report(facts, as_json, NO_ADAPTER if name == "none" else line)


@adapters.command()
@click.argument("name")
@_model
@_adapter
@json_option
def save(name: str, as_json: bool, **flags: Any) -> None:
    """Copy the adapter in use to a new NAME, with its version and ratings."""
    config.parse("adapter", name, "the command line")
    opened = _Open(flags)
    if name == "none" or opened.name is None:
        raise UsageError("none is no adapter; give another name.")
    opened.store.adapters.copy(opened.model.fingerprint, opened.name, name)
    facts = opened.facts(name)
    _report(
        facts, as_json, f"Saved a copy of adapter {opened.name!r} as {name!r}, version {facts['version']}."
    )


@adapters.command()
@click.argument("folder", type=NewPath(path_type=Path))
@_model
@_adapter
@click.option(
    "--format",
    "kind",
    type=click.Choice(["mlx-lm", "peft"]),
    help="mlx-lm by default, if it can hold the change.",
)
@click.option(
    "--bits", type=click.Choice(["32", "4"]), default="32", help="4: packed; only `adapters import` reads it."
)
@click.option("--without-head", is_flag=True, help="Leave out the change of the output head.")
@json_option
def export(
    folder: Path, kind: str | None, bits: str, without_head: bool, as_json: bool, **flags: Any
) -> None:
    """Write the adapter in use as a FOLDER that mlx-lm or PEFT loads."""
    from ruvmlx.lora import interchange
    from ruvmlx.lora.base_lora import EMBEDDING
    from ruvmlx.lora.merge import HEAD

    opened = _Open(flags, reading=True)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"{folder} exists; name a new folder, or delete this one first.")
    change = opened.change()
    if without_head and change.pairs:
        change = replace(change, pairs={p: pair for p, pair in change.pairs.items() if p != HEAD})
        if not change.pairs:
            raise UsageError(
                "--without-head leaves nothing: this adapter changes only the output head. Leave it out."
            )
    tied = opened.model.shape.tie_word_embeddings and not change.pairs.keys().isdisjoint({HEAD, EMBEDDING})
    chosen = kind or ("peft" if tied and bits == "32" else "mlx-lm")
    model = opened.model
    interchange.export(change, model.shape, folder, chosen, int(bits), model.name, model.wrapped)
    nbytes = sum(p.stat().st_size for p in folder.iterdir())
    facts = {
        **opened.facts(opened.require_name()),
        "rank": change.rank,
        "bytes": nbytes,
        "format": chosen,
        "path": str(folder),
    }
    _report(
        facts,
        as_json,
        f"Wrote adapter {opened.require_name()!r} to the folder {folder}, in the format of "
        f"{_PROGRAMS[chosen]}."
        if bits == "32"
        else f"Wrote adapter {opened.require_name()!r} to the folder {folder}, packed with 4 bits a weight: "
        "only `ruvmlx adapters import` reads it.",
    )


@adapters.command("import")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("name")
@_model
@setting_option("backend", "Backend that measures it.")
@json_option
def import_adapter(folder: Path, name: str, as_json: bool, **flags: Any) -> None:
    """Import a FOLDER of mlx-lm or PEFT (or of `export --bits 4`) as NAME, and measure its distance from the
    model."""
    from ruvmlx.lora.interchange_reader import load
    from ruvmlx.sona.import_adapter import import_adapter
    from ruvmlx.sona.instant import KL_CAP

    from .options import open_runtime

    if config.parse("adapter", name, "the command line") == "none":
        raise UsageError("none is no adapter; give another name.")
    settings = resolve(flags)
    # read the folder before the model's weights, so that a bad folder causes an early error
    change = load(folder, load_model(settings.model).shape)
    with open_runtime(replace(settings, adapter=name), creates_adapter=True) as runtime:
        adopted = import_adapter(runtime.store, runtime.learning.require_learner(), change, name)
    if adopted.kl > KL_CAP:
        far = f"KL {adopted.kl:.2f}, allowed {KL_CAP} nats per token"
        log(f"note: it is too far from the original model ({far}); the first rating scales it down.")
    facts = _Open({**flags, "adapter": name}).facts(name) | {"kl": adopted.kl}
    _report(
        facts,
        as_json,
        f"Imported adapter {name!r}. Its change is {share_text(adopted.kl, KL_CAP)} of the allowed change.\n"
        f"`ruvmlx adapters use {name}` switches to it.",
    )


@adapters.command("rm")
@click.argument("name", shell_complete=complete_adapters)
@click.option("--force", is_flag=True, help="Delete it even if it is in use.")
@_model
@json_option
def remove(name: str, force: bool, as_json: bool, **flags: Any) -> None:
    """Delete an adapter and its ratings for good. The model stays as it is."""
    if name == config.load().adapter and not force:
        raise UsageError(_why_not_deleted(name))
    opened = _Open(flags)
    facts = opened.facts(name)
    ratings = len(opened.store.ratings.in_force(opened.model.fingerprint, name))
    opened.store.adapters.delete(opened.model.fingerprint, name)
    _report(facts, as_json, f"Deleted adapter {name!r}; it had {count(ratings, 'rating')}.")


def _why_not_deleted(name: str) -> str:
    """Return the error's text for an adapter that is in use. The text proposes to delete the adapter only
    if the adapter has learned something."""
    from ruvmlx.store import Store

    if not any(row.name == name for row in Store(config.store_file()).adapters.all()):
        return f"adapter {name!r} is empty: it has learned nothing yet. There is nothing to delete."
    return (
        f"adapter {name!r} is in use. `ruvmlx adapters use NAME` switches to another one; --force deletes "
        f"{name!r} anyway, with all that it learned."
    )


@adapters.command()
@click.argument("folder", type=NewPath(path_type=Path))
@_model
@_adapter
@click.option(
    "--dtype", type=click.Choice(["float16", "bfloat16", "float32"]), help="The model's own by default."
)
@click.option("--dequantize", is_flag=True, help="Write every matrix unquantised, for tools other than MLX.")
@json_option
def fuse(folder: Path, dtype: str | None, dequantize: bool, as_json: bool, **flags: Any) -> None:
    """Write the model, with what it learned, to a new FOLDER that mlx-lm can load."""
    from ruvmlx.engine.model_identity import identify
    from ruvmlx.lora.fuse import fuse as write

    opened = _Open(flags, reading=True)
    change = opened.change()
    with suppress(StoreError):  # the new model can have the fingerprint of this one
        identify(opened.store, opened.model)
    write(opened.model, change, folder, dtype, dequantize)
    nbytes = sum(p.stat().st_size for p in folder.iterdir())
    facts = {**opened.facts(opened.require_name()), "rank": change.rank, "bytes": nbytes, "path": str(folder)}
    if as_json:
        print_json(facts)
    else:
        say(f"Wrote {folder}: the model with what the adapter {opened.name!r} learned, {size(nbytes)}.")
        if nbytes > (was := opened.model.bytes):
            hint(f"It is larger than the model ({size(was)}): the changed weights have more bits.")
        command = f"ruvmlx chat --model {shell_path(folder)}"
        hint(f"`{command}` chats with it. The adapter is not applied twice.")


VERBS = [adapters]
