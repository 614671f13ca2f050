"""This module finds a model's files in a Hugging Face repository, first in huggingface-hub's cache on this
machine, then on the hub."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ModelNotFound, RuvmlxError
from ...platform import cpu
from ...platform.files import NO_LOCKS, make_folder, read_ordinary
from ...progress import QUIET, Watch, Worker
from ..config.encoder import GGUF_ENCODERS, folder_encoder, is_encoder
from ..config.families import families_of
from ..config.header_facts import Facts
from ..config.hf_config import config_from_json
from ..config.layout import parameter_count
from ..config.other_models import runs, runs_elsewhere, shape_from_json
from ..files.error_text import one_line
from ..files.json_files import MAX_BYTES, parse_json, read_object
from ..weights.own_layouts import refuse_own_layout
from .starter import starter_path
from .variants import (
    GGUFVariant,
    best_variant,
    choose_variant,
    named_variant,
    variant_names,
    variants,
    variants_in,
)

if TYPE_CHECKING:
    from .fetching import Listing


def fetch(name: str, watch: Watch = QUIET, wanted: str = "") -> Path:
    """Return the path of a repository's folder of safetensors files, or of one of the repository's GGUF
    files. If the cache does not have the files, download them. A download that was interrupted before
    continues where it stopped.

    wanted: the path of a GGUF file in the repository, or its type ("Q5_K_M"). If `wanted` is "", the function
        takes a safetensors folder in the cache, else a GGUF file in the cache, else the repository's
        safetensors files, else the repository's GGUF file of the best type that fits into this machine's
        memory.
    watch: an object whose method `note_facts` (`note_choice` for a GGUF file) is called before the download,
        and which then receives the progress. If the watch raises an exception, the download stops, and its
        bytes stay in the cache.
    """
    here = cached_files(name, wanted)
    if here:
        return here
    if offline():
        which = f", file {wanted!r}," if wanted else ""
        raise ModelNotFound(
            f"model {name!r}{which} is not in the cache and HF_HUB_OFFLINE is set; unset it to fetch it, "
            f"or use what is here: {_names_here()}."
        )
    path = _download(name, watch, wanted)
    if path.is_dir() and not complete(path):
        refuse_own_layout(path, f"repository {name!r}")
        raise ModelNotFound(
            f"repository {name!r} has no config.json with model*.safetensors and no GGUF file; "
            "name one that has."
        )
    return path


def _names_here() -> str:
    """Return up to three names of models on this machine, and the number of the others, for an error
    message."""
    here = [*(["starter"] if starter_path() else []), *(name for name, _ in cached_repositories())]
    more = [f"{len(here) - 3} more (`ruvmlx ls`)"] if len(here) > 3 else []
    return ", ".join(here[:3] + more) or "nothing yet"


def offline() -> bool:
    return any(
        os.environ.get(k, "").upper() in ("1", "ON", "YES", "TRUE")
        for k in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def hub_cache() -> Path:
    """Return the folder of huggingface-hub's cache, from HF_HUB_CACHE, HF_HOME and XDG_CACHE_HOME as in
    huggingface-hub."""
    home = Path(
        os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    )
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()


def cached_files(name: str, wanted: str = "") -> Path | None:
    """Return the folder or the GGUF file of a repository's model in the cache, or None if the cache has no
    complete model. wanted: as in `fetch`."""
    return (None if wanted else cached_folder(name)) or _cached_gguf(name, wanted)


def _cached_gguf(name: str, wanted: str) -> Path | None:
    """Return the GGUF file `wanted` in the cache. If `wanted` is "", return the file of the best type that
    fits into this machine's memory, else the smallest file. Return None if the cache has no complete GGUF
    model that matches.

    Raises ModelNotFound if several files have the wanted type.
    """
    here = _cached_variants(repo_folder(name))
    found = [variant for variant in here if not wanted or variant.is_called(wanted)]
    if not found:
        return None
    if wanted:
        best = named_variant(name, found, wanted).chosen
    else:
        best = best_variant(found, _memory_limit()) or min(found, key=lambda variant: variant.bytes)
    return here[best] / best.files[0]


def _cached_variants(repo: Path) -> dict[GGUFVariant, Path]:
    """Return {complete GGUF model in the cache: folder of the first snapshot, in the order of `_snapshots`,
    that has this model}."""
    found: dict[GGUFVariant, Path] = {}
    for folder in _snapshots(repo):
        for variant in variants_in(folder):
            if all(variant.files != other.files for other in found):
                found[variant] = folder
    return found


def _memory_limit() -> int:
    return cpu.memory_limit(cpu.has_metal())


def cached_folder(name: str) -> Path | None:
    """Return the folder of a complete snapshot (revision) of a repository in the cache, or None; see
    `_snapshot`. This function does not import huggingface-hub."""
    return _snapshot(repo_folder(name))


def repo_folder(name: str) -> Path:
    """Return the path of a repository's folder in the cache. The folder can be missing."""
    return hub_cache() / f"models--{name.replace('/', '--')}"


def _snapshot(repo: Path) -> Path | None:
    """Return the folder of the revision that refs/main names if it is complete, else the newest complete
    snapshot, else None."""
    return next((path for path in _snapshots(repo) if complete(path)), None)


def _snapshots(repo: Path) -> list[Path]:
    """Return the folder of the revision that refs/main names, then the folders of all snapshots, the newest
    first."""
    try:
        main = [repo / "snapshots" / read_ordinary(repo / "refs" / "main", 1024).decode().strip()]
    except (OSError, UnicodeDecodeError):
        main = []
    return main + sorted(_folders(repo / "snapshots"), key=lambda p: p.stat().st_mtime, reverse=True)


