"""Builds a prompt's messages from a conversation, and drops the oldest if the context would overflow."""

import functools
from dataclasses import dataclass

from ..models.config.model import Message, Model
from .types import GenerationRequest


@dataclass(frozen=True)
class Turn:
    """One message of a saved chat, as the apps show it."""

    role: str  # "user" | "assistant" | "system"
    content: str
    reply_id: str | None = None  # assistant turns can be rated
    rating: str | None = None  # "up" | "down" | "1".."5"
    finish_reason: str | None = None
    id: int | None = None  # the message's id; None for a system prompt
    branch: int = 1  # position among the `branches` alternatives in this place, from 1
    branches: int = 1


def cut(sizes: list[int], limit: int, half: int) -> int:
    """Index of the first message to read: whenever the chat exceeds `limit`, it is cut down to `half`.

    The index depends on the messages alone, so it stays the same from turn to turn until the next cut.
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
    """Fits conversations into one model's context. Sizes are in tokens."""

    def __init__(self, model: Model):
        self.size = model.context
        encode = model.tokenizer.encode
        self._tokens = functools.lru_cache(4096)(lambda text: len(encode(text, add_bos=False)))

    def message_size(self, message: Message) -> int:
        """Tokens of one message, with 16 added for the chat template."""
        return self._tokens(message.content) + 16

    def fitting(self, messages: list[Message], max_new_tokens: int, summary: str = "") -> list[Message]:
        """The conversation without its oldest exchanges, if the context would overflow.

        A quarter of the context, or the reply's limit if that is less, is kept free for the reply. When the
        context is full, it is cut to half, so that the KV cache serves all turns until the next cut.

        summary: of what was said before; the first message begins with it.
        """
        limit = self.size - min(max_new_tokens, self.size // 4)
        if summary:
            limit -= self.message_size(Message("user", summary))
        head = messages[:1] if messages[0].role == "system" else []
        rest = messages[len(head) :]
        sizes = [self.message_size(message) for message in rest]
        first = cut(sizes, limit - sum(map(self.message_size, head)), limit // 2)
        while first < len(rest) - 1 and rest[first].role != "user":
            first += 1
        read = rest[first:]
        if summary and read:
            begun = f"(What was said before, in short: {summary})\n\n{read[0].content}"
            read[0] = Message(read[0].role, begun)
        return head + read

    def left_out(self, turns: list[Turn], max_new_tokens: int, summary: str = "") -> list[Turn]:
        """The oldest turns, for which the prompt of the last reply had no room."""
        asked = next((n for n in range(len(turns), 0, -1) if turns[n - 1].role == "user"), 0)
        read = turns[:asked]
        if sum(len(turn.content.encode()) + 16 for turn in read) < self.size // 2:
            return []  # a token has at least one byte
        messages, spoken = alternating(read), [t for t in read if t.role != "system" and t.content]
        gone = len(messages) - len(self.fitting(messages, max_new_tokens, summary))
        found, number = list[Turn](), 0
        for turn, after in zip(spoken, [*spoken[1:], None], strict=True):
            if number >= gone:
                break
            found.append(turn)
            number += after is None or after.role != turn.role  # neighbours of one role are one message
        return found


def alternating(turns: list[Turn]) -> list[Message]:
    """Turns as messages with alternating roles. Empty replies are dropped, and their neighbours joined."""
    messages: list[Message] = []
    for turn in turns:
        if messages and messages[-1].role == turn.role and turn.content:
            messages[-1] = Message(turn.role, f"{messages[-1].content}\n\n{turn.content}")
        elif turn.content:
            messages.append(Message(turn.role, turn.content))
    return messages


def question_of(request: GenerationRequest) -> str:
    """The user's message that the reply to this request answers."""
    if request.messages is None:
        return request.prompt or ""
    return next((m.content for m in reversed(request.messages) if m.role == "user"), "")
