"""This module computes the style basis. A measure is a number that describes a reply's text, such as its
number of lists (taste_measures.py). For each measure, the style basis has a direction in the weights that
raises the measure in replies.

The style basis is computed once for each model, from a bank of unrated replies to neutral questions. A user's
ratings choose one coefficient for each direction. There are 63 coefficients (one for each measure) and not
thousands, so about thirty ratings are enough.

For reply i with text y_i, g_i is the gradient of log p(y_i) by lora_b at lora_b = 0. A small change d of
lora_b changes log p(y_i) by g_i . d, so the expectation of any function f of replies changes by Cov(f, g .
d). The direction that raises f most for a given KL is proportional to W sum_i f_i g_i, where W = 1 / E[g^2]
stands for the inverse Fisher information. There are far fewer replies (n) than weights, so the sum over i is
computed as a ridge regression over replies (kernel form):
    K = G W G^T      alpha = C (C K C + lambda tr(C K C) / n)^-1 C f      d = W G^T alpha

The rows of G are the gradients g_i. C subtracts the mean over the replies to one question, because a
direction must distinguish styles and not topics. The direction of a weighted sum of measures is the weighted
sum of their directions.

To first order, the probability of the bank's prose (texts that are no replies) must not change. So each
direction is projected: d -= W P^T (P W P^T)^-1 P d. The rows of P are the gradients of the log-probabilities
of prose texts.
"""

import io
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...lora.base_lora import BaseLoRA, Pair, Place

RIDGE = 0.5  # lambda, the strength of the ridge
MODULE, RANK = "down_proj", 2  # the matrix of each layer that the basis changes, and the rank of the change
FOLDS = 4  # the number of parts of the questions in the cross-validation of `response`
_VERSION = 3  # the version of the stored form and of the order of the measures


@dataclass(frozen=True)
class BankGradients:
    """The gradients and measures of n replies of the bank. P is the number of elements of all lora_b.

    gradients: G [n, P] float32, one row for each reply
    measures: [n, M], the M measures of each reply
    question: [n], the index of the reply's question
    tokens: [n], the number of tokens of each reply
    prose: [m, P], the gradients of the log-probabilities of m texts of prose
    """

    gradients: np.ndarray
    measures: np.ndarray
    question: np.ndarray
    tokens: np.ndarray
    prose: np.ndarray

    def __getitem__(self, rows: np.ndarray) -> "BankGradients":
        """Return the data of the replies with these row indices, and of all texts of prose."""
        chosen = {name: getattr(self, name)[rows] for name in ("gradients", "measures", "question", "tokens")}
        return replace(self, **chosen)


@dataclass(frozen=True)
class StyleBasis:
    """A style basis of M directions in L layers.

    lora_a: [L, in, r] float32, lora_a of each layer's down_proj; all directions share it
    directions: [M, L, r, out] float32, the direction of each measure: lora_b of each layer's down_proj
    information: [M, M], the Fisher information per token along the directions; a change with coefficients
        beta has a KL of about beta^T information beta / 2 (nats per token)
    response: [M, M], the rise of each measure (row) for a coefficient of 1 of each direction (column). The
        response holds for small changes, on questions from which the direction was not computed.
    layers: the indices of the L layers
    """

    lora_a: np.ndarray
    directions: np.ndarray
    information: np.ndarray
    response: np.ndarray
    layers: tuple[int, ...]

    @classmethod
    def of(
        cls, bank: BankGradients, lora_a: np.ndarray, layers: Sequence[int], ridge: float = RIDGE
    ) -> "StyleBasis":
        count, rank = lora_a.shape[0], lora_a.shape[2]
        found = directions(bank, count * rank, ridge)
        along = bank.gradients @ found.T / np.sqrt(np.maximum(1, bank.tokens))[:, None]
        return cls(
            lora_a,
            found.reshape(len(found), count, rank, -1).astype(np.float32),
            along.T @ along / len(along),
            response(bank, count * rank, ridge),
            tuple(layers),
        )

    def lora(self, coefficients: np.ndarray) -> BaseLoRA:
        """Return the change of weights with these coefficients [M] of the directions, as a base LoRA."""
        b = np.tensordot(coefficients.astype(np.float32), self.directions, axes=1)
        pairs: Mapping[Place, Pair] = {
            (MODULE, layer): (np.ascontiguousarray(self.lora_a[i]), np.ascontiguousarray(b[i]))
            for i, layer in enumerate(self.layers)
        }
        return BaseLoRA(pairs)

    def kl(self, coefficients: np.ndarray) -> float:
        """Estimate the KL (nats per token) that `lora(coefficients)` causes. The estimate holds for small
        changes."""
        return 0.5 * float(coefficients @ self.information @ coefficients)

    def to_bytes(self) -> bytes:
        """Serialise the basis. Each row of a direction is stored as int8 with its own scale."""
        out, step = io.BytesIO(), abs(self.directions).max(axis=-1, keepdims=True) / 127
        np.savez(
            out, version=_VERSION, lora_a=self.lora_a.astype(np.float16), layers=np.array(self.layers),
            directions=np.rint(self.directions / np.maximum(step, 1e-30)).astype(np.int8), step=step,
            information=self.information, response=self.response,
        )  # fmt: skip
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "StyleBasis | None":
        """Decode a stored basis. Return None if the data is damaged or in another version's form; the caller
        must then compute the basis again."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as f:
                if int(f["version"]) != _VERSION:
                    return None
                lora_a, directions = f["lora_a"].astype(np.float32), f["directions"] * f["step"]
                found = cls(lora_a, directions, f["information"], f["response"], tuple(map(int, f["layers"])))
        except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile):
            return None
        arrays = (found.lora_a, found.directions, found.information, found.response)
        return found if all(np.isfinite(a).all() for a in arrays) else None


def sum_of_bases(trained: BaseLoRA | None, style: BaseLoRA) -> BaseLoRA:
    """Return a trained base LoRA and a style as one LoRA of scale 1. In each pair of a matrix that the style
    changes, the last RANK columns of lora_a belong to the style."""
    if trained is None:
        return style
    pairs: dict[Place, Pair] = {
        place: (a, b * np.float32(trained.scale)) for place, (a, b) in trained.pairs.items()
    }
    for place, (a, b) in style.pairs.items():
        if place in pairs:
            a, b = np.hstack([pairs[place][0], a]), np.vstack([pairs[place][1], b])
        pairs[place] = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return BaseLoRA(pairs)


def trained_part(base: BaseLoRA) -> BaseLoRA | None:
    """Return the trained base LoRA from a result of `sum_of_bases`; None if the sum has only a style."""
    pairs: dict[Place, Pair] = {}
    for place, (a, b) in base.pairs.items():
        if place[0] == MODULE:
            a, b = np.ascontiguousarray(a[:, :-RANK]), np.ascontiguousarray(b[:-RANK])
        if a.shape[1]:
            pairs[place] = a, b
    return BaseLoRA(pairs, base.scale) if pairs else None


def centre_by_question(values: np.ndarray, question: np.ndarray) -> np.ndarray:
    """Return values [n, M] of n replies, minus their mean over the replies to the same question. question:
    [n], the index of each reply's question."""
    out = values.copy()
    for one in np.unique(question):
        rows = question == one
        out[rows] -= out[rows].mean(axis=0)
    return out


