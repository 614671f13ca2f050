"""Summaries: notes that the model writes on the oldest messages of a chat, and reads in their place.

The messages stay in the store and on the screen. The notes stand at the beginning of the first message that
the model still reads:

    (What was said before, in short: The user plans a trip to Rome in May ...)

    And what about hotels?

A chat has one summary. It counts only where its last message is on the branch in use.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..engine import Chunk, GenerationRequest, LLMInferenceEngine, Sampling
from ..engine.context_window import ContextWindow, Turn
from ..errors import NotFound
from ..models.config.model import Message
from ..models.text.thinking import split
from ..store import Store

KEPT_MESSAGES = 4  # the newest, which are never summed up
KEPT_SHARE = 4  # they may take 1 / KEPT_SHARE of the context
READ_SHARE = 2  # one request reads at most 1 / READ_SHARE of the context
MAX_TOKENS = 300  # of the notes
TASK = (
    "Below is the beginning of a conversation. Write down in at most 150 words what one must know to "
    "continue it: facts, names, wishes, decisions, open questions. Write only that."
)
NAMES = {"user": "User", "assistant": "Assistant", "tool": "Result of a tool"}


@dataclass(frozen=True)
class ChatSummary:
    """count: the messages in whose place the model reads `text`; 0 for no summary."""

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
        """turns: those of a chat's branch in use, by the chat's id."""
        self._store, self._engine, self._window, self._turns = store, engine, window, turns

    def read_turns(self, session_id: str, turns: list[Turn]) -> tuple[str, list[Turn]]:
        """(the summary or "", the turns that the model reads besides it)"""
        text, rest = self._split(session_id, turns)
        return text, [*(turn for turn in turns if turn.role == "system"), *rest]

    def of(self, session_id: str, turns: list[Turn] | None = None) -> ChatSummary:
        """The summary that counts for these turns; None: for those of the branch in use."""
        turns = self._turns(session_id) if turns is None else turns
        text, rest = self._split(session_id, turns)
        return ChatSummary(text, len(_spoken_turns(turns)) - len(rest)) if text else ChatSummary()

    def _split(self, session_id: str, turns: list[Turn]) -> tuple[str, list[Turn]]:
        """(the summary or "", the spoken turns after it)"""
        chat, spoken = self._store.chats.get(session_id), _spoken_turns(turns)
        ends = (n for n, turn in enumerate(spoken, 1) if turn.id == chat.summarized_to)
        at = next(ends, 0) if chat.summary and chat.summarized_to is not None else 0
        return (chat.summary or "") if at else "", spoken[at:]

    def forget(self, session_id: str) -> None:
        """Let the model read the messages themselves again, as far as the context has room."""
        self._store.chats.set_summary(session_id, None, None)

    def write(self, session_id: str, cancel: threading.Event) -> Iterator[Chunk]:
        """Sum up all but the newest messages, from the next reply on; the chunks are those of the notes.

        Nothing changes if `cancel` is set before the end. NotFound if the chat is too short.
        """
        text, rest = self._split(session_id, self._turns(session_id))
        old = rest[: self._first_kept(rest)]
        if not old:
            raise NotFound("there is nothing to sum up yet: the model reads the newest messages themselves.")
        parts = self._parts(old)
        for number, part in enumerate(parts, 1):
            request = GenerationRequest(
                messages=[
                    Message("user", "\n\n".join([TASK, *([f"Before: {text}"] if text else []), *part]))
                ],
                max_new_tokens=min(MAX_TOKENS, self._window.size // 8),
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
                    text = split(chunk.response.text).answer.strip() or text
            if cancel.is_set():
                return
        self._store.chats.set_summary(session_id, text, old[-1].id)

    def _first_kept(self, turns: list[Turn]) -> int:
        """The place of the first message that stays as it is: a question."""
        first, room = len(turns), self._window.size // KEPT_SHARE
        while first and (len(turns) - first < KEPT_MESSAGES or room > 0):
            first -= 1
            room -= self._window.message_size(Message(turns[first].role, turns[first].content))
        while first and turns[first].role != "user":
            first -= 1
        return first

    def _parts(self, turns: list[Turn]) -> list[list[str]]:
        """The turns as text, so many at a time as the model can read; an endless one is cut."""
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


def _spoken_turns(turns: list[Turn]) -> list[Turn]:
    return [turn for turn in turns if turn.role != "system"]
