"""This module runs trials of drawn users (simulated users with random tastes). Each user reads and rates
replies. Then the model, which has learned from the ratings, answers unseen questions.

Several users share a batch (readers.py). At each checkpoint (a number of ratings), the model writes `best_of`
replies to each unseen question with the user's weights. An arm is a way to learn or to pick replies. The
first reply to a question is the reply of the arm "instant", "full" or "style". The arm "+best-of-N" uses the
reply that the taste model picks of all N replies. The arm "original+best-of-N" uses the taste model's pick of
N replies of the untouched model. The reply of each arm is compared with the untouched model's reply for the
same seed. While a user rates, the model writes only one reply to each question.
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
from ruvmlx.sona import unshown
from ruvmlx.sona.judge import CandidateReply, TasteJudge

from .as_chat import PATIENCE, ChatSetup, request_of
from .drawn_users import DrawnStars, DrawnUser
from .readers import learner_of, replies_to
from .statistics import judged_wins
from .trial import Arm, Bench, seed_for
from .untouched_replies import JudgedReply

REACH_BEST_OF = 8  # the number of the untouched model's replies to an unseen question in the measure of reach
SCALE_REPLIES = 4  # replies of the untouched model to each rated question; they set the scale of the stars
GROUP = 16  # the maximum number of users in one batch
_FIRST, _RATED, _SCALE, _UNSHOWN = 3, 0, 5, 6  # values of the parameter `purpose` of `seed_for`

Requests = dict[str, list[GenerationRequest]]  # question -> requests for replies to the question
Answers = dict[str, list[JudgedReply]]  # question -> replies to the question


@dataclass(frozen=True)
class DrawnSetup:
    """The settings of the trials.

    chat: the questions, the settings of replies, and the numbers of ratings at the checkpoints (`presses`)
    learn: "instant" (each rating updates weights), "full" or "style" (the background or the style loop
    updates weights, too)
    best_of: the number of replies to each unseen question, at most REACH_BEST_OF
    """

    chat: ChatSetup
    learn: str = "instant"
    best_of: int = 4

    @property
    def group(self) -> int:
        """The maximum number of users in one batch. With a slow loop, this number is 1, because each user
        then has a base LoRA, and the backend holds one base LoRA at a time."""
        return GROUP if self.learn == "instant" else 1

    def untouched_requests(self, runtime: Runtime, seed: int) -> tuple[Requests, Requests, Requests]:
        """Return the requests of FrozenReplies: to unseen questions, to rated questions, and for unshown
        replies."""
        unseen = self.unseen(runtime, seed, REACH_BEST_OF)
        rated = self._requests(runtime, self.chat.prompts, seed, _SCALE, SCALE_REPLIES)
        return unseen, rated, self._requests(runtime, self.chat.prompts, 0, _UNSHOWN, unshown.REPLIES)

    def unseen(self, runtime: Runtime, seed: int, count: int) -> Requests:
        """Return `count` requests for replies to each unseen question."""
        return self._requests(runtime, self.chat.heldout, seed, _FIRST, count)

    def _requests(
        self, runtime: Runtime, questions: Sequence[str], seed: int, purpose: int, count: int
    ) -> Requests:
        found = {}
        for i, question in enumerate(questions):
            first = request_of(runtime, question, self.chat, seed_for(seed, purpose, i))
            found[question] = requests_for(first, count)
        return found


@dataclass(frozen=True)
class FrozenReplies:
    """The untouched model's replies.

    unseen: REACH_BEST_OF replies to each unseen question; learned replies are compared with the first reply
    rated: SCALE_REPLIES replies to each question whose replies the users rate
    unshown: the measures of unshown replies to the rated questions (sona/unshown.py), which users do not see.
        In a chat, the model writes unshown replies in idle time.
    """

    unseen: Answers
    rated: Answers
    unshown: dict[str, np.ndarray]

    @property
    def texts(self) -> dict[str, list[str]]:
        return {q: [r.text for r in of] for q, of in (self.rated | self.unseen).items()}

    @classmethod
    def sample(cls, bench: Bench, setup: DrawnSetup, seed: int) -> "FrozenReplies":
        with bench.runtime(Arm(learn="off")) as runtime:
            unseen, rated, others = setup.untouched_requests(runtime, seed)
            found = bench.untouched.to(runtime.engine, _requests_of(unseen, rated, others))
        measures = {
            question: unshown.measures_of([(r.text, r.finished) for r in of])
            for question, of in _answers(others, found).items()
        }
        return cls(_answers(unseen, found), _answers(rated, found), measures)


@dataclass(frozen=True)
class UntouchedPart:
    """A part of the untouched model's replies: each `count`-th reply of a seed, from the reply `first` on."""

    setup: DrawnSetup
    seed: int
    first: int
    count: int

    def write(self, bench: Bench) -> None:
        """Let the untouched model write the part's missing replies into the file of `bench.untouched`."""
        with bench.runtime(Arm(learn="off")) as runtime:
            requests = _requests_of(*self.setup.untouched_requests(runtime, self.seed))
            bench.untouched.to(runtime.engine, requests[self.first :: self.count])


