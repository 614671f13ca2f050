"""Chats of a runtime: a message is answered, asked anew in other words, answered again, gone on with."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from . import soft_delete as put_away
from .backends.base import Backend
from .context_window import Turn, alternating, cut
from .engine import Chunk, GenerationRequest, LLMInferenceEngine, Sampling
from .engine.types import Begun
from .errors import NotFound, StoreBusy, UsageError
from .kv.disk import CacheFolder
from .models.model import Message, Model
from .sampling import check_sampling
from .store import Store

if TYPE_CHECKING:
    from .sona.learner import RatingResult

TAIL = 8  # tokens: more than one character ever takes


class Chatting:
    """What `Runtime` can do with chats. A chat is a tree of messages; calls work on the branch in use."""

    store: Store
    model: Model
    backend: Backend
    engine: LLMInferenceEngine
    sampling: Callable[..., Sampling]
    generate: Callable[..., Iterator[Chunk]]
    notice: Callable[[str, str], bool]
    rate: Callable[..., "RatingResult"]
    _prepared: Callable[..., GenerationRequest]
    _implicit: bool
    _folder: CacheFolder | None

    def new_chat(self, system: str | None = None) -> str:
        return self.store.chats.new(self.model.name, system or None)

    def last_chat(self) -> str | None:
        """The chat used last, if there is one."""
        sessions = self.store.chats.all()
        return sessions[0].id if sessions else None

    def find_chat(self, beginning: str) -> str:
        """A chat's id, from a unique beginning of it; NotFound where there is none."""
        return self.store.chats.find(beginning)

    def set_system(self, session_id: str, system: str | None) -> None:
        """Change a chat's system prompt; it holds from the next reply on."""
        self.store.chats.set_system(session_id, system or None)

    def asked_before(self) -> list[str]:
        """What the user wrote in all chats, the newest first, each text once."""
        return self.store.messages.user_texts()

    def turns(self, session_id: str) -> list[Turn]:
        """The branch in use, the system prompt first."""
        system = self.store.chats.get(session_id).system
        head = [Turn("system", system)] if system else []
        return head + [
            Turn(m.role, m.content, m.reply_id, m.rating, m.finish_reason, m.id, m.branch, m.branches)
            for m in self.store.messages.branch(session_id)
        ]

    def check_chat(self, session_id: str) -> None:
        """Can this model read what was said? UsageError or UnsupportedModel where its template refuses it."""
        messages = alternating([*self.turns(session_id), Turn("user", "?")])
        self.model.tokenizer.encode_chat(self._fitting(messages, 1))

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
        turns = self.turns(session_id)
        before = turns if instead_of is None else turns[: self._place(turns, instead_of, "user")]
        asked = [*before, Turn("user", text)]
        # Before it is saved: an empty or too long message is refused here.
        request = self._request(session_id, asked, sampling, max_new_tokens, cancel, untouched)
        self._notice_next(turns, before)
        if instead_of is not None:
            self.store.messages.set_head(session_id, before[-1].id if before else None)
        self.store.messages.add_user(session_id, text)
        yield from self.generate(request, session_id)

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
        self.store.messages.set_head(session_id, turns[end - 1].id)
        yield from self.generate(request, session_id)

    def go_on(
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
        cut_off = self.store.replies.get(turn.reply_id)
        if cut_off.fingerprint != self.model.fingerprint:
            raise UsageError(f"that reply was begun by {cut_off.model}; /again writes one with this model.")
        sampling = sampling or self.sampling()
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
        self.engine.prompt_ids(request)  # refused here if the context is full
        self.store.messages.set_head(session_id, turns[at - 1].id)
        yield from self.generate(request, session_id)

    def flip(self, session_id: str, step: int, message: int | None = None) -> int:
        """Show the next (or, step -1, the former) alternative of a message (None: of the last); its id."""
        turns = [turn for turn in self.turns(session_id) if turn.id is not None]
        if not turns:
            raise NotFound("there is nothing in this chat yet.")
        shown = next((t for t in turns if t.id == message), turns[-1])
        assert shown.id is not None
        return self.store.messages.next_sibling(session_id, shown.id, step)

    def prefer(self, session_id: str, message: int) -> "RatingResult":
        """Of several replies in one place this one is the best: it is shown from now on, and rated up."""
        known = {row.id: row.reply_id for row in self.store.messages.all(session_id)}
        reply_id = known.get(message)
        if reply_id is None:
            raise NotFound(f"message {message} is no reply of this chat.")
        self.store.messages.set_head(session_id, message)
        return self.rate(reply_id, "up")

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
        sampling = sampling or self.sampling()
        check_sampling(sampling)
        request = GenerationRequest(
            messages=self._fitting(alternating(turns), max_new_tokens),
            session_id=session_id,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            cancel=cancel,
            untouched=untouched,
        )
        return self._prepared(request, routed=True)

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
            self.notice(turn.reply_id, what)

    # -- the store -----------------------------------------------------------------------------------

    def tidy_chats(self) -> None:
        """What processes left behind that were killed: replies half written, chats put away, files."""
        with contextlib.suppress(StoreBusy):
            self.store.drafts.recover()
            put_away.delete_older(self.store)
            if self._folder is not None:
                self._folder.tidy(self.store.chats.ids())

    def put_away(self, session_id: str) -> None:
        """Delete a chat; until the runtime is closed, `bring_back` undoes it."""
        self.store.chats.soft_delete(session_id)
        self._put_away.add(session_id)

    def bring_back(self, session_id: str) -> None:
        self.store.chats.restore(session_id)
        self._put_away.discard(session_id)

    def hand_over(self) -> frozenset[str]:
        """The chats that were put away, which are another runtime's from now on: `take_over` there."""
        put_away = frozenset(self._put_away)
        self._put_away.clear()
        return put_away

    def take_over(self, put_away: frozenset[str]) -> None:
        self._put_away |= put_away

    def delete_put_away(self) -> None:
        """Unless another process brought them back."""
        for session_id in self._put_away & {row.id for row in self.store.chats.soft_deleted()}:
            with contextlib.suppress(NotFound):  # another process was quicker
                self.engine.sessions.drop(session_id)
                put_away.delete(self.store, session_id)
        self._put_away.clear()

    @functools.cached_property
    def _put_away(self) -> set[str]:
        return set()

    # -- room in the context -------------------------------------------------------------------------

    def _fitting(self, messages: list[Message], max_new_tokens: int) -> list[Message]:
        """The conversation without its oldest exchanges, if the context would overflow.

        A quarter of the context, or the reply's own limit if that is less, is kept free for the reply. Once
        full, half of the context is cleared at a time: the turns after that find their KV cache again.
        """
        context = self.model.config.max_context
        limit = context - min(max_new_tokens, context // 4)
        head = messages[:1] if messages[0].role == "system" else []
        rest = messages[len(head) :]
        sizes = [self._size(m) for m in rest]
        first = cut(sizes, limit - sum(map(self._size, head)), limit // 2)
        while first < len(rest) - 1 and rest[first].role != "user":
            first += 1
        return head + rest[first:]

    def _size(self, message: Message) -> int:
        """Tokens of one message, a little more than it needs."""
        return self._tokens(message.content) + 16

    @functools.cached_property
    def _tokens(self) -> Callable[[str], int]:
        """Number of tokens of a text, remembered."""
        encode = self.model.tokenizer.encode
        return functools.lru_cache(4096)(lambda text: len(encode(text, add_bos=False)))
