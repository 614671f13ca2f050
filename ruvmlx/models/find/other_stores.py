"""This module finds models in the folders of the programs ollama and LM Studio. The module writes nothing
into these folders.

ollama:     manifests/<registry>/<namespace>/<model>/<tag> is JSON with layers; the layer with the weights
            names blobs/sha256-<hex>, a GGUF file.
LM Studio:  <publisher>/<repository>/ with GGUF files, or with config.json and safetensors files.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CorruptFile, ModelNotFound, RuvmlxError, UnsupportedModel
from ..files.json_files import read_object
from .hub import complete
from .variants import variants_in

OLLAMA, LMSTUDIO = "ollama:", "lmstudio:"
_MANIFEST_BYTES = 4 << 20  # the maximum number of bytes of a manifest; ordinary manifests have about 1 kB
# ollama's default registry and default namespace, which the short name of a model leaves out
_PUBLIC = ("registry.ollama.ai", "library")
_LAYER = "application/vnd.ollama.image."
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_PART = re.compile(r"\w[\w.:-]*", re.ASCII)


@dataclass(frozen=True)
class StoredModel:
    """A model in the folders of another program.

    name: the short name
    full_name: the name with all its parts: for ollama registry, namespace, model and tag
    path: a folder or a GGUF file; if there is a `problem`, the manifest
    problem: the error for which ruvmlx cannot open the model (the manifest is unusable, or the file that the
        manifest names is missing), or None
    """

    name: str
    full_name: str
    path: Path
    problem: RuvmlxError | None = None


def stored_models() -> Iterator[StoredModel]:
    """Yield all models in the folders of ollama and LM Studio that the user has the right to read."""
    yield from _ollama_models()
    yield from _lmstudio_models()


def find_stored(name: str) -> StoredModel:
    """Return the model with this name or full name. `ruvmlx ls` shows the names. The user can omit ollama's
    tag "latest". Raises ModelNotFound for an unknown name, and the model's `problem` if it has one."""
    program, of_program = (
        ("ollama", _ollama_models) if name.startswith(OLLAMA) else ("LM Studio", _lmstudio_models)
    )
    wanted = {name, f"{name}:latest"} if program == "ollama" else {name}
    known = list(of_program())
    found = next((model for model in known if not wanted.isdisjoint((model.name, model.full_name))), None)
    if found is None:
        raise ModelNotFound(_not_found(name, program, [model.name for model in known]))
    if found.problem:
        raise found.problem
    return found


def _not_found(name: str, program: str, known: list[str]) -> str:
    of_folder = [other for other in known if other.startswith(f"{name}/")]
    if of_folder:
        return f"{name} holds {len(of_folder)} models; name one: {_first(of_folder)}."
    if known:
        return f"{program} has no model {name!r} on this machine; it has: {_first(known)}."
    return f"{program} has no model {name!r}: no models of {program} are on this machine (`ruvmlx ls`)."


def _first(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more (`ruvmlx ls`)" if len(names) > 5 else "")


# ollama -------------------------------------------------------------------------------------------


def _ollama_folders() -> list[Path]:
    """Return ollama's model folders: the folder in OLLAMA_MODELS, else the user's folder and the folder of
    the Linux service that ollama's installer makes."""
    named = os.environ.get("OLLAMA_MODELS")
    places = [named] if named else ["~/.ollama/models", "/usr/share/ollama/.ollama/models"]
    return [Path(place).expanduser() for place in places]


def _ollama_models() -> Iterator[StoredModel]:
    seen = set()
    for store in _ollama_folders():
        for manifest in _sorted_paths(store / "manifests", "*/*/*/*"):
            parts = manifest.parts[-4:]
            if all(map(_PART.fullmatch, parts)) and parts not in seen:
                seen.add(parts)
                yield _of_manifest(store, manifest)


def _of_manifest(store: Path, manifest: Path) -> StoredModel:
    *place, tag = manifest.parts[-4:]
    full = f"{OLLAMA}{'/'.join(place)}:{tag}"
    name = full.replace(f"{OLLAMA}{'/'.join(_PUBLIC)}/", OLLAMA).replace(f"{OLLAMA}{_PUBLIC[0]}/", OLLAMA)
    try:
        return StoredModel(name, full, _blob(name, store, manifest))
    except RuvmlxError as error:
        return StoredModel(name, full, manifest, error)


def _blob(name: str, store: Path, manifest: Path) -> Path:
    """Return the GGUF file that a manifest of ollama names."""
    layers = _layers(name, manifest)
    again = f"Fetch it again: `ollama pull {name.removeprefix(OLLAMA)}`."
    if any(layer.get("mediaType") == f"{_LAYER}adapter" for layer in layers):
        raise UnsupportedModel(
            f"{name} has an adapter layer of ollama's, which is not applied here; "
            "open the model that it is based on."
        )
    weights = [layer for layer in layers if layer.get("mediaType") == f"{_LAYER}model"]
    if len(weights) != 1:
        raise UnsupportedModel(
            f"{name}: its manifest names {len(weights)} layers of type {_LAYER}model; one GGUF file was "
            "expected (cloud models and ollama's safetensors models have none)."
        )
    digest = _DIGEST.fullmatch(str(weights[0].get("digest")))
    if not digest:
        got = str(weights[0].get("digest"))[:40]
        raise CorruptFile(f"{name}: the digest {got!r} is not sha256 and 64 hexadecimal digits. {again}")
    blob = store / "blobs" / f"sha256-{digest[1]}"
    if not _is_file(blob):
        raise CorruptFile(f"{name}: its blob {blob.name[:19]}... is missing from {blob.parent}. {again}")
    return blob


def _layers(name: str, manifest: Path) -> list[dict[str, Any]]:
    try:
        layers = read_object(manifest, missing_ok=False, limit=_MANIFEST_BYTES).get("layers")
    except RuvmlxError as error:
        raise type(error)(f"{name}: the manifest {error}") from None
    return [layer for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []


# LM Studio ----------------------------------------------------------------------------------------


def _lmstudio_folders() -> list[Path]:
    """Return the folder in LMSTUDIO_MODELS, else the default folders of new and old versions of LM Studio. If
    the two default paths lead to the same folder (a link), the list has the folder once."""
    named = os.environ.get("LMSTUDIO_MODELS")
    places = [named] if named else ["~/.lmstudio/models", "~/.cache/lm-studio/models"]
    return list({path.resolve(): path for path in (Path(place).expanduser() for place in places)}.values())


def _lmstudio_models() -> Iterator[StoredModel]:
    for root in _lmstudio_folders():
        for folder in _sorted_paths(root, "*/*", folders=True):
            yield from _of_folder(f"{LMSTUDIO}{folder.parent.name}/{folder.name}", folder)


def _of_folder(name: str, folder: Path) -> Iterator[StoredModel]:
    whole, found = complete(folder), variants_in(folder)
    if whole:
        yield StoredModel(name, name, folder)
    for variant in found:
        full = f"{name}/{variant.files[0]}"
        yield StoredModel(name if len(found) == 1 and not whole else full, full, folder / variant.files[0])


def _sorted_paths(folder: Path, pattern: str, folders: bool = False) -> list[Path]:
    """Return the sorted files (or folders, if `folders` is True) that match the pattern; none if `folder` is
    missing or not readable."""
    try:
        return sorted(path for path in folder.glob(pattern) if (path.is_dir() if folders else path.is_file()))
    except OSError:
        return []


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False
