"""What the tests of ratings below the head share."""

from dataclasses import replace

import numpy as np

from ruvmlx.lora.layer_lora import LayerLoRA, pack_adapter
from ruvmlx.sona.optional.layer_update import LayerLimit

WIDE = LayerLimit(10.0, 10.0)


def learned_state(runtime) -> tuple[bytes, bytes]:
    """Everything that shapes the next reply."""
    runtime.learner.sync()
    state, lora = runtime.learner.state, runtime.backend.lora
    return pack_adapter(state.micro, state.layer_lora), lora.to_bytes() if lora else b""


def true_logprob(runtime, reply_id) -> float:
    """Mean log-probability per token of a reply under the weights in use, read anew."""
    runtime.learner.sync()
    row, learner = runtime.store.replies.get(reply_id), runtime.learner
    return learner.traces.replay(row, learner.state).logprob / len(row.sampled_ids)


def random_body(config, seed=0, places=(("q_proj", 0), ("v_proj", 1), ("down_proj", 1)), rank=1) -> LayerLoRA:
    """One that was rated already."""
    from ruvmlx.lora.base_lora import place_shape

    rng = np.random.default_rng(seed)
    shapes = {p: place_shape(config, *p) for p in places}
    layer_lora = LayerLoRA.fresh(
        {p: rng.normal(0, 0.1, (i, rank)).astype(np.float32) for p, (i, _) in shapes.items()},
        {p: rng.uniform(0.5, 2, (rank, o)).astype(np.float32) for p, (_, o) in shapes.items()},
    )
    n = layer_lora.lora_b.size
    return replace(
        layer_lora,
        lora_b=rng.normal(0, 0.1, n).astype(np.float32),
        evidence=np.stack([rng.normal(0, 1, n), rng.uniform(1, 3, n)]).astype(np.float32),
        tokens=90.0,
        gain=0.7,
        curvature=3.0,
    )
