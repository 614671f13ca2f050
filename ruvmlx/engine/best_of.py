"""This module writes the best of n: several replies to one request form one batch, and a judge picks one.

The prompt is read once. Each reply after the first continues from a fork of the prompt's cache, and gets a
seed of its own if the request has a seed. Reply 0 has the request's own seed, so it is the reply that the
request would get alone, apart from rounding errors of the batch.

The judge scores all replies each time that the number of tokens of the running replies is one of CHECKPOINTS.
The module drops each unfinished reply whose score is more than MARGIN stars below the best score. When all
replies except one are more than MARGIN stars below the best score, the user sees the text of the best reply
while it is written. The idea comes from Hoeffding races (Maron & Moore 1994).

The score of a reply's start says little about the whole reply. If the worse half of the replies were dropped
at 32 and at 64 tokens, most of the gain of best of n would be lost. With that rule, after 100 ratings, the
chosen reply would fit the user's taste better than another reply in 62% of the cases instead of 92% (a user
who likes short replies), and in 54% instead of 72% (a formal tone). If replies that score more than 1.5 stars
(MARGIN) below the best are dropped, these percentages fall by at most 3 points; with one star instead of 1.5,
the percentages fall by up to 12 points.
"""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from ..backends.base import HeadAdapter
from ..lora.base_lora import BaseLoRA
from .recorder import Recorder
from .run import EngineParts, Run
from .types import Chunk, GenerationRequest, TokenLogprob

CHECKPOINTS = (32, 64, 128, 256, 512)  # tokens
MARGIN = 1.5  # stars
FAILED = "The judge of the replies failed ({}), so no reply is chosen."  # the name of the error's class

Score = Callable[[Sequence[Run]], np.ndarray]  # a judge: n runs, finished or not -> n scores in stars


def requests_for(request: GenerationRequest, count: int) -> list[GenerationRequest]:
    """Return `count` requests, one for each reply. The first request is `request`; each later request has a
    new id, no session and, if `request` has a seed, another seed."""
    others = [
        replace(
            request,
            request_id=uuid.uuid4().hex[:12],
            session_id=None,
            sampling=replace(request.sampling, seed=_seed(request.sampling.seed, i)),
        )
        for i in range(1, count)
    ]
    return [request, *others]


def _seed(seed: int | None, i: int) -> int | None:
    return None if seed is None else int(np.random.SeedSequence([seed, i]).generate_state(1)[0])