def _folders(path: Path) -> list[Path]:
    try:
        return [p for p in path.iterdir() if p.is_dir()]
    except OSError:
        return []


def complete(path: Path) -> bool:
    """Return True if the folder has a config.json and all weight files. If the folder has an index, all
    weight files that the index names must be there. If the folder has no index
    (model.safetensors.index.json), one safetensors file is enough."""
    if not (path / "config.json").is_file():
        return False
    try:
        index = parse_json(read_ordinary(path / "model.safetensors.index.json", MAX_BYTES))
        return all((path / str(name)).is_file() for name in set(index["weight_map"].values()))
    except OSError:
        return any(p.is_file() for p in path.glob("*.safetensors"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return True  # the index is no valid JSON; the loader reports the error later


def _download(name: str, watch: Watch, wanted: str) -> Path:
    from . import fetching

    repo, worker = repo_folder(name), Worker(f"Asking Hugging Face for {name}")
    try:
        make_folder(repo.parent, 0o777)
        listing = worker.attend(lambda: fetching.Listing.of(name, repo), watch)
        if wanted or (not listing.has_safetensors and listing.ggufs):
            return _download_gguf(listing, wanted, watch, worker)
        small = worker.attend(lambda: fetching.fetch_small(listing), watch)
        if not (small / "config.json").is_file():
            return small
        watch.note_facts(_facts(name, small, listing.total, listing.total - listing.here))
        return worker.attend(lambda: fetching.fetch_weights(listing, worker), watch)
    except RuvmlxError:
        raise
    except Exception as error:  # noqa: BLE001 - hub, network and disk raise errors of many classes
        raise ModelNotFound(_why(name, error)) from None


def _download_gguf(listing: "Listing", wanted: str, watch: Watch, worker: Worker) -> Path:
    from . import fetching

    name, found = listing.name, variants({weight.file: weight.size for weight in listing.ggufs})
    # `families_of` raises UnsupportedModel for an unsupported architecture before gigabytes are downloaded
    if listing.architecture and listing.architecture not in GGUF_ENCODERS:
        families_of(listing.architecture, name)
    choice = named_variant(name, found, wanted) if wanted else choose_variant(name, found, _memory_limit())
    watch.note_choice(choice)
    files = listing.only(choice.chosen.files)
    return worker.attend(lambda: fetching.fetch_weights(files, worker), watch) / choice.chosen.files[0]


def _facts(name: str, folder: Path, size: int, to_fetch: int) -> Facts:
    """Return the facts about a model from its config.json alone. The function raises UnsupportedModel for a
    model that ruvmlx cannot run, before gigabytes of weights are downloaded."""
    data = read_object(folder / "config.json")
    if is_encoder(data):
        encoder = folder_encoder(folder, data, name)
        facts = Facts(name, folder, "safetensors", encoder, encoder.parameters, size, to_fetch)
        return replace(facts, embeds=True)
    if runs_elsewhere(data):
        shape = shape_from_json(data, name)
        return Facts(name, folder, "safetensors", shape, _about(size, data), size, to_fetch)
    config = config_from_json(data, has_head=True, where=name)
    return Facts(name, folder, "safetensors", config, parameter_count(config), size, to_fetch)


def _about(size: int, data: Mapping[str, Any]) -> int:
    """Estimate the number of parameters from the weights' size in bytes, because the headers of the weight
    files are unknown before the download."""
    table = data.get("quantization")
    bits = table.get("bits") if isinstance(table, dict) else None
    return round(8 * size / (bits + 0.5 if type(bits) is int and bits > 0 else 16))


def _why(name: str, error: Exception) -> str:
    """Return one line for the user that explains why the download failed."""
    from huggingface_hub import errors

    if isinstance(error, OSError) and error.errno in NO_LOCKS:
        return (
            f"model {name!r} could not be fetched: the file system of {hub_cache()} has no locks "
            f"({error.strerror}); set HF_HUB_CACHE to a folder on a local disk."
        )
    if isinstance(error, errors.GatedRepoError):
        return f"model {name!r} is gated: accept its licence on huggingface.co/{name}, then `hf auth login`."
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return f"there is no public model {name!r} on Hugging Face; check the name, or run `hf auth login`."
    if isinstance(error, errors.LocalEntryNotFoundError) or "onnect" in type(error).__name__:
        return (
            f"model {name!r} is not in the cache and Hugging Face cannot be reached; check the network, "
            f"or use what is here: {_names_here()}."
        )
    return f"model {name!r} could not be fetched: {one_line(error)}."


def cached_repositories() -> Iterator[tuple[str, Path]]:
    """Yield (owner/name, folder) for every complete safetensors model in the cache that ruvmlx or mlx-lm can
    run. For each complete GGUF model, also of an unsupported architecture, yield (the name from
    `variant_names`, for example owner/name:Q5_K_M, first file)."""
    for repo in sorted(path for path in _folders(hub_cache()) if path.name.startswith("models--")):
        name = repo.name.removeprefix("models--").replace("--", "/", 1)
        path = _snapshot(repo)
        if path and runs(_config(path)):
            yield name, path
        here = _cached_variants(repo)
        names = variant_names(name, list(here), alone=path is None)
        yield from ((called, here[v] / v.files[0]) for called, v in zip(names, here, strict=True))


def _config(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(read_ordinary(path / "config.json", MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {}
