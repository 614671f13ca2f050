"""Small random models of architectures that the project does not name, saved as mlx-lm saves them."""

from pathlib import Path
from typing import Any

from ruvmlx.platform import mlxlm
from ruvmlx.platform.mx import mx, nn

from .vocabularies import write_json, write_tokenizer

_COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
# Mixture of experts; logits with a cap; logits with a scale, layer norms; a state space model; sliding
# windows and the text model inside of a model that sees.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0},
    "cohere": {"layer_norm_eps": 1e-5, "logit_scale": 0.5},
    "mamba": {
        "state_size": 8, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 32,
        "time_step_min": 0.001, "time_step_max": 0.1, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
    },
    "gemma3": {
        "text_config": {**_COMMON, "model_type": "gemma3_text", "num_hidden_layers": 6, "head_dim": 16,
                        "query_pre_attn_scalar": 16, "sliding_window": 24, "sliding_window_pattern": 3},
    },
}  # fmt: skip


def make_stored_model(folder: Path, mode: str) -> Path:
    """A Llama in MLX's mxfp4, nvfp4 or mxfp8, under a name for them that mlx-lm alone reads."""
    folder.mkdir(parents=True, exist_ok=True)
    how = {"group_size": 16 if mode == "nvfp4" else 32, "bits": 8 if mode == "mxfp8" else 4, "mode": mode}
    config = {
        **_COMMON,
        "intermediate_size": 128,
        "model_type": "llama",
        "eos_token_id": 2,
        "quantization_config": {"quant_method": mode},
    }
    if mode == "nvfp4":
        named = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
        config["quantization_config"] = named
    module = mlxlm.load("models.llama")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    nn.quantize(model, **how)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(nn.utils.tree_flatten(model.parameters())))
    write_json(folder / "config.json", config)
    write_tokenizer(folder)
    return folder


def make_other_model(folder: Path, kind: str, bits: int | None = None, seed: int = 0) -> Path:
    """A folder that mlx-lm loads. bits: MLX affine, in groups of 32."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**_COMMON, **ARCHITECTURES[kind], "model_type": kind, "eos_token_id": 2}
    module = mlxlm.load(f"models.{kind}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
        config["quantization"] = {"group_size": 32, "bits": bits}
    mx.save_safetensors(str(folder / "model.safetensors"), dict(nn.utils.tree_flatten(model.parameters())))
    write_json(folder / "config.json", config)
    write_tokenizer(folder)
    return folder
