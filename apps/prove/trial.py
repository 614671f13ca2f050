"""This module runs a trial: one experiment with one arm (a way to learn) and one random seed. A simulated
user chats and rates replies. Then the learned model answers the held-out prompts, which the user never rated.

A trial uses a temporary store. The trial neither reads nor writes the adapter of the real user.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ruvmlx.engine import GenerationRequest
from ruvmlx.engine.best_of import requests_for
from ruvmlx.models.config.model import Message
from ruvmlx.platform.files import replacing
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.sona import faults, unshown
from ruvmlx.sona.judge import CandidateReply, TasteJudge
from ruvmlx.sona.measure_directions import FINISHED
from ruvmlx.store import Store

from .retention import NeutralText
from .untouched_replies import JudgedReply, UntouchedReplies
from .users import Scorer

CONSOLIDATE_EVERY = 32  # the number of ratings from one training to the next, in the arm "full"
REACH_PROMPTS = REACH_SAMPLES = 8  # the numbers of prompts and of samples of each prompt in `within_reach`


@dataclass(frozen=True)
class Arm:
    """An arm is a way to learn: the settings that differ between the trials that are compared.

    learn: "off"; "instant": each rating updates weights; "full" or "style": a slow loop updates weights, too
    examples: the number of liked replies that the prompt contains
    shuffle: True if each reply gets the stars of a random reply among the replies so far
    flip: the probability that the user's stars are reversed (6 - stars)
    reverse_at: the number of ratings after which the user wants the opposite; None for never
    system: a system prompt that states the taste; None for no system prompt
    """

    learn: str = "instant"
    examples: int = 0
    shuffle: bool = False
    flip: float = 0.0
    reverse_at: int | None = None
    system: str | None = None

    @property
    def name(self) -> str:
        parts = [self.learn] if self.learn != "off" or not (self.examples or self.system) else []
        parts += ["examples"] if self.examples else []
        parts += ["oracle prompt"] if self.system else []
        parts += ["shuffled"] if self.shuffle else []
        parts += [f"{self.flip:.0%} flipped"] if self.flip else []
        parts += [f"reversed at {self.reverse_at}"] if self.reverse_at is not None else []
        return " + ".join(parts)


@dataclass(frozen=True)
class TrialSetup:
    """The settings that all arms of a comparison share.

    scorer: the simulated user: the function that gives stars to a reply
    prompts, heldout: the prompts that the user rates, and the prompts that only test the learned model
    checkpoints: the numbers of ratings after which the learned model is measured
    best_of: the number of replies to a held-out prompt of which the taste model picks one; 1 for no choice
    """

    scorer: Scorer
    prompts: Sequence[str]
    heldout: Sequence[str]
    ratings: int
    checkpoints: Sequence[int]
    max_tokens: int = 96
    temperature: float | None = 0.7  # None: the temperature of the chat app
    best_of: int = 1

    def score(self, reply: "TrialReply", reversed_: bool = False) -> int:
        stars = self.scorer(reply.prompt, reply.text, reply.finished)
        return 6 - stars if reversed_ else stars


@dataclass(frozen=True)
class TrialReply:
    id: str
    prompt: str
    text: str
    finished: bool
    token_ids: Sequence[int]


@dataclass(frozen=True)
class Checkpoint:
    """The results of a trial after a certain number of ratings.

    scores, base_scores: [P], the stars of the learned model's and of the frozen (original) model's replies to
        P held-out prompts
    kl, ppl_change: the KL from the frozen model and the change of perplexity on neutral text (retention.py)
    mean_tokens, mean_tokens_base: the mean numbers of tokens of both models' replies
    best_scores: [P], the stars of the replies that the taste model picks; None if the taste model picks none
    """

    ratings: int
    scores: np.ndarray
    base_scores: np.ndarray
    kl: float
    ppl_change: float
    mean_tokens: float
    mean_tokens_base: float
    variety: float  # the distinct-2 of the learned model's replies, divided by the frozen model's distinct-2
    sample: str
    best_scores: np.ndarray | None = None


class Bench:
    """The model, its measurements and the frozen (original) model's replies, which all trials share."""

    def __init__(
        self, model, backend, chosen: Mapping[str, Any] | None = None,
        kept_replies: Path | None = None, measured: tuple[bytes | None, bytes] | None = None,
    ):  # fmt: skip
        """chosen: settings of the runtimes; None: their defaults.
        kept_replies: the file of the frozen model's replies; None: the model writes them in each run.
        measured: the model's measurements (KL probe, whitening); None: the first runtime makes them. The KL
        probe is None if the package has it."""
        self.model, self.backend, self.chosen = model, backend, chosen or {}
        self.neutral = NeutralText(backend, model.tokenizer)
        self.untouched = UntouchedReplies(backend, f"{model.fingerprint} {model.content()}", kept_replies)
        self.question_states: dict[str, np.ndarray] = {}  # the pooled hidden state [D] of each question
        self._base: dict[tuple, list[TrialReply]] = {}
        self._unshown: dict[tuple, dict[str, np.ndarray]] = {}
        self.measured = measured
        self._directions_file = kept_replies and kept_replies.with_name(
            f"prove-directions-{model.content()[:16]}.npz"
        )
        self._directions = b""

    @contextmanager
    def runtime(self, arm: "Arm | None" = None) -> Iterator[Runtime]:
        """Yield a runtime with a temporary store, whose adapter has learned nothing yet."""
        examples, learn = (arm.examples, arm.learn != "off") if arm else (0, True)
        with tempfile.TemporaryDirectory(prefix="ruvmlx-prove-") as folder:
            store, model = Store(Path(folder) / "prove.db"), self.model.fingerprint
            if self.measured:
                probe, whitening = self.measured
                if probe:
                    store.model_data.put_reference_text(model, probe)
                store.model_data.put_whitening(model, whitening)
            if self._directions:
                store.checkpoints.put_measurement(model, FINISHED, self._directions)
            slow_loop = "style" if arm and arm.learn == "style" else "training"
            settings = Settings(
                adapter="prove", examples=examples, slow_loop=slow_loop, kv_disk=None, **self.chosen
            )  # fmt: skip
            with Runtime(store, self.model, self.backend, settings, learn) as runtime:
                if learn:
                    self._learn_directions(runtime)
                yield runtime
                if not self.measured and (mean := store.model_data.whitening(model)):
                    self.measured = store.model_data.reference_text(model), mean

    def measure(self) -> None:
        """Measure the model, unless it is measured. All later runtimes use these measurements."""
        if not self.measured:
            with self.runtime() as runtime:
                assert runtime.learner is not None
                runtime.learner.sync()
                runtime.learner.rating_index.measure()

    def _learn_directions(self, runtime: Runtime) -> None:
        """Compute the directions of the taste's measures (sona/measure_directions.py) once, or read them from
        a file. In a chat, the runtime computes the directions in idle time."""
        learner, file = runtime.learner, self._directions_file
        assert learner is not None
        learner.active.measure()
        if self._directions or learner.directions.are_shipped:
            return
        if file is not None and file.exists():
            self._directions = file.read_bytes()
            runtime.store.checkpoints.put_measurement(self.model.fingerprint, FINISHED, self._directions)
            return
        learner.directions.complete(self.model, self.backend, learner.probe, lambda: None)
        self._directions = runtime.store.checkpoints.measurement(self.model.fingerprint, FINISHED) or b""
        if file is not None:
            with replacing(file) as out:
                out.write(self._directions)

    def base_replies(self, setting: TrialSetup, seed: int) -> list[TrialReply]:
        """Return the frozen model's replies to the held-out prompts."""
        key = (tuple(setting.heldout), setting.max_tokens, setting.temperature, seed)
        if key not in self._base:
            with self.runtime() as runtime:
                requests = _heldout_requests(runtime, setting, Arm("off"), seed)
                found = self.untouched.to(runtime.engine, requests)
                self._base[key] = [
                    _reply(prompt, request.request_id, found[request.request_id])
                    for prompt, request in zip(setting.heldout, requests, strict=True)
                ]
        return self._base[key]

    def unshown_measures(self, setting: TrialSetup) -> dict[str, np.ndarray]:
        """Return {prompt: measures of unshown replies}. Unshown replies are replies to the prompt that the
        user does not see (sona/unshown.py). In a chat, the model writes unshown replies in idle time."""
        key = (tuple(setting.prompts), setting.max_tokens, setting.temperature)
        if key not in self._unshown:
            with self.runtime() as runtime:
                asked = {
                    prompt: requests_for(
                        request_for(runtime, setting, prompt, seed_for(0, 5, i)), unshown.REPLIES
                    )
                    for i, prompt in enumerate(setting.prompts)
                }
                found = self.untouched.to(runtime.engine, [r for of in asked.values() for r in of])
                self._unshown[key] = {
                    prompt: unshown.measures_of([(reply.text, reply.finished) for reply in of])
                    for prompt, of in ((p, [found[r.request_id] for r in rs]) for p, rs in asked.items())
                }
        return self._unshown[key]


