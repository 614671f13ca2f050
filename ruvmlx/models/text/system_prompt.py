"""This module finds the system prompt that a model receives in a conversation, and its origin: the user,
ruvmlx or the chat template."""

from dataclasses import dataclass

from ..config.model import Message, Model

_MARK = "\ue000system\ue000"  # a text with private-use characters, which we expect in no template
_QUESTION = "\ue000question\ue000"


@dataclass(frozen=True)
class SystemPrompt:
    """A system prompt and its origin: "yours", "measured" (the tokenizer's `default_system`, chosen by
    measurements), "template" (the chat template adds it to conversations without one), or "none"."""

    text: str
    origin: str


def system_prompt(model: Model, given: str | None = None) -> SystemPrompt:
    """Return the system prompt that the model receives.

    given: the user's system prompt, which replaces all other system prompts; "": the user wants no system
    prompt; None: the user has not chosen
    """
    if given is not None:
        return SystemPrompt(given, "yours" if given else "none")
    if model.tokenizer.default_system is not None:
        return SystemPrompt(model.tokenizer.default_system, "measured")
    written = _of_template(model)
    return SystemPrompt(written, "template" if written else "none")


def _of_template(model: Model) -> str:
    """Return the system prompt that the chat template adds to a conversation without a system message."""
    question = Message("user", _QUESTION)
    bare = model.tokenizer.chat_text([question])
    before, mark, after = model.tokenizer.chat_text([Message("system", _MARK), question]).partition(_MARK)
    has_place = mark and bare.startswith(before) and bare.endswith(after)
    return bare[len(before) : len(bare) - len(after)].strip() if has_place else ""
