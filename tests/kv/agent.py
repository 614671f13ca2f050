"""An agent's pattern: a long system prompt with tools, two conversations in turns, a restart in the middle.

    python -m tests.kv.agent --full            # 8,000 tokens, 30 turns, the starter model
    python -m tests.kv.agent --full --kv f16   # without tiers

Each request is the whole conversation so far and has no session, as agents send them. Prints: tokens
prefilled by tokens that no earlier request had, milliseconds to the first token of a turn with at most 32 new
tokens, the restart's first token against reading again, and with --alone the replies of an engine that has
read nothing.
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ruvmlx.backends.base import Backend
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.engine import GenerationRequest, GenerationResponse, LLMInferenceEngine, Sampling
from ruvmlx.kv.disk import CacheFolder
from ruvmlx.kv.policy import F16, TIERED, TierPolicy
from ruvmlx.models.config.model import Model
from ruvmlx.models.find.starter import starter_path
from ruvmlx.models.load import load_model
from ruvmlx.sampling import log_softmax

from .texts import TEXTS, read

NEW = 32  # most new tokens of a turn whose first token is timed


@dataclass
class Figures:
    """prefilled, new: tokens over all requests but the first; first_ms: of the turns with at most NEW new
    tokens; restart_ms, again_ms: first token after the restart, and of an engine that reads all of it;
    kept_s: the end of the first process; kl: nats between the logits with reuse and without; same: tokens of
    replies that are the same, of all."""

    prefilled: int = 0
    new: int = 0
    first_ms: list[float] = field(default_factory=list)
    restart_ms: list[float] = field(default_factory=list)
    again_ms: list[float] = field(default_factory=list)
    kept_s: float = 0.0
    kl: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For people."""
        first = sorted(self.first_ms)
        found = [
            f"tokens prefilled / new ones: {self.prefilled / self.new:.3f} ({self.prefilled} of {self.new})",
            f"first token, at most {NEW} new: "
            f"median {statistics.median(first):.1f} ms, worst {first[-1]:.1f} ms",
            f"first token after the restart: {max(self.restart_ms):.0f} ms, read again "
            f"{min(self.again_ms):.0f} ms: {min(self.again_ms) / max(self.restart_ms):.0f} times sooner; "
            f"writing took {self.kept_s:.2f} s",
        ]
        if self.kl:
            found.append(
                f"KL to replies without reuse: mean {statistics.mean(self.kl):.6f}, worst {max(self.kl):.6f} "
                f"nats; {sum(self.same)} of {len(self.same)} replies equal"
            )
        return found