def within_reach(bench: Bench, setting: TrialSetup, seed: int) -> bool:
    """Return True if a reply of the frozen model comes near the user's taste: of 8 samples of each of 8
    prompts, at least one sample earns 3 stars. If no sample earns 3 stars, ratings may not teach the taste,
    because ratings only choose among replies that the model writes."""
    asked = [p for p in setting.prompts[:REACH_PROMPTS] for _ in range(REACH_SAMPLES)]
    with bench.runtime() as runtime:
        requests = [request_for(runtime, setting, p, seed_for(seed, 2, i)) for i, p in enumerate(asked)]
        found = bench.untouched.to(runtime.engine, requests)
        pairs = zip(asked, requests, strict=True)
        return any(setting.score(_reply(p, r.request_id, found[r.request_id])) >= 3 for p, r in pairs)


def run(
    bench: Bench, setting: TrialSetup, arm: Arm, seed: int, log: Callable[[str], None]
) -> Iterator[Checkpoint]:
    """Run a trial, and yield its checkpoints in order."""
    user = _User(setting, arm, seed)
    bench.base_replies(setting, seed)  # the frozen model writes its replies before the trial learns
    with bench.runtime(arm) as runtime:
        for done in range(1, setting.ratings + 1):
            if arm.learn != "off" or arm.examples:
                _rate_reply(bench, runtime, setting, arm, user, seed, done)
            is_style_due = arm.learn == "style" and runtime.learning.is_due()
            if is_style_due or (arm.learn == "full" and done % CONSOLIDATE_EVERY == 0):
                log(_consolidate(runtime))
            if done in setting.checkpoints:
                yield _checkpoint(bench, runtime, setting, arm, seed, done)
                log(f"{arm.name}, seed {seed}: rating {done} of {setting.ratings}")


