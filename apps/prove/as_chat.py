"""This module implements `ruvmlx prove --as-chat`, an experiment with simulated users who rate by thumbs (up
and down). The experiment uses the settings of the chat app.

A simulated user (a rater) reads replies to the prompts in data/. The rater presses a thumb if the length of a
reply pleases or annoys the rater, and does not rate other replies. Some raters press only thumbs up, or only
thumbs down. After certain numbers of presses (the checkpoints), the model answers unseen questions with what
it learned from the rater's presses. With the instant loop, all raters read in one batch, each with an adapter
of their own. With the style loop, each rater reads alone, because all replies of a batch have the same base
LoRA.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from ruvmlx.engine import GenerationRequest, GenerationResponse
from ruvmlx.engine.batch import generate_many
from ruvmlx.lora import MicroLoRA
from ruvmlx.models.config.model import Message, Tokenizer
from ruvmlx.runtime import Runtime
from ruvmlx.sona.faults import Faults

from .readers import learner_of, replies_to
from .trial import Arm, Bench, seed_for
from .users import words_of

# A reply of fewer than SHORT words gets a thumb up, and a reply of more than LONG words gets a thumb down.
SHORT, LONG = 80, 120
PRESSES = (5, 10, 20, 30)  # the numbers of presses at the checkpoints
PATIENCE = 2  # a rater reads at most PATIENCE * n replies before the checkpoint at n presses
FAULTS = ("empty", "loops", "foreign", "endless")  # fields of Faults (sona/faults.py)
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
class ChatResult:
    """The result of one rater with one seed at one checkpoint.

    presses: the number of presses at the checkpoint
    pressed, read: the numbers of thumbs that the rater pressed and of replies that the rater read until the
        checkpoint; `pressed` is less than `presses` if the rater stopped at the limit of PATIENCE
    words, words_base: the mean number of words in the replies to unseen questions, with the rater's weights
        and with the original model
    kl, ppl_change: the KL to the original model (nats per token) and the relative change of perplexity on
        neutral text (retention.py)
    faults: {name of a fault of FAULTS: (number of the original model's replies to unseen questions that have
        it, number of the replies with the rater's weights)}
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
    faults: dict[str, tuple[int, int]] = field(default_factory=dict)

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
    """A rater with one seed and a separate store. untouched: the original model's replies to the unseen
    questions."""

    rater: str
    seed: int
    runtime: Runtime
    untouched: Sequence[GenerationResponse]
    read: int = 0
    pressed: int = 0
    results: list[ChatResult] = field(default_factory=list)

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
        """Add a result for each checkpoint that the rater has reached, or for which the rater has read
        PATIENCE times as many replies."""
        for presses in setup.presses[len(self.results) :]:
            if self.pressed < presses and self.read < PATIENCE * presses:
                return
            learner = learner_of(self)
            learner.sync()
            replies = _answers(self.runtime, setup, self.seed, learner.micro)
            kl, ppl_change = bench.neutral.compare(learner.micro)
            self.results.append(
                ChatResult(
                    self.rater, self.seed, presses, self.pressed, self.read, _mean_words(replies),
                    _mean_words(self.untouched), round(kl, 4), round(ppl_change, 4),
                    _count_faults(replies, self.untouched, bench.model.tokenizer),
                )
            )  # fmt: skip


def run(
    bench: Bench,
    setup: ChatSetup,
    raters: Sequence[str],
    seeds: int,
    log: Callable[[str], None],
    learn: str = "instant",
) -> list[ChatResult]:
    """Run each rater with each seed. Return a result for each rater, seed and checkpoint.

    learn: the loop that learns, "instant" or "style" (Arm.learn)
    """
    bench.measure()
    with bench.runtime(Arm("off")) as runtime:
        untouched = [_answers(runtime, setup, seed, None) for seed in range(seeds)]
    everyone = [(rater, seed) for seed in range(seeds) for rater in raters]
    found = list[ChatResult]()
    for group in [[one] for one in everyone] if learn == "style" else [everyone]:
        with ExitStack() as stack:
            people = [
                _Person(rater, seed, stack.enter_context(bench.runtime(Arm(learn))), untouched[seed])
                for rater, seed in group
            ]
            while busy := [p for p in people if len(p.results) < len(setup.presses)]:
                _round(bench, setup, busy)
                pressed, read = sum(p.pressed for p in people), sum(p.read for p in people)
                log(f"{pressed} thumbs pressed on {read} replies")
                if learn == "style" and people[0].runtime.learning.is_due():
                    people[0].runtime.learning.consolidate()
            found += [result for person in people for result in person.results]
    return found


def _round(bench: Bench, setup: ChatSetup, people: Sequence[_Person]) -> None:
    """Let each rater read one reply and press a thumb or none. If a rater has reached a checkpoint, add the
    result."""
    received = replies_to(people, lambda p: p.request(setup), lambda _: False, bench.question_states)
    for person, _, response in list(received):
        person.receive(response)
        person.checkpoint(bench, setup)


def _answers(
    runtime: Runtime, setup: ChatSetup, seed: int, micro: MicroLoRA | None
) -> list[GenerationResponse]:
    """Return the model's replies to the unseen questions, in one batch, with the backend's base LoRA.

    micro: None for no adapter
    """
    requests = [
        request_of(runtime, prompt, setup, seed_for(seed, 3, i)) for i, prompt in enumerate(setup.heldout)
    ]
    found = {r.request_id: r for r in generate_many(runtime.engine, requests, lambda _: micro)}
    return [found[request.request_id] for request in requests]


def _mean_words(replies: Sequence[GenerationResponse]) -> float:
    return round(float(np.mean([len(words_of(reply.text)) for reply in replies])), 1)


def _count_faults(
    replies: Sequence[GenerationResponse], untouched: Sequence[GenerationResponse], tokenizer: Tokenizer
) -> dict[str, tuple[int, int]]:
    new, old = (
        [(list(reply.token_ids), reply.finish_reason == "stop") for reply in of]
        for of in (replies, untouched)
    )
    before, after = Faults.of(old, old, tokenizer), Faults.of(new, old, tokenizer)
    return {name: (getattr(before, name), getattr(after, name)) for name in FAULTS}


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
    mean number of words, the mean number of words for each seed, the KL and the perplexity of the worst seed,
    and the numbers of replies with faults."""
    lines = ["rater  presses  words          change  per seed"]
    for rater, presses in dict.fromkeys((r.rater, r.presses) for r in results):
        of = [r for r in results if (r.rater, r.presses) == (rater, presses)]
        now, base = (float(np.mean([getattr(r, name) for r in of])) for name in ("words", "words_base"))
        each = "  ".join(
            f"{r.words_base:.0f}->{r.words:.0f} ({r.change:+.0%}, {r.pressed}/{r.read})" for r in of
        )
        faults = ", ".join(
            f"{name} {sum(r.faults[name][0] for r in of)}->{sum(r.faults[name][1] for r in of)}"
            for name in of[0].faults
        )
        lines.append(
            f"{rater:<5}  {presses:>7}  {base:5.0f} -> {now:4.0f}  {now / base - 1:+6.0%}  {each}"
            f"  KL {max(r.kl for r in of):.3f}  perplexity {max(r.ppl_change for r in of):+.1%}  {faults}"
        )
    return "\n".join(
        [
            *lines,
            "per seed: words before -> after (change, thumbs pressed / replies read)",
            "at the end: replies with each fault, before -> after; endless: no end within the length limit",
        ]
    )
