"""The rating index updates the reasoning bank if the ratings in the store change, and answers queries about
the bank. The reasoning bank holds rated questions and finds similar questions (reasoning_bank.py).

After `sync`, the bank has the ratings in force (the stored ratings that were not taken back) except those for
wrong facts, also after an undo, a rollback or another process's rating. Questions are embedded while the user
reads a reply (`settle`), or else at the rating. Before a reply, its question is embedded only if the prompt
needs liked replies as examples.
"""

import re
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..backends.base import QUESTIONS, Backend, TwoSided, original_model, worker
from ..errors import StoreError
from ..models.config.model import Message, Model
from ..pausing import Pause
from ..store import ReplyRow, Store
from . import embedding, signal
from .adapter_history import AdapterHistory
from .reasoning_bank import SIMILAR, ReasoningBank, Tidied
from .signal import LearningSignal

MAX_PENDING_REPLIES = (
    # `settle` prepares at most this number of replies; the question of an older reply is embedded at its
    # rating
    64
)
_UNKNOWN = -1, 0  # a version that no adapter has; the next `sync` then compares the bank with the store again


@dataclass(frozen=True)
class MemoryStatus:
    """The status of the reasoning bank, the memory of rated questions.

    entries: the number of replies in the bank: rated replies and, if implicit feedback is on, other replies
    patterns: the number of kinds of question (clusters) that the bank has found
    poor: the number of patterns with mostly disliked replies
    hits: the number of times that a bank entry became an example in the prompt of a new question
    signals: the number of learning signals (signal.py) in the store
    dropped: the number of learning signals that the store deleted because it had too many
    """

    entries: int
    patterns: int
    poor: int
    hits: int
    signals: int
    dropped: int


@dataclass(frozen=True)
class LikedExample:
    """A liked reply to a similar question, as an example in a prompt."""

    reply_id: str
    question: str
    reply: str

    @property
    def messages(self) -> list[Message]:
        return [Message("user", self.question), Message("assistant", self.reply)]


