"""This module recognises model folders in Mistral's or Meta's own file layout and refuses them, because
ruvmlx reads only Hugging Face's layout."""

from pathlib import Path

from ...errors import UnsupportedModel


def refuse_own_layout(path: Path, name: str) -> None:
    """Raise UnsupportedModel for a folder with params.json or consolidated files. Do nothing for a folder
    without params.json and consolidated files.

    Call this function only if the files of Hugging Face's layout are missing, because many folders have both
    layouts.
    """
    found = sorted(p.name for p in (*path.glob("params.json"), *path.glob("consolidated*")))
    if found:
        raise UnsupportedModel(
            f"{name} holds {found[0]}: its maker's own layout, which is not read. Take the same model with "
            "config.json and model*.safetensors (for example from mlx-community), or as a GGUF file."
        )
