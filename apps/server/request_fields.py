"""This module lists the request fields that this server does not use.

A body's struct lists the fields that the server uses. UNUSED lists fields that clients send, but that change
nothing in this server. The server accepts the fields of UNUSED, and the answer's header `x-ruvmlx-ignored`
names the fields that a request has. WOULD_CHANGE lists fields that would change the answer in a way that this
server does not support. The server refuses a request with a field of WOULD_CHANGE, and the error gives the
name of the field and the reason. If a field is neither in a struct nor in one of these two lists, the server
refuses the request, and the error gives the name of the field.

The lists have the path of each field as an error shows the path, but without the numbers of items:
`tools[].strict`. `tools[web_search]` means the items of `tools` whose `type` is web_search.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from .anthropic_bodies import CountBody, MessagesBody
from .bodies import ChatBody, CompletionBody, EmbeddingBody, RatingBody
from .llama_cpp_bodies import InfillBody
from .ollama_bodies import OllamaChatBody, OllamaEmbedBody, OllamaEmbeddingsBody, OllamaGenerateBody
from .responses_bodies import ResponsesBody


@dataclass(frozen=True)
class Unused:
    """A field that the server accepts and that changes nothing. kind: the type of the field's values; null is
    always allowed. why: the reason why it changes nothing, for the OpenAPI document."""

    kind: Any
    why: str


_CACHES = "Every prompt's prefix is cached."
_ONE_TIER = "There is one tier."
_NOT_KEPT = "It is not used and not kept."
_NO_HOSTED = "This server runs no tools of its own."
_ALL_TOOLS = "The model sees every tool."

_OPENAI_HINTS = {
    "prompt_cache_key": Unused(str, _CACHES),
    "prompt_cache_retention": Unused(str, _CACHES),
    "prompt_cache_options": Unused(dict[str, Any], _CACHES),
    "safety_identifier": Unused(str, _NOT_KEPT),
    "service_tier": Unused(Literal["auto", "default", "flex", "scale", "priority", "fast"], _ONE_TIER),
}
_OBFUSCATION = Unused(bool, "Nothing is added to a stream.")
_ObfuscationOnly = Annotated[
    dict[Literal["include_obfuscation"], bool],
    # msgspec does not write the names of the allowed keys into the schema, so this line adds the names.
    Meta(extra_json_schema={"propertyNames": {"enum": ["include_obfuscation"]}}),
]
_ANTHROPIC_HINTS = {
    "context_management": Unused(dict[str, Any], "Nothing is removed from the conversation."),
    "output_config.effort": Unused(str, "A model has one effort."),
    "output_config.task_budget": Unused(dict[str, Any], "max_tokens is the limit."),
    "thinking.display": Unused(Literal["summarized", "omitted", "updates"], "Thoughts come as they are."),
    "thinking.block_binding": Unused(Any, "Nothing checks where a thought came from."),
    "tools[].eager_input_streaming": Unused(bool, "The input of every call is streamed."),
    "tools[].defer_loading": Unused(bool, _ALL_TOOLS),
    "tools[].input_examples": Unused(list[dict[str, Any]], "Templates have no place for examples."),
    "tools[].allowed_callers": Unused(list[Literal["direct"]], "Only the model calls tools."),
    "messages[].content[tool_use].caller": Unused(dict[str, Any], "Only the model calls tools."),
    "messages[].content[tool_use].toolset_name": Unused(str, "Tools have no sets."),
    "messages[].content[tool_result].toolset_name": Unused(str, "Tools have no sets."),
    "betas": Unused(list[str], "What a beta adds has fields of its own."),
    "speed": Unused(Literal["standard", "fast"], "There is one speed."),
    "metadata": Unused(dict[str, Any], _NOT_KEPT),
    "billing_policy": Unused(Any, "Nothing is billed."),
    "user_profile_id": Unused(str, _NOT_KEPT),
    "workspace_id": Unused(str, _NOT_KEPT),
}
_FUNCTION_HINTS = {
    "allowed_callers": Unused(list[Literal["direct"]], "Only the model calls tools."),
    "defer_loading": Unused(bool, _ALL_TOOLS),
    "output_schema": Unused(dict[str, Any], "Results are read as they are."),
}
_MESSAGES_HINTS = {
    "service_tier": Unused(Literal["auto", "standard_only"], _ONE_TIER),
    "inference_geo": Unused(str, "The model runs on this machine."),
    "diagnostics": Unused(Any, _NOT_KEPT),
    "fallbacks": Unused(Any, "There is one model."),
    "fallback_credit_token": Unused(str, "Nothing is billed."),
}
# Some classes of OpenAI's Python client add these fields to the server's answer. If a program sends an
# earlier reply back, the client also sends these fields.
_PARSED = Unused(Any, "The text has it.")
_MARKS = Unused(dict[str, Any], _CACHES)
# The package @openai/agents repeats the fields of an earlier reply in each text part of the reply.
_OF_MESSAGE = "Only the field of the message counts."
_BESIDE_TEXT = {
    "role": Unused(Literal["assistant"], _OF_MESSAGE),
    "refusal": Unused(type(None), _OF_MESSAGE),
    "reasoning_content": Unused(str, _OF_MESSAGE),
    "tool_calls": Unused(list[dict[str, Any]], _OF_MESSAGE),
    "prompt_cache_breakpoint": _MARKS,
}
_Included = Literal[
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]

_MACHINE = "The settings of the server decide."
_OLLAMA_OPTIONS = {
    **{
        f"options.{name}": Unused(int, _MACHINE)
        for name in ("main_gpu", "num_batch", "num_gpu", "num_thread")
    },
    **{
        f"options.{name}": Unused(bool, _MACHINE)
        for name in ("f16_kv", "low_vram", "numa", "use_mlock", "use_mmap")
    },
    **{f"options.{name}": Unused(bool, _NOT_KEPT) for name in ("embedding_only", "logits_all", "vocab_only")},
    "options.num_gqa": Unused(int, "The shape is the model's."),
    "options.rope_frequency_base": Unused(float, "The shape is the model's."),
    "options.rope_frequency_scale": Unused(float, "The shape is the model's."),
    "options.reasoning_effort": Unused(str, "As in ollama, only `think` counts."),
    "options.num_ctx": Unused(int, "The context is the model's."),
    "options.num_keep": Unused(int, "Nothing is removed from the conversation."),
    "options.mirostat": Unused(Literal[0], "0 is off."),
    "options.tfs_z": Unused(Literal[1], "1 is off."),
    "options.typical_p": Unused(Literal[1], "1 is off."),
    "options.mirostat_eta": Unused(float, "Only mirostat uses it."),
    "options.mirostat_tau": Unused(float, "Only mirostat uses it."),
    "options.penalize_newline": Unused(bool, "A new line is a token like any other."),
}
_OPTIONS_ONLY = "As in ollama, only `options` counts."
_OLLAMA_BESIDE = {
    "max_output_tokens": Unused(int, _OPTIONS_ONLY),
    "temperature": Unused(float, _OPTIONS_ONLY),
    "top_p": Unused(float, _OPTIONS_ONLY),
}
_FOR_REPLIES = Unused(dict[str, Any], "They are for replies.")
_OLLAMA_REFUSED = {
    "options.mirostat": "give top_p or min_p",
    "options.tfs_z": "give top_p or min_p",
    "options.typical_p": "give top_p or min_p",
}

# Open WebUI and clients of llama.cpp send these fields to /v1/chat/completions and /v1/completions.
_LLAMA_CPP_HINTS = {
    "cache_prompt": Unused(bool, _CACHES),
    "id_slot": Unused(int, "Any slot has every cache."),
    "mirostat": Unused(Literal[0], "0 is off."),
    "mirostat_eta": Unused(float, "Only mirostat uses it."),
    "mirostat_tau": Unused(float, "Only mirostat uses it."),
    "typical_p": Unused(Literal[1], "1 is off."),
    **{name: Unused(int, _MACHINE) for name in ("num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread")},
    **{name: Unused(bool, _MACHINE) for name in ("use_mlock", "use_mmap")},
    "keep_alive": Unused(str | float, "The setting server_unload decides."),
}
_LLAMA_CPP_REFUSED = {"mirostat": "give top_p or min_p", "typical_p": "give top_p or min_p"}

UNUSED: dict[type, dict[str, Unused]] = {
    ChatBody: {
        **_OPENAI_HINTS,
        **_LLAMA_CPP_HINTS,
        "stream_options.include_obfuscation": _OBFUSCATION,
        # LangChain and AutoGen send a name with messages. OpenAI's examples send it with a tool's result.
        "messages[].name": Unused(str, "Roles and ids say who speaks."),
        "messages[].parsed": _PARSED,
        "messages[].tool_calls[].index": Unused(int, "Calls have an order."),
        "messages[].tool_calls[].function.parsed_arguments": _PARSED,
        # the document has one schema for the parts of a message and of a prediction
        **{
            f"{parts}[].{name}": field
            for parts in ("messages[].content", "prediction.content")
            for name, field in _BESIDE_TEXT.items()
        },
        "metadata": Unused(dict[str, str], _NOT_KEPT),
        "modalities": Unused(Annotated[list[Literal["text"]], Meta(min_length=1)], "Answers are text."),
        "store": Unused(bool, _NOT_KEPT),
        "verbosity": Unused(Literal["low", "medium", "high"], "A model has one verbosity."),
    },
    CompletionBody: {
        **_LLAMA_CPP_HINTS,
        "best_of": Unused(Literal[1], "1 is the default."),
        "stream_options.include_obfuscation": _OBFUSCATION,
    },
    EmbeddingBody: {"user": Unused(str, _NOT_KEPT)},
    ResponsesBody: {
        **_OPENAI_HINTS,
        "client_metadata": Unused(dict[str, str], _NOT_KEPT),
        "context_management": Unused(list[dict[str, Any]], "Nothing is removed from the conversation."),
        "include": Unused(list[_Included], "The answer has all that there is."),
        "max_tool_calls": Unused(int, _NO_HOSTED),
        "reasoning.summary": Unused(Literal["auto", "concise", "detailed"], "The output has the thought."),
        "reasoning.generate_summary": Unused(str, "The output has the thought itself."),
        "stream_options": Unused(_ObfuscationOnly, _OBFUSCATION.why),
        "top_logprobs": Unused(Literal[0], "0 is the default."),
        "text.verbosity": Unused(Literal["low", "medium", "high"], "A model has one verbosity."),
        "input[].content[].parsed": _PARSED,
        "input[].content[].prompt_cache_breakpoint": _MARKS,
        "input[].output[].parsed": _PARSED,
        "input[].output[].prompt_cache_breakpoint": _MARKS,
        "input[].parsed_arguments": _PARSED,
        "input[].created_by": Unused(str, "The type says it."),
        "input[function_call].caller": Unused(dict[str, Any], "Only the model calls tools."),
        "input[function_call_output].caller": Unused(dict[str, Any], "Only the model calls tools."),
        **{f"tools[function].{name}": field for name, field in _FUNCTION_HINTS.items()},
        **{f"tools[].tools[].{name}": field for name, field in _FUNCTION_HINTS.items()},
        "tools[web_search]": Unused(dict[str, Any], _NO_HOSTED),
        "tools[web_search_preview]": Unused(dict[str, Any], _NO_HOSTED),
    },
    OllamaChatBody: {
        **_OLLAMA_OPTIONS,
        **_OLLAMA_BESIDE,
        "messages[].name": Unused(str, "Roles say who speaks."),
    },
    OllamaGenerateBody: {**_OLLAMA_OPTIONS, "template": Unused(Literal[""], "The template is the model's.")},
    OllamaEmbeddingsBody: {"options": _FOR_REPLIES},
    OllamaEmbedBody: {"options": _FOR_REPLIES},
    InfillBody: {
        "cache_prompt": Unused(bool, _CACHES),
        "grammar": Unused(Literal[""], "An empty grammar is none."),
        "id_slot": Unused(int, "Any slot has every cache."),
        "n_probs": Unused(Literal[0], "0 is the default."),
        "n_indent": Unused(int, "Lines are as the model writes them."),
        "response_fields": Unused(list[str], "The answer has all its fields."),
        "samplers": Unused(list[str], "top_k, top_p and min_p apply together."),
        "t_max_predict_ms": Unused(int, "n_predict is the limit."),
        "t_max_prompt_ms": Unused(int, "n_predict is the limit."),
    },
    # Anthropic's server counts the tokens before the compaction. This server does the same.
    CountBody: {**_ANTHROPIC_HINTS, "compaction": Unused(Any, "All messages count.")},
    MessagesBody: {**_ANTHROPIC_HINTS, **_MESSAGES_HINTS},
}

WOULD_CHANGE: dict[type, dict[str, str]] = {
    ChatBody: {
        "audio": "answers are text",
        "function_call": "give tool_choice",
        "functions": "give tools",
        "moderation": "this server moderates nothing",
        "web_search_options": "this server searches nothing",
        **_LLAMA_CPP_REFUSED,
    },
    CompletionBody: {"best_of": "give n, and choose yourself", **_LLAMA_CPP_REFUSED},
    ResponsesBody: {
        "conversation": "give previous_response_id",
        "moderation": "this server moderates nothing",
        "prompt": "prompts are not kept; send the text as input",
        "top_logprobs": "give logprobs to /v1/chat/completions",
    },
    RatingBody: {"reply_id": "give it as id"},
    OllamaChatBody: _OLLAMA_REFUSED,
    OllamaGenerateBody: {
        **_OLLAMA_REFUSED,
        "context": "send the conversation to /api/chat",
        **dict.fromkeys(("height", "steps", "width"), "this server makes no images"),
    },
    InfillBody: {"grammar": "give stop", "json_schema": "give stop", "n_probs": "ask /v1/completions"},
    CountBody: {"mcp_servers": "this server calls no other servers", "thread": "threads are not kept"},
    MessagesBody: {
        "compaction": "this server makes no summaries",
        "container": "this server runs no code",
        "mcp_servers": "this server calls no other servers",
        "thread": "threads are not kept",
    },
}

_NULL = Unused(type(None), "null is no value")
# These are the names of Anthropic's betas (features that the header `anthropic-beta` turns on) whose fields
# and blocks this server supports, or which add no fields.
_BETAS_IN_FORCE = (
    "claude-code",
    "fine-grained-tool-streaming",
    "interleaved-thinking",
    "mid-conversation-system",
    "prompt-caching",
    "extended-cache-ttl",
    "structured-outputs",
    "token-counting",
    "token-efficient-tools",
)
_BETA = re.compile(r"[a-zA-Z0-9._-]{1,64}")
MOST_BETAS = 32
_STEP = re.compile(r"(?P<name>\w+)(\[(?P<tag>\w*)\])?")


def ignored_betas(header: str) -> list[str]:
    """Return the betas in a header `anthropic-beta` (its first MOST_BETAS names) that change nothing in this
    server. A word that cannot be the name of a beta is left out."""
    names = [name.strip() for name in header.split(",")[:MOST_BETAS]]
    return [n for n in names if _BETA.fullmatch(n) and not n.startswith(_BETAS_IN_FORCE)]


def take_unused(body: Any, kind: type) -> list[str]:
    """Remove the unused fields from a decoded body, and return their paths. If the value of an unused field
    has a wrong type, the field stays in the body, so that the decoder refuses the body. Also remove each
    field of WOULD_CHANGE whose value is null, because null changes nothing."""
    for path in WOULD_CHANGE.get(kind, {}):
        _take(body, steps_of(path), _NULL)
    return [path for path, field in UNUSED.get(kind, {}).items() if _take(body, steps_of(path), field)]


def steps_of(path: str) -> list[tuple[str, str | None]]:
    """Split a path into steps, and return (field, item) for each step. item: None for the field itself, ""
    for all items of the field, or the `type` of the items that are meant."""
    return [(found["name"], found["tag"]) for found in _STEP.finditer(path)]


def is_unused(kind: type, path: str) -> bool:
    """Return True if the field changes nothing. path: the path of the field, with or without the numbers of
    items."""
    plain = re.sub(r"\[\d+\]", "[]", path)
    return any(re.sub(r"\[\w+\]", "[]", name) == plain for name in UNUSED.get(kind, {}))


def reason_of(kind: type, path: str) -> str | None:
    """Return the reason why the server refuses a field, or None if WOULD_CHANGE does not have the field.
    path: the path of the field, with or without the numbers of items."""
    return WOULD_CHANGE.get(kind, {}).get(re.sub(r"\[\d+\]", "[]", path))


def _take(value: Any, steps: list[tuple[str, str | None]], field: Unused) -> bool:
    (name, tag), *rest = steps
    if not isinstance(value, dict) or name not in value:
        return False
    if rest:
        return any([_take(item, rest, field) for item in _items(value[name], tag)])
    if tag is not None:
        return _take_items(value[name], tag)
    if not _fits(value[name], field.kind):
        return False
    del value[name]
    return True


def _items(value: Any, tag: str | None) -> Iterator[Any]:
    if tag is None:
        yield value
    elif isinstance(value, list):
        yield from (item for item in value if not tag or _type_of(item) == tag)


def _take_items(items: Any, tag: str) -> bool:
    if not isinstance(items, list):
        return False
    kept = [item for item in items if _type_of(item) != tag]
    found, items[:] = len(kept) < len(items), kept
    return found


def _type_of(item: Any) -> Any:
    return item.get("type") if isinstance(item, dict) else None


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(value, float) and value.is_integer():  # JSON does not distinguish 2.0 and 2
        value = int(value)
    try:
        msgspec.convert(value, kind | None if kind is not Any else Any)
    except msgspec.ValidationError:
        return False
    return True
