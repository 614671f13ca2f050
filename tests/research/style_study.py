"""What the style basis (ruvmlx/sona/optional/style_basis.py) gives drawn users, before any loop uses it.

    python -m tests.research.style_study BANK build      # sample and differentiate; may be stopped
    python -m tests.research.style_study BANK measures   # what the basis moves, on questions left out
    python -m tests.research.style_study BANK users --users 8 --ratings 30 --parts 0.08+0,0.04+0.04
    python -m tests.research.style_study BANK ship       # write the starter's basis into the package

`users`: each user rates replies of the bank, which are the untouched model's. The taste model's weights are
the coefficients of the basis. Unseen questions are then answered with the changed weights. `--taste true`:
the user's stars of all replies of the bank are known. `--sure`: KL falls with the doubt, as in the loop.
`--parts 0.08+0,0.04+0.04`: for each pair, the KL of the taste's push on the output head (taste_push.py) and
the KL of the basis. The push alone is what ratings change at once; both together are the instant and the
style loop. The KL of a pair is measured in replies, and no cap limits it.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
from ruvmlx.apps.prove import prompts
from ruvmlx.apps.prove.drawn_users import DrawnStars, DrawnUser
from ruvmlx.apps.prove.retention import NeutralText
from ruvmlx.apps.prove.statistics import mean_interval
from ruvmlx.apps.prove.trial import seed_for
from ruvmlx.apps.prove.untouched_replies import JudgedReply, UntouchedReplies

from ruvmlx.backends.base import Backend, with_lora
from ruvmlx.backends.select import open_backend
from ruvmlx.engine import GenerationRequest, LLMInferenceEngine
from ruvmlx.engine.batch import generate_many
from ruvmlx.engine.best_of import requests_for
from ruvmlx.lora import MicroLoRA
from ruvmlx.lora.base_lora import BaseLoRA
from ruvmlx.lora.micro_lora import RANK
from ruvmlx.models.config.model import Message, Model
from ruvmlx.models.find.starter import starter_path
from ruvmlx.models.load import load_model
from ruvmlx.platform.files import replacing
from ruvmlx.settings import home
from ruvmlx.sona import calibration, taste_push
from ruvmlx.sona.faults import variety
from ruvmlx.sona.kl_probe import KLProbe, log_softmax_rows
from ruvmlx.sona.measure_directions import MeasureDirections
from ruvmlx.sona.optional.style_bank import BasisBuilder, StyleBank, texts
from ruvmlx.sona.optional.style_basis import StyleBasis, left_out
from ruvmlx.sona.optional.style_choice import StyleChoice
from ruvmlx.sona.optional.style_file import StyleFiles
from ruvmlx.sona.sampled_replies import sampling_of
from ruvmlx.sona.shipped import shipped_bytes
from ruvmlx.sona.taste import RatedFeatures, TasteModel
from ruvmlx.sona.taste_features import features_of
from ruvmlx.sona.taste_measures import MEASURES
from ruvmlx.sona.taste_push import TastePush
from ruvmlx.training.slices import TrainingText

KL = 0.08  # nats per token: the target of a change of weights
SAMPLES = 2  # changed replies to each unseen question
FROZEN = 8  # untouched replies to each unseen question, which the changed reply is compared with
KL_REPLIES = 16  # replies of the bank on which it is measured
LOOKS = 12  # measurements of KL in the search for the size of a change
SAVE_EVERY = 20.0  # seconds


@dataclass(frozen=True)
class BankReply:
    question: str
    text: str
    finished: bool


class StyleStudy:
    """One model and its bank."""

    def __init__(self, model: Model, backend: Backend, file: Path):
        self.model, self.backend, self._file = model, backend, file
        self.bank = StyleBank.from_bytes(file.read_bytes() if file.exists() else None)
        self.builder = BasisBuilder(model, backend, self.bank, texts("style_questions"), texts("style_prose"))
        self._saved = time.monotonic()

    def build(self) -> StyleBasis:
        try:
            return self.builder.run(self._show, lambda: None)
        finally:
            self._save()

    def _show(self, what: str, done: int, total: int) -> None:
        if time.monotonic() - self._saved > SAVE_EVERY:
            self._save()
            print(f"{what}: {done} of {total}", flush=True)

    def _save(self) -> None:
        with replacing(self._file) as out:
            out.write(self.bank.to_bytes())
        self._saved = time.monotonic()

    @property
    def replies(self) -> list[BankReply]:
        """The replies whose gradients are known; all replies of a bank without gradients."""
        questions, decode = texts("style_questions"), self.model.tokenizer.decode
        known = self.bank.replies[: len(self.bank.gradients) or None]
        return [BankReply(questions[q], decode(ids), ended) for q, ids, ended in known]

    # -- what the basis moves --------------------------------------------------------------------------

    def correlations(self) -> np.ndarray:
        """[M]: for each measure, the correlation of the change that its direction predicts with the measure,
        among replies to one question. Directions are of other questions; mean of the folds."""
        rows, found = self.lora_a.shape[0] * self.lora_a.shape[2], []
        for moved, measures in left_out(self.builder.gradients(), rows):
            spread = np.sqrt((moved * moved).sum(axis=0) * (measures * measures).sum(axis=0))
            found.append((moved * measures).sum(axis=0) / np.maximum(spread, 1e-12))
        return np.mean(found, axis=0)

    @property
    def lora_a(self) -> np.ndarray:
        assert self.bank.lora_a is not None
        return self.bank.lora_a

    # -- users -----------------------------------------------------------------------------------------

    def users(
        self, count: int, ratings: int, questions: Sequence[str], parts: Sequence[tuple[float, float]],
        true: bool = False, sure: bool = False,
    ) -> dict[tuple[float, float], list[float]]:  # fmt: skip
        """Print and return the win-rate of each user, for each pair (KL of the push, KL of the basis).

        true: the taste model gets the stars of all replies, in place of `ratings` of them. sure: a less
        certain taste gets a smaller step along the basis."""
        basis, engine = self.basis, LLMInferenceEngine(self.model, self.backend)
        requests = {
            q: requests_for(self._request_for(q, seed_for(0, 3, i)), FROZEN) for i, q in enumerate(questions)
        }
        kept = UntouchedReplies(self.backend, self.model.fingerprint, home() / "prove-replies.db")
        found = kept.to(engine, [r for of in requests.values() for r in of])
        frozen = {q: [found[r.request_id] for r in of] for q, of in requests.items()}
        rates: dict[tuple[float, float], list[float]] = {pair: [] for pair in parts}
        for number in range(count):
            user = DrawnUser.draw(number, held_out=False)
            stars = DrawnStars(user, self._texts(frozen))
            given = self._all_rated(stars) if true else self._some_ratings(user, stars, ratings)
            taste = TasteModel.fit(given)
            choice = StyleChoice.of(taste, basis)
            for pair in parts:
                kl = pair[1] * (choice.confidence if sure else 1)
                micro, lora = self._push(taste, pair[0]), self._change(basis, choice, kl)
                with with_lora(self.backend, lora):
                    kl, (_, ppl_change) = self._reply_kl(lora, micro), self._neutral.compare(micro)
                    again = {
                        q: requests_for(self._request_for(q, seed_for(0, 3, i)), SAMPLES)
                        for i, q in enumerate(questions)
                    }
                    every = [r for of in again.values() for r in of]
                    new = {
                        r.request_id: JudgedReply.of(r)
                        for r in generate_many(engine, every, lambda _, micro=micro: micro)
                    }
                written = {q: [new[r.request_id] for r in of] for q, of in again.items()}
                rates[pair].append(_win_rate(stars, written, frozen))
                ratio = variety(
                    [of[0].token_ids for of in written.values()], [of[0].token_ids for of in frozen.values()]
                )
                print(
                    f"user {number}, {user.rater}, {pair[0]}+{pair[1]}: {rates[pair][-1]:.0%}; confidence "
                    f"{choice.confidence:.2f}, KL {kl:.3f}, perplexity {ppl_change:+.1%}, distinct-2 "
                    f"{ratio:.2f}; {user.words}",
                    flush=True,
                )
        return rates

    @cached_property
    def basis(self) -> StyleBasis:
        """The basis of the bank's gradients; if the bank has none, the basis in the package."""
        if self.bank.gradients:
            return self.builder.basis()
        shipped = StyleFiles(self.model.fingerprint).basis()
        assert shipped is not None, "no basis: run `build`"
        return shipped

    @cached_property
    def _neutral(self) -> NeutralText:
        return NeutralText(self.backend, self.model.tokenizer)

    @cached_property
    def _probe(self) -> KLProbe:
        return calibration.measure(self.backend, self.model.tokenizer, RANK, self.model.shape.max_context)

    def _push(self, taste: TasteModel, kl: float) -> MicroLoRA | None:
        """The taste's push on the output head, whose KL in answers of the reference text is at most `kl`."""
        if kl == 0:
            return None
        fresh = MicroLoRA.fresh(self._probe.directions, self.model.shape.vocab_size)
        directions = MeasureDirections.from_bytes(shipped_bytes("directions", self.model.fingerprint))
        stored = SimpleNamespace(of=lambda tokens: directions)
        push = TastePush(self.model.tokenizer, SimpleNamespace(model=taste), stored)
        lora_b = np.zeros_like(fresh.lora_b)
        with patch.object(taste_push, "PUSH_KL", kl):
            lora_b[0, self._probe.tokens] = push.of(0, fresh, self._probe)
        return replace(fresh, lora_b=lora_b)

    def _texts(self, frozen: dict[str, list[JudgedReply]]) -> dict[str, list[str]]:
        found = {q: [w.text for w in of] for q, of in frozen.items()}
        for reply in self.replies:
            found.setdefault(reply.question, []).append(reply.text)
        return found

    def _some_ratings(self, user: DrawnUser, stars: DrawnStars, ratings: int) -> list[RatedFeatures]:
        """So many ratings of the bank's replies."""
        rng, given = np.random.default_rng([user.number, 77]), list[RatedFeatures]()
        for i in rng.permutation(len(self.replies)):
            reply = self.replies[i]
            rating = user.rating(stars(reply.question, reply.text, reply.finished), rng)
            if rating is not None and len(given) < ratings:
                given.append(RatedFeatures(features_of(reply.question, reply.text, reply.finished), rating))
        return given

    def _all_rated(self, stars: DrawnStars) -> list[RatedFeatures]:
        """The true stars of all of the bank's replies."""
        return [
            RatedFeatures(
                features_of(r.question, r.text, r.finished), str(stars(r.question, r.text, r.finished))
            )
            for r in self.replies
        ]

    def _request_for(self, question: str, seed: int) -> GenerationRequest:
        sampling = replace(sampling_of(self.model), seed=seed)
        return GenerationRequest(messages=[Message("user", question)], max_new_tokens=96, sampling=sampling)

    @cached_property
    def _plain(self) -> list[tuple[TrainingText, np.ndarray]]:
        """Some replies of the bank, with the untouched model's hidden states."""
        step = max(1, len(self.bank.replies) // KL_REPLIES)
        some = [self.builder._text(reply) for reply in self.bank.replies[::step]]
        return [(text, self.backend.hidden_states(list(text.tokens[:-1]))) for text in some]

    def _reply_kl(self, lora: BaseLoRA | None, micro: MicroLoRA | None = None) -> float:
        """The KL to the untouched model in the bank's replies, nats per token."""
        total = count = 0.0
        with with_lora(self.backend, lora):
            for text, hidden in self._plain:
                new = self.backend.hidden_states(list(text.tokens[:-1])) if lora else hidden
                rows = slice(len(text.tokens) - 1 - text.answer_tokens, None)
                old, now = (np.ascontiguousarray(states[rows]) for states in (hidden, new))
                logits = self.backend.head(now)
                if micro is not None:
                    micro.add_to_logits(logits, now)
                before, after = log_softmax_rows(self.backend.head(old)), log_softmax_rows(logits)
                total += float(np.sum(np.exp(after) * (after - before)))
                count += len(after)
        return total / max(1.0, count)

    def _change(self, basis: StyleBasis, choice: StyleChoice, target: float) -> BaseLoRA | None:
        """The change of weights along these coefficients whose KL is at most the target."""
        if target == 0:
            return None
        lora = basis.lora(choice.coefficients * np.sqrt(target / max(basis.kl(choice.coefficients), 1e-12)))
        for _ in range(LOOKS):
            kl = self._reply_kl(lora)
            if 0.8 * target <= kl <= target:
                break
            factor = 0.95 * np.sqrt(target / max(kl, 1e-12))
            lora = lora.shrunk(min(factor, 0.25) if kl > 4 * target else factor)
        return lora


def _win_rate(
    stars: DrawnStars, new: dict[str, list[JudgedReply]], frozen: dict[str, list[JudgedReply]]
) -> float:
    """How often a new reply has more stars than an untouched one to its question; a tie is half a win."""
    wins = []
    for question, replies in new.items():
        worth = np.array([[stars(question, w.text, w.finished)] for w in replies])
        others = np.array([stars(question, w.text, w.finished) for w in frozen[question]])
        wins.append(np.mean((worth > others) + 0.5 * (worth == others)))
    return float(np.mean(wins))


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("bank", type=Path)
    ask.add_argument("what", choices=("build", "measures", "users", "ship"))
    ask.add_argument("--users", type=int, default=8)
    ask.add_argument("--ratings", type=int, default=30)
    ask.add_argument("--questions", type=int, default=24)
    ask.add_argument("--taste", choices=("ratings", "true"), default="ratings")
    ask.add_argument("--sure", action="store_true")
    ask.add_argument("--parts", default=f"0+{KL}")
    ask.add_argument("--threads", type=int)
    given = ask.parse_args()
    model = load_model(str(starter_path()))
    study = StyleStudy(model, open_backend("native", model, given.threads), given.bank)
    if given.what == "build":
        study.build()
        print(f"{len(study.bank.gradients)} replies, {given.bank}")
    elif given.what == "ship":
        StyleFiles(model.fingerprint).ship(study.builder.basis())
    elif given.what == "measures":
        found = study.correlations()
        for k in np.argsort(-found):
            print(f"{found[k]:5.2f}  {MEASURES[k].more}")
        print(f"{found.mean():5.2f}  mean")
    else:
        questions = prompts.own("heldout")[: given.questions]
        pairs = [tuple(map(float, pair.split("+"))) for pair in given.parts.split(",")]
        found = study.users(given.users, given.ratings, questions, pairs, given.taste == "true", given.sure)
        for pair, rates in found.items():
            low, high = mean_interval(np.array(rates))
            more = np.array(rates) - np.array(found[pairs[0]])
            error = np.std(more) / np.sqrt(len(more))
            print(
                f"{pair[0]}+{pair[1]}: mean {np.mean(rates):.1%} ({low:.1%} to {high:.1%}), "
                f"worst {min(rates):.1%}, over the first {np.mean(more):+.1%} +- {error:.1%}"
            )


if __name__ == "__main__":
    main()
