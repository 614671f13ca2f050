"""Calibration: measured once per model, from the frozen model's hidden states over the reference text.

It yields lora_a, the coordinates of ratings (tokens, and features of tokens), and the contexts on which KL to
the frozen model is measured (kl_probe.py).
"""

import numpy as np

from ..backends.base import Backend
from ..errors import RuvmlxError
from ..models.model import Tokenizer
from ..progress import QUIET, Told, Watch
from . import reference_text
from .kl_probe import KLProbe, chosen, drifting

ACTIVE = 2048  # tokens that ratings may move: the most frequent ones in plain replies
FEATURES = 256  # directions in which tokens move together
WIDEST, NARROWEST = 8.0, 0.003  # range of the standard deviations of the prior of tokens' weights
_CONTEXTS = 48, 48, 80  # in answers, in prose with the largest projections, in other prose


def measure(
    backend: Backend,
    tokenizer: Tokenizer,
    rank: int,
    vocab_size: int,
    max_context: int,
    watch: Watch = QUIET,
) -> KLProbe:
    """The frozen model's KL probe, from the reference text: some 2,700 tokens of prefill."""
    count = Told(watch, "Getting to know the model, once", len(reference_text.texts()), "texts")
    pause = None if watch is QUIET else lambda: count.add(0)  # a pause makes prefill slower
    states, following, at_end, answers = reference_text.read(backend, tokenizer, max_context, pause, count)
    count.begin("Getting to know its words, once", 0)

    def head(hidden: np.ndarray) -> np.ndarray:
        count.add(0)
        return backend.head(hidden)

    if not (np.isfinite(states).all() and np.isfinite(at_end).all()):
        raise RuvmlxError(
            "the model computes NaN or Inf on plain text: its weights are damaged. Fetch it again."
        )
    ends = sorted(tokenizer.eos_ids)
    every = np.concatenate([states, at_end])
    ended = [bool(question) for question, _ in reference_text.texts()]
    in_reply = np.concatenate([np.arange(len(states)) < answers, ended])
    frequency, cost, ending = survey(every, head, ends)
    tokens, precision = prior(frequency, cost, ends)
    reading = directions(every, in_reply, ending)[:, :rank].copy()
    along = features(head, states.shape[1], tokens, frequency[tokens])
    rows, counts = measured(states @ reading, answers)
    return KLProbe(
        np.ascontiguousarray(states[rows]), rows, counts, np.array(len(states) - answers), following[rows],
        reading,
        tokens, np.array(ends), np.concatenate([precision, np.ones(along.shape[1], np.float32)]), along,
        drifting(states[answers:], following[answers:], head, reading, tokens), backend.head,
    )  # fmt: skip


def survey(states: np.ndarray, head, ends: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Over states [T, D]: mean probability [V] and mean p (1 - p) [V] of each token, and the log-probability
    [T] that the reply ends at each state."""
    frequency, cost, ending = 0.0, 0.0, []
    for i in range(0, len(states), 64):
        z = head(states[i : i + 64]).astype(np.float64)
        p = np.exp(z - z.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        frequency, cost = frequency + p.sum(axis=0), cost + (p * (1 - p)).sum(axis=0)
        ending.append(np.log(p[:, ends].sum(axis=1) + 1e-5))
    n = len(states)
    return np.asarray(frequency) / n, np.asarray(cost) / n, np.concatenate(ending)


def prior(frequency: np.ndarray, cost: np.ndarray, ends: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that ratings may move, and how freely: (tokens [A], precision [A]).

    precision is 1 / sigma^2, where sigma is the standard deviation of the prior of a token's weight. Tokens
    that all replies share carry style; rare ones carry topics. So sigma is smaller for tokens rarer than the
    end-of-reply token, which every reply has, and for tokens that cost more KL to move than it does: those
    with a larger variance in plain text.
    """
    tokens = np.sort(np.argsort(-frequency, kind="stable")[:ACTIVE])
    end = max(ends, key=lambda t: frequency[t])
    common = np.minimum(1, frequency[tokens] / frequency[end])
    cheap = np.minimum(1, cost[end] / np.maximum(cost[tokens], 1e-12))
    sigma = np.maximum(WIDEST * common * cheap, NARROWEST)
    return tokens.astype(np.int32), (sigma**-2).astype(np.float32)


def measured(readings: np.ndarray, answers: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the states on which KL is measured, and how many are in answers, in prose with the largest
    projections, and in other prose.

    readings [T, r]: projections of all states; the first `answers` are in answers. Prose has projections near
    zero except in few places, where an adapter changes it most: all of those are chosen.
    """
    most_read, prose = answers + np.argsort(-np.sum(readings[answers:] ** 2, axis=1)), len(readings) - answers
    loud = np.sort(most_read[: min(_CONTEXTS[1], prose)])
    groups = [chosen(np.arange(answers), _CONTEXTS[0]), loud]
    groups.append(chosen(np.sort(most_read[len(loud) :]), _CONTEXTS[2]))
    return np.concatenate(groups).astype(np.int32), np.array([len(g) for g in groups])


def directions(states: np.ndarray, in_reply: np.ndarray, ending: np.ndarray) -> np.ndarray:
    """lora_a [D, 2] from states [T, D]: is a state in a reply, and how near is the end of that reply?

    Ridge regressions of in_reply [T] and, inside replies, of ending [T]. Both targets are 0 in plain prose,
    which no rating is about. Over replies the first projection has mean 1, the second standard deviation 1.
    """
    states, replies = states.astype(np.float64), np.flatnonzero(in_reply)
    weight = np.where(in_reply, 1 / in_reply.sum(), 1 / max(1, (~in_reply).sum()))
    gram = (states * weight[:, None]).T @ states
    ridge = gram + np.trace(gram) / len(gram) * np.eye(len(gram))
    nearness = np.where(in_reply, ending - ending[replies].mean(), 0.0)
    found = np.linalg.solve(ridge, states.T @ (weight[:, None] * np.stack([in_reply, nearness], axis=1)))
    u = states[replies] @ found
    return (found / np.maximum([abs(u[:, 0].mean()), u[:, 1].std()], 1e-9)).astype(np.float32)


def features(head, width: int, tokens: np.ndarray, frequency: np.ndarray) -> np.ndarray:
    """Directions in which tokens [A] move together: [A, k] float32.

    The principal directions of these tokens' rows in the head, weighted by frequency: words of one kind have
    similar rows. Each has variance 1 over tokens drawn by `frequency` [A], so all cost the same KL.
    """
    unit = np.eye(width, dtype=np.float32)
    rows = np.concatenate([head(unit[i : i + 64]).take(tokens, axis=1) for i in range(0, width, 64)])
    p = (frequency / frequency.sum()).astype(np.float32)
    rows = rows.T - rows @ p
    variance, axes = np.linalg.eigh(((rows * p[:, None]).T @ rows).astype(np.float64))
    kept = np.flatnonzero(variance > 1e-6 * variance[-1])[-FEATURES:]
    return np.ascontiguousarray(rows @ (axes[:, kept] / np.sqrt(variance[kept])), np.float32)
