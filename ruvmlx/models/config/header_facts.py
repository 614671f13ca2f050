"""This module holds the facts about a model that the headers of its files give. The program reads these facts
before it downloads or reads weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from .model import Model, ModelShape


@dataclass(frozen=True)
class Facts:
    """The facts about a model that the headers of its files give.

    bytes: the number of bytes of the tensors in the model's files
    to_fetch: the number of bytes that the program must still download
    types: {tensor type: number of weights} for a GGUF file or a folder with small floats; {} for other
        folders
    file_type: the quantisation of a GGUF file, for example "Q4_K_M"; "": it is not known
    embeds: True if the model is trained to embed texts
    """

    name: str
    path: Path
    format: str  # "gguf" | "safetensors"
    shape: ModelShape
    parameters: int
    bytes: int
    to_fetch: int = 0
    types: Mapping[str, int] = field(default_factory=dict, hash=False)
    file_type: str = ""
    embeds: bool = False

    @property
    def bits(self) -> float:
        """Return the number of stored bits per parameter. These bits include the scales and biases of
        quantised weights."""
        return 8 * self.bytes / self.parameters

    @classmethod
    def of(cls, model: Model) -> "Facts":
        facts = cls(model.name, model.path, model.format, model.shape, model.parameters, model.bytes)
        return replace(facts, types=model.types, file_type=model.file_type, embeds=model.embeds)
