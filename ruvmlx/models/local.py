"""What `ruvmlx ls` lists: the models on this machine that need no fetching."""

from pathlib import Path
from typing import Any

from ..errors import RuvmlxError
from .hub import cached_repositories
from .layout import parameter_count
from .resolve import starter_path


def rows() -> list[dict[str, Any]]:
    """The starter model, then every Llama or Mistral repository in the Hugging Face cache.

    Keys: name, path, format, bits (stored, per parameter), parameters, bytes, problem. A model that cannot be
    read is listed with its files' bytes, without bits and parameters; `problem` says why.
    """
    starter = starter_path()
    found = [_row("starter", starter, "gguf")] if starter else []
    return found + [_row(name, folder, "safetensors") for name, folder in cached_repositories()]


def _row(name: str, path: Path, form: str) -> dict[str, Any]:
    row = {"name": name, "path": str(path), "format": form, "bits": None, "parameters": None}
    try:
        parameters, size = _measure(path)
    except RuvmlxError as error:
        return row | {"bytes": _file_bytes(path), "problem": str(error)}
    bits = round(8 * size / parameters, 2)
    return row | {"bits": bits, "parameters": parameters, "bytes": size, "problem": ""}


def _measure(path: Path) -> tuple[int, int]:
    """-> parameters, bytes of their tensors; read from the headers."""
    if path.is_dir():
        from .safetensors_model import open_folder

        folder = open_folder(path, path.name)
        return parameter_count(folder.config), folder.tensor_bytes
    from .gguf_model import open_gguf

    file, config = open_gguf(path)
    return parameter_count(config), file.tensor_bytes


def _file_bytes(path: Path) -> int:
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)
