"""What a model's headers say, without loading the model."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from .model import Model, ModelShape


@dataclass(frozen=True)
class Facts:
    """Facts of a model.

    bytes: bytes of its tensors, as stored
    to_fetch: bytes that are not on this machine yet
    types: of a GGUF file, {type: number of weights}
    embeds: as in `Model`
    """

    name: str
    path: Path
    format: str  # "gguf" | "safetensors"
    shape: ModelShape
    parameters: int
    bytes: int
    to_fetch: int = 0
    types: Mapping[str, int] = field(default_factory=dict, hash=False)
    embeds: bool = False

    @property
    def bits(self) -> float:
        """Stored bits per parameter, with scales and biases."""
        return 8 * self.bytes / self.parameters

    @classmethod
    def of(cls, model: Model) -> "Facts":
        facts = cls(model.name, model.path, model.format, model.shape, model.parameters, model.bytes)
        return replace(facts, types=model.types, embeds=model.embeds)
