"""This module writes summaries: the model writes notes on the oldest messages of a chat, and then reads the
notes instead of these messages.

The messages stay in the store and on the screen. The notes are at the beginning of the first message that the
notes do not replace:

    (What was said before, in short: The user plans a trip to Rome in May ...)

    And what about hotels?

A chat has at most one summary. The summary is used only if the last message that it replaces is on the
current branch.
"""

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..engine import Chunk, GenerationRequest, LLMInferenceEngine, Sampling
from ..engine.context_window import ContextWindow, Turn
from ..errors import NotFound
from ..models.config.model import Message
from ..models.text.thinking import split
from ..store import Store

KEPT_MESSAGES = 4  # the number of newest messages that a summary never replaces
KEPT_SHARE = 4  # a summary leaves newest messages that take about 1 / KEPT_SHARE of the context, or more
READ_SHARE = 2  # the messages in one request for a summary take at most 1 / READ_SHARE of the context
MAX_TOKENS = 300  # the maximum number of tokens of the notes
TASK = (
    "Below is the beginning of a conversation. Write down in at most 150 words what one must know to "
    "continue it: facts, names, wishes, decisions, open questions. Write only that."
)
NAMES = {"user": "User", "assistant": "Assistant", "tool": "Result of a tool"}


@dataclass(frozen=True)
class ChatSummary:
    """A summary. count: the number of messages that `text` replaces for the model; 0: there is no summary."""

    text: str = ""
    count: int = 0


class Summaries:
    def __init__(
        self,
        store: Store,
        engine: LLMInferenceEngine,
        window: ContextWindow,
        turns: Callable[[str], list[Turn]],
    ):
        """turns: a function from a chat's id to the turns of its current branch"""
        self._store, self._engine, self._window, self._turns = store, engine, window, turns

    def read_turns(self, session_id: str, turns: list[Turn]) -> tuple[str, list[Turn]]:
        """Return the summary (or ""), and the turns that the model reads in addition to the summary."""
        text, rest = self._split(session_id, turns)
        return text, [*(turn for turn in turns if turn.role == "system"), *rest]

    def of(self, session_id: str, turns: list[Turn] | None = None) -> ChatSummary:
        """Return the summary that replaces the oldest of these turns for the model. turns: None: the turns of
        the current branch."""
        turns = self._turns(session_id) if turns is None else turns
        text, rest = self._split(session_id, turns)
        return ChatSummary(text, len(_spoken_turns(turns)) - len(rest)) if text else ChatSummary()

    def _split(self, session_id: str, turns: list[Turn]) -> tuple[str, list[Turn]]:
        """Return the summary (or ""), and the turns after the summary, without system prompts."""
        chat, spoken = self._store.chats.get(session_id), _spoken_turns(turns)
        ends = (n for n, turn in enumerate(spoken, 1) if turn.id == chat.summarized_to)
        at = next(ends, 0) if chat.summary and chat.summarized_to is not None else 0
        return (chat.summary or "") if at else "", spoken[at:]

    def forget(self, session_id: str) -> None:
        """Remove the summary. The model then reads the replaced messages again, if the context has room for
        them."""
        self._store.chats.set_summary(session_id, None, None)

    def is_possible(self, session_id: str, turns: list[Turn], max_new_tokens: int) -> bool:
        """Return True if `write` would find messages of these turns that a summary replaces."""
        return any(self._ends(session_id, turns, max_new_tokens))

    def write(self, session_id: str, cancel: threading.Event, max_new_tokens: int) -> Iterator[Chunk]:
        """Write a summary of the oldest messages: of all messages that the model does not read, or would not
        read beside the notes, and of all others except the newest ones (at least KEPT_MESSAGES). For its next
        replies, the model reads the summary instead of these messages. Yield the chunks of the notes.

        If `cancel` is set before the notes are complete, the chat keeps its old summary. max_new_tokens: the
        maximum number of tokens of a reply in this chat. Raises NotFound if the chat is too short.
        """
        turns = self._turns(session_id)
        text, rest = self._split(session_id, turns)
        old = rest[: max(self._ends(session_id, turns, max_new_tokens))]
        if not old:
            raise NotFound("there is nothing to sum up yet: the model reads all messages themselves.")
        parts = self._parts(old)
        for number, part in enumerate(parts, 1):
            request = GenerationRequest(
                messages=[
                    Message("user", "\n\n".join([TASK, *([f"Before: {text}"] if text else []), *part]))
                ],
                max_new_tokens=self._max_tokens,
                sampling=Sampling(0.0),
                untouched=True,
                cancel=cancel,
            )
            for chunk in self._engine.stream(request):
                if number == len(parts):
                    yield chunk
                elif not chunk.response:
                    yield replace(chunk, text="")
                if chunk.response:
                    notes = split(chunk.response.text).answer.strip()
                    is_cut = chunk.response.finish_reason == "length"
                    text = (whole_sentences(notes) if is_cut else notes) or text
            if cancel.is_set():
                return
        self._store.chats.set_summary(session_id, text, old[-1].id)

    @property
    def _max_tokens(self) -> int:
        """The maximum number of tokens of the notes, also in a small context."""
        return min(MAX_TOKENS, self._window.size // 8)

    def _ends(self, session_id: str, turns: list[Turn], max_new_tokens: int) -> Iterator[int]:
        """Yield three numbers. Each number is a count of the oldest messages that the summary in use does not
        cover. The next summary replaces as many messages as the largest number says.

        The first number counts the messages that the model does not read now. The second number counts the
        messages before the newest messages (`_first_kept`). The third number counts the messages that the
        model would not read beside the longest notes.
        """
        (text, read), rest = self.read_turns(session_id, turns), self._split(session_id, turns)[1]
        reserved = self._max_tokens + self._window.message_size(Message("user", ""))

        def count(gone: list[Turn]) -> int:
            return 1 + [turn.id for turn in rest].index(gone[-1].id) if gone else 0

        yield count(self._window.left_out(read, max_new_tokens, text))
        yield self._first_kept(rest)
        yield count(self._window.left_out(read, max_new_tokens, reserved=reserved))

    def _first_kept(self, turns: list[Turn]) -> int:
        """Return the index of the first message that the summary does not replace. This message is a message
        of the user, or the first message of `turns`."""
        first, room = len(turns), self._window.size // KEPT_SHARE
        while first and (len(turns) - first < KEPT_MESSAGES or room > 0):
            first -= 1
            room -= self._window.message_size(Message(turns[first].role, turns[first].content))
        while first and turns[first].role != "user":
            first -= 1
        return first

    def _parts(self, turns: list[Turn]) -> list[list[str]]:
        """Return the turns as text, in parts that the model can read in one request. A very long turn is
        cut."""
        limit = self._window.size // READ_SHARE
        parts: list[list[str]] = [[]]
        used = 0
        for turn in turns:
            words = split(turn.content).answer if turn.role == "assistant" else turn.content
            while (size := self._window.message_size(Message(turn.role, words))) > limit:
                words = words[: len(words) * limit // size - 16]
            if parts[-1] and used + size > limit:
                parts.append([])
                used = 0
            parts[-1].append(f"{NAMES[turn.role]}: {words}")
            used += size
        return parts


def whole_sentences(text: str) -> str:
    """Return `text` up to the end of its last whole sentence or line. Return all of it if it has neither."""
    ends = [found.end() for found in re.finditer(r"[.!?](?=\s)|[^\s](?=\n)", text)]
    return text[: ends[-1]] if ends else text


def _spoken_turns(turns: list[Turn]) -> list[Turn]:
    return [turn for turn in turns if turn.role != "system"]
