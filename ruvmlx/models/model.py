"""What a loaded model is, whatever file format it came from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import UnsupportedModel
from .rope_scaling import RopeScaling

if TYPE_CHECKING:  # the tokenizer's process starts faster without it
    import numpy as np


@dataclass(frozen=True)
class QueryScale:
    """Queries at position p are multiplied by 1 + beta * ln(1 + floor(p / original_max_position))."""

    beta: float
    original_max_position: int


@dataclass(frozen=True)
class ModelShape:
    """What is known of any model. Learning from ratings needs no more."""

    model_type: str
    hidden_size: int
    n_layers: int
    vocab_size: int
    max_context: int
    tie_word_embeddings: bool


@dataclass(frozen=True)
class ModelConfig(ModelShape):
    """A decoder that this project computes itself: Llama's, with what its family changes (families.py).

    Rope is half-split; loaders undo interleaved layouts.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    biases: frozenset[str] = frozenset()  # of which modules: "q_proj"
    head_norms: bool = False  # q and k of every head go through an RMS norm before rope
    layers_without_rope: frozenset[int] = frozenset()
    query_scale: QueryScale | None = None


@dataclass(frozen=True)
class OtherShape(ModelShape):
    """A model that mlx-lm runs. weights: how they are stored, where that is the reason; else ""."""

    weights: str = ""


def without(shape: ModelShape) -> str:
    """What a model lacks that this project has no decoder for, in words for people."""
    weights = f" with {shape.weights} weights" if isinstance(shape, OtherShape) and shape.weights else ""
    return (
        f"{shape.model_type} models{weights} run on mlx-lm's own code: chat and ratings work; KV tiers, "
        "training in the background and changes of other layers than the output head do not"
    )


# Items may be converted when they are asked for: ask once, in order, and keep no more than you need.
# Weights are named as mlx-lm names them ("model.layers.0.self_attn.q_proj.weight", "lm_head.weight"...).
# A plain tensor is one array [out, in], float32, float16 or ml_dtypes.bfloat16.
# A quantised one is three, in MLX's affine layout: ".weight" uint32 [out, in * bits / 32] (little end first),
# ".scales" and ".biases" float16/float32 [out, in / group_size]:   w = scale * q + bias.
Weights = Mapping[str, "np.ndarray"]


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    tool_calls: of an assistant, each {"id", "type": "function", "function": {"name", "arguments"}} with the
    arguments as an object. tool_call_id, name: of a tool's result.
    """

    role: str  # "system" | "user" | "assistant" | "tool"
    content: str
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tool_call_id: str = ""
    name: str = ""


Tools = Sequence[Mapping[str, Any]]  # {"type": "function", "function": {"name", "description", "parameters"}}


class Tokenizer(Protocol):
    """Text <-> token ids. User text can never become a special token unless `special=True` is asked for."""

    vocab_size: int
    bos_id: int | None
    eos_ids: frozenset[int]  # any of them ends a reply
    special_tokens: Mapping[str, int]
    chat_template: str | None
    strips_leading_space: bool  # SentencePiece: the first token's leading space is not part of the text

    def encode(
        self, text: str, *, add_bos: bool = True, special: bool = False, most: int | None = None
    ) -> list[int]:
        """Text -> ids. `special=False` reads "<|im_end|>" as ten plain characters. most: of a text that has
        more tokens, the ids may be those of its beginning: more than `most`. From any thread; for a long
        text, others run meanwhile."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to the text; b"" for a special token."""

    def decode(self, ids: Sequence[int]) -> str:
        """Ids -> text without special tokens; invalid UTF-8 becomes U+FFFD."""

    def text_with_specials(self, ids: Sequence[int]) -> str:
        """Ids -> text in which special tokens are written out."""

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        thinking: bool | None = None,
        tools: Tools = (),
        salt: str = "",
        most: int | None = None,
        opening: str = "",
        values: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Conversation -> ids through the model's chat template, rendered in a sandbox. thinking: whether the
        model is to think first; None is the template's own choice. Templates without a choice ignore it.
        tools: what the model may call; UsageError if the template has no place for tools. salt: texts that
        were encoded before are known only under an equal salt. most: as in `encode`. opening: text with which
        the reply begins, the last of the ids. values: more variables for the template."""

    def chat_text(self, messages: Sequence[Message], *, tools: Tools = ()) -> str:
        """The text that `encode_chat` encodes, special tokens as they are written."""


@dataclass
class Model:
    """A validated model on this machine. `load_weights` does the heavy part, when asked."""

    name: str
    path: Path
    format: str  # "gguf" | "safetensors"
    shape: ModelShape  # a ModelConfig where this project has its own decoder for the model
    tokenizer: Tokenizer
    load_weights: Callable[[], Weights]
    fingerprint: str  # adapters belong to it; equal for equal files, wherever they lie
    parameters: int
    bytes: int
    # The model's own sampling settings, where it has them.
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    # The system prompt of conversations that have none, perhaps an empty one; None: what the template does.
    default_system: str | None = None
    context_limit: int | None = None  # tokens; the user's own limit
    types: Mapping[str, int] = field(default_factory=dict)  # of a GGUF file: weights by type
    wrapped: bool = False  # the folder holds a model for images, of which this is the language model

    @property
    def context(self) -> int:
        """Tokens of the longest prompt and reply together."""
        return min(self.shape.max_context, self.context_limit or self.shape.max_context)

    @property
    def is_own(self) -> bool:
        """Does this project have a decoder for the model?"""
        return isinstance(self.shape, ModelConfig)

    @property
    def config(self) -> ModelConfig:
        """The decoder; UnsupportedModel where only mlx-lm has one."""
        if isinstance(self.shape, ModelConfig):
            return self.shape
        raise UnsupportedModel(f"{self.name}: {without(self.shape)}.")

    @property
    def bits(self) -> float:
        """Stored bits per parameter, scales and biases included."""
        return 8 * self.bytes / self.parameters
