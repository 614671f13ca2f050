"""Models that are trained to embed texts.

Of them, decoders of Qwen's families run here: the vector of a text is the state of the token END behind it.
(Qwen3-Embedding, Zhang et al. 2025)
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files.json_files import read_object

FAMILIES = ("qwen2", "qwen3")
END = "<|endoftext|>"
LAST_TOKEN = 3  # GGUF's pooling_type


def folder_embeds(path: Path, name: str, model_type: object) -> bool:
    """Is this folder an embedding model that runs here? Where no file says how it pools, its name does."""
    if model_type not in FAMILIES:
        return False
    pooling = read_object(path / "1_Pooling" / "config.json")
    if pooling:
        return pooling.get("pooling_mode_lasttoken") is True
    return "embedding" in f"{name}/{path.name}".lower()


def gguf_embeds(metadata: Mapping[str, Any], model_type: str) -> bool:
    """Is this GGUF file an embedding model that runs here?"""
    return model_type in FAMILIES and metadata.get(f"{model_type}.pooling_type") == LAST_TOKEN
