"""This module reads the training data of the background loop: the ratings and preferences in force (not taken
back), and plain text (texts that no user rated). Training should not change what the model predicts on the
plain text.

The plain text differs from the reference text (reference_text.py), which tests the result. The ratings are
read from the store at each run, so the data contains no rating that was taken back.
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

LIMIT = 10_000  # the maximum number of replies with a rating or preference; only the newest are used
HELD_OUT = 5  # about one of 5 rated replies is held out: no run trains on this reply
# The maximum number of held-out replies in the test of the result; the test takes the newest ones. With
# thousands of ratings, a test on all held-out replies would take longer than the training.
TEST_LIMIT = 100
_TOKEN = "<i4"  # the type of a token id in the store
BATCH = (4, 2, 2)  # texts in one step, at most: newly rated replies, older rated replies, plain texts


@dataclass(frozen=True)
class RatedExample:
    """A rated reply, or a reply of a preference. A run can keep thousands of examples in memory, so the
    tokens are bytes: a tuple of token ids takes several times the memory.

    tokens: the token ids of the text to train on, little-endian int32
    first: the index of the reply's first token
    reward, value: the reward r and the user's mean reward V(x) of objective.py
    drawn: the reply's mean log-probability per token when the reply was generated; None if it is unknown
    """

    reply_id: str
    rating: str
    tokens: bytes
    first: int
    reward: float
    value: float
    version: int  # the adapter version that the rating made
    drawn: float | None

    @property
    def text(self) -> TrainingText:
        """The text to train on, made from `tokens` at each call."""
        return TrainingText(tuple(np.frombuffer(self.tokens, _TOKEN).tolist()), self.first)

    @property
    def held_out(self) -> bool:
        """True if a hash of the reply's id selects the reply for the test and not for the training. So each
        run holds out the same replies (`load` selects two replies if the hash selects fewer)."""
        return hashlib.sha256(self.reply_id.encode()).digest()[0] % HELD_OUT == 0


@dataclass(frozen=True)
class Buffer:
    """The data of one run of the background loop.

    train, held_out: the ratings to train on, and the ratings that test the result; no rating is in both, and
        older held-out ratings are in neither
    plain, reference: plain texts to train on, and the reference text for the test; no text is in both
    since: the adapter version of the newest promotion (promotion.py); ratings with a later version are new
    """

    train: Sequence[RatedExample]
    held_out: Sequence[RatedExample]
    plain: Sequence[TrainingText]
    reference: Sequence[TrainingText]
    since: int

    def batch(self, seed: int, step: int) -> tuple[list[RatedExample], list[TrainingText]]:
        """Choose the rated replies and the plain texts of one training step. For the same data, the choice
        depends only on seed and step, so that a stopped run can be resumed."""
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
    """Read the data of a run of the background loop from the store. `pause` is called after every reply and
    text; it can raise an exception to stop."""
    rows = history.rated_replies(LIMIT)
    pause()
    examples = _examples(rows, index, pause)
    held = [e for e in examples if e.held_out]
    if len(held) < 2:  # if ratings are few, the hash can hold out fewer than two replies by chance
        held = sorted(examples, key=lambda e: hashlib.sha256(e.reply_id.encode()).digest())[:2]
    kept = {e.reply_id for e in held}
    plain, judged = (_texts(pairs, tokenizer, context, pause) for pairs in (_plain(), reference_text.texts()))
    train = [e for e in examples if e.reply_id not in kept]
    return Buffer(train, held[-TEST_LIMIT:], plain, judged, history.last_promotion())


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
        # V(x) is set to 0 for a preference, because V(x) of two replies to the same question cancels.
        reward, value = (
            (row.reward, 0.0)
            if row.reward is not None
            else index.reward_and_value_in_force(row.reply_id, row.rating)
        )
        prompt, said = (np.frombuffer(ids, _TOKEN).tolist() for ids in (row.prompt_ids, row.sampled_ids))
        prompt, said = prompt + said[: row.thought], said[row.thought :]
        drawn = None if row.logprob is None else row.logprob / len(said)
        text = TrainingText.cut(prompt, said)
        tokens = np.array(text.tokens, _TOKEN).tobytes()
        known = row.reply_id, row.rating, tokens, text.first
        out.append(RatedExample(*known, reward, value, row.version, drawn))
        pause()
    return out
