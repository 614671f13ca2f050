"""This module loads a model with mlx-lm. The module turns errors of mlx-lm or MLX into UnsupportedModel with
one line of text."""

from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import RuvmlxError, UnsupportedModel
from ...models.config.model import Model
from ...platform import mlxlm
from ...platform.mx import mx, nn
from ...progress import QUIET, Told, Watch
from . import graph

# the number of bytes of weights, in one or several tensors, after which `_read` reports the progress
PIECE = 256 << 20


def load_graph(model: Model, float32: bool, watch: Watch = QUIET) -> nn.Module:
    """Return mlx-lm's model; its weights are read into memory.

    float32: True: convert all floating-point numbers to float32 (of quantised weights: the scales and
        biases), because MLX's 16-bit products are slow on a CPU
    watch: an object that receives the number of bytes read so far
    """
    with one_line(model), mlxlm.keyed_weights():
        made, _ = mlxlm.utils().load_model(model.path, lazy=True)
        if float32:
            made.set_dtype(mx.float32)
    _read(made, Told(watch, f"Loading {model.name}", model.bytes))
    return made


@contextmanager
def one_line(model: Model, *through: type[Exception]) -> Iterator[None]:
    """Convert an exception in the `with` block to UnsupportedModel, except RuvmlxError and errors of the
    types `through`."""
    try:
        yield
    except RuvmlxError:
        raise
    except through:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - mlx-lm's model code can raise any exception
        line = " ".join(str(error).split())[:160] or type(error).__name__
        kind = model.shape.model_type
        raise UnsupportedModel(
            f"{model.name}: mlx-lm cannot load this {kind} model ({line}); fetch it again, or choose another."
        ) from None


def _read(made: nn.Module, count: Told) -> None:
    """Read the weights into memory (mx.eval) in pieces. After each piece the watch is told the progress, and
    can raise an exception to stop the loading."""
    arrays = list(graph.parameters(made).values())
    # the bytes in memory: more than in the file if 16-bit numbers become 32-bit numbers
    whole = sum(array.nbytes for array in arrays)
    done = 0
    for piece in _pieces(arrays):
        mx.eval(piece)
        done += sum(array.nbytes for array in piece)
        count.add(count.total * done // whole - count.done)


def _pieces(arrays: list[mx.array]) -> Iterator[list[mx.array]]:
    """Yield the arrays in lists. A list ends with the array with which the list reaches PIECE bytes."""
    piece: list[mx.array] = []
    size = 0
    for array in arrays:
        piece.append(array)
        size += array.nbytes
        if size >= PIECE:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece
