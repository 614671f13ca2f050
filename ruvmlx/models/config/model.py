"""This module defines the classes for a loaded model of any file format: Model, ModelConfig, Message,
Tokenizer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ...errors import UnsupportedModel
from .rope_scaling import RopeScaling

# tokenizer_process.py imports this module, and starts faster if the module does not import NumPy
if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class QueryScale:
    """A scale of the queries: the attention multiplies a query at position p by
    1 + beta * ln(1 + floor(p / original_max_position))."""

    beta: float
    original_max_position: int


@dataclass(frozen=True)
class ModelShape:
    """The sizes that every model has. To train an adapter of a model's output head on ratings, ruvmlx needs
    no other sizes of the model than the fields of this class."""

    writes: ClassVar[bool] = True  # False: the model is an encoder, which embeds texts and writes none

    model_type: str
    hidden_size: int
    n_layers: int
    vocab_size: int
    max_context: int
    tie_word_embeddings: bool


@dataclass(frozen=True)
class ModelConfig(ModelShape):
    """The configuration of a decoder that ruvmlx computes with its own code: Llama's decoder with the
    differences of the model's family (families.py).

    RoPE rotates number i of a head together with number i + turned_dims / 2. If a file has the numbers of a
    head in another order, the file's loader reorders the rows of q and k.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float  # the epsilon of the norms, both RMS norms and LayerNorms
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    biases: frozenset[str] = frozenset()  # the modules that have a bias, for example "q_proj"
    head_norms: bool = False  # True: q and k of every head go through an RMS norm before RoPE
    layers_without_rope: frozenset[int] = frozenset()
    query_scale: QueryScale | None = None
    layer_norm: bool = False  # True: the norms of the layers and the final norm are LayerNorms, not RMS norms
    norm_biases: bool = False  # True: the norms of the layers and the final norm have biases
    rope_dims: int | None = None  # RoPE rotates the first rope_dims numbers of each head; None: all numbers
    alibi_bias_max: float = 0.0  # if over 0, the attention adds ALiBi's biases (alibi.py) to the scores
    # True: the MLP is down(silu(gate(x)) * up(x)); False: the MLP is down(gelu(up(x)))
    gated_mlp: bool = True

    @property
    def turned_dims(self) -> int:
        """Return how many numbers of each head RoPE rotates."""
        return self.head_dim if self.rope_dims is None else self.rope_dims


@dataclass(frozen=True)
class OtherShape(ModelShape):
    """The shape of a model that only mlx-lm runs. weights: the storage format of the weights, if ruvmlx
    cannot read this format; "": ruvmlx has no decoder for the architecture."""

    weights: str = ""


def missing_features(shape: ModelShape) -> str:
    """Return a text that tells the user which of ruvmlx's features a model that only mlx-lm runs does not
    have, or that an encoder writes no text."""
    if not shape.writes:
        return f"{shape.model_type} models embed texts and write none"
    weights = f" with {shape.weights} weights" if isinstance(shape, OtherShape) and shape.weights else ""
    return (
        f"{shape.model_type} models{weights} run on mlx-lm's own code: chat and ratings work; KV tiers, "
        "training in the background and changes of other layers than the output head do not"
    )


def writes_nothing(name: str) -> str:
    """Return the sentence that tells the user that the encoder `name` cannot answer."""
    return f"{name} embeds texts and writes none: choose another model, or make vectors with `ruvmlx embed`."


# The weights of a model: {name: array}. The names are mlx-lm's ("model.layers.0.self_attn.q_proj.weight",
# "lm_head.weight"...). Each read of an item can convert the stored tensor again. So a caller should read each
# item once, in order, and keep only the arrays that it needs. A tensor that is not quantised is one array of
# float32, float16 or ml_dtypes.bfloat16 numbers (a matrix: [out, in]). A quantised matrix is three arrays in
# MLX's affine layout, w = scale * q + bias: ".weight" uint32 [out, in * bits / 32] (low bits first),
# ".scales" and ".biases" float16/float32 [out, in / group_size].
Weights = Mapping[str, "np.ndarray"]


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    tool_calls: the assistant's tool calls, each {"id", "type": "function", "function": {"name",
        "arguments"}}; the arguments are an object
    tool_call_id, name: for the result of a tool, the id of the tool call and the name of the tool
    """

    role: str  # "system" | "user" | "assistant" | "tool"
    content: str
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tool_call_id: str = ""
    name: str = ""


Tools = Sequence[Mapping[str, Any]]  # {"type": "function", "function": {"name", "description", "parameters"}}


class Tokenizer(Protocol):
    """The methods that every tokenizer has. A user's text can become a special token (a token that controls
    the model) only by `encode` with `special=True`; in `encode_chat` only the chat template's own text
    does."""

    vocab_size: int
    bos_id: int | None
    eos_id: int | None  # the id of the token that ends a text
    eos_ids: frozenset[int]  # the ids of the tokens that end a reply
    special_tokens: Mapping[str, int]
    chat_template: str | None
    strips_leading_space: bool  # True if `decode` removes the space that SentencePiece puts before a text
    # The system prompt of conversations without a system message; "" is a possible value. None: the template
    # decides.
    default_system: str | None

    def encode(
        self, text: str, *, add_bos: bool = True, special: bool = False, most: int | None = None
    ) -> list[int]:
        """Return the token ids of a text. Any thread can call this method; a long call does not block other
        Python threads.

        special: if False, a text such as "<|im_end|>" becomes the tokens of its ten characters and no special
            token
        most: a limit of tokens; for a text of more tokens, the result can have only the ids of the text's
            beginning, but has more than `most` ids, so that the caller sees that the text is too long
        """

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token adds to the text; b"" if the token is special."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, in which special tokens give no text. Invalid UTF-8 becomes
        U+FFFD."""

    def text_with_specials(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, in which special tokens give their strings, for example
        "<|im_end|>"."""

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
        """Return the token ids of a conversation. The model's chat template (code from the model's files)
        writes the conversation's text in a sandbox. A conversation without a system message and without tools
        begins with `default_system`. A request with tools usually comes from an agent program, which has a
        system prompt of its own.

        thinking: True asks the template for a thought before the answer, False for none; None: the template
            decides. Some templates ignore `thinking`.
        tools: the functions that the model can call; the method raises UsageError if the template does not
            support tools
        salt: a secret of the user; a text's ids come from the cache of encoded texts only if the call that
            stored them had the same salt
        most: as in `encode`
        opening: a text with which the reply must begin; its ids come last in the result
        values: more variables for the template
        """

    def chat_text(self, messages: Sequence[Message], *, tools: Tools = ()) -> str:
        """Return the text that `encode_chat` encodes, with the strings of special tokens."""

    def forget_texts(self) -> None:
        """Drop the texts whose token ids are in memory."""


@dataclass
class Model:
    """A model on this machine whose files were checked. The function `load_weights` returns the weights,
    which are read from the files later, when a backend needs them."""

    name: str
    path: Path
    format: str  # "gguf" | "safetensors"
    shape: ModelShape  # a ModelConfig if ruvmlx has its own decoder for the model
    tokenizer: Tokenizer
    load_weights: Callable[[], Weights]
    # a hash of the model's content that does not depend on its path; an adapter fits only the model with the
    # fingerprint for which it was trained
    fingerprint: str
    # returns a hash of a piece of every tensor (fingerprint.content_hash)
    content: Callable[[], str]
    parameters: int
    bytes: int
    # The recommended sampling settings (sampling_defaults.py).
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    context_limit: int | None = None  # the user's limit of the context in tokens; None: the user set no limit
    types: Mapping[str, int] = field(default_factory=dict)  # {tensor type: number of weights} of a GGUF file
    file_type: str = ""  # the quantisation of a GGUF file, for example "Q4_K_M"; "": it is not known
    # True if the files hold a model for text and images, of which ruvmlx runs only the text part
    wrapped: bool = False
    embeds: bool = False  # True if the model is trained to embed texts, see embedding_model.py

    @property
    def context(self) -> int:
        """Return the maximum number of tokens of prompt and reply together."""
        return min(self.shape.max_context, self.context_limit or self.shape.max_context)

    @property
    def is_own(self) -> bool:
        """Return True if ruvmlx has its own decoder for the model; False if only mlx-lm runs it."""
        return isinstance(self.shape, ModelConfig)

    @property
    def config(self) -> ModelConfig:
        """Return the configuration of ruvmlx's decoder. Raises UnsupportedModel if only mlx-lm runs the
        model."""
        if isinstance(self.shape, ModelConfig):
            return self.shape
        raise UnsupportedModel(f"{self.name}: {missing_features(self.shape)}.")

    @property
    def bits(self) -> float:
        """Return the number of stored bits per parameter. These bits include the scales and biases of
        quantised weights."""
        return 8 * self.bytes / self.parameters
