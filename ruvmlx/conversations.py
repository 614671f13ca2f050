"""Chats on one model: a message is answered, asked in other words, answered again, continued."""

import threading
from collections.abc import Iterator

from .context_window import Turn, alternating
from .engine import Chunk, GenerationRequest, Sampling
from .engine.types import Begun
from .errors import NotFound, UsageError
from .learning import Learning
from .models.model import Message
from .reply_writer import ReplyWriter
from .sampling import check_sampling
from .sona.state import RatingResult
from .store import Store

TAIL = 8  # tokens: more than one character ever takes


class Conversations:
    """The user's chats. A chat is a tree of messages; calls work on the branch in use."""

    def __init__(self, store: Store, writer: ReplyWriter, learning: Learning, implicit: bool):
        """implicit: what is done with unrated replies counts a little."""
        self._store, self._writer, self._learning = store, writer, learning
        self._model, self._implicit = writer.engine.model, implicit

    def new_chat(self, system: str | None = None) -> str:
        return self._store.chats.new(self._model.name, system or None)

    def last_chat(self) -> str | None:
        """The chat used last, if there is one."""
        sessions = self._store.chats.all()
        return sessions[0].id if sessions else None

    def find_chat(self, beginning: str) -> str:
        """A chat's id, from a unique beginning of it; NotFound where there is none."""
        return self._store.chats.find(beginning)

    def set_system(self, session_id: str, system: str | None) -> None:
        """Change a chat's system prompt; it holds from the next reply on."""
        self._store.chats.set_system(session_id, system or None)

    def asked_before(self) -> list[str]:
        """What the user wrote in all chats, the newest first, each text once."""
        return self._store.messages.user_texts()

    def turns(self, session_id: str) -> list[Turn]:
        """The branch in use, the system prompt first."""
        system = self._store.chats.get(session_id).system
        head = [Turn("system", system)] if system else []
        return head + [
            Turn(m.role, m.content, m.reply_id, m.rating, m.finish_reason, m.id, m.branch, m.branches)
            for m in self._store.messages.branch(session_id)
        ]

    def check_chat(self, session_id: str) -> None:
        """Can this model read what was said? UsageError or UnsupportedModel where its template refuses it."""
        messages = alternating([*self.turns(session_id), Turn("user", "?")])
        self._model.tokenizer.encode_chat(self._writer.window.fitting(messages, 1))

    # -- replies -------------------------------------------------------------------------------------

    def say(
        self,
        session_id: str,
        text: str,
        *,
        sampling: Sampling | None = None,
        max_new_tokens: int,
        cancel: threading.Event,
        instead_of: int | None = None,
        untouched: bool = False,
    ) -> Iterator[Chunk]:
        """Answer one message of a chat. The user's words are committed before the first token.

        sampling: None is what `sampling()` says. instead_of: id of an earlier message of the user; the chat
        goes on from there with these words, on a branch of its own. untouched: without what was learned.
        """
        if not text.strip():
            raise UsageError("the message is empty; give some text.")
        turns = self.turns(session_id)
        before = turns if instead_of is None else turns[: self._place(turns, instead_of, "user")]
        asked = [*before, Turn("user", text)]
        # Before it is saved: an empty or too long message is refused here.
        request = self._request(session_id, asked, sampling, max_new_tokens, cancel, untouched)
        self._notice_next(turns, before)
        if instead_of is not None:
            self._store.messages.set_head(session_id, before[-1].id if before else None)
        self._store.messages.add_user(session_id, text)
        yield from self._writer.generate(request, session_id)

    def again(
        self,
        session_id: str,
        *,
        sampling: Sampling | None = None,
        max_new_tokens: int,
        cancel: threading.Event,
        message: int | None = None,
        untouched: bool = False,
    ) -> Iterator[Chunk]:
        """Another reply beside one that is there (None: the last), to the same question.

        untouched: without what was learned.
        """
        turns = self.turns(session_id)
        end = len(turns) if message is None else self._place(turns, message) + 1
        while end and turns[end - 1].role != "user":
            end -= 1
        if not end:
            raise NotFound("there is no question yet that could be answered again.")
        request = self._request(session_id, turns[:end], sampling, max_new_tokens, cancel, untouched)
        if end < len(turns):
            self._notice_of(turns[end], "regenerated")
        self._store.messages.set_head(session_id, turns[end - 1].id)
        yield from self._writer.generate(request, session_id)

    def continue_reply(
        self,
        session_id: str,
        *,
        sampling: Sampling | None = None,
        max_new_tokens: int,
        cancel: threading.Event,
        message: int | None = None,
    ) -> Iterator[Chunk]:
        """Write on where a reply (None: the last message) was cut or stopped, token for token.

        The longer reply stands beside the one that was cut. UsageError where nothing is missing, or another
        model wrote it.
        """
        turns = self.turns(session_id)
        at = len(turns) - 1 if message is None else self._place(turns, message)
        turn = turns[at] if turns else None
        if turn is None or turn.reply_id is None:
            raise NotFound("there is no reply that could be gone on with.")
        if turn.finish_reason == "stop":
            raise UsageError("that reply came to its own end; /again writes another one.")
        cut_off = self._store.replies.get(turn.reply_id)
        if cut_off.fingerprint != self._model.fingerprint:
            raise UsageError(f"that reply was begun by {cut_off.model}; /again writes one with this model.")
        sampling = sampling or self._writer.sampling()
        check_sampling(sampling)
        request = GenerationRequest(
            messages=[Message("user", cut_off.prompt)],
            input_ids=cut_off.prompt_ids + cut_off.sampled_ids,
            begun=Begun(turn.content, tuple(cut_off.sampled_ids[-TAIL:])),
            session_id=session_id,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            examples=cut_off.examples,
            cancel=cancel,
        )
        self._writer.engine.prompt_ids(request)  # refused here if the context is full
        self._store.messages.set_head(session_id, turns[at - 1].id)
        yield from self._writer.generate(request, session_id)

    def next_sibling(self, session_id: str, step: int, message: int | None = None) -> int:
        """Show the next (or, step -1, the former) alternative of a message (None: of the last); its id."""
        turns = [turn for turn in self.turns(session_id) if turn.id is not None]
        if not turns:
            raise NotFound("there is nothing in this chat yet.")
        shown = next((t for t in turns if t.id == message), turns[-1])
        assert shown.id is not None
        return self._store.messages.next_sibling(session_id, shown.id, step)

    def prefer(self, session_id: str, message: int) -> RatingResult:
        """Of several replies in one place this one is the best: it is shown from now on, and rated up."""
        known = {row.id: row.reply_id for row in self._store.messages.all(session_id)}
        reply_id = known.get(message)
        if reply_id is None:
            raise NotFound(f"message {message} is no reply of this chat.")
        self._store.messages.set_head(session_id, message)
        return self._learning.required().rate(reply_id, "up")

    def _request(
        self,
        session_id: str,
        turns: list[Turn],
        sampling: Sampling | None,
        max_new_tokens: int,
        cancel: threading.Event,
        untouched: bool = False,
    ) -> GenerationRequest:
        """The reply to the last of these turns, as token ids; UsageError for what cannot be answered."""
        sampling = sampling or self._writer.sampling()
        check_sampling(sampling)
        request = GenerationRequest(
            messages=self._writer.window.fitting(alternating(turns), max_new_tokens),
            session_id=session_id,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            cancel=cancel,
            untouched=untouched,
        )
        return self._writer.prepared(request, routed=True)

    @staticmethod
    def _place(turns: list[Turn], message: int, role: str | None = None) -> int:
        for place, turn in enumerate(turns):
            if turn.id == message and role in (None, turn.role):
                return place
        raise NotFound(f"message {message} is not in the conversation that is shown.")

    # -- what the user did ---------------------------------------------------------------------------

    def _notice_next(self, turns: list[Turn], before: list[Turn]) -> None:
        """The talk goes on, or a question is put in other words: that says a little about its reply."""
        if len(before) < len(turns):
            self._notice_of(next((t for t in turns[len(before) :] if t.reply_id), None), "edited")
        elif turns:
            self._notice_of(turns[-1], "continued")

    def _notice_of(self, turn: Turn | None, what: str) -> None:
        """Unless it was rated, or not even read to its end."""
        if not self._implicit or turn is None or turn.reply_id is None:
            return
        if turn.rating is None and turn.finish_reason != "cancelled":
            self._learning.notice(turn.reply_id, what)
