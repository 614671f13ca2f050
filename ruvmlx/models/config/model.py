"""What a loaded model is, for every file format."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ...errors import UnsupportedModel
from .rope_scaling import RopeScaling

if TYPE_CHECKING:  # without this import the tokenizer's process starts faster
    import numpy as np


@dataclass(frozen=True)
class QueryScale:
    """Queries at position p are multiplied by 1 + beta * ln(1 + floor(p / original_max_position))."""

    beta: float
    original_max_position: int


@dataclass(frozen=True)
class ModelShape:
    """The sizes that every model has. Learning from ratings needs only these."""

    model_type: str
    hidden_size: int
    n_layers: int
    vocab_size: int
    max_context: int
    tie_word_embeddings: bool


@dataclass(frozen=True)
class ModelConfig(ModelShape):
    """A decoder that this project computes itself: Llama's, with the differences of its family (families.py).

    RoPE is half-split; loaders undo interleaved layouts.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    biases: frozenset[str] = frozenset()  # the modules that have a bias, for example "q_proj"
    head_norms: bool = False  # q and k of every head go through an RMS norm before RoPE
    layers_without_rope: frozenset[int] = frozenset()
    query_scale: QueryScale | None = None


@dataclass(frozen=True)
class OtherShape(ModelShape):
    """A model that mlx-lm runs. weights: how they are stored, if that is why only mlx-lm can run it; else
    ""."""

    weights: str = ""


def missing_features(shape: ModelShape) -> str:
    """Return, as text for people, what does not work with a model for which this project has no decoder."""
    weights = f" with {shape.weights} weights" if isinstance(shape, OtherShape) and shape.weights else ""
    return (
        f"{shape.model_type} models{weights} run on mlx-lm's own code: chat and ratings work; KV tiers, "
        "training in the background and changes of other layers than the output head do not"
    )


# An item may be converted when it is read. So read each item once, in order, and keep only what you need. The
# names are mlx-lm's ("model.layers.0.self_attn.q_proj.weight", "lm_head.weight"...). A plain tensor is one
# array [out, in] of float32, float16 or ml_dtypes.bfloat16. A quantised tensor is three arrays in MLX's
# affine layout, w = scale * q + bias: ".weight" uint32 [out, in * bits / 32] (low bits first), ".scales" and
# ".biases" float16/float32 [out, in / group_size].
Weights = Mapping[str, "np.ndarray"]


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    tool_calls: an assistant's calls, each {"id", "type": "function", "function": {"name", "arguments"}} with
        the arguments as an object
    tool_call_id, name: of the result of a tool
    """

    role: str  # "system" | "user" | "assistant" | "tool"
    content: str
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tool_call_id: str = ""
    name: str = ""


Tools = Sequence[Mapping[str, Any]]  # {"type": "function", "function": {"name", "description", "parameters"}}


class Tokenizer(Protocol):
    """Text <-> token ids. A user's text can become a special token only with `special=True`."""

    vocab_size: int
    bos_id: int | None
    eos_ids: frozenset[int]  # each of them ends a reply
    special_tokens: Mapping[str, int]
    chat_template: str | None
    strips_leading_space: bool  # SentencePiece: the first token's leading space is not part of the text

    def encode(
        self, text: str, *, add_bos: bool = True, special: bool = False, most: int | None = None
    ) -> list[int]:
        """Text -> ids. Can be called from any thread; while a long text is encoded, other threads run.

        special: False: "<|im_end|>" is encoded as ten plain characters
        most: for a text with more tokens, the result may be the ids of its beginning; it has more than `most`
            ids
        """

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token adds to the text; b"" for a special token."""

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
        """Conversation -> ids, through the model's chat template in a sandbox.

        thinking: whether the model must think first; None: the template decides; templates without a choice
            ignore it
        tools: the functions that the model may call; UsageError if the template has no place for tools
        salt: texts that were encoded before are found only with an equal salt
        most: as in `encode`
        opening: text with which the reply begins; its ids come last
        values: more variables for the template
        """

    def chat_text(self, messages: Sequence[Message], *, tools: Tools = ()) -> str:
        """Return the text that `encode_chat` encodes, with the special tokens written out."""


@dataclass
class Model:
    """A checked model on this machine. `load_weights` does the slow part."""

    name: str
    path: Path
    format: str  # "gguf" | "safetensors"
    shape: ModelShape  # a ModelConfig if this project has a decoder for the model
    tokenizer: Tokenizer
    load_weights: Callable[[], Weights]
    fingerprint: str  # adapters belong to it; equal for equal files in any place
    parameters: int
    bytes: int
    # The sampling settings from the model's own files, if it has them.
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    # The system prompt for conversations without one; it may be empty. None: the template decides.
    default_system: str | None = None
    context_limit: int | None = None  # tokens: the user's own limit
    types: Mapping[str, int] = field(default_factory=dict)  # of a GGUF file: {type: number of weights}
    wrapped: bool = False  # whether the folder holds a model for images that contains this language model
    embeds: bool = False  # whether it is trained to embed texts, see embedding_model.py

    @property
    def context(self) -> int:
        """The maximum number of tokens of prompt and reply together."""
        return min(self.shape.max_context, self.context_limit or self.shape.max_context)

    @property
    def is_own(self) -> bool:
        """Does this project have a decoder for the model?"""
        return isinstance(self.shape, ModelConfig)

    @property
    def config(self) -> ModelConfig:
        """The decoder's configuration. Raises UnsupportedModel if only mlx-lm has a decoder."""
        if isinstance(self.shape, ModelConfig):
            return self.shape
        raise UnsupportedModel(f"{self.name}: {missing_features(self.shape)}.")

    @property
    def bits(self) -> float:
        """Stored bits per parameter, with scales and biases."""
        return 8 * self.bytes / self.parameters