def _requests_of(*parts: Requests) -> list[GenerationRequest]:
    return [request for part in parts for of in part.values() for request in of]


def _answers(requests: Requests, found: dict[str, JudgedReply]) -> Answers:
    return {question: [found[r.request_id] for r in of] for question, of in requests.items()}


def _write_replies(
    runtime: Runtime,
    requests: Sequence[GenerationRequest],
    adapter: Callable[[GenerationRequest], HeadAdapter | None],
) -> dict[str, JudgedReply]:
    """Let the model write a reply to each request. Return {request id: reply}. adapter: a function that
    returns the adapter with which a request's reply is written."""
    return {r.request_id: JudgedReply.of(r) for r in generate_many(runtime.engine, requests, adapter)}


@dataclass
class TrialSeconds:
    """The seconds of one user's trial. For work in a batch, each user has an equal share of the seconds.

    ratings: the seconds in which the model writes the rated replies and learns from the ratings
    training: the seconds of the slow loop (the background or the style loop)
    replies: the seconds in which the model writes one reply to every unseen question at every checkpoint
    best_of: the seconds of the other replies to the unseen questions, and of the taste model's choice
    """

    ratings: float = 0.0
    training: float = 0.0
    replies: float = 0.0
    best_of: float = 0.0


@dataclass
class _Drawn:
    """A drawn user with one seed and a separate store.

    stars: the function that gives the user's stars
    unshown: {question: measures of unshown replies to the question}
    read: the number of replies that the user has read
    given: the number of ratings that the user has given
    tested: the results of each checkpoint
    """

    user: DrawnUser
    seed: int
    stars: DrawnStars
    unshown: dict[str, np.ndarray]
    runtime: Runtime
    read: int = 0
    given: int = 0
    tested: list[dict[str, Any]] = field(default_factory=list)
    seconds: TrialSeconds = field(default_factory=TrialSeconds)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng([self.seed, 6, self.user.number])

    def request(self, chat: ChatSetup) -> GenerationRequest:
        """Return a request for a reply to the user's next question. The order of the questions and the random
        seeds differ between users."""
        number = self.user.number
        order = np.random.default_rng([self.seed, 4, number]).permutation(len(chat.prompts))
        prompt = chat.prompts[order[self.read % len(order)]]
        return request_of(self.runtime, prompt, chat, seed_for(self.seed, _RATED, 1000 * number + self.read))

    def receive(self, question: str, response: GenerationResponse) -> None:
        """Count a reply as read, and give the user's rating if the user rates this reply."""
        self.read += 1
        rating = self.user.rating(self.worth(question, JudgedReply.of(response)), self._rng)
        if rating is not None:
            self.runtime.learning.settle()
            self.runtime.rate(response.request_id, rating)
            self.given += 1
        # In a chat, `UserTaste.compare` adds the measures of unshown replies in idle time.
        learner_of(self).taste.add_unshown({response.request_id: self.unshown[question]})

    def worth(self, question: str, reply: JudgedReply) -> int:
        return self.stars(question, reply.text, reply.finished)

    def is_due(self, chat: ChatSetup) -> bool:
        """Return True if the next checkpoint is due: the user has given as many ratings as the checkpoint
        needs, or has read PATIENCE times as many replies."""
        ratings = chat.presses[len(self.tested)]
        return self.given >= ratings or self.read >= PATIENCE * ratings

    def train(self) -> None:
        """Run the slow loop (the background or the style loop) if this loop is due."""
        if self.runtime.learning.is_due():
            started = time.perf_counter()
            self.runtime.learning.consolidate()
            self.seconds.training += time.perf_counter() - started


