"""mlx-lm itself, as a judge: its loader, its graph, its caches, its masks."""

from pathlib import Path

import numpy as np

from ruvmlx.platform.mx import mx


def mlx_lm_model(folder: Path, float32: bool = True, slides: bool | None = None):
    """mlx_lm's own model of a folder; in float32 (packed weights stay packed) or as stored.

    mlx-lm refuses a model whose layers all slide, so such a one gets a full layer too many, which is then
    taken off: the masks, the rotating cache and the layers that run are mlx-lm's.

    slides: whether the window holds for all layers; None: if there is one.
    """
    from mlx_lm.utils import load_config, load_model

    config = load_config(folder)
    overrides = {}
    text = config.get("text_config", config)
    if text.get("sliding_window") and slides is not False:
        n = text["num_hidden_layers"]
        types = ["sliding_attention"] * n + ["full_attention"]
        overrides = {"num_hidden_layers": n + 1, "layer_types": types}
        overrides = overrides if text is config else {"text_config": text | overrides}
    model, _ = load_model(folder, lazy=True, strict=not overrides, model_config=overrides)
    if overrides:
        decoder = model.model if text is config else model.language_model.model
        decoder.layers.pop()
        decoder.fa_idx = 0
    if float32:
        model.set_dtype(mx.float32)
    return model


def mlx_lm_logits(model, tokens: list[int], chunks: tuple[int, ...]) -> np.ndarray:
    """tokens [T] -> logits [T, V] through mlx-lm's cache: the chunks first, then token by token."""
    from mlx_lm.models.cache import make_prompt_cache

    cache, out, at = make_prompt_cache(model), [], 0
    sizes = list(chunks) + [1] * (len(tokens) - sum(chunks))
    for size in sizes:
        out.append(model(mx.array([tokens[at : at + size]]), cache)[0].astype(mx.float32))
        mx.eval(out[-1])
        at += size
    return np.concatenate([np.array(a) for a in out])