class RatingIndex:
    """The index of the rated questions of one adapter on one model. Only the backend's thread can use the
    index."""

    def __init__(
        self, store: Store, model: Model, backend: Backend, history: AdapterHistory, implicit: bool = False
    ):
        """implicit: True to use implicit feedback (actions of the user, signal.py) on unrated replies,
        too."""
        self._store, self._model, self._backend, self._history = store, model, backend, history
        self._implicit = implicit
        # the adapter version whose ratings the bank has, and `AdapterHistory.failures` at that time
        self._version: tuple[int, int] | None = None
        # The pooled hidden state of each question that this process has embedded recently.
        self._questions: dict[str, np.ndarray] = {}
        # The questions that the backend's other side embeds while a reply is written.
        self._ahead: dict[str, Future[np.ndarray | None]] = {}
        # The replies whose questions `settle` has not embedded yet.
        self._new: deque[ReplyRow] = deque(maxlen=MAX_PENDING_REPLIES)
        self._read = embedding.ReadQuestions()

    @cached_property
    def whitening(self) -> embedding.Whitening:
        """The model's whitening (embedding.py). The measurement of the whitening takes seconds, once per
        model."""
        return embedding.whitening_of(self._store, self._model, self._backend, self._read)

    @cached_property
    def bank(self) -> ReasoningBank:
        return ReasoningBank(self.whitening.dimensions)

    # -- questions -----------------------------------------------------------------------------------

    def state_of(self, text: str) -> np.ndarray | None:
        """Return a question's pooled state [D] (the mean of its hidden states), from the cache or by one
        prefill; None if the text is empty."""
        job = self._ahead.pop(text, None)
        if job is not None and not job.cancel() and job.exception() is None:
            self._keep(text, job.result())
        if (
            text not in self._questions
        ):  # embed without the base LoRA, because vectors must stay comparable if the base LoRA changes
            backend = worker(self._backend, QUESTIONS)
            with original_model(backend):
                self._keep(text, embedding.read_question(backend, self._model.tokenizer, text))
        return self._questions.get(text)

    def _keep(self, text: str, state: np.ndarray | None) -> None:
        if state is not None:
            while len(self._questions) >= 8:
                self._questions.pop(next(iter(self._questions)))
            self._questions[text] = state

    def forget_questions(self) -> None:
        """Drop the questions in memory, and drop the bank with their vectors. The next `sync` makes a new
        bank from the store. If a reply has no stored vector, the rating of the reply computes the vector."""
        while self._ahead:
            self._ahead.popitem()[1].cancel()
        self._questions.clear()
        self._new.clear()
        vars(self).pop("bank", None)
        self._version = None

    def known_state(self, text: str) -> np.ndarray | None:
        """Return a question's pooled state [D] from the cache; None if the cache does not have the
        question."""
        job = self._ahead.get(text)
        return self.state_of(text) if job is not None and job.done() else self._questions.get(text)

    def read_ahead(self, text: str) -> None:
        """Embed the question of a reply that begins, on the backend's other side, if it has one. The next
        `state_of` takes the result."""
        known = text in self._questions or text in self._ahead
        if known or not text or not isinstance(self._backend, TwoSided):
            return
        tokenizer = self._model.tokenizer
        job = self._backend.start_beside(
            QUESTIONS, lambda backend, pause: embedding.read_question(backend, tokenizer, text)
        )
        if job is not None:
            while len(self._ahead) >= 8:
                self._ahead.pop(next(iter(self._ahead))).cancel()
            self._ahead[text] = job

    def queue_reply(self, reply: ReplyRow) -> None:
        """Queue a stored reply for `settle`, which embeds the reply's question."""
        self._new.append(reply)

    @property
    def is_measured(self) -> bool:
        """True if the model's whitening is in memory, so that a rating need not wait for its measurement."""
        return "whitening" in vars(self)

    def measure(self, pause: Pause | None = None) -> None:
        """Load the model's whitening from the store, or else measure it, unless it is in memory. pause: a
        function that is called between two questions and can raise an exception to stop; the next call
        continues."""
        if not self.is_measured:
            self.whitening = embedding.whitening_of(
                self._store, self._model, self._backend, self._read, pause
            )

    def settle(self, pause: Pause | None = None) -> None:
        """Embed the newest questions, sort the bank's new entries into cells if they are many, and sometimes
        copy the store's log. The runtime calls this function while the user reads. pause: a function that is
        called between two questions and can raise an exception to stop; the next call continues."""
        self.measure(pause)
        while self._new:
            if pause is not None:
                pause()
            reply = self._new.popleft()
            self.query(reply)
            if reply.finish_reason == "cancelled":
                self.record_implicit(reply, "stopped")
        self.sync()
        self.bank.tend()
        self._store.db.copy_log_early()

    def query(self, reply: ReplyRow) -> np.ndarray | None:
        """Return the unit vector of a reply's question; None if the reply has no question. If the question
        was never embedded, embed it now."""
        state = reply.query if reply.query is not None else self._store.replies.query(reply.id)
        if state is None and reply.prompt:
            state = self.state_of(reply.prompt)
            if state is not None:
                self._store.replies.set_query(reply.id, state)
        return self._unit(state)

    # -- updating the bank from the store ------------------------------------------------------------

    def sync(self) -> None:
        """Update the bank to the ratings in force, if the adapter version in use has changed or implicit
        feedback was recorded."""
        version = self._history.version(), self._history.failures
        if version == self._version:
            return
        wanted, held, pruned = self._labels(), self.bank.labels(), self._history.deep.pruned_ratings()
        for reply_id in held.keys() - wanted.keys():
            self.bank.remove(reply_id)
        for reply_id, label in wanted.items():
            if held.get(reply_id) != label:
                is_pruned = pruned.get(reply_id) == label
                if is_pruned:  # the bank can have this entry, with another label, in its lookups
                    self.bank.remove(reply_id)
                self.bank.put(reply_id, label, None if is_pruned else self._vector(reply_id))
        if self._version is None:  # this is the first call of `sync`
            for reply_id in self._store.replies.examples_used(self._model.fingerprint):
                self.bank.hit(reply_id)
            self.bank.tend()
        self._version = version

    def _labels(self) -> dict[str, str]:
        """Return {reply id: label}. The label of a rated reply is its rating. If implicit feedback is on, the
        label of another reply is its strongest implicit feedback."""
        mine = self._model.fingerprint
        signs = self._store.signals.all(mine, "implicit") if self._implicit else []
        # The sort is stable, so the newest of equally strong feedback on a reply stays last and becomes its
        # label.
        signs.sort(key=lambda s: signal.IMPLICIT[s.label][1])
        rated = {reply_id: rating for reply_id, rating, _ in self._history.labels()}
        return {s.reply_id: s.label for s in signs} | rated

    def _vector(self, reply_id: str) -> np.ndarray | None:
        """Return the vector of a reply's question, for a new entry of the bank. Return None if the bank
        already has an entry with a vector for this reply."""
        if self.bank.is_placed(reply_id):
            return None
        return self._unit(self._store.replies.query(reply_id))

    def _unit(self, state: np.ndarray | None) -> np.ndarray | None:
        """Return the unit vector of a pooled state; None if the state has the wrong shape or is not
        finite."""
        if state is None or state.shape != self.whitening.mean.shape or not np.isfinite(state).all():
            return None
        return self.whitening(state)

    def tidy(self, pause: Callable[[], None]) -> tuple[Tidied, dict[str, str]]:
        """Merge and prune the bank's patterns. Return the result, and {reply id: label} of all pruned
        entries, also of earlier calls.

        The caller must store these labels. If these labels are not stored, the next start of the program puts
        the entries into the bank again.
        """
        self.sync()
        held = self.bank.labels()
        before = {
            reply_id: label
            for reply_id, label in self._history.deep.pruned_ratings().items()
            if held.get(reply_id) == label and not self.bank.is_placed(reply_id)
        }
        tidied = self.bank.tidy(pause)
        return tidied, before | tidied.entries

    def vector(self, reply_id: str) -> np.ndarray | None:
        """Return the unit vector of a reply's question, also if the reply's entry was pruned; None if the
        question was never embedded."""
        known = self.bank.vector(reply_id)
        return self._unit(self._store.replies.query(reply_id)) if known is None else known

    def add_ratings(self, ratings: Sequence[LearningSignal], version: int) -> None:
        """Add committed ratings to the bank. If `ratings` is empty, the next `sync` compares the bank with
        the store.

        version: the adapter version that the ratings made. The bank must already have all ratings of the
            version before.
        """
        for rating in ratings:
            self.bank.put(rating.reply_id, rating.label, rating.query)
            self._version = version, self._history.failures

    def record_implicit(self, reply: ReplyRow, label: str) -> bool:
        """Record implicit feedback if the setting `implicit_feedback` is on. Return True if the feedback was
        recorded. If the store cannot take the feedback, the feedback is lost."""
        signal.check_implicit(label)
        if not self._implicit:
            return False
        try:
            self._store.signals.add([self.learning_signal(reply, label).row()])
        except StoreError:
            return False
        self._version = _UNKNOWN
        return True

    def learning_signal(self, reply: ReplyRow, label: str) -> LearningSignal:
        """Return the learning signal of a rating of a reply, or of implicit feedback. If the reply's question
        was never embedded, this function embeds the question."""
        return signal.extract(
            reply.id, label, self.bank.counts_without(reply.id), self.query(reply), reply.latency_ratio,
            signal.size_class(self._model.parameters), len(reply.prompt_ids) + len(reply.sampled_ids),
        )  # fmt: skip

    # -- queries ------------------------------------------------------------------------------------

    def reward_and_value(self, reply: ReplyRow, rating: str) -> tuple[float, float]:
        """Return (r, V(x)) of a new rating, computed from the bank's entries of all other replies. r is the
        reward of the rating, and V(x) is the mean reward for similar questions (objective.py)."""
        r = self.reward(reply.id, rating)
        return r, self.bank.value(self.query(reply), without=reply.id)

    def reward_and_value_in_force(self, reply_id: str, rating: str) -> tuple[float, float]:
        """Return (r, V(x)) of a rating in force. Take the question's vector from the bank, while
        `reward_and_value` can embed the question. If the bank has no such vector, V(x) is the mean reward of
        all questions."""
        r = self.reward(reply_id, rating)
        return r, self.bank.value(self.bank.vector(reply_id), without=reply_id)

    def reward(self, reply_id: str, rating: str) -> float:
        """Return the reward r of a rating, computed from the bank's entries of all other replies."""
        self.sync()
        return signal.reward_of(rating, self.bank.counts_without(reply_id))

    def examples(
        self,
        question: str,
        n: int,
        room: int,
        size: Callable[[LikedExample], int],
        known: Collection[str] = (),
    ) -> list[LikedExample]:
        """Return at most n liked replies to questions similar to `question`, the most similar last.

        room: the maximum number of tokens of all examples together
        size: a function that returns the number of tokens of an example
        known: texts that are already in the conversation; examples with these questions are left out
        """
        anything = self._implicit or self._history.version() > 0
        state = self.state_of(question) if n and anything else None
        if state is None:
            return []
        self.sync()
        chosen: list[LikedExample] = []
        seen = {_plain(text) for text in (question, *known)}
        for reply_id in self.bank.liked_replies(self.whitening(state), similar=SIMILAR):
            example = self._example(reply_id)
            if len(chosen) == n or example is None or _plain(example.question) in seen:
                continue
            tokens = size(example)
            if tokens <= room:
                room -= tokens
                seen.add(_plain(example.question))
                chosen.append(example)
                self.bank.hit(reply_id)
        return chosen[::-1]

    def _example(self, reply_id: str) -> LikedExample | None:
        """Return a stored reply as an example. Return None if ruvmlx must not learn from the reply, if its
        chat was deleted, if its text is empty, or if it did not end by itself and has no complete line or
        sentence."""
        reply = self._store.replies.get(reply_id)
        text = reply.text if reply.finish_reason == "stop" else whole_sentences(reply.text)
        usable = reply.teaches and reply.prompt.strip() and text.strip()
        return LikedExample(reply.id, reply.prompt, text) if usable else None

    def status(self) -> MemoryStatus:
        self.sync()
        patterns = self.bank.patterns()
        return MemoryStatus(
            entries=len(self.bank),
            patterns=len(patterns),
            poor=sum(p.poor for p in patterns),
            hits=self.bank.hits,
            signals=self._store.signals.count(),
            dropped=self._store.signals.dropped_count(),
        )


def whole_sentences(text: str) -> str:
    """Return the text up to the end of its last complete line or sentence, because an example must not end in
    the middle of a sentence."""
    ends = [m.end() for m in re.finditer(r"(?<!\d)[.!?…][\"'”’)]*(?=\s|$)|[。！？]|\n", text)]
    return text[: ends[-1]].rstrip() if ends else ""


def _plain(text: str) -> str:
    """Return a question in lower case, without extra spaces and outer punctuation, for comparisons."""
    return " ".join(text.casefold().split()).strip(" .?!")
