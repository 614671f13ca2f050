"""This module builds a prompt's messages from a chat. The oldest messages are left out if the context would
overflow."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..models.config.model import Message, Model
from ..models.text.tool_calls import ParsedCall
from .types import GenerationRequest

TEMPLATE_TOKENS = 16  # the number of tokens that each message takes besides its text, for the chat template
REST_LEFT_OUT = "(The rest of this result was left out.)"  # these words end a shortened result of a tool
MAX_COUNTS = 1 << 12  # the maximum number of texts whose number of tokens is kept; a text takes 150 bytes


@dataclass(frozen=True)
class Turn:
    """A message of a saved chat, as the apps show it."""

    role: str  # "user" | "assistant" | "system" | "tool"
    content: str
    # the id with which the user can rate this message; None: the message is not a reply
    reply_id: str | None = None
    rating: str | None = None  # "up" | "down" | "1".."5"
    finish_reason: str | None = None
    id: int | None = None  # the message's id; None for a system prompt
    # the position (from 1) of this message among its `branches` versions: the replies to the same question,
    # or the questions after the same message
    branch: int = 1
    branches: int = 1
    # an assistant's turn: the tool calls of the reply; a tool's turn: the one call that has this result
    calls: tuple[ParsedCall, ...] = ()


def cut(sizes: list[int], limit: int, half: int) -> int:
    """Return the index of the first message that the prompt keeps. Whenever the messages exceed `limit`
    tokens, the oldest messages are cut off until at most `half` tokens, or only the newest message, are left.
    sizes: the number of tokens of each message

    The index depends only on the sizes and the two limits, so the prompts of later turns begin with the same
    message until the next cut.
    """
    first, total = 0, 0
    for i, size in enumerate(sizes):
        total += size
        if total > limit:
            while first < i and total > half:
                total -= sizes[first]
                first += 1
    return first


def first_measured(count: int, limit: int) -> int:
    """Return the index of the first of `count` messages whose size `cut` must know to find the messages that
    fit into `limit` tokens.

    Each message takes TEMPLATE_TOKENS or more, so the messages from this index on are more than the room
    holds. The index stays the same for `limit / TEMPLATE_TOKENS` messages, so that the prompts of later turns
    begin with the same message. In a long chat, the sizes of thousands of older messages are not needed.
    """
    many = max(limit, 0) // TEMPLATE_TOKENS + 1
    return max(0, count // many - 1) * many


class ContextWindow:
    """A context window fits conversations into one model's context and into the memory for KV caches. Sizes
    are in tokens."""

    def __init__(self, model: Model, longest: Callable[[], int] | None = None):
        """longest: a function that returns the maximum number of tokens for whose KV cache there is memory;
        None: there is memory for the whole context"""
        self._context, self._longest = model.context, longest
        self._tokenizer = model.tokenizer
        self._counts: dict[bytes, int] = {}  # hash of a text -> number of tokens

    @property
    def size(self) -> int:
        """Return the maximum number of tokens of a prompt and its reply."""
        return min(self._context, self._longest()) if self._longest else self._context

    def _room(self, max_new_tokens: int) -> int:
        """Return the number of tokens of the longest prompt. A quarter of the size, or the reply's limit if
        that is less, stays free for the reply. If memory limits the size, a reply's own limit stays free as a
        whole, because the memory for it must be there before the reply begins."""
        size = self.size
        is_whole = size < self._context and max_new_tokens < self._context
        return size - (max_new_tokens if is_whole else min(max_new_tokens, size // 4))

    def _tokens(self, text: str) -> int:
        """Return the number of tokens of a text. The numbers of the last MAX_COUNTS texts are kept by the
        texts' hashes, because each reply needs the size of every message of its chat."""
        key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if key not in self._counts:
            while len(self._counts) >= MAX_COUNTS:
                self._counts.pop(next(iter(self._counts)))
            self._counts[key] = len(self._tokenizer.encode(text, add_bos=False))
        return self._counts[key]

    def message_size(self, message: Message) -> int:
        """Return the number of tokens of one message's text and tool calls, with TEMPLATE_TOKENS added
        for the chat template."""
        calls = json.dumps(message.tool_calls, ensure_ascii=False) if message.tool_calls else ""
        return self._tokens(message.content) + self._tokens(calls) + TEMPLATE_TOKENS

    def fitting(
        self, messages: list[Message], max_new_tokens: int, summary: str = "", reserved: int = 0
    ) -> list[Message]:
        """Return the messages that fit into the context. If the context would overflow, leave out the oldest
        exchanges. Never leave out the newest message of the user: if the messages from there on do not fit,
        shorten their oldest tool results.

        When the context is full, the oldest messages are cut off until the messages fit into half of the room
        for messages (`cut`), because all prompts until the next cut then begin with the same tokens, which
        the KV cache can hold.

        summary: a summary of the left-out messages; the first message that is kept, apart from the system
            prompt, begins with it
        reserved: the number of tokens that the prompt has besides the messages
        """
        limit = self._room(max_new_tokens) - reserved
        if summary:
            limit -= self.message_size(Message("user", summary))
        head = [message for message in messages[:1] if message.role == "system"]
        rest = messages[len(head) :]
        begin = first_measured(len(rest), limit)
        sizes = [self.message_size(message) for message in rest[begin:]]
        room = limit - sum(map(self.message_size, head))
        ends = (n for n in range(len(rest) - 1, -1, -1) if rest[n].role == "user")
        first = min(begin + cut(sizes, room, room // 2), next(ends, len(rest) - 1))
        while first < len(rest) - 1 and rest[first].role != "user":
            first += 1
        read = self._with_short_results(rest[first:], room)
        if summary and read:
            begun = f"(What was said before, in short: {summary})\n\n{read[0].content}"
            read[0] = replace(read[0], content=begun)
        return head + read

    def _with_short_results(self, messages: list[Message], room: int) -> list[Message]:
        """Return the messages with shorter tool results, so that the messages fit into `room` tokens if this
        is possible. The oldest results are shortened first, and only as far as needed."""
        found, excess = list(messages), sum(map(self.message_size, messages)) - room
        for place, message in enumerate(messages):
            if excess > 0 and message.role == "tool":
                size = self._tokens(message.content)
                text = self._short_text(message.content, size - excess)
                if (saved := size - self._tokens(text)) > 0:
                    found[place] = replace(message, content=text)
                    excess -= saved
        return found

    def _short_text(self, text: str, room: int) -> str:
        """Return the beginning of a tool's result and the words REST_LEFT_OUT, in at most `room` tokens.
        Return the words alone if `room` is too small."""
        while text and (size := self._tokens(f"{text}\n{REST_LEFT_OUT}")) > room:
            text = text[: max(0, len(text) * room // size - 16)]
        return f"{text}\n{REST_LEFT_OUT}" if text else REST_LEFT_OUT

    def left_out(
        self, turns: list[Turn], max_new_tokens: int, summary: str = "", reserved: int = 0
    ) -> list[Turn]:
        """Return the oldest turns of the chat, which `fitting` leaves out of the prompt for the chat's last
        user message. summary, reserved: as in `fitting`."""
        asked = next((n for n in range(len(turns), 0, -1) if turns[n - 1].role == "user"), 0)
        read = turns[:asked]
        is_plain = not summary and not any(turn.calls for turn in read)
        least = self._room(max_new_tokens) // 2 - reserved
        if is_plain and sum(len(turn.content.encode()) + TEMPLATE_TOKENS for turn in read) < least:
            return []  # a token has at least one byte, so these turns fit, unless tool calls are very long
        messages = as_messages(read)
        gone = len(messages) - len(self.fitting(messages, max_new_tokens, summary, reserved))
        return [turn for turn in _kept_turns(read) if turn.role != "system"][:gone]


def as_messages(turns: list[Turn]) -> list[Message]:
    """Return the turns as messages. Empty replies, and tool calls without a result, are left out."""
    return [
        Message("tool", turn.content, (), turn.calls[0].id, turn.calls[0].name)
        if turn.role == "tool"
        else Message(turn.role, turn.content, tuple(map(_as_tool_call, turn.calls)))
        for turn in _kept_turns(turns)
    ]


def join_neighbours(messages: list[Message]) -> list[Message]:
    """Join neighbouring messages that have the same role and no tool calls, and return the new list. For
    example, two messages of the user are neighbours if the reply between them was empty."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else None
        if (
            last is not None
            and last.role == message.role != "tool"
            and not (last.tool_calls or message.tool_calls)
        ):
            found[-1] = Message(message.role, f"{last.content}\n\n{message.content}")
        else:
            found.append(message)
    return found


def _kept_turns(turns: list[Turn]) -> Iterator[Turn]:
    """Yield the turns that have text, tool calls with a result, or the result of a tool call. Tool calls
    without a result are removed from their turn. The prompt has only the turns that this function yields."""
    for place, turn in enumerate(turns):
        if turn.role == "assistant" and turn.calls:
            results = itertools.takewhile(lambda later: later.role == "tool", turns[place + 1 :])
            answered = {later.calls[0].id for later in results if later.calls}
            turn = replace(turn, calls=tuple(call for call in turn.calls if call.id in answered))
        if turn.calls or (turn.content and turn.role != "tool"):
            yield turn


def _as_tool_call(call: ParsedCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.loads(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def question_of(request: GenerationRequest) -> str:
    """Return the user's message that the reply to this request answers; "" if the request has none."""
    if request.asked is not None:
        return request.asked
    if request.messages is None:
        return request.prompt or ""
    return next((m.content for m in reversed(request.messages) if m.role == "user"), "")
