"""This module loads a model by its name: it finds the files, checks them and builds the tokenizer. The
weights are read later, through `Model.load_weights`."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..progress import QUIET, Watch
from ..settings import SAMPLING
from .config.embedding_model import gguf_embeds
from .config.layout import check_vocab, parameter_count
from .config.model import Model
from .config.sampling_defaults import sampling_defaults
from .find.resolve import find_model
from .find.starter import STARTER_SAMPLING, STARTER_SYSTEM, starter_path

if TYPE_CHECKING:
    from .files.gguf import GGUFFile


def load_model(name: str | None = None, watch: Watch = QUIET) -> Model:
    """Find a model by its name (see find/resolve.py) and check its files, but not the values of the weights.

    A later read of a weight from `Model.load_weights()` raises CorruptFile for NaN and infinity in the
    weight. watch: an object that receives the facts about the model before a download, and the progress of
    the download.
    """
    found = find_model(name, watch)
    if found.path.is_dir():
        return _load_folder(found.name, found.path)
    model = load_gguf(found.path, found.name)
    if found.path == starter_path():
        model.default_sampling, model.tokenizer.default_system = STARTER_SAMPLING, STARTER_SYSTEM
    return model


def load_gguf(path: Path, name: str | None = None) -> Model:
    from .config.encoder import is_gguf_encoder
    from .config.fingerprint import content_hash, fingerprint
    from .files.gguf_split import read_whole, whole_name
    from .text.gguf_tokenizer import gguf_tokenizer
    from .weights.gguf_model import check_gguf, weights_loader

    file = read_whole(path)
    if is_gguf_encoder(file.metadata):
        return _load_encoder(file, name or whole_name(path))
    file, config = check_gguf(file)
    tokenizer = gguf_tokenizer(file)
    check_vocab(tokenizer.vocab_size, config.vocab_size, path.name)
    layout = {t.name: (t.type.name, t.shape) for t in file.tensors.values()}
    sampled = [t for t in file.tensors.values() if t.name in _SAMPLED_GGUF]
    return Model(
        name=name or whole_name(path),
        path=path,
        format="gguf",
        shape=config,
        tokenizer=tokenizer,
        load_weights=weights_loader(file, config),
        fingerprint=fingerprint(config, layout, map(file.raw, sampled)),
        content=partial(content_hash, layout, lambda name: file.raw(file.tensors[name])),
        parameters=parameter_count(config),
        bytes=file.tensor_bytes,
        default_sampling=_gguf_sampling(file.metadata, config.model_type, path),
        types=file.types,
        file_type=file.file_type,
        embeds=gguf_embeds(file.metadata, config.model_type),
    )


def _load_encoder(file: "GGUFFile", name: str) -> Model:
    from .config.fingerprint import fingerprint
    from .text.gguf_tokenizer import gguf_tokenizer
    from .weights.encoder_files import open_encoder_gguf

    found, tokenizer = open_encoder_gguf(file), gguf_tokenizer(file)
    check_vocab(tokenizer.vocab_size, found.shape.vocab_size, file.path.name)
    return Model(
        name=name,
        path=file.path,
        format="gguf",
        shape=found.shape,
        tokenizer=tokenizer,
        load_weights=found.load_weights,
        fingerprint=fingerprint(found.shape, found.layout, found.samples()),
        content=found.content,
        parameters=found.parameters,
        bytes=found.bytes,
        types=found.types,
        file_type=file.file_type,
        embeds=True,
    )


_SAMPLED_GGUF = ("token_embd.weight", "output.weight", "output_norm.weight", "blk.0.attn_q.weight")


def _gguf_sampling(metadata: Mapping[str, Any], model_type: str, path: Path) -> dict[str, float]:
    """Return a GGUF model's recommended sampling settings: from general.sampling.temp and similar keys, which
    newer files have, else from the table ADVICE of sampling_defaults.py."""
    values = {name: metadata.get(f"general.sampling.{name}") for name in SAMPLING}
    values |= {"temperature": metadata.get("general.sampling.temp")}
    parts = (str(metadata.get(f"general.{key}", "")) for key in ("basename", "size_label", "finetune"))
    names = [path.name, str(metadata.get("general.name", "")), " ".join(parts)]
    return sampling_defaults(values, model_type, names)


def _load_folder(name: str, path: Path) -> Model:
    from .weights.safetensors_model import load_folder

    return load_folder(path, name)