class BestOf:
    """A job of the scheduler: one or several replies to one request. At the end `leader` is the chosen reply,
    and `others` holds the other replies that the user did not stop."""

    def __init__(
        self,
        engine: EngineParts,
        requests: Sequence[GenerationRequest],
        adapter: HeadAdapter | None,
        recorders: Sequence[Recorder | None],
        score: Score | None = None,
        lora: BaseLoRA | Literal["installed"] | None = "installed",
        note: str = "",
    ):
        """Prepare the job. Call `start` to begin.

        requests: the list that `requests_for` returned
        score: the judge; None: the user's taste is unknown, so reply 0 is chosen, the user sees its text
            while it is written, and no reply is dropped
        lora: the base LoRA with which the replies are decoded; "installed": the base LoRA that the backend
            has now; None: no base LoRA
        note: a line for the user
        """
        self._engine, self._requests, self._recorders = engine, requests, recorders
        self._adapter, self._score = adapter, score
        self.lora = engine.backend.lora if lora == "installed" else lora
        self.several = len(requests) > 1
        self.runs: list[Run] = []
        self.running: list[Run] = []
        self._chosen = score is None  # True if no other reply can become the leader any more
        # The number of the leader's text pieces that the user has received. The first piece of a run that
        # continues a reply is the text of this reply, which the user already has.
        self._shown = 1 if requests[0].begun else 0
        self._shown_logprobs = 0  # the number of the leader's logprobs that the user has received
        self._drawn = 0  # the number of tokens that each running reply has now
        self._interrupted: list[Run] = []  # the runs of the replies that the user stopped
        self._note = note  # a line for the user that no chunk has yet

    def start(self) -> Run:
        """Return the run that reads the prompt."""
        self.leader = Run(
            self._engine, self._requests[0], self._adapter, self._recorders[0], steps=self.several
        )
        self.runs.append(self.leader)
        return self.leader

    def join(self) -> None:
        """Start the other replies with forks of the leader's cache, unless the leader has already ended. Call
        `join` only after the whole prompt was read."""
        if not self.leader.is_over:
            for request, recorder in zip(self._requests[1:], self._recorders[1:], strict=True):
                self.runs.append(self.leader.fork(request, recorder))
            self.running = list(self.runs)

    @property
    def others(self) -> list[Run]:
        """Return all replies except the leader and the replies that the user stopped."""
        return [run for run in self.runs if run not in (self.leader, *self._interrupted)]

    # Decoding

    def next_chunk(self) -> Chunk:
        """Update the job after each running reply has drawn one token, and return a chunk with the new text
        of the leader. The chunk has no text while another reply can still become the leader."""
        if self.leader.request.cancel.is_set():
            self._interrupted = self.running
        self._drawn += 1
        if self._drawn in CHECKPOINTS and not self._chosen:
            self._drop()
        self.running = [run for run in self.running if not run.is_over]
        read = len(self.leader.prompt)
        replies = len(self.running) if self.several else 1
        text, logprobs = self._news()
        note = self._take_note()
        return Chunk(text, len(self.leader.ids), read, read, replies=replies, logprobs=logprobs, note=note)

    def _drop(self) -> None:
        """End the unfinished replies whose score is more than MARGIN stars below the best score. MARGIN is
        large because the unwritten part of each reply can change its score."""
        stars = self._choose()
        behind = stars < stars.max() - MARGIN
        for run, is_behind in zip(self.runs, behind, strict=True):
            if is_behind and not run.is_over:
                run.finish_reason = "cancelled"
        self._chosen = bool(behind.sum() == len(behind) - 1)

    def _choose(self) -> np.ndarray:
        """Make the reply with the most stars the leader, whose text the user sees. Returns the stars [n] of
        all replies; a dropped reply has -inf."""
        dropped = [run.finish_reason == "cancelled" and run not in self._interrupted for run in self.runs]
        stars = np.where(dropped, -np.inf, self._stars())
        self.leader = self.runs[int(stars.argmax())]
        return stars

    def _stars(self) -> np.ndarray:
        """Return the judge's stars [n] of all replies. If the judge fails, make a note for the user; from
        then on, an earlier reply has more stars than a later reply."""
        assert self._score is not None
        try:
            return self._score(self.runs)
        except Exception as error:  # noqa: BLE001 - a judge's error must not lose the replies
            self._note = " ".join(filter(None, [self._note, FAILED.format(type(error).__name__)]))
            self._score = _stars_by_place
            return self._score(self.runs)

    def _predicted_stars(self) -> float | None:
        """Return the judge's stars of the leader's whole reply; None if there is no judge, or if the judge
        fails."""
        if self._score is None or self._score is _stars_by_place:
            return None
        try:
            return float(self._score(self.runs)[self.runs.index(self.leader)])
        except Exception:  # noqa: BLE001 - a judge's error must not lose the replies
            return None

    def _take_note(self) -> str:
        note, self._note = self._note, ""
        return note

    def _news(self) -> tuple[str, tuple[TokenLogprob, ...]]:
        """Return the leader's text and logprobs since the last call. Text and logprobs are empty while
        another reply can become the leader."""
        if not self._chosen:
            return "", ()
        shown, self._shown = self._shown, len(self.leader.text)
        if self.leader.request.logprobs:
            self.leader.record()
        # the tokens of a stop text have no logprobs, because the text leaves the stop text out
        news = tuple(self.leader.logprobs[self._shown_logprobs : self.leader.stops.shown_count])
        self._shown_logprobs += len(news)
        return "".join(self.leader.text[shown:]), news

    def end(self) -> Chunk:
        """Return the last piece of text with the response. All replies must have ended."""
        tails = [run.end() for run in self.runs]
        if not self._chosen:
            self._choose()
            self._chosen = True
        session = self._requests[0].session_id
        if session is not None:
            self._engine.sessions.put(session, self.leader.session)
        done = {run.request.request_id: chunk.response for run, chunk in zip(self.runs, tails, strict=True)}
        others = tuple(filter(None, (done[run.request.request_id] for run in self.others)))
        best = done[self.leader.request.request_id]
        assert best is not None
        best = replace(best, session_id=session, others=others, predicted_stars=self._predicted_stars())
        text, logprobs = self._news()
        return Chunk(text, len(self.leader.ids), response=best, logprobs=logprobs, note=self._take_note())


def _stars_by_place(runs: Sequence[Run]) -> np.ndarray:
    return -2 * MARGIN * np.arange(len(runs))
