"""This module writes chats with one model: it answers or edits a message, and continues a reply."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Required, TypedDict, Unpack

from ..engine import Chunk, GenerationRequest, Sampling
from ..engine.context_window import Turn, as_messages, join_neighbours
from ..engine.types import INTERACTIVE, Begun
from ..errors import NotFound, UsageError
from ..models.config.model import Message, writes_nothing
from ..models.text.system_prompt import system_prompt
from ..sampling import check_sampling
from ..sona.state import PreferenceResult
from ..store import Store
from . import tool_turns
from .branch_turns import end_of_question, place_of
from .choices import Choices, EditedReply
from .implicit_feedback import ImplicitFeedback
from .learning import Learning
from .reply_writer import ReplyWriter
from .summaries import Summaries
from .tool_turns import NO_TOOLS, ToolOffer, ToolResult

TAIL = 8  # a number of tokens that is larger than the number of tokens of any single character


@dataclass(frozen=True)
class ChatRoom:
    """The messages that the model does not read. left_out: the ids of these messages, the oldest of the chat.
    summed_up: the number of left-out messages that the summary covers. can_sum_up: True if a new summary
    would replace more messages."""

    left_out: frozenset[int]
    summed_up: int
    can_sum_up: bool

    @property
    def unread(self) -> int:
        """The number of messages that neither the model reads nor the summary covers."""
        return max(0, len(self.left_out) - self.summed_up)


ALL_READ = ChatRoom(frozenset(), 0, False)


class ReplyWishes(TypedDict, total=False):
    """What a caller asks of a reply in a chat.

    max_new_tokens: the maximum number of tokens; the only value that every call must give. sampling: None:
    `ReplyWriter.sampling()`. cancel: an event that ends the reply. untouched: True for the model without an
    adapter. best_of: the number of replies to write; the reply that fits the user's taste is shown, and the
    others are branches beside it; None: the setting `best_of`. adapter_id: the name of the adapter; "": no
    adapter; None: the adapter in use. tools: the tools that the reply can call.
    """

    max_new_tokens: Required[int]
    sampling: Sampling | None
    cancel: threading.Event
    untouched: bool
    best_of: int | str | None
    adapter_id: str | None
    tools: ToolOffer


class Conversations:
    """The user's chats. A chat is a tree of messages; calls work on the current branch."""

    def __init__(
        self, store: Store, writer: ReplyWriter, learning: Learning, choices: Choices, implicit: bool
    ):
        """implicit: True: record implicit feedback (what the user does next) on unrated replies"""
        self._store, self._writer, self._learning, self._choices = store, writer, learning, choices
        self._model = writer.engine.model
        self._implicit = ImplicitFeedback(learning, implicit)
        self.summaries = Summaries(store, writer.engine, writer.window, self.turns)
        self._room: tuple[object, ChatRoom] | None = None  # the result of the last call of `room`

    def new_chat(self, system: str | None = None) -> str:
        return self._store.chats.new(self._model.name, system or None)

    def last_chat(self) -> str | None:
        """Return the id of the chat that was used last. Return None if there is no chat."""
        sessions = self._store.chats.all()
        return sessions[0].id if sessions else None

    def find_chat(self, beginning: str) -> str:
        """Return the id of the only chat whose id begins with `beginning`; else raise NotFound."""
        return self._store.chats.find(beginning)

    def find_message(self, words: str, session_id: str | None = None) -> tuple[str, int]:
        """Return the ids (chat, message) of the newest message with all these words, in one or all chats.
        Raises NotFound if there is no such message."""
        hit = self._store.search.newest(words, session_id)
        if hit is None or hit.message_id is None:
            raise NotFound(f"no message has the words {words!r}; `ruvmlx sessions ls` lists all chats.")
        return hit.session.id, hit.message_id

    def show_message(self, session_id: str, message: int) -> None:
        """Make the branch with this message the current branch."""
        self._store.messages.show(session_id, message)

    def set_system(self, session_id: str, system: str | None) -> None:
        """Change a chat's system prompt for the next replies."""
        self._store.chats.set_system(session_id, system or None)

    def asked_before(self) -> list[str]:
        """Return the user's newest messages of all chats (up to 200), newest first, each text once."""
        return self._store.messages.user_texts()

    def turns(self, session_id: str, newest: int | None = None) -> list[Turn]:
        """Return the system prompt, then the messages of the current branch. Each reply has the rating that
        the user gave for the adapter in use. If the user never rated the reply for this adapter, the reply
        has its newest rating for another adapter.

        newest: the number of messages to return, from the end of the branch; None: all messages
        """
        messages = self._store.messages
        system = self._store.chats.get(session_id).system
        head = [Turn("system", system)] if system else []
        rows = messages.newest(session_id, newest) if newest else messages.branch(session_id)
        rated = self._learning.ratings_in_use(m.reply_id for m in rows if m.reply_id)
        return head + [
            Turn(
                m.role, m.content, m.reply_id, rated.get(m.reply_id or "", m.rating), m.finish_reason, m.id,
                m.branch, m.branches, tool_turns.calls_of_json(m.calls) if m.calls else (),
            )
            for m in rows
        ]  # fmt: skip

    def prompt_text(self, session_id: str, max_new_tokens: int = 1, tools: ToolOffer = NO_TOOLS) -> str:
        """Return the prompt of the next reply, with its special tokens. The message "..." stands for the next
        message of the user."""
        turns = [*self.turns(session_id), Turn("user", "...")]
        messages, read = self._read(session_id, turns, max_new_tokens, tools)
        request = GenerationRequest(messages=messages, max_new_tokens=max_new_tokens, **read)
        return self._model.tokenizer.text_with_specials(self._writer.encode_request(request).encoded or [])

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text for this model."""
        return len(self._model.tokenizer.encode(text, add_bos=False))

    def left_out(self, session_id: str, max_new_tokens: int) -> frozenset[int]:
        """Return ids of the oldest messages, which the model does not read: the context has no room for them,
        or the summary replaces them."""
        return self.room(session_id, self.turns(session_id), max_new_tokens).left_out

    def room(self, session_id: str, turns: list[Turn], max_new_tokens: int) -> ChatRoom:
        """Return which of these turns (a chat's current branch) the model does not read. The first call for a
        chat reads the sizes of its newest messages, at most two for every TEMPLATE_TOKENS tokens of the
        context (engine/context_window.py)."""
        known = (
            session_id,
            [turn.id or turn.content for turn in turns],
            self.summaries.of(session_id, turns),
            max_new_tokens,
        )
        if self._room is None or self._room[0] != known:
            summary, read = self.summaries.read_turns(session_id, turns)
            gone = self._writer.window.left_out(read, max_new_tokens, summary)
            kept = {turn.id for turn in read} - {turn.id for turn in gone}
            left_out = frozenset(turn.id for turn in turns if turn.id is not None and turn.id not in kept)
            can_sum_up = bool(gone) or self.summaries.is_possible(session_id, turns, max_new_tokens)
            self._room = known, ChatRoom(left_out, known[2].count, can_sum_up)
        return self._room[1]

    def _read(
        self, session_id: str, turns: list[Turn], max_new_tokens: int, offer: ToolOffer = NO_TOOLS
    ) -> tuple[Sequence[Message], dict[str, Any]]:
        """Return (the messages of these turns that the model reads, the request's fields for the tools)."""
        summary, read = self.summaries.read_turns(session_id, turns)
        reserved = self.count_tokens(tool_turns.offered_text(offer)) if offer.tools else 0
        fitting = self._writer.window.fitting(as_messages(read), max_new_tokens, summary, reserved)
        messages = join_neighbours(fitting)
        with_tools = tool_turns.tool_prompt(self._model, messages, offer)
        if with_tools is None:
            return messages, {}
        fields = with_tools.fields()
        return fields.pop("messages"), fields

    def template_system(self) -> str:
        """Return the system prompt that the model gets if the user has set none; "": no system prompt."""
        return system_prompt(self._model).text

    def check_chat(self, session_id: str) -> None:
        """Raise UsageError or UnsupportedModel if the model's chat template does not accept the chat, or if
        the model writes no text."""
        if not self._model.shape.writes:
            raise UsageError(writes_nothing(self._model.name))
        messages, _ = self._read(session_id, [*self.turns(session_id), Turn("user", "?")], 1)
        self._model.tokenizer.encode_chat(messages)

    # -- replies -------------------------------------------------------------------------------------

    def say(
        self, session_id: str, text: str, *, instead_of: int | None = None, **wishes: Unpack[ReplyWishes]
    ) -> Iterator[Chunk]:
        """Answer one message of a chat. The message is in the store before the first token. If the reply
        calls tools, use `answer_results` next.

        instead_of: the id of an earlier user message that this message replaces, on a new branch
        """
        request = self.question(session_id, text, instead_of=instead_of, **wishes)
        yield from self._write(request, session_id)

    def question(
        self, session_id: str, text: str, *, instead_of: int | None = None, **wishes: Unpack[ReplyWishes]
    ) -> GenerationRequest:
        """Save a message and return the request for its reply. instead_of: as in `say`."""
        if not text.strip():
            raise UsageError("the message is empty; give some text.")
        turns = self.turns(session_id)
        before = turns if instead_of is None else turns[: place_of(turns, instead_of, "user")]
        asked = [*before, Turn("user", text)]
        # This call raises an error, for example for a message that is too long, before the message is saved.
        request = self._request(session_id, asked, **wishes)
        self._implicit.notice_next(turns, before)
        if before and instead_of is None:  # an edited question says nothing about the reply before it
            self._choices.learn_from_continuation(session_id, before[-1])
        last = before[-1].id if before else None
        request.question_id = self._store.messages.add_user(session_id, text, after=last)
        return request

    def again(
        self, session_id: str, *, message: int | None = None, **wishes: Unpack[ReplyWishes]
    ) -> Iterator[Chunk]:
        """Write another reply to the same question, beside the reply `message` (None: the last reply)."""
        turns = self.turns(session_id)
        end = end_of_question(turns, message)
        request = self._request(session_id, turns[:end], **wishes)
        if end < len(turns):
            self._implicit.notice_of(turns[end], "regenerated")
        request.question_id = turns[end - 1].id
        yield from self._write(request, session_id)

    def add_results(self, session_id: str, results: Sequence[ToolResult]) -> list[Turn]:
        """Save the results of the tool calls of a reply directly after this reply, also if another process
        has added messages after the reply. Return the saved turns. A result that would take too much of the
        context is replaced by one line of explanation."""
        after, saved = self._message_of_call(session_id, results[0].call.id), list[int]()
        for result in results:
            text = tool_turns.readable_result(result.text, self._model.context, self.count_tokens)
            calls = tool_turns.calls_to_json([result.call])
            after = self._store.messages.add_result(session_id, text, calls, after)
            saved.append(after)
        return [turn for turn in self.turns(session_id) if turn.id in saved]

    def _message_of_call(self, session_id: str, call_id: str) -> int:
        """Return the id of the newest assistant message with this tool call, or raise NotFound."""
        for row in reversed(self._store.messages.all(session_id)):
            calls = tool_turns.calls_of_json(row.calls) if row.role == "assistant" else ()
            if call_id in [call.id for call in calls]:
                return row.id
        raise NotFound("the reply with this tool call was deleted meanwhile; ask again.")

    def answer_results(self, session_id: str, **wishes: Unpack[ReplyWishes]) -> Iterator[Chunk]:
        """Write the next reply, after the results of tools. The adapter does not learn from a rating of this
        reply, because the reply can repeat the words of a tool's result."""
        turns = self.turns(session_id)
        if not turns or turns[-1].role != "tool":
            raise NotFound("there is no result of a tool to go on from.")
        request = self._request(session_id, turns, **wishes)
        request.question_id = turns[-1].id
        yield from self._write(request, session_id)

    def _write(self, request: GenerationRequest, session_id: str) -> Iterator[Chunk]:
        chunks = self._writer.generate(request, session_id)
        return tool_turns.without_calls(self._model.tokenizer, request, chunks)

    def continue_reply(
        self, session_id: str, *, message: int | None = None, **wishes: Unpack[ReplyWishes]
    ) -> Iterator[Chunk]:
        """Continue a reply that was cut off or stopped, from its last token. message: the id of
        the reply, or None for the last message.

        The longer reply is stored beside the unfinished reply. Ratings of the longer reply change the adapter
        only if ratings of the unfinished reply can. Raises UsageError if the reply is complete, or if another
        model wrote it.
        """
        turns = self.turns(session_id)
        at = len(turns) - 1 if message is None else place_of(turns, message)
        turn = turns[at] if turns else None
        if turn is None or turn.reply_id is None:
            raise NotFound("there is no reply to continue.")
        if turn.finish_reason == "stop":
            raise UsageError("that reply is complete; /again writes another one.")
        cut_off = self._store.replies.get(turn.reply_id)
        if cut_off.fingerprint != self._model.fingerprint:
            raise UsageError(f"{cut_off.model} began that reply; /again writes one with this model.")
        if not cut_off.prompt_ids:
            raise UsageError(
                "that reply cannot be continued: its stored prompt was deleted. /again writes a new reply."
            )
        request = GenerationRequest(
            messages=[Message("user", cut_off.prompt)],
            input_ids=cut_off.prompt_ids + cut_off.sampled_ids,
            begun=Begun(turn.content, tuple(cut_off.sampled_ids[-TAIL:])),
            session_id=session_id,
            examples=cut_off.examples,
            asked=None if cut_off.teaches else cut_off.prompt,
            priority=INTERACTIVE,
            **self._fields(**wishes),
        )
        with self._writer.archive.noting_failure(request):
            self._writer.engine.prompt_ids(request)  # this call raises an error if the context is full
        request.question_id = turns[at - 1].id
        yield from self._writer.generate(request, session_id)

    def next_sibling(self, session_id: str, step: int, message: int | None = None) -> int:
        """Show the next version (step 1) or the previous version (step -1) of a message. Return the id of
        the version. The message can be on another branch than the current one, because another process can
        change the current branch. message: the id of a message; None for the last message"""
        if message is None or message not in {row.id for row in self._store.messages.all(session_id)}:
            turns = [turn.id for turn in self.turns(session_id) if turn.id is not None]
            if not turns:
                raise NotFound("this chat has no messages yet.")
            message = turns[-1]
        return self._store.messages.next_sibling(session_id, message, step)

    def prefer(self, session_id: str, better: int, worse: int) -> PreferenceResult:
        """Choose one of two replies to one question: show this reply, and learn that it is better."""
        chosen, other = (self._reply_of(session_id, message) for message in (better, worse))
        learned = self._choices.prefer(chosen, other)
        self._store.messages.set_head(session_id, better)
        return learned

    def edit_reply(self, session_id: str, message: int, text: str) -> EditedReply:
        """Store the user's version of a reply beside it, and learn that this version is better."""
        return self._choices.edit(self._reply_of(session_id, message), text, (session_id, message))

    def _reply_of(self, session_id: str, message: int) -> str:
        known = {row.id: row.reply_id for row in self._store.messages.all(session_id)}
        reply_id = known.get(message)
        if reply_id is None:
            raise NotFound(f"message {message} is not a reply of this chat.")
        return reply_id

    def _request(
        self, session_id: str, turns: list[Turn], tools: ToolOffer = NO_TOOLS, **wishes: Any
    ) -> GenerationRequest:
        """Return the request for a reply to the last of these turns. Raises UsageError if a sampling value is
        invalid."""
        fields = self._fields(**wishes)
        messages, read = self._read(session_id, turns, fields["max_new_tokens"], tools)
        if turns[-1].role == "tool":
            read["asked"] = next(turn.content for turn in reversed(turns) if turn.role == "user")
        if tools.tools or turns[-1].role == "tool":
            fields["best_of"] = 1
        request = GenerationRequest(
            messages=messages, session_id=session_id, priority=INTERACTIVE, **read, **fields
        )
        return self._writer.prepare_request(request, routed=True)

    def _fields(
        self, *, max_new_tokens: int, sampling: Sampling | None = None, **wishes: Any
    ) -> dict[str, Any]:
        """Return the fields of the request that a caller asked for. Raises UsageError if a sampling value is
        invalid."""
        sampling = sampling or self._writer.sampling()
        check_sampling(sampling)
        return {"max_new_tokens": max_new_tokens, "sampling": sampling, **wishes}
