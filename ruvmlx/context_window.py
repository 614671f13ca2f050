"""A conversation on its way into a prompt: turns become messages, and old ones make room."""

import functools
from dataclasses import dataclass

from .engine.types import GenerationRequest
from .models.model import Message, Model


@dataclass(frozen=True)
class Turn:
    """One message of a saved chat, as the apps show it."""

    role: str  # "user" | "assistant" | "system"
    content: str
    reply_id: str | None = None  # assistant turns can be rated
    rating: str | None = None  # "up" | "down" | "1".."5"
    finish_reason: str | None = None
    id: int | None = None  # of the message; a system prompt has none
    branch: int = 1  # which of `branches` alternatives in this place it is
    branches: int = 1


def cut(sizes: list[int], limit: int, half: int) -> int:
    """Index of the first message to read, as if the chat had been cut whenever it came to its limit.

    It depends on the messages alone, so the cut stays where it is from turn to turn until the next one.
    """
    first, total = 0, 0
    for i, size in enumerate(sizes):
        total += size
        if total > limit:
            while first < i and total > half:
                total -= sizes[first]
                first += 1
    return first


class ContextWindow:
    """How much of a conversation one model reads. Sizes are in tokens."""

    def __init__(self, model: Model):
        self.size = model.shape.max_context
        encode = model.tokenizer.encode
        self._tokens = functools.lru_cache(4096)(lambda text: len(encode(text, add_bos=False)))

    def message_size(self, message: Message) -> int:
        """Tokens of one message, a little more than it needs."""
        return self._tokens(message.content) + 16

    def fitting(self, messages: list[Message], max_new_tokens: int) -> list[Message]:
        """The conversation without its oldest exchanges, if the context would overflow.

        A quarter of the context, or the reply's own limit if that is less, is kept free for the reply. Once
        full, half of the context is cleared at a time: the turns after that find their KV cache again.
        """
        limit = self.size - min(max_new_tokens, self.size // 4)
        head = messages[:1] if messages[0].role == "system" else []
        rest = messages[len(head) :]
        sizes = [self.message_size(message) for message in rest]
        first = cut(sizes, limit - sum(map(self.message_size, head)), limit // 2)
        while first < len(rest) - 1 and rest[first].role != "user":
            first += 1
        return head + rest[first:]


def alternating(turns: list[Turn]) -> list[Message]:
    """Turns as messages. A reply stopped before its first word is no turn: its neighbours are joined."""
    messages: list[Message] = []
    for turn in turns:
        if messages and messages[-1].role == turn.role and turn.content:
            messages[-1] = Message(turn.role, f"{messages[-1].content}\n\n{turn.content}")
        elif turn.content:
            messages.append(Message(turn.role, turn.content))
    return messages


def question_of(request: GenerationRequest) -> str:
    """The user's words that a reply answers."""
    if request.messages is None:
        return request.prompt or ""
    return next((m.content for m in reversed(request.messages) if m.role == "user"), "")
