"""Best of n: several replies to one request, decoded as one batch from one prompt; a judge picks one.

The prompt is read once; each reply continues from a fork of its cache, with a seed of its own. Reply 0 is the
one that a request for a single reply would have had.

The judge looks at the replies after CHECKPOINTS tokens. Those more than MARGIN stars behind the best are
dropped; once one is left, it streams. (The idea of Hoeffding races: Maron & Moore 1994) Beginnings say little
about whole replies: to drop the worse half at 32 and at 64 tokens costs most of what best of n gains. After
100 ratings the reply shown beats another one in 62% instead of 92% for someone who likes short replies, in
54% instead of 72% for a formal tone. MARGIN costs at most 3 points, one star up to 12.
"""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from ..backends.base import HeadAdapter
from ..lora.base_lora import BaseLoRA
from .run import EngineParts, Recorder, Run
from .types import Chunk, GenerationRequest, TokenLogprob

CHECKPOINTS = (32, 64, 128, 256, 512)  # tokens
MARGIN = 1.5  # stars

Score = Callable[[Sequence[Run]], np.ndarray]  # n runs, begun or over -> stars [n]


def requests_for(request: GenerationRequest, count: int) -> list[GenerationRequest]:
    """One request for each reply: the first is `request`, the others have ids and seeds of their own."""
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
    """A job of the scheduler: the replies to one request, which may be a single one. At the end `leader` is
    the reply that was chosen, and `others` are those beside it."""

    def __init__(
        self,
        engine: EngineParts,
        requests: Sequence[GenerationRequest],
        adapter: HeadAdapter | None,
        recorders: Sequence[Recorder | None],
        score: Score | None = None,
        lora: BaseLoRA | Literal["installed"] | None = "installed",
    ):
        """requests: from `requests_for`. score: None: nothing is known of the user's taste, so reply 0 is
        chosen and streams, and all are written to their ends. lora: the base LoRA to run under."""
        self._engine, self._requests, self._recorders = engine, requests, recorders
        self._adapter, self._score = adapter, score
        self.lora = engine.backend.lora if lora == "installed" else lora
        self.several = len(requests) > 1
        self.runs: list[Run] = []
        self.running: list[Run] = []
        self._chosen = score is None  # the leader will not change any more
        self._shown = self._shown_logprobs = 0  # pieces of the leader's text, and logprobs, that were sent
        self._drawn = 0  # tokens of each reply
        self._interrupted: list[Run] = []  # runs that the user stopped

    def start(self) -> Run:
        """The run that reads the prompt."""
        self.leader = Run(
            self._engine, self._requests[0], self._adapter, self._recorders[0], steps=self.several
        )
        self.runs.append(self.leader)
        return self.leader

    def join(self) -> None:
        """The prompt is read: the other replies begin with forks of its cache."""
        if not self.leader.over:
            for request, recorder in zip(self._requests[1:], self._recorders[1:], strict=True):
                self.runs.append(self.leader.fork(request, recorder))
            self.running = list(self.runs)

    @property
    def others(self) -> list[Run]:
        """The replies beside the leader, without those that the user stopped."""
        return [run for run in self.runs if run not in (self.leader, *self._interrupted)]

    # Decoding

    def drawn(self) -> Chunk:
        """Each running reply has drawn a token. No text while another reply may become the leader."""
        if self.leader.request.cancel.is_set():
            self._interrupted = self.running
        self._drawn += 1
        if self._drawn in CHECKPOINTS and not self._chosen:
            self._drop()
        self.running = [run for run in self.running if not run.over]
        read = len(self.leader.prompt)
        replies = len(self.running) if self.several else 1
        text, logprobs = self._news()
        return Chunk(text, len(self.leader.ids), read, read, replies=replies, logprobs=logprobs)

    def _drop(self) -> None:
        """Drop the replies that are clearly worse than the best. What a reply will still become is not known:
        MARGIN allows for it."""
        stars = self._choose()
        behind = stars < stars.max() - MARGIN
        for run, is_behind in zip(self.runs, behind, strict=True):
            if is_behind and not run.over:
                run.finish_reason = "cancelled"
        self._chosen = bool(behind.sum() == len(behind) - 1)

    def _choose(self) -> np.ndarray:
        """Make the best reply the leader; returns the stars [n] of all, none for those that were dropped."""
        assert self._score is not None
        dropped = [run.finish_reason == "cancelled" and run not in self._interrupted for run in self.runs]
        stars = np.where(dropped, -np.inf, self._score(self.runs))
        self.leader = self.runs[int(stars.argmax())]
        return stars

    def _news(self) -> tuple[str, tuple[TokenLogprob, ...]]:
        """The leader's text and logprobs since the last call; none while another reply may take its place."""
        if not self._chosen:
            return "", ()
        shown, self._shown = self._shown, len(self.leader.text)
        if self.leader.request.logprobs:
            self.leader.record()
        known, self._shown_logprobs = self._shown_logprobs, len(self.leader.logprobs)
        return "".join(self.leader.text[shown:]), tuple(self.leader.logprobs[known:])

    def end(self) -> Chunk:
        """All replies are over: the last piece of text, with the response."""
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
        best = replace(best, session_id=session, others=others)
        text, logprobs = self._news()
        return Chunk(text, len(self.leader.ids), response=best, logprobs=logprobs)
