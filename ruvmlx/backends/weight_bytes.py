"""This module computes how much memory the weights of a model take on each backend, and how the hybrid
backend divides a model of which two copies do not fit."""

from collections.abc import Mapping

from ..models.config.model import ModelShape
from ..platform import cpu
from .matrix_types import bytes_in_memory


def bytes_of_weights(types: Mapping[str, int], stored: int, parameters: int, name: str, device: str) -> int:
    """Return the number of bytes that the weights take in memory. The native backend and GPUs keep the
    weights quantised. The reference backend expands the weights to float32. MLX on a CPU does so if they then
    take at most a quarter of the memory. The two sides of the hybrid backend have a copy each, or one copy
    together.

    types: {storage type: number of weights}; empty if it is not known. stored: the bytes of the files.
    """
    if name == "hybrid":
        sizes = [bytes_of_weights(types, stored, parameters, side, device) for side in ("mlx", "native")]
        return sum(sizes) if sum(sizes) <= hybrid_limit(device) else max(sizes)
    whole = 4 * parameters
    if name == "reference":
        return whole
    if name == "mlx" and device == "cpu" and whole <= cpu.total_memory() / 4:
        return whole
    return bytes_in_memory(types, name) if types else stored


def bytes_of_shard(shape: ModelShape, parameters: int, whole: int, ranks: int) -> int:
    """Return the bytes that rank 0 holds of `whole` bytes of weights: its share of the layers, the embedding
    and the output head."""
    tables = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
    return whole * ((parameters - tables) // ranks + tables) // max(1, parameters)


def hybrid_limit(device: str) -> int:
    """Return the number of bytes that a model on both sides can use. Only MLX's side has the GPU's limit."""
    return max(cpu.memory_limit(False), cpu.memory_limit(device == "metal"))


def first_layers(types: Mapping[str, int], stored: int, parameters: int, device: str, n_layers: int) -> int:
    """Return the number of layers that the C decoder computes for the hybrid backend, before MLX computes the
    others: as many as do not fit MLX's device. Return 0 if two copies of the model fit, so that each side can
    have all layers."""
    mlx, native = (bytes_of_weights(types, stored, parameters, side, device) for side in ("mlx", "native"))
    if mlx + native <= hybrid_limit(device):
        return 0
    fitting = n_layers * cpu.memory_limit(device == "metal") // max(mlx, 1)
    return max(1, n_layers - fitting)
