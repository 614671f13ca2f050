"""This command measures whether a small model's first tokens show that a larger model should answer:

    python -m tests.sona.handover_study SMALL LARGE

Both models answer the questions of handover_questions.tsv, without sampling. An answer is right if one of the
question's answers is among its words. Three numbers describe how unsure the small model is in its first
TOKENS tokens: the mean log-probability of the tokens, the lowest one, and the mean entropy (over the TOP
likeliest tokens). The command prints how well each number separates the questions that the small model
answers wrongly (AUC: 0.5 is chance), and what thresholds of the mean log-probability would change.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ruvmlx.backends.select import open_backend
from ruvmlx.engine import GenerationRequest, LLMInferenceEngine, Sampling
from ruvmlx.engine.types import GenerationResponse
from ruvmlx.models.config.model import Message
from ruvmlx.models.load import load_model

QUESTIONS = Path(__file__).with_name("handover_questions.tsv")
TOKENS, LONGEST, TOP = 16, 40, 20


@dataclass(frozen=True)
class Answer:
    """One model's answer. logprobs, entropies: of its first TOKENS tokens. ms: its time per token."""

    right: bool
    logprobs: list[float]
    entropies: list[float]
    ms: float

    @property
    def signals(self) -> dict[str, float]:
        """The numbers that are larger for an answer of which the model is surer."""
        return {
            "mean logprob": float(np.mean(self.logprobs)),
            "lowest logprob": float(np.min(self.logprobs)),
            "negative mean entropy": -float(np.mean(self.entropies)),
        }


def questions() -> list[tuple[str, list[str]]]:
    rows = [line.split("\t") for line in QUESTIONS.read_text("utf-8").splitlines()]
    return [(question, answers.split("|")) for question, answers in rows]


def is_right(text: str, answers: Sequence[str]) -> bool:
    return any(re.search(rf"\b{re.escape(answer)}\b", text.lower()) for answer in answers)


def entropy(top: Sequence[tuple[int, float]]) -> float:
    p = np.exp([logprob for _, logprob in top])
    return float(-(p * np.log(np.maximum(p, 1e-12))).sum())


def answers_of(name: str) -> list[Answer]:
    model = load_model(name)
    engine = LLMInferenceEngine(model, open_backend("native", model))
    found = []
    for question, answers in questions():
        request = GenerationRequest(
            messages=[Message("user", question)], max_new_tokens=LONGEST, sampling=Sampling(0.0), logprobs=TOP
        )
        response = engine.generate(request)
        found.append(_answer(response, answers))
    return found


def _answer(response: GenerationResponse, answers: Sequence[str]) -> Answer:
    first = response.logprobs[:TOKENS]
    return Answer(
        is_right(response.text, answers),
        [token.logprob for token in first],
        [entropy(token.top) for token in first],
        response.latency_ms / max(1, response.generation_tokens),
    )


def auc(signal: np.ndarray, right: np.ndarray) -> float:
    """Return the chance that a right answer has a larger signal than a wrong one."""
    good, bad = signal[right], signal[~right]
    return float(np.mean((good[:, None] > bad) + 0.5 * (good[:, None] == bad)))


def report(small: Sequence[Answer], large: Sequence[Answer]) -> list[str]:
    mine, theirs = (np.array([answer.right for answer in both]) for both in (small, large))
    lines = [f"right: small {mine.mean():.0%}, large {theirs.mean():.0%} of {len(mine)}"]
    for name in small[0].signals:
        signal = np.array([answer.signals[name] for answer in small])
        lines.append(f"AUC of the {name}: {auc(signal, mine):.2f}")
    signal = np.array([answer.signals["mean logprob"] for answer in small])
    lines.append("threshold  handed on  small right there  large right there  right in all")
    for share in (0.1, 0.2, 0.3, 0.4, 0.5, 0.7):
        threshold = float(np.quantile(signal, share))
        on = signal <= threshold
        right = np.where(on, theirs, mine).mean()
        lines.append(
            f"{threshold:9.2f}  {on.mean():9.0%}  {mine[on].mean():17.0%}  {theirs[on].mean():17.0%}"
            f"  {right:12.0%}"
        )
    ms = [float(np.median([answer.ms for answer in both])) for both in (small, large)]
    lines.append(f"median ms per token: small {ms[0]:.1f}, large {ms[1]:.1f}")
    return lines


if __name__ == "__main__":
    print("\n".join(report(answers_of(sys.argv[1]), answers_of(sys.argv[2]))))