@dataclass(frozen=True)
class TrialPart:
    """The description of a trial for the process that runs the trial."""

    setting: TrialSetup
    arm: Arm
    seed: int
    log: Callable[[str], None]


def run_part(bench: Bench, part: TrialPart) -> tuple[int, list[Checkpoint]]:
    """Run one trial, and return (seed, checkpoints)."""
    return part.seed, list(run(bench, part.setting, part.arm, part.seed, part.log))


def _rate_reply(
    bench: Bench, runtime: Runtime, setting: TrialSetup, arm: Arm, user: "_User", seed: int, done: int
) -> None:
    """Let the model write one reply, and rate this reply as the user does. done: the number of this rating,
    from 1."""
    prompt = setting.prompts[(done - 1) % len(setting.prompts)]
    reply = _kept_reply(runtime, setting, prompt, seed_for(seed, 0, done), arm.system)
    runtime.rate(reply.id, str(user.stars(reply, done)))
    if arm.learn != "off":
        assert runtime.learner is not None
        runtime.learner.taste.add_unshown({reply.id: bench.unshown_measures(setting)[prompt]})


class _User:
    """A simulated user. The setup's `scorer` gives the stars. An arm (`Arm`) can make the user give the stars
    of a random reply among those so far (shuffle), give 6 - stars by chance (flip), or want the opposite
    later (reverse)."""

    def __init__(self, setting: TrialSetup, arm: Arm, seed: int):
        self._setting, self._arm = setting, arm
        self._rng = np.random.default_rng([seed, 1])
        self._earned: list[int] = []

    def stars(self, reply: TrialReply, done: int) -> int:
        stars = self._setting.score(reply, _is_reversed(self._arm, done))
        self._earned.append(stars)
        if self._arm.shuffle:
            stars = int(self._rng.choice(self._earned))
        return 6 - stars if self._rng.random() < self._arm.flip else stars


def _is_reversed(arm: Arm, done: int) -> bool:
    return arm.reverse_at is not None and done > arm.reverse_at


