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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ..backends.base import HeadAdapter
from .batch import decode_one, draw_all
from .engine import LLMInferenceEngine
from .run import Recorder, Run, settled
from .types import Chunk, GenerationRequest

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
    """Iterate over `chunks`; afterwards `leader` is the reply that was chosen, and `others` are those beside
    it. A single request runs as it would alone."""

    def __init__(
        self,
        engine: LLMInferenceEngine,
        requests: Sequence[GenerationRequest],
        adapter: HeadAdapter | None,
        recorders: Sequence[Recorder | None],
        score: Score | None = None,
    ):
        """requests: from `requests_for`. score: None: nothing is known of the user's taste, so reply 0 is
        chosen and streams, and all are written to their ends."""
        self._engine, self._requests, self._recorders = engine, requests, recorders
        self._score = score
        self.leader = (
            engine.run(requests[0], adapter, recorders[0])
            if len(requests) == 1
            else Run(engine, requests[0], adapter, recorders[0], steps=True)
        )
        self._runs = [self.leader]
        self._chosen = score is None  # the leader will not change any more
        self._shown = 0  # pieces of the leader's text that were sent
        self._interrupted: list[Run] = []  # runs that the user stopped

    def chunks(self) -> Iterator[Chunk]:
        if len(self._requests) == 1:
            yield from self.leader.chunks()
            return
        with settled(self._runs):  # the list grows inside
            yield from self.leader.prefill()
            if not self.leader.over:
                rest = zip(self._requests[1:], self._recorders[1:], strict=True)
                self._runs += [self.leader.fork(request, recorder) for request, recorder in rest]
            yield from self._decode()
        yield self._end()

    @property
    def others(self) -> list[Run]:
        """The replies beside the leader, without those that the user stopped."""
        return [run for run in self._runs if run not in (self.leader, *self._interrupted)]

    # Decoding

    def _decode(self) -> Iterator[Chunk]:
        running = [run for run in self._runs if not run.over]
        drawn = 0
        while running:
            draw_all(self._engine, running)
            if self.leader.request.cancel.is_set():
                self._interrupted = running
            drawn += 1
            if drawn in CHECKPOINTS and not self._chosen:
                self._drop()
            running = [run for run in running if not run.over]
            yield self._chunk(len(running))
            decode_one(self._engine, running)

    def _drop(self) -> None:
        """Drop the replies that are clearly worse than the best. What a reply will still become is not known:
        MARGIN allows for it."""
        stars = self._choose()
        behind = stars < stars.max() - MARGIN
        for run, is_behind in zip(self._runs, behind, strict=True):
            if is_behind and not run.over:
                run.finish_reason = "cancelled"
        self._chosen = bool(behind.sum() == len(behind) - 1)

    def _choose(self) -> np.ndarray:
        """Make the best reply the leader; returns the stars [n] of all, none for those that were dropped."""
        assert self._score is not None
        dropped = [run.finish_reason == "cancelled" and run not in self._interrupted for run in self._runs]
        stars = np.where(dropped, -np.inf, self._score(self._runs))
        self.leader = self._runs[int(stars.argmax())]
        return stars

    def _chunk(self, running: int) -> Chunk:
        read = len(self.leader.prompt)
        return Chunk(self._news(), len(self.leader.ids), read, read, replies=running)

    def _news(self) -> str:
        """The leader's text since the last call; nothing while another reply may take its place."""
        if not self._chosen:
            return ""
        shown, self._shown = self._shown, len(self.leader.text)
        return "".join(self.leader.text[shown:])

    def _end(self) -> Chunk:
        tails = [run.end() for run in self._runs]
        if not self._chosen:
            self._choose()
            self._chosen = True
        session = self._requests[0].session_id
        if session is not None:
            self._engine.sessions.put(session, self.leader.session)
        done = {run.request.request_id: chunk.response for run, chunk in zip(self._runs, tails, strict=True)}
        others = tuple(filter(None, (done[run.request.request_id] for run in self.others)))
        best = done[self.leader.request.request_id]
        assert best is not None
        best = replace(best, session_id=session, others=others)
        return Chunk(self._news(), len(self.leader.ids), response=best)