def inverse_information(gradients: np.ndarray, rows: int) -> np.ndarray:
    """Return W [P], which is 1 / mean g^2. All weights in one of the `rows` rows of lora_b get the same
    value. A separate value for each weight would be mostly noise, because the number of weights is larger
    than the number of replies."""
    square = np.einsum("np,np->p", gradients, gradients, dtype=np.float64) / len(gradients)
    mean = square.reshape(rows, -1).mean(axis=1)
    return np.repeat(1 / np.maximum(mean, 1e-12), square.size // rows).astype(np.float32)


def directions(bank: BankGradients, rows: int, ridge: float = RIDGE) -> np.ndarray:
    """Return the direction of each measure: [M, P]. To first order, the probability of the bank's prose does
    not change along a direction. rows: the number of rows of lora_b in all layers together."""
    weight = inverse_information(bank.gradients, rows)
    measures = centre_by_question(bank.measures.astype(np.float64), bank.question)
    return without_prose(ridge_directions(bank, weight, measures, ridge), bank.prose, weight)


def left_out(bank: BankGradients, rows: int, ridge: float = RIDGE) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Divide the questions into FOLDS parts. For each part, yield two arrays about its n replies: the
    predicted rise [n, M] of their log-probability along each direction, and their measures [n, M]. The
    directions are computed from the questions of all other parts. The means over the replies to each question
    are subtracted from both arrays."""
    for fold in range(FOLDS):
        out = bank.question % FOLDS == fold
        if out.any() and not out.all():
            moved = bank.gradients[out] @ directions(bank[~out], rows, ridge).T
            both = (moved.astype(np.float64), bank.measures[out].astype(np.float64))
            rise, measures = (centre_by_question(values, bank.question[out]) for values in both)
            yield rise, measures


def response(bank: BankGradients, rows: int, ridge: float = RIDGE) -> np.ndarray:
    """Return the covariance of each measure (row) with the rise of the log-probability along each direction
    (column): [M, M]."""
    total, count = np.zeros((bank.measures.shape[1],) * 2), 0
    for moved, measures in left_out(bank, rows, ridge):
        total, count = total + measures.T @ moved, count + len(moved)
    return total / max(1, count)


def ridge_directions(
    bank: BankGradients, weight: np.ndarray, measures: np.ndarray, ridge: float
) -> np.ndarray:
    """Return the direction d of each measure: [M, P]. measures: [n, M], minus their means over the replies to
    each question."""
    count = len(bank.gradients)
    kernel = (bank.gradients * weight) @ bank.gradients.T
    kernel = centre_by_question(centre_by_question(kernel.astype(np.float64), bank.question).T, bank.question)
    kernel += ridge * np.trace(kernel) / count * np.eye(count)
    alpha = centre_by_question(np.linalg.solve(kernel, measures), bank.question)
    return (alpha.T.astype(np.float32) @ bank.gradients) * weight


def without_prose(directions: np.ndarray, prose: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Project the directions [M, P], so that a small change along a direction keeps the log-probability of
    each of the `prose` texts. Return the projected directions."""
    if not len(prose):
        return directions
    changes = (prose * weight) @ prose.T
    changes += 1e-6 * np.trace(changes) / len(changes) * np.eye(len(changes))
    return directions - np.linalg.solve(changes, prose @ directions.T).T.astype(np.float32) @ (prose * weight)