def _checkpoint(
    bench: Bench, runtime: Runtime, setting: TrialSetup, arm: Arm, seed: int, done: int
) -> Checkpoint:
    base, turned = bench.base_replies(setting, seed), _is_reversed(arm, done)
    assert runtime.learner is not None
    runtime.learner.sync()
    every = heldout_replies(runtime, setting, arm, seed, setting.best_of)
    new = _first(every)
    picked = _picked_replies(runtime, every) if setting.best_of > 1 else None
    kl, ppl_change = bench.neutral.compare(runtime.learner.micro)
    return Checkpoint(
        ratings=done,
        scores=np.array([setting.score(r, turned) for r in new]),
        base_scores=np.array([setting.score(r, turned) for r in base]),
        kl=kl,
        ppl_change=ppl_change,
        mean_tokens=float(np.mean([len(r.token_ids) for r in new])),
        mean_tokens_base=float(np.mean([len(r.token_ids) for r in base])),
        variety=faults.variety([r.token_ids for r in new], [r.token_ids for r in base]),
        sample=new[0].text,
        best_scores=np.array([setting.score(r, turned) for r in picked]) if picked else None,
    )


def heldout_replies(
    runtime: Runtime, setting: TrialSetup, arm: Arm, seed: int, count: int = 1
) -> list[list[TrialReply]]:
    """Return `count` replies of the learned model to each held-out prompt. The replies are neither stored nor
    rated. The first reply to a prompt does not depend on `count`."""
    asked = [requests_for(first, count) for first in _heldout_requests(runtime, setting, arm, seed)]
    responses = {r.request_id: r for r in runtime.writer.answers([r for of in asked for r in of])}
    return [
        [_reply(prompt, r.request_id, JudgedReply.of(responses[r.request_id])) for r in of]
        for prompt, of in zip(setting.heldout, asked, strict=True)
    ]


def _heldout_requests(runtime: Runtime, setting: TrialSetup, arm: Arm, seed: int) -> list[GenerationRequest]:
    return [
        request_for(runtime, setting, prompt, seed_for(seed, 3, i), arm.system)
        for i, prompt in enumerate(setting.heldout)
    ]


def _first(replies: list[list[TrialReply]]) -> list[TrialReply]:
    return [of[0] for of in replies]


def _picked_replies(runtime: Runtime, replies: list[list[TrialReply]]) -> list[TrialReply]:
    """Return, for each prompt, the reply for which the taste model predicts the most stars."""
    assert runtime.learner is not None
    judge, picked = TasteJudge(runtime.learner.taste.model), []
    for of in replies:
        among = [CandidateReply(r.prompt, r.text, "stop" if r.finished else "length") for r in of]
        picked.append(of[int(np.argmax(judge.score(among)))])
    return picked


def _consolidate(runtime: Runtime) -> str:
    report = runtime.learning.consolidate()
    return f"consolidated: {report['reason']} ({report.get('seconds', 0):.0f} s)"


def _kept_reply(
    runtime: Runtime, setting: TrialSetup, prompt: str, seed: int, system: str | None
) -> TrialReply:
    """Let the model write a reply, save the reply in the store, so that it can be rated, and return it."""
    for chunk in runtime.writer.generate(request_for(runtime, setting, prompt, seed, system)):
        response = chunk.response
    runtime.learning.settle()
    assert response is not None
    return _reply(prompt, response.request_id, JudgedReply.of(response))


def request_for(
    runtime: Runtime, setting: TrialSetup, prompt: str, seed: int, system: str | None = None
) -> GenerationRequest:
    head = [Message("system", system)] if system else []
    return GenerationRequest(
        messages=[*head, Message("user", prompt)],
        max_new_tokens=setting.max_tokens,
        sampling=runtime.writer.sampling(temperature=setting.temperature, seed=seed),
    )


def _reply(prompt: str, id_: str, reply: JudgedReply) -> TrialReply:
    return TrialReply(id_, prompt, reply.text, reply.finished, reply.token_ids)


def seed_for(seed: int, purpose: int, i: int) -> int:
    """Return the random seed of request `i` for a purpose (0: rated replies, 3: held-out prompts ...) in a
    trial with the seed `seed`. For i below 100,003, two purposes never have the same random seed. All arms
    use the same random seeds, so that their replies can be compared in pairs."""
    return (seed * 8 + purpose) * 100_003 + i
