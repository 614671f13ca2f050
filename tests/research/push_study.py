"""How well directions of lora_b follow the tastes of drawn users, without writing a reply.

    python -m tests.research.push_study BANK        # a bank of tests.research.style_study

For a small change of lora_b's first row by b, the log-ratio of a reply is b times the reply's gradient. Stars
rise in proportion to the correlation of stars and log-ratios among the replies to one question, times the
root of the KL. So this correlation measures a direction, whatever its size. This is only true if the
gradients are those of the distribution from which the replies' tokens were drawn (sampled_replies.py).

Each user rates one reply to each of half of the bank's questions (a user of one thumb up to two); the other
half is unseen. Printed for each family of tastes: the mean correlation, its standard error, and the KL in
replies (nats per token) at the size that the taste's push has.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from ruvmlx.apps.prove.drawn_users import DrawnUser

from ruvmlx.backends.select import open_backend
from ruvmlx.lora import MicroLoRA
from ruvmlx.models.config.model import Message
from ruvmlx.models.find.starter import starter_path
from ruvmlx.models.load import load_model
from ruvmlx.sampling import LogitChanges, Sampling, token_weights
from ruvmlx.sona import calibration
from ruvmlx.sona.instant import RULE
from ruvmlx.sona.kl_probe import KLProbe, softmax_rows
from ruvmlx.sona.measure_directions import MeasureDirections, regress
from ruvmlx.sona.optional.style_bank import StyleBank, texts
from ruvmlx.sona.sampled_replies import TEMPERATURE, sampling_of
from ruvmlx.sona.shipped import shipped_bytes
from ruvmlx.sona.taste import NEUTRAL, STARS, RatedFeatures, TasteModel, background_counts
from ruvmlx.sona.taste_measures import MEASURES
from ruvmlx.sona.taste_push import ALONG, LOGIT, PUSH_KL, TastePush, TokenEffects, limit_kl

from .taste_within import FAMILIES, TasteWithin, drawn_user

READ_TWICE = ("thumbs", "only-up", "only-down")  # these users press something at about half of the replies


@dataclass(frozen=True)
class Gradients:
    """Of the bank's N replies, as logits at a reading of 1:

    drawn, plain: [N, A], the gradients by lora_b's first row of the log-probability in the distribution from
        which tokens are drawn, and in the model's own distribution (temperature 1, as in trace.py)
    information: [N, A], the Fisher information of each token alone, in the model's own distribution
    tokens: [N], the lengths in tokens
    """

    drawn: np.ndarray
    plain: np.ndarray
    information: np.ndarray
    tokens: np.ndarray

    @classmethod
    def of(cls, model, backend, bank: StyleBank, probe: KLProbe) -> "Gradients":
        asked, a, sampling = texts("style_questions"), probe.directions[:, 0], sampling_of(model)
        drawn = np.zeros((len(bank.replies), probe.tokens.size))
        plain, information, lengths = np.zeros_like(drawn), np.zeros_like(drawn), np.zeros(len(drawn))
        for i, (question, ids, ended) in enumerate(bank.replies):
            prompt = model.tokenizer.encode_chat([Message("user", asked[question])])
            said = [*ids, max(model.tokenizer.eos_ids)] if ended else ids
            states = backend.hidden_states([*prompt, *said][:-1])[len(prompt) - 1 :]
            logits = backend.head(np.ascontiguousarray(states))
            p = softmax_rows(logits)[:, probe.tokens]
            reading = states @ a
            plain[i], information[i] = -reading @ p, reading**2 @ p
            drawn[i] = -reading @ drawn_rows(logits, said, sampling)[:, probe.tokens]
            for u, token in zip(reading, said, strict=True):
                plain[i, probe.tokens == token] += u
                drawn[i, probe.tokens == token] += u
            lengths[i] = len(said)
        return cls(drawn, plain, information, lengths)


def drawn_rows(logits: np.ndarray, said: Sequence[int], sampling: Sampling) -> np.ndarray:
    """Return the probabilities [T, V] with which the tokens of a reply were drawn. logits: [T, V], of the
    model; the function changes them. said: the T tokens."""
    rule, found = LogitChanges(sampling), np.zeros_like(logits)
    for row, z, token in zip(found, logits, said, strict=True):
        rule.restrict(z)
        ids, weights = token_weights(z, sampling)
        row[ids] = weights / weights.sum()
        rule.take(token)
    return found


class PushStudy:
    def __init__(self, model, backend, bank: StyleBank):
        self._users = TasteWithin(model, bank)
        self._probe = calibration.measure(backend, model.tokenizer, 2, model.shape.max_context)
        self._fresh = MicroLoRA.fresh(self._probe.directions, model.shape.vocab_size)
        self._of = Gradients.of(model, backend, bank, self._probe)
        self._effects = TokenEffects.of(model.tokenizer, self._probe.tokens)
        shipped = shipped_bytes("directions", model.fingerprint)
        directions = MeasureDirections.from_bytes(shipped)
        assert directions is not None, "no directions are shipped for this model"
        self._directions, self._tokenizer = directions, model.tokenizer
        self._stored = SimpleNamespace(of=lambda tokens: directions)

    def results(self, family: str, users: int, ratings: int) -> Iterator[dict[str, tuple[float, float]]]:
        """Yield {direction: (correlation, KL)} of each user."""
        for number in range(users):
            user, question = drawn_user(family, number), self._users.question
            stars, rng = self._users.stars(user), np.random.default_rng([number, 0, 5])
            questions = rng.permutation(question.max() + 1)
            rated = np.isin(question, questions[: len(questions) // 2])
            given, passed_over, rows = self._read(user, stars, rated, ratings, rng)
            if given:
                unseen = np.flatnonzero(~rated)
                yield {
                    name: (self._correlation(b, stars, unseen), self._kl(b, unseen))
                    for name, b in self._pushes(given, passed_over, rows, stars, rated).items()
                }

    def _read(
        self, user: DrawnUser, stars: np.ndarray, rated: np.ndarray, ratings: int, rng: np.random.Generator
    ) -> tuple[list[RatedFeatures], list[RatedFeatures], list[int]]:
        """Return (ratings, replies that were passed over, rows of the rated replies)."""
        found, none, rows, question = [], [], [], self._users.question
        for _ in range(2 if user.rater in READ_TWICE else 1):
            for asked in rng.permutation(np.unique(question[rated])):
                if len(found) < ratings:
                    one = self._users.sample_reply(user, stars, asked, rng)
                    (found if one[1].rating else none).append(one[1])
                    rows += [one[0]] if one[1].rating else []
        return found, none, rows

    def _pushes(
        self, given: list[RatedFeatures], passed_over: list[RatedFeatures], rows: list[int],
        stars: np.ndarray, rated: np.ndarray,
    ) -> dict[str, np.ndarray]:  # fmt: skip
        taste = TasteModel.fit(given, passed_over if background_counts(given) else ())
        by_token = LOGIT * self._effects.stars(taste, self._probe.likely)
        along = ALONG * self._directions.logits(
            taste.token_weights().mean[: len(MEASURES)], self._probe.tokens
        )
        whole = TastePush(self._tokenizer, SimpleNamespace(model=taste), self._stored)
        even = 16 * (by_token / LOGIT + along / ALONG)
        even[self._probe.coordinates.ends] = 0
        true = self._centre(stars)[rated]
        return {
            "the evidence of ratings": self._evidence(given, rows, self._of.plain),
            "the same, drawn distribution": self._evidence(given, rows, self._of.drawn),
            "the words of the taste": by_token,
            "the directions of the taste": along,
            "the push of the product": whole.of(0, self._fresh, self._probe) * self._probe.reading,
            "equal factors, not cut": limit_kl(even, PUSH_KL, self._probe),
            "true stars of all replies": regress(self._centre(self._of.drawn)[rated], true[:, None])[0],
        }

    def _evidence(self, given: list[RatedFeatures], rows: list[int], gradients: np.ndarray) -> np.ndarray:
        """Compute the weights of tokens [A] as the instant loop does (instant.py). The gradients [N, A] are
        of the untouched model."""
        weight = np.array([(STARS[one.rating] - NEUTRAL) / 2 for one in given])
        if len(set(weight.tolist())) > 1:
            weight -= weight.mean()
        rule, g, f = RULE.tokens, 2 * gradients[rows], 4 * self._of.information[rows]
        total, squares, information = weight @ g, weight**2 @ g**2, np.abs(weight) @ f
        precision = self._probe.precision[: total.size]
        agreed = np.divide(total**2, total**2 + rule.agree * squares, np.zeros_like(total), where=squares > 0)
        return total / (precision + information) * agreed

    def _centre(self, rows: np.ndarray) -> np.ndarray:
        """Subtract the mean of each question's replies from the rows [N, ...]. Return the differences."""
        found = np.array(rows, float)
        for question in np.unique(self._users.question):
            found[self._users.question == question] -= found[self._users.question == question].mean(axis=0)
        return found

    def _correlation(self, b: np.ndarray, stars: np.ndarray, unseen: np.ndarray) -> float:
        ratio, worth = (self._centre(x)[unseen] for x in (self._of.drawn @ b, stars))
        return float(ratio @ worth / max(1e-12, np.sqrt(ratio @ ratio * (worth @ worth))))

    def _kl(self, b: np.ndarray, unseen: np.ndarray) -> float:
        """Return the KL in nats per token, to second order: half of the variance of the log-ratio."""
        ratios = self._of.drawn[unseen] @ b / TEMPERATURE
        return float((ratios**2).sum() / self._of.tokens[unseen].sum() / 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bank", type=Path)
    parser.add_argument("--users", type=int, default=30)
    parser.add_argument("--ratings", type=int, default=30)
    asked = parser.parse_args()
    model = load_model(str(starter_path()))
    backend = open_backend("native", model, None)
    study = PushStudy(model, backend, StyleBank.from_bytes(asked.bank.read_bytes()))
    for family in FAMILIES:
        found = list(study.results(family, asked.users, asked.ratings))
        print(f"{family}, {len(found)} users")
        for name in found[0]:
            rho, kl = np.array([one[name] for one in found]).T
            error = rho.std() / np.sqrt(len(rho))
            print(f"  {name:28} {rho.mean():.3f} +- {error:.3f}   KL {kl.mean():.3f}", flush=True)


if __name__ == "__main__":
    main()
