"""This module loads a model with mlx-lm. The module turns each error of mlx-lm or MLX into an error with one
line of text."""

from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import RuvmlxError, UnsupportedModel
from ...models.config.model import Model
from ...platform import mlxlm
from ...platform.mx import mx, nn
from ...progress import QUIET, Told, Watch
from . import graph

PIECE = 256 << 20  # the number of bytes of weights that MLX reads at a time, in one or several tensors


def load_graph(model: Model, float32: bool, watch: Watch = QUIET) -> nn.Module:
    """Return mlx-lm's model with its evaluated weights.

    float32: True: convert all numbers that are not quantised to float32, because MLX's 16-bit products are
        slow on a CPU
    watch: an object that receives the number of bytes read so far
    """
    with one_line(model):
        made, _ = mlxlm.utils().load_model(model.path, lazy=True)
        if float32:
            made.set_dtype(mx.float32)
    _read(made, Told(watch, f"Loading {model.name}", model.bytes))
    return made


@contextmanager
def one_line(model: Model, *through: type[Exception]) -> Iterator[None]:
    """Convert every error of mlx-lm or MLX in the `with` block to UnsupportedModel, except errors of the
    types `through`."""
    try:
        yield
    except RuvmlxError:
        raise
    except through:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any of 120 model files may raise anything
        line = " ".join(str(error).split())[:160] or type(error).__name__
        kind = model.shape.model_type
        raise UnsupportedModel(
            f"{model.name}: mlx-lm cannot load this {kind} model ({line}); fetch it again, or choose another."
        ) from None


def _read(made: nn.Module, count: Told) -> None:
    """Evaluate the weights in pieces. Between two pieces the watch can raise an exception to stop the
    loading."""
    arrays = list(graph.parameters(made).values())
    # the sum is larger than the file if 16-bit numbers become 32-bit numbers
    whole = sum(array.nbytes for array in arrays)
    done = 0
    for piece in _pieces(arrays):
        mx.eval(piece)
        done += sum(array.nbytes for array in piece)
        count.add(count.total * done // whole - count.done)


def _pieces(arrays: list[mx.array]) -> Iterator[list[mx.array]]:
    """Yield the arrays in lists. Each list has about PIECE bytes."""
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
