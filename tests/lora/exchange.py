"""What tests of exchanged adapters share: changes, dense twins, folders as PEFT writes them."""

import numpy as np

from ruvmlx.lora import MicroLoRA
from ruvmlx.lora.base_lora import EMBEDDING, MODULES, BaseLoRA
from ruvmlx.lora.interchange import (
    CONFIG,
    FILES,
    full_name,
    places,
)
from ruvmlx.lora.merge import HEAD
from ruvmlx.models.files.safetensors_writer import write_json, write_safetensors

TOKENS = [5, 77, 300, 12, 9, 31]


def a_change(config, rng, head=True, scale=0.5) -> BaseLoRA:
    """Every module in turn, with ranks that differ, and some layers left alone. A tied embedding stays as it
    is, because mlx-lm cannot change it without the head."""
    sizes, pairs = {place: size for place, size in places(config).values()}, {}
    if config.tie_word_embeddings:
        del sizes[EMBEDDING]
    for i, place in enumerate(sizes):
        if (head or place != HEAD) and (i % 3 != 1 or place == EMBEDDING):
            (n_in, n_out), rank = sizes[place], 1 + i % 4
            spread = 1 if place == EMBEDDING else n_in**0.5
            a = (rng.standard_normal((n_in, rank)) / spread).astype(np.float32)
            pairs[place] = (a, 0.3 * rng.standard_normal((rank, n_out)).astype(np.float32))
    assert {module for module, _ in pairs} >= set(MODULES) - {"lm_head", "embed_tokens"}
    return BaseLoRA(pairs, scale)


def a_micro(config, rng) -> MicroLoRA:
    a = rng.standard_normal((config.hidden_size, 2)).astype(np.float32)
    return MicroLoRA(a, rng.standard_normal((2, config.vocab_size)).astype(np.float32))


def deltas(change: BaseLoRA) -> dict[str, np.ndarray]:
    """Full name -> dense change [out, in]; of the embedding [V, D]."""
    dense = {p: change.scale * (a @ b) for p, (a, b) in change.pairs.items()}
    return {full_name(p): delta if p == EMBEDDING else delta.T for p, delta in dense.items()}


def logits(model) -> np.ndarray:
    import mlx.core as mx

    return np.array(model(mx.array([TOKENS]))[0].astype(mx.float32))


def mlx_lm_model(folder):
    from mlx_lm.utils import load_model as load_mlx

    return load_mlx(folder)[0]


# adapters of others, good and bad ---------------------------------------------------------------------


def peft(
    folder, rank=3, n_in=64, n_out=128, name="model.layers.1.self_attn.q_proj", dtype="float32", **settings
):
    """A PEFT folder as it comes from elsewhere."""
    rng = np.random.default_rng(8)
    a, b = rng.standard_normal((rank, n_in)), rng.standard_normal((n_out, rank))
    folder.mkdir()
    tensors = {f"lora_{k}.weight": w.astype(dtype) for k, w in (("A", a), ("B", b))}
    prefix = "base_model.model."
    write_safetensors(folder / FILES["peft"], {f"{prefix}{name}.{k}": w for k, w in tensors.items()}, {})
    write_json(folder / CONFIG, {"peft_type": "LORA", "r": rank, "lora_alpha": 12, **settings})
    return (b @ a).astype(np.float32)
