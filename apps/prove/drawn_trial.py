"""Trials of drawn users: they read and rate replies, then unseen questions are answered again.

Several users take turns in one batch (readers.py). Each unseen question gets `best_of` replies by the weights
of the moment: the first one is the reply of the arm "instant" or "full"; of all, the taste model picks that of
"+best-of-N". "original+best-of-N" is its choice among the untouched model's replies. All replies are compared
with the untouched model's reply for the same seed. Best of n plays no part while the user rates.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ruvmlx.backends.base import HeadAdapter
from ruvmlx.engine import GenerationRequest, GenerationResponse
from ruvmlx.engine.batch import generate_many
from ruvmlx.engine.best_of import requests_for
from ruvmlx.runtime import Runtime
from ruvmlx.sona.judge import CandidateReply, TasteJudge

from .as_chat import PATIENCE, ChatSetup, asked
from .drawn_users import DrawnStars, DrawnUser
from .readers import learner_of, next_replies
from .statistics import judged_wins
from .trial import Arm, Bench, seed_for

REACH_BEST_OF = 8  # untouched replies to each unseen question, among which a perfect judge picks
SCALE_REPLIES = 4  # untouched replies to each question that is rated on
GROUP = 8  # users in one batch
_FIRST, _RATED, _SCALE = 3, 0, 5  # purposes of seeds, see seed_for

Answers = dict[str, list[GenerationResponse]]  # by question


@dataclass(frozen=True)
class DrawnSetup:
    """chat: the questions, how replies are written, and after how many ratings (`presses`) they are tested.
    learn: "instant" or "full". best_of: replies to each unseen question, at most REACH_BEST_OF."""

    chat: ChatSetup
    learn: str = "instant"
    best_of: int = 4

    @property
    def group(self) -> int:
        """Users in one batch. With training each has a base LoRA, and the backend holds one at a time."""
        return 1 if self.learn == "full" else GROUP

    def unseen(self, runtime: Runtime, seed: int, count: int) -> Iterator[tuple[str, list[GenerationRequest]]]:
        """(question, `count` requests) of each unseen question."""
        for i, question in enumerate(self.chat.heldout):
            first = asked(runtime, question, self.chat, seed_for(seed, _FIRST, i))
            yield question, requests_for(first, count)


@dataclass(frozen=True)
class FrozenReplies:
    """The untouched model's replies. unseen: REACH_BEST_OF to each unseen question; the first is what others
    are compared with. rated: SCALE_REPLIES to each question that is rated on. seconds: for one of them."""

    unseen: Answers
    rated: Answers
    seconds: float

    @property
    def texts(self) -> dict[str, list[str]]:
        return {q: [r.text for r in of] for q, of in (self.rated | self.unseen).items()}

    @classmethod
    def sample(cls, bench: Bench, setup: DrawnSetup, seed: int) -> "FrozenReplies":
        with bench.runtime(Arm()) as runtime:
            unseen = dict(setup.unseen(runtime, seed, REACH_BEST_OF))
            firsts = [asked(runtime, q, setup.chat, seed_for(seed, _SCALE, i))
                      for i, q in enumerate(setup.chat.prompts)]  # fmt: skip
            rated = {q: requests_for(r, SCALE_REPLIES) for q, r in zip(setup.chat.prompts, firsts, strict=True)}
            started, every = time.perf_counter(), [r for of in (unseen | rated).values() for r in of]
            found = _written(runtime, every, lambda request: None)
            seconds = (time.perf_counter() - started) / len(every)
            return cls(
                {q: [found[r.request_id] for r in of] for q, of in unseen.items()},
                {q: [found[r.request_id] for r in of] for q, of in rated.items()},
                seconds,
            )


def _written(
    runtime: Runtime,
    requests: Sequence[GenerationRequest],
    adapter: Callable[[GenerationRequest], HeadAdapter | None],
) -> dict[str, GenerationResponse]:
    """Responses by request id."""
    return {r.request_id: r for r in generate_many(runtime.engine, requests, adapter)}


@dataclass
class Seconds:
    """What one user's trial took; of what was done in a batch, this user's share. ratings: replies that were
    read, and what each rating did. training: the background loop. replies: one reply to every unseen question
    at every checkpoint. best_of: the other replies to them, and the taste model."""

    ratings: float = 0.0
    training: float = 0.0
    replies: float = 0.0
    best_of: float = 0.0


@dataclass
class _Drawn:
    """One drawn user and seed, with a store of their own. tested: facts of each checkpoint."""

    user: DrawnUser
    seed: int
    stars: DrawnStars
    runtime: Runtime
    read: int = 0
    given: int = 0
    tested: list[dict[str, Any]] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng([self.seed, 6, self.user.number])

    def request(self, chat: ChatSetup) -> GenerationRequest:
        """A request for the next question. Order and replies differ between users."""
        number = self.user.number
        order = np.random.default_rng([self.seed, 4, number]).permutation(len(chat.prompts))
        prompt = chat.prompts[order[self.read % len(order)]]
        return asked(self.runtime, prompt, chat, seed_for(self.seed, _RATED, 1000 * number + self.read))

    def receive(self, question: str, response: GenerationResponse) -> None:
        """Read a reply, and rate it or not."""
        self.read += 1
        rating = self.user.rating(self.worth(question, response), self._rng)
        if rating is not None:
            self.runtime.settle()
            self.runtime.rate(response.request_id, rating)
            self.given += 1

    def worth(self, question: str, response: GenerationResponse) -> int:
        return self.stars(question, response.text, response.finish_reason == "stop")

    def due(self, chat: ChatSetup) -> bool:
        """Is the next checkpoint reached, or has this user found too little to rate until it?"""
        ratings = chat.presses[len(self.tested)]
        return self.given >= ratings or self.read >= PATIENCE * ratings

    def train(self) -> None:
        """The background loop, when the chat would begin it."""
        if self.runtime.learning.due():
            started = time.perf_counter()
            self.runtime.consolidate()
            self.seconds.training += time.perf_counter() - started


def run(
    bench: Bench, setup: DrawnSetup, users: Sequence[DrawnUser], seed: int,
    frozen: FrozenReplies, scale: FrozenReplies, log: Callable[[str], None],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Facts of each user's trial. frozen: the untouched model's replies for this seed; scale: those that stars
    are scaled by, the same for all seeds."""
    for at in range(0, len(users), setup.group):
        with ExitStack() as stack:
            people = [
                _Drawn(user, seed, DrawnStars(user, scale.texts), stack.enter_context(bench.runtime(Arm())))
                for user in users[at : at + setup.group]
            ]
            while busy := [p for p in people if len(p.tested) < len(setup.chat.presses)]:
                _round(setup, busy)
                if due := [p for p in busy if p.due(setup.chat)]:
                    _test(bench, setup, due, frozen)
                    log(f"{due[0].given} ratings by {len(due)} users, seed {seed}")
        for person in people:
            yield _facts(setup, person)


