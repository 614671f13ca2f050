"""Lets mlx-lm load a model, and says in one line what went wrong."""

import os

from ...errors import RuvmlxError, UnsupportedModel
from ...models.model import Model
from ...platform.mx import mx, nn
from . import mlxlm


def load_graph(model: Model, float32: bool) -> nn.Module:
    """mlx-lm's model with its weights, evaluated. float32: all numbers that are not packed become it, because
    MLX's products in 16 bits are slow on a CPU."""
    kind = model.shape.model_type
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that PyTorch is missing concerns nobody
    try:
        graph, _ = mlxlm.load("utils").load_model(model.path, lazy=True)
        if float32:
            graph.set_dtype(mx.float32)
        mx.eval(graph.parameters())
    except RuvmlxError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - 120 model files, which raise anything
        line = " ".join(str(error).split())[:160] or type(error).__name__
        raise UnsupportedModel(
            f"{model.name}: mlx-lm cannot load this {kind} model ({line}); fetch it again, or choose another."
        ) from None
    return graph
