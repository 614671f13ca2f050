"""The system prompt that a model really receives, and where it comes from."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..config.model import Message, Model

_MARK = "\ue000system\ue000"  # no template writes private-use characters
_QUESTION = "\ue000question\ue000"


@dataclass(frozen=True)
class SystemPrompt:
    """A system prompt and its origin: "yours", "measured" (the model's `default_system`), "template" (the
    chat template adds it to conversations without one), or "none"."""

    text: str
    origin: str


def system_prompt(model: Model, given: str | None = None) -> SystemPrompt:
    """Return what the model receives as its system prompt.

    given: the user's choice, which always wins; "": no system prompt; None: the user chose nothing
    """
    if given is not None:
        return SystemPrompt(given, "yours" if given else "none")
    if model.default_system is not None:
        return SystemPrompt(model.default_system, "measured")
    written = _of_template(model)
    return SystemPrompt(written, "template" if written else "none")


def with_system(model: Model, messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with the model's `default_system` first, unless it has a system message."""
    own = any(message.role == "system" for message in messages)
    if own or model.default_system is None:
        return list(messages)
    return [Message("system", model.default_system), *messages]


def _of_template(model: Model) -> str:
    """Return what the chat template writes as system prompt for a conversation without one."""
    question = Message("user", _QUESTION)
    bare = model.tokenizer.chat_text([question])
    before, mark, after = model.tokenizer.chat_text([Message("system", _MARK), question]).partition(_MARK)
    has_place = mark and bare.startswith(before) and bare.endswith(after)
    return bare[len(before) : len(bare) - len(after)].strip() if has_place else ""
