"""This module counts faults that learning must not add to replies. A reply with a fault is empty, loops, uses
another script (writing system) than the original model's reply, or does not end. A clear loss of variety over
all replies is a fault, too.

The model with the adapter answers questions that no user rated. The faults of these replies are compared with
the faults of the original model's replies to the same questions.
"""

import itertools
import json
import math
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources

import numpy as np

from ..backends.base import Backend, HeadAdapter, original_model
from ..engine.repetition import GRAM, Repetition
from ..models.config.model import Model, Tokenizer
from ..pausing import Pause
from ..store import Store
from .sampled_replies import SampledReply, begin_replies, question_prompt, sampled_replies, sampling_of

MAX_REPLY_TOKENS = 96  # the maximum number of tokens in a reply
# Chance alone changes the number of loops and of endless replies. So more of them are a fault only if the
# difference to the original model is over CHANCE standard deviations of a difference by chance.
CHANCE = 1.5
MIN_VARIETY = 0.92  # the minimum variety, as a share of the original model's variety
_NAME = "replies/untouched"  # the name of the stored replies; no adapter can have this name
_FOREIGN = 0.2  # a reply is foreign if more than this share of its letters is in new scripts (`is_foreign`)
_REPEATED = 0.5  # a reply loops if more than this share of its groups of GRAM tokens are repetitions


@cache
def questions() -> tuple[str, ...]:
    text = resources.files(__package__).joinpath("fault_questions.json").read_text(encoding="utf-8")
    return tuple(json.loads(text))


@dataclass(frozen=True)
class Faults:
    """The number of replies with each fault, and the variety of the replies.

    empty: replies without text
    loops: replies that repeat themselves (`is_loop`)
    foreign: replies of which over a fifth of the letters are in scripts (writing systems) that the original
        model's reply to the same question does not use
    endless: replies that do not end within MAX_REPLY_TOKENS
    variety: the distinct-2 of the replies, divided by the distinct-2 of the original model's replies
    """

    empty: int = 0
    loops: int = 0
    foreign: int = 0
    endless: int = 0
    variety: float = 1.0

    @classmethod
    def of(
        cls, replies: Sequence[SampledReply], untouched: Sequence[SampledReply], tokenizer: Tokenizer
    ) -> "Faults":
        """Count the faults of replies. untouched: the original model's replies to the same questions."""
        texts = [tokenizer.decode(ids) for ids, _ in replies]
        plain = [tokenizer.decode(ids) for ids, _ in untouched]
        return cls(
            sum(not text.strip() for text in texts),
            sum(is_loop(ids) for ids, _ in replies),
            sum(is_foreign(text, beside) for text, beside in zip(texts, plain, strict=True)),
            sum(not ended for _, ended in replies),
            variety([ids for ids, _ in replies], [ids for ids, _ in untouched]),
        )

    def worse_than(self, untouched: "Faults", may_be_longer: bool = False) -> str:
        """Return in words which fault is worse than in the replies of the untouched (original) model; "" if
        no fault is worse. may_be_longer: True if the user likes longer replies, so that a reply without an
        end is no fault"""
        for name, words, by_chance in (
            ("empty", "empty replies", False), ("loops", "replies that repeat themselves", True),
            ("foreign", "replies in another script", False), ("endless", "replies without an end", True),
        ):  # fmt: skip
            new, old = getattr(self, name), getattr(untouched, name)
            if name == "endless" and may_be_longer:
                continue
            if new > old + (_chance(new, old) if by_chance else 0):
                return f"{new} {words} to {len(questions())} questions, {old} before"
        if self.variety < MIN_VARIETY:
            return f"{1 - self.variety:.0%} less variety"
        return ""


def _chance(new: int, old: int) -> float:
    """Return the largest difference of two numbers of replies that chance explains: CHANCE standard
    deviations of the difference of two binomial numbers with the same mean."""
    share = (new + old) / (2 * len(questions()))
    return CHANCE * math.sqrt(2 * len(questions()) * share * max(0.0, 1 - share))


def sample(model: Model, backend: Backend, adapter: HeadAdapter | None, pause: Pause) -> list[SampledReply]:
    """Sample one reply to each of `questions()` with the backend's base LoRA and this head adapter, and
    return the replies. The random seed is always the same."""
    prompts = [question_prompt(model.tokenizer, question) for question in questions()]
    begun = begin_replies(backend, prompts, pause, adapter)
    generators = [np.random.default_rng(24)] * len(begun)
    return sampled_replies(
        backend, model.tokenizer, begun, generators, MAX_REPLY_TOKENS, sampling_of(model), pause, adapter
    )


class FaultBaseline:
    """The replies of one model, without an adapter, to `questions()`. The model writes the replies once. The
    store keeps the replies."""

    def __init__(self, store: Store, fingerprint: str):
        self._store, self._fingerprint = store, fingerprint

    def sample(self, model: Model, backend: Backend, pause: Pause) -> list[SampledReply]:
        """Return the replies. The backend has the same base LoRA before and after the call."""
        prompts = [question_prompt(model.tokenizer, question) for question in questions()]
        about = json.dumps([prompts, MAX_REPLY_TOKENS, asdict(sampling_of(model)), "coarse"])
        try:
            known = json.loads(self._store.checkpoints.measurement(self._fingerprint, _NAME) or b"{}")
            if known.get("about") == about:
                return [(ids, ended) for ids, ended in known["replies"]]
        except (ValueError, KeyError, TypeError, AttributeError):  # damaged: the replies are written again
            pass
        with original_model(backend):
            replies = sample(model, backend, None, pause)
        data = json.dumps({"about": about, "replies": replies}).encode()
        self._store.checkpoints.put_measurement(self._fingerprint, _NAME, data)
        return replies


def is_loop(ids: Sequence[int]) -> bool:
    """Return True if the reply ends in a loop, or if it has more than GRAM groups of GRAM tokens and more
    than half of the groups repeat earlier groups."""
    grams = Counter(tuple(ids[i : i + GRAM]) for i in range(len(ids) - GRAM + 1))
    total = sum(grams.values())
    return Repetition(ids).is_loop or (total > GRAM and 1 - len(grams) / total > _REPEATED)


def is_foreign(text: str, untouched: str) -> bool:
    """Return True if more than a fifth of the text's letters are in scripts that the original model's reply
    does not use."""
    own, usual = scripts(text), scripts(untouched)
    return sum(n for script, n in own.items() if script not in usual) > _FOREIGN * max(1, own.total())


def scripts(text: str) -> Counter[str]:
    """Return the number of letters in each script. The script of a letter is the first word of its Unicode
    name, such as LATIN."""
    return Counter(unicodedata.name(c, "?").split()[0] for c in text if c.isalpha())


def variety(new: Sequence[Sequence[int]], old: Sequence[Sequence[int]]) -> float:
    """Return the distinct-2 (Li et al. 2016) of the new replies divided by the distinct-2 of the old replies.
    Longer texts repeat more token pairs. So the longer reply to a question is cut to the length of the
    shorter reply."""
    cut = [(a[: len(b)], b[: len(a)]) for a, b in zip(new, old, strict=True)]
    return _distinct_2([a for a, _ in cut]) / _distinct_2([b for _, b in cut])


def _distinct_2(replies: Sequence[Sequence[int]]) -> float:
    """Return the distinct-2 of replies: the number of different pairs of neighbouring tokens divided by the
    number of all such pairs; 1 if there are no pairs."""
    pairs = [pair for ids in replies for pair in itertools.pairwise(ids)]
    return len(set(pairs)) / len(pairs) if pairs else 1.0
