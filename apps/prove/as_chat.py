"""This module implements `ruvmlx prove --as-chat`, an experiment with simulated users who rate by thumbs (up
and down). The experiment uses the settings of the chat app.

A simulated user (a rater) reads replies to the prompts in data/. The rater presses a thumb if the length of a
reply pleases or annoys the rater, and does not rate other replies. Some raters press only thumbs up, or only
thumbs down. After certain numbers of presses (the checkpoints), this module keeps a copy of the adapter that
learned from the rater's presses. At the end, the model answers unseen questions with the adapter of each
checkpoint. The replies for all raters are generated in one batch, each with the adapter of its rater.
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

from .readers import learner_of, replies_to
from .trial import Arm, Bench, seed_for
from .users import words_of

# A reply of fewer than SHORT words gets a thumb up, and a reply of more than LONG words gets a thumb down.
SHORT, LONG = 80, 120
PRESSES = (5, 10, 20, 30)  # the numbers of presses at the checkpoints
PATIENCE = 2  # a rater reads at most PATIENCE * n replies before the checkpoint at n presses
THUMBS = {"both": ("up", "down"), "down": ("down",), "up": ("up",)}  # kind of rater -> its thumbs


@dataclass(frozen=True)
class ChatSetup:
    """The settings for all raters.

    prompts: the questions whose replies the raters rate
    heldout: the unseen questions, which only test the result
    presses: the numbers of presses at the checkpoints
    max_tokens: the maximum number of tokens of a reply
    temperature: the temperature of replies; None for the model's own temperature, which the chat uses
    """

    prompts: Sequence[str]
    heldout: Sequence[str]
    presses: Sequence[int]
    max_tokens: int
    temperature: float | None = None


@dataclass(frozen=True)
class Snapshot:
    """The weights that a rater's presses gave until a checkpoint.

    presses: the number of presses at the checkpoint
    pressed, read: the numbers of thumbs that the rater pressed and of replies that the rater read until the
        checkpoint; `pressed` is less than `presses` if the rater stopped at the limit of PATIENCE
    micro: the MicroLoRA, which has the learned weights
    kl, ppl_change: the KL to the original model (nats per token) and the relative change of perplexity on
        neutral text (retention.py)
    """

    presses: int
    pressed: int
    read: int
    micro: MicroLoRA | None
    kl: float
    ppl_change: float


@dataclass(frozen=True)
class ChatResult:
    """The result of one rater with one seed at one checkpoint. Snapshot explains the other fields.

    words, words_base: the mean number of words in the replies to unseen questions, with the rater's weights
        and with the original model
    """

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
        """The relative change of the mean number of words: 0.1 if the learned replies are a tenth longer."""
        return self.words / self.words_base - 1


def thumb(rater: str, reply: str) -> str | None:
    """Return the thumb that a rater of this kind presses for a reply: "up", "down" or None."""
    n = len(words_of(reply))
    wanted = "up" if n < SHORT else "down" if n > LONG else None
    return wanted if wanted in THUMBS[rater] else None


@dataclass
class _Person:
    """A rater with one seed and a separate store."""

    rater: str
    seed: int
    runtime: Runtime
    read: int = 0
    pressed: int = 0
    snapshots: list[Snapshot] = field(default_factory=list)

    def request(self, setup: ChatSetup) -> GenerationRequest:
        """Return a request for a reply to the rater's next question. The order of the questions depends on
        the seed."""
        order = np.random.default_rng([self.seed, 4]).permutation(len(setup.prompts))
        prompt = setup.prompts[order[self.read % len(order)]]
        return request_of(self.runtime, prompt, setup, seed_for(self.seed, 0, self.read))

    def receive(self, response: GenerationResponse) -> None:
        """Count a reply as read, and press a thumb if the reply's length pleases or annoys the rater."""
        self.read += 1
        pressed = thumb(self.rater, response.text)
        if pressed is not None:
            self.runtime.learning.settle()
            self.runtime.rate(response.request_id, pressed)
            self.pressed += 1

    def checkpoint(self, bench: Bench, setup: ChatSetup) -> None:
        """Keep a copy of the weights for each checkpoint that the rater has reached, or for which the rater
        has read PATIENCE times as many replies."""
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
    """Run all raters with all seeds. Return a result for each rater, seed and checkpoint."""
    bench.measure()
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
    """Let each rater read one reply and press a thumb or none. If a rater has reached a checkpoint, keep a
    copy of the rater's weights."""
    for person, _, response in replies_to(
        people, lambda p: p.request(setup), lambda _: False, bench.question_states
    ):
        person.receive(response)
        person.checkpoint(bench, setup)


def _results(setup: ChatSetup, people: Sequence[_Person], log: Callable[[str], None]) -> list[ChatResult]:
    """Let the model answer the unseen questions once with the weights of each checkpoint, and once for each
    seed without an adapter, all in one batch. Return the results."""
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
    """Let the model answer the unseen questions with each of several weights. Yield (key, mean number of
    words of the answers).

    wanted: (key, random seed, MicroLoRA, or None for the original model) for each of the weights
    """
    micro_of, lengths = {}, {key: list[int]() for key, *_ in wanted}
    requests = []
    for key, seed, micro in wanted:
        for i, prompt in enumerate(setup.heldout):
            requests.append(request_of(runtime, prompt, setup, seed_for(seed, 3, i)))
            micro_of[requests[-1].request_id] = key, micro
    for response in generate_many(runtime.engine, requests, lambda r: micro_of[r.request_id][1]):
        key, _ = micro_of[response.request_id]
        lengths[key].append(len(words_of(response.text)))
        if len(lengths[key]) == len(setup.heldout):
            log(f"{len(setup.heldout)} unseen questions, {key}: {np.mean(lengths[key]):.0f} words")
            yield key, float(np.mean(lengths[key]))


def request_of(runtime: Runtime, prompt: str, setup: ChatSetup, seed: int) -> GenerationRequest:
    """Return a request for a reply to a prompt, with the chat's own sampling, but with the setup's
    temperature if it has one."""
    request = GenerationRequest(
        messages=[Message("user", prompt)],
        max_new_tokens=setup.max_tokens,
        sampling=runtime.writer.sampling(temperature=setup.temperature, seed=seed),
    )
    return runtime.writer.prepare_request(request)


def table(results: Sequence[ChatResult]) -> str:
    """Return a table as text with a line for each kind of rater and checkpoint. A line has the change of the
    mean number of words, the mean number of words for each seed, and the KL and the perplexity of the worst
    seed."""
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