def _round(setup: DrawnSetup, people: Sequence[_Drawn]) -> None:
    """Each reads one reply and rates it."""
    started = time.perf_counter()
    for person, question, response in next_replies(people, lambda p: p.request(setup.chat)):
        person.receive(question, response)
    for person in people:
        person.seconds.ratings += (time.perf_counter() - started) / len(people)
    if setup.learn == "full":
        people[0].train()


def _test(bench: Bench, setup: DrawnSetup, people: Sequence[_Drawn], frozen: FrozenReplies) -> None:
    """Answer the unseen questions by the weights of these people."""
    for person in people:
        learner_of(person).sync()
    micro = {}
    asked_of: list[dict[str, list[GenerationRequest]]] = []
    for person in people:
        asked_of.append(dict(setup.unseen(person.runtime, person.seed, setup.best_of)))
        micro |= {r.request_id: learner_of(person).micro for of in asked_of[-1].values() for r in of}
    started = time.perf_counter()
    found, runtime = {}, people[0].runtime
    for part, name in ((slice(0, 1), "replies"), (slice(1, None), "best_of")):
        requests = [r for every in asked_of for of in every.values() for r in of[part]]
        found |= _written(runtime, requests, lambda request: micro[request.request_id])
        for person in people:
            spent = (time.perf_counter() - started) / len(people)
            setattr(person.seconds, name, getattr(person.seconds, name) + spent)
        started = time.perf_counter()
    for person, every in zip(people, asked_of, strict=True):
        answers = {q: [found[r.request_id] for r in of] for q, of in every.items()}
        person.tested.append(_tested(bench, setup, person, answers, frozen))


def _tested(
    bench: Bench, setup: DrawnSetup, person: _Drawn, answers: Answers, frozen: FrozenReplies
) -> dict[str, Any]:
    kl, ppl_change = bench.neutral.compare(learner_of(person).micro)
    stars = {
        "original": [person.worth(q, of[0]) for q, of in frozen.unseen.items()],
        setup.learn: [person.worth(q, of[0]) for q, of in answers.items()],
    }
    if setup.best_of > 1:
        started = time.perf_counter()
        stars[f"{setup.learn}+best-of-{setup.best_of}"] = _picked(person, setup.best_of, answers)
        person.seconds.best_of += time.perf_counter() - started
        if setup.learn == "instant":
            stars[f"original+best-of-{setup.best_of}"] = _picked(person, setup.best_of, frozen.unseen)
    return {
        "ratings": setup.chat.presses[len(person.tested)], "given": person.given, "read": person.read,
        "kl": round(kl, 5), "ppl_change": round(ppl_change, 5), "stars": stars,
    }  # fmt: skip


def _picked(person: _Drawn, count: int, answers: Answers) -> list[int]:
    """Stars of the replies that the taste model picks, each among the first `count` to a question."""
    judge = TasteJudge(learner_of(person).taste.model)
    picked = []
    for question, of in answers.items():
        among = [CandidateReply(question, r.text, r.finish_reason) for r in of[:count]]
        picked.append(person.worth(question, of[int(np.argmax(judge.score(among)))]))
    return picked


def reach(stars: DrawnStars, frozen: FrozenReplies) -> float:
    """How often a perfect judge's pick among the untouched model's replies beats a random one of them."""
    worth = [[stars(q, r.text, r.finish_reason == "stop") for r in of] for q, of in frozen.unseen.items()]
    return judged_wins(np.array(worth), np.array(worth))


def _facts(setup: DrawnSetup, person: _Drawn) -> dict[str, Any]:
    user = person.user
    return {
        "user": user.number, "family": user.family, "rater": user.rater, "kind": user.kind, "taste": user.words,
        "learn": setup.learn, "best_of": setup.best_of, "seed": person.seed,
        "checkpoints": person.tested,
        "seconds": {name: round(value, 2) for name, value in vars(person.seconds).items()},
    }  # fmt: skip
