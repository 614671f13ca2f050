"""`prove --as-chat`: simulated users who press thumbs, with the chat's own settings.

A simulated person reads replies to our prompts, presses a thumb where the length of one pleases or annoys
them, and does not rate the others. Some press only up, or only down. Unseen questions are then answered by
the weights of each checkpoint. All people take turns: their replies are written as one batch, each with that
person's own weights.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ruvmlx.engine import GenerationRequest, GenerationResponse
from ruvmlx.engine.batch import generate_many
from ruvmlx.lora import MicroLoRA
from ruvmlx.models.config.model import Message
from ruvmlx.runtime import Runtime

from .readers import learner_of, next_replies
from .trial import Arm, Bench, seed_for
from .users import words_of

SHORT, LONG = 80, 120  # words: thumbs up below, thumbs down above, no thumb from one to the other
PRESSES = (5, 10, 20, 30)  # checkpoints
PATIENCE = 2  # replies read for each press: who finds nothing to press stops there
THUMBS = {"both": ("up", "down"), "down": ("down",), "up": ("up",)}  # what each rater ever presses


@dataclass(frozen=True)
class ChatSetup:
    """Settings shared by all raters. temperature: None is the model's own, as in the chat."""

    prompts: Sequence[str]
    heldout: Sequence[str]
    presses: Sequence[int]
    max_tokens: int
    temperature: float | None = None


@dataclass(frozen=True)
class Snapshot:
    """A rater's weights at a checkpoint. pressed, read: thumbs and replies so far; fewer thumbs than
    `presses` if this rater found nothing more to press. kl, ppl_change: on neutral text."""

    presses: int
    pressed: int
    read: int
    micro: MicroLoRA | None
    kl: float
    ppl_change: float


@dataclass(frozen=True)
class ChatResult:
    """One seed of one rater at one checkpoint. words, words_base: mean of the replies to unseen questions."""

    rater: str
    seed: int
    presses: int
    pressed: int
    read: int
    words: float
    words_base: float
    kl: float
    ppl_change: float

    @property
    def change(self) -> float:
        """Relative change of the mean number of words."""
        return self.words / self.words_base - 1


def thumb(rater: str, reply: str) -> str | None:
    """The thumb that this rater presses for a reply: up, down or none."""
    n = len(words_of(reply))
    wanted = "up" if n < SHORT else "down" if n > LONG else None
    return wanted if wanted in THUMBS[rater] else None


@dataclass
class _Person:
    """One rater of one seed, with a store of their own."""

    rater: str
    seed: int
    runtime: Runtime
    read: int = 0
    pressed: int = 0
    snapshots: list[Snapshot] = field(default_factory=list)

    def request(self, setup: ChatSetup) -> GenerationRequest:
        """A request for the next question. The order of the questions depends on the seed."""
        order = np.random.default_rng([self.seed, 4]).permutation(len(setup.prompts))
        prompt = setup.prompts[order[self.read % len(order)]]
        return asked(self.runtime, prompt, setup, seed_for(self.seed, 0, self.read))

    def receive(self, response: GenerationResponse) -> None:
        """Read a reply, and press a thumb or not."""
        self.read += 1
        pressed = thumb(self.rater, response.text)
        if pressed is not None:
            self.runtime.settle()
            self.runtime.rate(response.request_id, pressed)
            self.pressed += 1

    def checkpoint(self, bench: Bench, setup: ChatSetup) -> None:
        """Keep the weights if a checkpoint is reached, or if patience has run out."""
        for presses in setup.presses[len(self.snapshots) :]:
            if self.pressed < presses and self.read < PATIENCE * presses:
                return
            micro = learner_of(self).micro
            self.snapshots.append(
                Snapshot(presses, self.pressed, self.read, micro, *bench.neutral.compare(micro))
            )