def run(
    bench: Bench, setup: DrawnSetup, users: Sequence[DrawnUser], seed: int,
    frozen: FrozenReplies, scale: FrozenReplies, log: Callable[[str], None],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Run the trials, and yield the results of each trial when it ends.

    frozen: the untouched model's replies for this seed, with which learned replies are compared
    scale: the untouched model's replies from which the scale of the stars is computed; all seeds share them
    """
    for at in range(0, len(users), setup.group):
        with ExitStack() as stack:
            people = [
                _Drawn(
                    user,
                    seed,
                    DrawnStars(user, scale.texts),
                    scale.unshown,
                    stack.enter_context(bench.runtime(Arm(setup.learn))),
                )
                for user in users[at : at + setup.group]
            ]
            while busy := [p for p in people if len(p.tested) < len(setup.chat.presses)]:
                _read_until_due(bench, setup, busy)
                _test(bench, setup, busy, frozen)
                log(", ".join(f"user {p.user.number}: {p.given} ratings" for p in busy))
                yield from (_facts(setup, p) for p in busy if len(p.tested) == len(setup.chat.presses))


def _read_until_due(bench: Bench, setup: DrawnSetup, people: Sequence[_Drawn]) -> None:
    """Let each user read replies and rate them until the user's next checkpoint is due. With a slow loop, the
    loop can run after each reply, so the batch ends there."""
    is_instant = setup.learn == "instant"
    while reading := [p for p in people if not p.is_due(setup.chat)]:
        started = time.perf_counter()
        for person, question, response in replies_to(
            reading,
            lambda p: p.request(setup.chat),
            wants_more=lambda p: is_instant and not p.is_due(setup.chat),
            states=bench.question_states,
        ):
            person.receive(question, response)
        share = (time.perf_counter() - started) / len(reading)
        for person in reading:
            person.seconds.ratings += share
        if not is_instant:
            people[0].train()


def _test(bench: Bench, setup: DrawnSetup, people: Sequence[_Drawn], frozen: FrozenReplies) -> None:
    """Let the model answer the unseen questions with the weights of each of these users, and add the results
    of the checkpoint to `tested`."""
    wanted, micro = list[Requests](), dict[str, HeadAdapter]()
    for person in people:
        learner_of(person).sync()
        wanted.append(setup.unseen(person.runtime, person.seed, setup.best_of))
        micro |= {r.request_id: learner_of(person).micro for of in wanted[-1].values() for r in of}
    found = dict[str, JudgedReply]()
    for which, first in ((slice(0, 1), True), (slice(1, None), False)):
        started = time.perf_counter()
        requests = [r for requests in wanted for of in requests.values() for r in of[which]]
        found |= _write_replies(people[0].runtime, requests, lambda request: micro[request.request_id])
        share = (time.perf_counter() - started) / len(people)
        for person in people:
            person.seconds.replies += share if first else 0
            person.seconds.best_of += 0 if first else share
    for person, requests_ in zip(people, wanted, strict=True):
        person.tested.append(_checkpoint_facts(bench, setup, person, _answers(requests_, found), frozen))


def _checkpoint_facts(
    bench: Bench, setup: DrawnSetup, person: _Drawn, answers: Answers, frozen: FrozenReplies
) -> dict[str, Any]:
    kl, ppl_change = bench.neutral.compare(learner_of(person).micro)
    stars = {
        "original": [person.worth(q, of[0]) for q, of in frozen.unseen.items()],
        setup.learn: [person.worth(q, of[0]) for q, of in answers.items()],
    }
    if setup.best_of > 1:
        started = time.perf_counter()
        stars[f"{setup.learn}+best-of-{setup.best_of}"] = _picked_stars(person, setup.best_of, answers)
        person.seconds.best_of += time.perf_counter() - started
        if setup.learn == "instant":
            stars[f"original+best-of-{setup.best_of}"] = _picked_stars(person, setup.best_of, frozen.unseen)
    return {
        "ratings": setup.chat.presses[len(person.tested)], "given": person.given, "read": person.read,
        "kl": round(kl, 5), "ppl_change": round(ppl_change, 5), "stars": stars,
    }  # fmt: skip


def _picked_stars(person: _Drawn, count: int, answers: Answers) -> list[int]:
    """Return the stars of the replies that the taste model picks. For each question, the taste model picks
    one of the first `count` replies."""
    judge = TasteJudge(learner_of(person).taste.model)
    picked = []
    for question, of in answers.items():
        among = [CandidateReply(question, r.text, r.finish_reason) for r in of[:count]]
        picked.append(person.worth(question, of[int(np.argmax(judge.score(among)))]))
    return picked


def reach(stars: DrawnStars, frozen: FrozenReplies) -> float:
    """Return the reach of a user: how often the best of the untouched model's replies to a question beats
    another of these replies. It is the highest share of wins that choosing alone could give. Each best reply
    is compared with all replies to its question, itself included; a tie is half a win."""
    worth = [[stars(q, r.text, r.finished) for r in of] for q, of in frozen.unseen.items()]
    return judged_wins(np.array(worth), np.array(worth))


def _facts(setup: DrawnSetup, person: _Drawn) -> dict[str, Any]:
    user = person.user
    return {
        "user": user.number, "family": user.family, "rater": user.rater, "kind": user.kind,
        "taste": user.words, "learn": setup.learn, "best_of": setup.best_of, "seed": person.seed,
        "checkpoints": person.tested,
        "seconds": {name: round(value, 2) for name, value in vars(person.seconds).items()},
    }  # fmt: skip