class Agent:
    """Two conversations with one system prompt. model: real text where it has real weights."""

    def __init__(
        self, model: Model, backend: Backend, policy: TierPolicy, folder: Path, system: int, reply: int
    ):
        self.model, self.backend, self.policy, self.folder = model, backend, policy, folder
        self.system, self.reply = system, reply
        self.figures, self._rng = Figures(), random.Random(0)
        words = model.tokenizer.encode("\n".join(read(name) for name in TEXTS))
        self._text = [token for token in words if token not in model.tokenizer.eos_ids]
        start = self._take(system)
        self.conversations = [[*start, *self._take(20)] for _ in range(2)]
        self.engine = self.open_engine()

    def open_engine(self) -> LLMInferenceEngine:
        return LLMInferenceEngine(self.model, self.backend, self.policy, CacheFolder(self.folder, 1 << 40))

    def _take(self, n: int) -> list[int]:
        at = self._rng.randrange(len(self._text) - n)
        return self._text[at : at + n]

    def _ask(self, engine: LLMInferenceEngine, prompt: list[int]) -> tuple[GenerationResponse, float]:
        """(response, milliseconds to the first token)"""
        request = GenerationRequest(
            input_ids=prompt,
            max_new_tokens=self.reply,
            sampling=Sampling(0.0),
            ignore_eos=True,
            resumable=True,
        )
        begun = time.perf_counter()
        for chunk in engine.stream(request):
            if chunk.generated == 1:
                first = 1e3 * (time.perf_counter() - begun)
        assert chunk.response is not None
        return chunk.response, first

    def run(self, turns: int, alone: int = 0) -> Figures:
        """alone: in every so many turns compare with an engine that has read nothing; 0: never."""
        known = [0, self.system]  # tokens of each conversation that a request has held
        for turn in range(turns):
            if turn == turns // 2:
                self._restart()
            for i, prompt in enumerate(self.conversations):
                got, first = self._ask(self.engine, prompt)
                if (turn, i) != (0, 0):
                    self._count(len(prompt) - known[i], got, first, timed=turn not in (0, turns // 2))
                if turn == turns // 2:
                    self.figures.restart_ms.append(first)
                if alone and turn % alone == alone - 1:
                    self._compare(prompt, got)
                prompt += got.token_ids
                known[i] = len(prompt) - 1  # the last token of a reply is not read
                prompt += self._take(self._rng.randrange(8, NEW) if turn % 3 else 150)
        return self.figures

    def _count(self, new: int, got: GenerationResponse, first: float, timed: bool) -> None:
        self.figures.prefilled += got.prompt_tokens - got.cached_tokens
        self.figures.new += new
        if new <= NEW and timed:
            self.figures.first_ms.append(first)

    def _restart(self) -> None:
        """Another engine on the same folder; and one that reads a whole conversation."""
        begun = time.perf_counter()
        self.engine.sessions.keep_all()
        self.figures.kept_s = time.perf_counter() - begun
        self.engine.sessions.clear()
        empty = LLMInferenceEngine(self.model, self.backend, self.policy)
        self.figures.again_ms.append(self._ask(empty, self.conversations[0])[1])
        empty.sessions.clear()
        self.engine = self.open_engine()

    def _compare(self, prompt: list[int], got: GenerationResponse) -> None:
        """The distributions that the reply was drawn from, beside those without reuse. Equal: at each token
        the most likely one is the same."""
        empty = LLMInferenceEngine(self.model, self.backend, self.policy)
        fresh, reused = empty.sessions.get_or_create(None), self.engine.sessions.get_or_create(None, prompt)
        n, equal = self.engine.sessions.rewind(reused, prompt), True
        assert n == len(prompt) - 1
        sequences = (fresh.cache, prompt), (reused.cache, prompt[n:])
        steps = [self.backend.prefill(tokens, cache) for cache, tokens in sequences]
        for token in got.token_ids:
            p, q = (log_softmax(np.asarray(step.logits, np.float64)) for step in steps)
            self.figures.kl.append(float(np.sum(np.exp(p) * (p - q))))
            equal &= int(np.argmax(p)) == token
            steps = [self.backend.decode(token, cache) for cache, _ in sequences]
        self.figures.same.append(equal)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--full", action="store_true", help="8,000 tokens and 30 turns; else 1,000 and 6")
    options.add_argument("--kv", choices=("tiered", "f16"), default="tiered")
    options.add_argument("--alone", type=int, default=0, help="compare every so many turns")
    given = options.parse_args()
    path = starter_path()
    assert path is not None, "the starter model's package is not installed"
    model = load_model(str(path))
    policy = TIERED if given.kv == "tiered" else F16
    shape = replace(model.config, max_context=12_288)  # the starter's own is 8,192: its speed is the same
    model = replace(model, shape=shape)
    system, turns = (8000, 30) if given.full else (1000, 6)
    with tempfile.TemporaryDirectory(prefix="ruvmlx-agent-", ignore_cleanup_errors=True) as folder:
        backend = NativeBackend(model, threads=os.cpu_count() or 1)
        agent = Agent(model, backend, policy, Path(folder), system, 40)
        print("\n".join(agent.run(turns, given.alone).lines()))


if __name__ == "__main__":
    main()