def run(
    bench: Bench, setup: ChatSetup, raters: Sequence[str], seeds: int, log: Callable[[str], None]
) -> list[ChatResult]:
    """All raters and seeds, at all checkpoints."""
    with bench.runtime() as first:  # what it measures of the model serves all others
        assert first.learner is not None
        first.learner.rating_index.whitening  # noqa: B018 - kept once measured
    with ExitStack() as stack:
        people = []
        for seed in range(seeds):
            for rater in raters:
                people.append(_Person(rater, seed, stack.enter_context(bench.runtime(Arm()))))
        while busy := [p for p in people if len(p.snapshots) < len(setup.presses)]:
            _round(bench, setup, busy)
            log(f"{sum(p.pressed for p in people)} thumbs pressed on {sum(p.read for p in people)} replies")
        return _results(setup, people, log)


def _round(bench: Bench, setup: ChatSetup, people: Sequence[_Person]) -> None:
    """One reply for each of them."""
    for person, _, response in next_replies(people, lambda p: p.request(setup)):
        person.receive(response)
        person.checkpoint(bench, setup)


def _results(setup: ChatSetup, people: Sequence[_Person], log: Callable[[str], None]) -> list[ChatResult]:
    """Answer the unseen questions with all weights at once; the untouched model's answers, once a seed."""
    runtime, wanted = people[0].runtime, list[tuple[Any, int, MicroLoRA | None]]()
    wanted += [(("base", seed), seed, None) for seed in sorted({p.seed for p in people})]
    wanted += [((p.rater, p.seed, s.presses), p.seed, s.micro) for p in people for s in p.snapshots]
    found = dict(mean_words(runtime, setup, wanted, log))
    return [
        ChatResult(
            p.rater, p.seed, s.presses, s.pressed, s.read, round(found[p.rater, p.seed, s.presses], 1),
            round(found["base", p.seed], 1), round(s.kl, 4), round(s.ppl_change, 4),
        )
        for p in people for s in p.snapshots
    ]  # fmt: skip


def mean_words(
    runtime: Runtime,
    setup: ChatSetup,
    wanted: Sequence[tuple[Any, int, MicroLoRA | None]],
    log: Callable[[str], None],
) -> Iterator[tuple[Any, float]]:
    """(key, mean words of the answers to the unseen questions) of each (key, seed, weights)."""
    micro_of, lengths = {}, {key: list[int]() for key, *_ in wanted}
    requests = []
    for key, seed, micro in wanted:
        for i, prompt in enumerate(setup.heldout):
            requests.append(asked(runtime, prompt, setup, seed_for(seed, 3, i)))
            micro_of[requests[-1].request_id] = key, micro
    for response in generate_many(runtime.engine, requests, lambda r: micro_of[r.request_id][1]):
        key, _ = micro_of[response.request_id]
        lengths[key].append(len(words_of(response.text)))
        if len(lengths[key]) == len(setup.heldout):
            log(f"{len(setup.heldout)} unseen questions, {key}: {np.mean(lengths[key]):.0f} words")
            yield key, float(np.mean(lengths[key]))


def asked(runtime: Runtime, prompt: str, setup: ChatSetup, seed: int) -> GenerationRequest:
    """A request for a reply, with the chat's own sampling."""
    request = GenerationRequest(
        messages=[Message("user", prompt)],
        max_new_tokens=setup.max_tokens,
        sampling=runtime.sampling(temperature=setup.temperature, seed=seed),
    )
    return runtime.writer.prepare_request(request)


def table(results: Sequence[ChatResult]) -> str:
    """One line for each rater and checkpoint: the mean change of words, and each seed's words."""
    lines = ["rater  presses  words          change  per seed"]
    for rater, presses in dict.fromkeys((r.rater, r.presses) for r in results):
        of = [r for r in results if (r.rater, r.presses) == (rater, presses)]
        now, base = (float(np.mean([getattr(r, name) for r in of])) for name in ("words", "words_base"))
        each = "  ".join(
            f"{r.words_base:.0f}->{r.words:.0f} ({r.change:+.0%}, {r.pressed}/{r.read})" for r in of
        )
        lines.append(
            f"{rater:<5}  {presses:>7}  {base:5.0f} -> {now:4.0f}  {now / base - 1:+6.0%}  {each}"
            f"  KL {max(r.kl for r in of):.3f}  perplexity {max(r.ppl_change for r in of):+.1%}"
        )
    return "\n".join([*lines, "per seed: words before -> after (change, thumbs pressed / replies read)"])
