"""The stores of ollama and LM Studio, laid out as these programs document them, with models of ours.

python -m tests.models.store_layouts FOLDER     # FOLDER/ollama and FOLDER/lmstudio
OLLAMA_MODELS=FOLDER/ollama LMSTUDIO_MODELS=FOLDER/lmstudio ruvmlx ls
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from .make_gguf import make_gguf_model
from .make_models import make_safetensors_model

LAYER = "application/vnd.ollama.image."
REGISTRY = "registry.ollama.ai"


def add_blob(store: Path, data: bytes, kind: str) -> dict[str, Any]:
    """Write a blob; the layer that a manifest has for it."""
    digest = hashlib.sha256(data).hexdigest()
    blob = store / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    return {"mediaType": f"{LAYER}{kind}", "digest": f"sha256:{digest}", "size": len(data)}


def write_manifest(store: Path, place: str, layers: Any) -> Path:
    """place: registry/namespace/model/tag."""
    config = add_blob(store, b'{"model_format":"gguf","model_family":"llama"}', "unused")
    config["mediaType"] = "application/vnd.docker.container.image.v1+json"
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": config,
        "layers": layers,
    }
    path = store / "manifests" / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(manifest))
    return path


def add_ollama_model(store: Path, place: str, gguf: bytes) -> Path:
    """A model with the layers that `ollama pull` leaves: weights, template, parameters, licence."""
    layers = [
        add_blob(store, gguf, "model"),
        add_blob(store, b"{{ .Prompt }}", "template"),
        add_blob(store, b'{"stop":["<|im_end|>"]}', "params"),
        add_blob(store, b"A licence.", "license"),
    ]
    return write_manifest(store, place, layers)


def make_ollama_store(store: Path, gguf: bytes) -> Path:
    """Of ollama's library, of a user, and of another registry."""
    add_ollama_model(store, f"{REGISTRY}/library/llama3.2/1b", gguf)
    add_ollama_model(store, f"{REGISTRY}/library/smollm2/latest", gguf)
    add_ollama_model(store, f"{REGISTRY}/somebody/own/v1", gguf)
    add_ollama_model(store, "hf.co/owner/Tiny-GGUF/Q4_K_M", gguf)
    return store


def make_lmstudio_store(root: Path, gguf: Path) -> Path:
    """A repository with one file (and a vision part), one with several, one of safetensors."""
    for name in ("one/Tiny-GGUF/Tiny-Q4_K_M.gguf", "one/Tiny-GGUF/mmproj-Tiny-f16.gguf",
                 "two/Tiny-GGUF/Tiny-Q4_K_M.gguf", "two/Tiny-GGUF/Tiny-Q8_0.gguf"):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(gguf, root / name)
    make_safetensors_model(root / "mlx-community" / "tiny-4bit", bits=4)
    return root


if __name__ == "__main__":
    top = Path(sys.argv[1])
    made = make_gguf_model(top / "tiny.gguf")
    make_ollama_store(top / "ollama", made.read_bytes())
    make_lmstudio_store(top / "lmstudio", made)
