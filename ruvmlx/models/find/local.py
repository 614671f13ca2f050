"""This module lists the models on this machine that need no download. The command `ruvmlx ls` shows the
list."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import RuvmlxError
from ..config.embedding_model import gguf_embeds
from ..config.encoder import is_gguf_encoder
from ..config.header_facts import Facts
from ..config.layout import parameter_count
from .hub import cached_repositories
from .other_stores import stored_models
from .starter import starter_path


def list_local_models() -> list[dict[str, Any]]:
    """Return one row for each model on this machine: the starter model, then the models in the Hugging Face
    cache (but no safetensors model that neither ruvmlx nor mlx-lm can run), then the models of ollama and LM
    Studio.

    Keys: name, path, format, bits (stored bits per parameter), parameters, bytes, embeds (True if the model
        is trained to embed texts), problem. If ruvmlx cannot read a model, `problem` has the reason, `bytes`
        has the size of the folder's safetensors files or of the file at `path`, bits and parameters are None,
        and embeds is False.
    """
    return [_row(*found) for found in _local_models()]


def readable_models() -> Iterator[Facts]:
    """Yield the `Facts` of those models of `list_local_models` that ruvmlx can read."""
    for name, path, problem in _local_models():
        with contextlib.suppress(RuvmlxError):
            if not problem:
                yield survey(name, path)


def local_paths() -> dict[str, Path]:
    """Return {name: path} of the models on this machine, without those models of ollama whose manifest shows
    that ruvmlx cannot open them."""
    return {name: path for name, path, problem in _local_models() if not problem}


def _local_models() -> Iterator[tuple[str, Path, RuvmlxError | None]]:
    """Yield (name, path, problem) for each model on this machine. problem: the error that ollama's manifest
    causes, or None."""
    starter = starter_path()
    if starter:
        yield "starter", starter, None
    yield from ((name, path, None) for name, path in cached_repositories())
    yield from ((model.name, model.path, model.problem) for model in stored_models())


def _row(name: str, path: Path, problem: RuvmlxError | None) -> dict[str, Any]:
    form = "safetensors" if path.is_dir() else "gguf"
    row: dict[str, Any] = {"name": name, "path": str(path), "format": form, "bits": None, "parameters": None}
    try:
        if problem:
            raise problem
        facts = survey(name, path)
    except RuvmlxError as error:
        return row | {"bytes": _file_bytes(path), "problem": str(error), "embeds": False}
    numbers = {"bits": round(facts.bits, 2), "parameters": facts.parameters, "bytes": facts.bytes}
    return row | numbers | {"problem": "", "embeds": facts.embeds}


def survey(name: str, path: Path) -> Facts:
    """Return the facts about the model at `path` from the headers of its files."""
    if path.is_dir():
        from ..weights.safetensors_model import open_folder

        folder = open_folder(path, path.name)
        facts = Facts(name, path, "safetensors", folder.shape, folder.parameters, folder.bytes)
        return replace(facts, types=folder.types, embeds=folder.embeds)
    from ..files.gguf_split import read_whole
    from ..weights.gguf_model import check_gguf

    file = read_whole(path)
    if is_gguf_encoder(file.metadata):
        from ..weights.encoder_files import open_encoder_gguf

        found = open_encoder_gguf(file)
        facts = Facts(name, path, "gguf", found.shape, found.parameters, found.bytes, types=found.types)
        return replace(facts, file_type=file.file_type, embeds=True)
    file, config = check_gguf(file)
    facts = Facts(name, path, "gguf", config, parameter_count(config), file.tensor_bytes, types=file.types)
    return replace(facts, file_type=file.file_type, embeds=gguf_embeds(file.metadata, config.model_type))


def _file_bytes(path: Path) -> int:
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())  # a symbolic link can be dangling
