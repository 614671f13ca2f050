"""This module reads the training data of the background loop: the ratings and preferences in force, and plain
text. Training should not change what the model predicts on the plain text.

The plain text differs from the reference text, with which the result is tested. The data is read from the
store at each run, so it contains no rating that was taken back.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np

from ..models.config.model import Tokenizer
from ..store import RatedReply
from ..training.slices import TrainingText
from . import reference_text
from .adapter_history import AdapterHistory
from .rating_index import RatingIndex

LIMIT = 10_000  # the maximum number of ratings; the newest are used
HELD_OUT = 5  # one of this many ratings is held out: it tests the result and is never used for training
BATCH = (4, 2, 2)  # texts in one step: replies rated since the last training, older replies, plain texts


@dataclass(frozen=True)
class RatedExample:
    """One rated reply, or one reply of a preference. reward, value: r and V(x) (objective.py). drawn: the
    reply's mean log p when the reply was generated."""

    reply_id: str
    rating: str
    text: TrainingText
    reward: float
    value: float
    version: int  # the version that the rating made
    drawn: float | None

    @property
    def held_out(self) -> bool:
        """True if the reply is never used for training. A hash of the id decides, so every run gets the same
        result."""
        return hashlib.sha256(self.reply_id.encode()).digest()[0] % HELD_OUT == 0


@dataclass(frozen=True)
class Buffer:
    """The data of one run. train and held_out are disjoint. plain and reference (the text of the promotion
    test) are disjoint too.

    since: the version of the newest promotion; ratings with a later version are new
    """

    train: Sequence[RatedExample]
    held_out: Sequence[RatedExample]
    plain: Sequence[TrainingText]
    reference: Sequence[TrainingText]
    since: int

    def batch(self, seed: int, step: int) -> tuple[list[RatedExample], list[TrainingText]]:
        """Return one step's replies and plain texts. The choice depends only on seed and step, so that a run
        can be resumed."""
        rng = np.random.default_rng([seed, step])
        new = [e for e in self.train if e.version > self.since] or list(self.train)
        old = [e for e in self.train if e.version <= self.since] or list(self.train)
        count, reservoir, texts = BATCH
        liked, disliked = ([e for e in old if (e.reward > e.value) == sign] for sign in (True, False))
        halves = [half or old for half in (liked, disliked)]
        drawn = _sample(rng, new, count)
        for i in range(reservoir):
            drawn += _sample(rng, halves[(step + i) % 2], 1)
        return drawn, _sample(rng, self.plain, texts)


def _sample(rng: np.random.Generator, items: Sequence, count: int) -> list:
    return [items[i] for i in rng.choice(len(items), min(count, len(items)), replace=False)]


def load(
    history: AdapterHistory,
    index: RatingIndex,
    tokenizer: Tokenizer,
    context: int,
    pause: Callable[[], None] = lambda: None,
) -> Buffer:
    """Read the training data of a run from the store. `pause` is called after every reply and text; it may
    raise an exception to stop."""
    rows = history.rated_replies(LIMIT)
    pause()
    examples = _examples(rows, index, pause)
    held = [e for e in examples if e.held_out]
    if len(held) < 2:  # this can happen by chance with few ratings
        held = sorted(examples, key=lambda e: hashlib.sha256(e.reply_id.encode()).digest())[:2]
    kept = {e.reply_id for e in held}
    plain, judged = (_texts(pairs, tokenizer, context, pause) for pairs in (_plain(), reference_text.texts()))
    train = [e for e in examples if e.reply_id not in kept]
    return Buffer(train, held, plain, judged, history.last_promotion())


def _plain() -> list[tuple[str, str]]:
    file = resources.files(__package__).joinpath("replay_texts.json")
    return json.loads(file.read_text(encoding="utf-8"))


def _texts(
    pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer, context: int, pause: Callable[[], None]
) -> list[TrainingText]:
    out = []
    for question, answer in pairs:
        tokens, first = reference_text.encode_pair(tokenizer, question, answer, context)
        out.append(TrainingText(tuple(tokens), first))
        pause()
    return out


def _examples(
    rows: Sequence[RatedReply], index: RatingIndex, pause: Callable[[], None]
) -> list[RatedExample]:
    out = []
    for row in rows:
        # V(x) is 0 for a preference, because V(x) of two replies to the same question would cancel.
        reward, value = (
            (row.reward, 0.0) if row.reward is not None else index.standing(row.reply_id, row.rating)
        )
        prompt, said = (np.frombuffer(ids, "<i4").tolist() for ids in (row.prompt_ids, row.sampled_ids))
        prompt, said = prompt + said[: row.thought], said[row.thought :]
        drawn = None if row.logprob is None else row.logprob / len(said)
        text = TrainingText.cut(prompt, said)
        out.append(RatedExample(row.reply_id, row.rating, text, reward, value, row.version, drawn))
        pause()
    return out
