"""This module defines ruvmlx's player in the serving suite (serving.py). The player runs requests in parallel
with the scheduler of `engine/scheduler.py`. The engine guesses no tokens: the scheduler would guess only for
a request that runs alone, and the bench could not compare such a request with several requests."""

import time
from collections.abc import Sequence
from typing import cast

import numpy as np

from ruvmlx.backends.base import Backend
from ruvmlx.engine import Chunk, GenerationRequest, LLMInferenceEngine, Sampling
from ruvmlx.engine.scheduler import Scheduler
from ruvmlx.lora import MicroLoRA
from ruvmlx.sona.trace import Trace

from .clocked import Clocked

MAX_REQUESTS = 8  # the maximum number of requests in parallel, and the number of adapters


class TimedReply:
    """A receiver that gets the tokens of one reply from the scheduler, and keeps the times of the tokens."""

    def __init__(self) -> None:
        self.tokens, self.times, self.over = 0, list[float](), False
        self.error: BaseException | None = None

    def take(self, chunk: Chunk) -> None:
        if chunk.generated > self.tokens:
            self.tokens = chunk.generated
            self.times.append(time.perf_counter())
        self.over = chunk.response is not None

    def fail(self, error: BaseException) -> None:
        self.error, self.over = error, True


class ServingPlayer:
    """A player that runs one of ruvmlx's backends with a scheduler. Replies are sampled with an adapter, and
    their traces are recorded, as in a chat."""

    def __init__(self, model: str | None, backend: str, threads: int):
        from ruvmlx.backends.select import cache_policy, open_backend
        from ruvmlx.models.load import load_model

        loaded = load_model(model)
        self._clocked = Clocked(open_backend(backend, loaded, threads))
        policy = cache_policy("auto", cast(Backend, self._clocked), loaded.shape)
        self._engine = LLMInferenceEngine(loaded, cast(Backend, self._clocked), policy, speculate="off")
        self._scheduler = Scheduler(self._engine)
        noise, shape = np.random.default_rng(0).standard_normal, loaded.shape
        self._adapters = [
            MicroLoRA(
                noise((shape.hidden_size, 2), np.float32), 1e-4 * noise((2, shape.vocab_size), np.float32)
            )
            for _ in range(MAX_REQUESTS)
        ]
        self.facts = {"max_context": shape.max_context, "kernels": self._clocked.kernels}

    def in_parallel(self, prompts: list[list[int]], n: int, adapters: int = 1) -> dict[str, float]:
        """Write a reply to each prompt at the same time, with `adapters` different adapters, until one reply
        has n tokens.

        Return {"rate": tokens per second of all replies after all prefills, from the median time of a step;
        "decode": the share of the time that the backend's decode steps take}.
        """
        replies = [self._submit(prompt, n + i, i % adapters) for i, prompt in enumerate(prompts)]
        while any(reply.tokens < 2 for reply in replies):
            self._step(replies)
        self._clocked.seconds, times = 0.0, [time.perf_counter()]
        while not any(reply.over for reply in replies):
            self._step(replies)
            times.append(time.perf_counter())
        self._scheduler.drop_all()
        decode = self._clocked.seconds / (times[-1] - times[0])
        return {"rate": len(prompts) / float(np.median(np.diff(times))), "decode": decode}

    def arrive(self, prompt: list[int], arriving: list[int]) -> dict[str, float]:
        """Let the model write a reply to `prompt`, and send another prompt, `arriving`, during this reply.
        Return the seconds between two tokens of the running reply: before the other prompt arrives ("plain"),
        and while the other prompt is read ("most", "median"). Also return the seconds to the first token of
        the reply to the other prompt ("first")."""
        running = self._submit(prompt, 1000, 0)
        while running.tokens < 30:
            self._step([running])
        plain = float(np.median(np.diff(running.times[2:])))
        asked, other = time.perf_counter(), self._submit(arriving, 4, 1)
        first = len(running.times) - 1
        while not other.tokens:
            self._step([running, other])
        gaps = np.diff(running.times[first:])
        self._scheduler.drop_all()
        return {
            "plain": plain,
            "most": float(gaps.max()),
            "median": float(np.median(gaps)),
            "first": other.times[0] - asked,
        }

    def _submit(self, prompt: list[int], n: int, adapter: int) -> TimedReply:
        reply, lora = TimedReply(), self._adapters[adapter]
        sampling = Sampling(0.2, top_p=0.9, seed=n)
        request = GenerationRequest(input_ids=prompt, max_new_tokens=n, sampling=sampling, ignore_eos=True)
        self._scheduler.submit(request, reply, lora, Trace(lora, 0))
        return reply

    def _step(self, replies: Sequence[TimedReply]) -> None:
        self._scheduler.step()
        for reply in replies:
            if reply.error is not None:
                raise reply.error
