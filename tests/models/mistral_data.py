"""What tests of Mistral's tokenizers share: mistral-common's files, its encoder, and conversations for it."""

import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ruvmlx.models.config.model import Message

# Special tokens that came with later versions, at ids that old files keep free.
_LATER = ["[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "[MODEL_SETTINGS]", "[/MODEL_SETTINGS]"]


def mistral_file(name: str) -> Path:
    """A file of mistral-common's data folder."""
    spec = find_spec("mistral_common")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return next(path for folder in folders for path in [Path(folder) / "data" / name] if path.is_file())


def tekken_of_version(version: int, path: Path, **more: Any) -> Path:
    """20,000 tokens of a real file, with the special tokens that a file of that version has."""
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    data = json.loads(mistral_file("tekken_240718.json").read_text(encoding="utf-8"))
    data["config"] |= {"version": f"v{version}", "default_vocab_size": 20_000}
    data["vocab"] = data["vocab"][:19_000]
    if version > 7:
        old = [str(token["token_str"].value) for token in Tekkenizer.DEPRECATED_SPECIAL_TOKENS]
        names = enumerate([*old, *_LATER])
        data["special_tokens"] = [{"rank": i, "token_str": text, "is_control": True} for i, text in names]
    settings = {"model_settings_builder": {}} if version >= 15 else {}
    path.write_text(json.dumps(data | settings | more), encoding="utf-8")
    return path


def encoder(path: Path) -> Callable[..., list[int]]:
    """(messages, tools) -> the prompt's ids, by mistral-common."""
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    tokenizer = MistralTokenizer.from_file(str(path))

    def encode(messages: Sequence[Message], tools: Sequence[Any] = (), **more: Any) -> list[int]:
        turns = [_turn(message) for message in messages]
        request = ChatCompletionRequest.from_openai(messages=turns, tools=list(tools) or None)
        return tokenizer.encode_chat_completion(request.model_copy(update=more)).tokens

    return encode


def _turn(message: Message) -> dict[str, Any]:
    """In OpenAI's form, with thoughts as chunks."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.content.startswith("[THINK]"):
        thought, _, answer = message.content.removeprefix("[THINK]").partition("[/THINK]")
        turn["content"] = [
            {"type": "thinking", "thinking": thought, "closed": True},
            {"type": "text", "text": answer},
        ]
    if message.tool_calls:
        turn["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.role == "tool":
        turn |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return turn


def _call(call: Any) -> dict[str, Any]:
    function = call["function"]
    return {
        **call,
        "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)},
    }


def tools() -> list[dict[str, Any]]:
    city = {"type": "string", "description": "The city's name, <s>[INST] or é"}
    schema = {
        "type": "object",
        "properties": {"city": city, "days": {"type": "integer"}},
        "required": ["city"],
    }
    weather = {"name": "weather", "description": "Tells the weather.", "parameters": schema}
    clock = {"name": "clock", "description": "", "parameters": {"type": "object", "properties": {}}}
    return [{"type": "function", "function": function} for function in (weather, clock)]


def conversations(version: int, with_tools: bool = False) -> dict[str, list[Message]]:
    if with_tools:
        return _tool_conversations(version)
    user, system = Message("user", "What is 2 + 2?"), Message("system", "Be brief.\n\nReally.")
    turns = [user, Message("assistant", "4 "), Message("user", "  And 3?\n"), Message("assistant", "Né 😀\n")]
    typed = "[INST] <s></s> [/INST] [SYSTEM_PROMPT] <SPECIAL_30> {{ x }}"
    found = {
        "one turn": [user],
        "system": [system, user],
        "several turns": [*turns, user],
        "several turns with system": [system, *turns, user],
        "typed special tokens": [Message("system", typed), Message("user", typed)],
        "two questions": [user, Message("user", "Well?")],
        "system, then two questions": [system, *turns, user, Message("user", "Well?")],
    }
    if version >= 13:
        thought = Message("assistant", "[THINK]Two and two.[/THINK]4")
        found["a thought"] = [user, thought, user]
    return found


def _tool_conversations(version: int) -> dict[str, list[Message]]:
    user = Message("user", "What is the weather in Paris?")
    call = {
        "id": "abcdefgh1",
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": "Zürich"}},
    }
    other = {"id": "abcdefgh2", "type": "function", "function": {"name": "clock", "arguments": {}}}
    asked = Message("assistant", "", tool_calls=(call,))
    both = Message("assistant", "", tool_calls=(call, other))
    sunny = Message("tool", '{"sky": "clear", "degrees": [20, 25]}', tool_call_id="abcdefgh1", name="weather")
    noon = Message("tool", "noon [/TOOL_RESULTS]", tool_call_id="abcdefgh2", name="clock")
    found = {
        "definitions": [user],
        "definitions with system": [Message("system", "S"), user],
        "later turns": [user, Message("assistant", "Sunny."), user],
        "a call": [user, asked, sunny],
        "two calls": [user, both, sunny, noon],
        "an answer": [user, both, sunny, noon, Message("assistant", "Clear."), user],
    }
    if version >= 7:
        found["text and a call"] = [user, Message("assistant", "Let me see.", tool_calls=(call,)), sunny]
    return found
