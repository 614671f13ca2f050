"""This module recognises models that are trained to embed texts (make one vector of a text).

ruvmlx supports embedding models that are decoders of Qwen's families. The vector of a text in these models is
the hidden state at the token END, which ruvmlx puts after the text. (Qwen3-Embedding, Zhang et al. 2025)
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files.json_files import read_object

FAMILIES = ("qwen2", "qwen3")
END = "<|endoftext|>"
LAST_TOKEN = 3  # the value of GGUF's pooling_type if the vector of a text is the state of its last token


def folder_embeds(path: Path, name: str, model_type: object) -> bool:
    """Return True if a folder is a supported embedding model. If the folder has no file
    1_Pooling/config.json, a folder of Qwen's families is an embedding model if the model's or the folder's
    name contains "embedding"."""
    if model_type not in FAMILIES:
        return False
    pooling = read_object(path / "1_Pooling" / "config.json")
    if pooling:
        return pooling.get("pooling_mode_lasttoken") is True
    return "embedding" in f"{name}/{path.name}".lower()


def gguf_embeds(metadata: Mapping[str, Any], model_type: str) -> bool:
    """Return True if a GGUF file is a supported embedding model."""
    pooling = metadata.get(f"{model_type}.pooling_type")
    return model_type in FAMILIES and isinstance(pooling, int) and pooling == LAST_TOKEN
