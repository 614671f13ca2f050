"""This module turns the taste model into a change of the output head's weights. The module computes how much
the logit of each token rises or falls in replies. This change of the logits is called the push of the taste.

The taste model (taste.py) predicts stars from measures of a reply. Some measures change by about the same
amount wherever a token is added to the text. For example, the token " you" raises the measure "more 'you'".
So each token has an effect in stars: the taste model's weights times the change of the measures. In replies,
the token's logit rises by LOGIT times this effect, within limits. For a limit on the KL to the frozen model,
the distribution log p' = log p + stars / beta earns the most stars (Ziegler et al. 2019, eq. 3; here p and p'
are the probabilities of one token before and after, and 1 / beta is LOGIT).

If a taste is about words, the push learns the taste from fewer ratings than the gradients of the rated
replies do. The reason is that many tokens share a measure, and that about 30 ratings are enough to know the
weight of a measure. Lists, paragraphs and other measures of structure depend on the place of a token. For
these measures, the weights come from gradients: of rated replies (instant.py) and of unrated replies
(measure_directions.py).
"""

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

from ..lora.micro_lora import ALPHA, MicroLoRA
from ..models.config.model import Tokenizer
from ..pausing import Pause
from .instant import block_of, stored_evidence
from .kl_probe import KLProbe
from .measure_directions import StoredDirections
from .taste import TasteModel
from .taste_features import bucket, grams
from .taste_measures import MEASURES, measure_text
from .user_taste import UserTaste

LOGIT = 8.0  # the rise of a token's logit for each star that one more use of the token earns
ALONG = 16.0  # the rise of logits along a measure's direction (measure_directions.py) for each star
# The maximum rise, and the maximum fall, of a token's logit by the push, except of end-of-reply tokens.
MAX_RAISE_LOGITS, MAX_LOWER_LOGITS = 2.0, 6.0
END_LOGIT = 8.0  # logits of the end-of-reply tokens for each star that a reply of half the length earns
MOST_END = 5.0  # the maximum number of logits by which the push raises or lowers an end-of-reply token
# The KL to which the push of tokens is limited, nats per token. End-of-reply tokens use this KL first, up to
# MOST_END and END_KL; all other tokens get the rest, but at least a quarter of PUSH_KL.
PUSH_KL = 0.08
# The maximum KL from the original model of the end-of-reply tokens alone, nats per token. Two parts of lora_b
# change these tokens: the push, and the part from the gradients of rated replies (instant.py). Both parts can
# follow from the same ratings. Without this limit, the two parts together exceeded KL_CAP. The update then
# scaled down lora_b, and so the change of all other tokens, too.
END_KL = 0.05
# The number of bisections that find the largest scale of the push with a KL of at most END_KL.
END_HALVINGS = 7
# The push adds this number to the logits of the end-of-reply tokens for each step of TasteModel.shorter. The
# user expects an effect of a reason on the next reply. The fit of the taste model needs more ratings.
STATED_END = 1.5
FIRST, FIRST_END = 8, 4  # minimum number of ratings for a push: of ordinary tokens, of end-of-reply tokens
DOUBTED = 0.5  # an effect below this number of standard deviations gives no push
# The maximum number of ratings by which the push can be out of date. A fit of the taste model at each rating
# would delay the rating.
LAG = 8

# To measure a token's effect, the token is put between these two parts. The text of both parts is about as
# long as the starter model's replies, and each measure of this text is near its mean over those replies.
_BEFORE = (
    "A good garden starts with the soil. Water it early in the day, and feed it every spring with compost, "
    "because healthy roots need both. Most vegetables like sunlight, but lettuce and spinach also grow well "
    "in partial shade. If you plant tomatoes, it's best to give"
)
_AFTER = (
    " them support before the branches become heavy. Different plants attract different insects, so a mixed "
    "border is usually healthier than a single crop, and it looks beautiful as well."
)
_BY_WORD = np.array([measure.by_word for measure in MEASURES])
_OF_LENGTH = np.array(
    [measure.more in ("longer replies", "more paragraphs", "more varied words") for measure in MEASURES]
)
_COMPLETE = [measure.more for measure in MEASURES].index("complete replies")


@dataclass(frozen=True)
class TokenEffects:
    """The effects of A tokens on the M measures of a reply.

    measures: [A, M] float32, the change of each measure if a reply has the token once more; 0 for measures of
        structure
    words: [A], the hash of the token's word; -1 if the token is not a whole word
    shorter: [M], the change of each measure that grows with the length, if a reply ends at half of its words;
        0 for all other measures
    """

    measures: np.ndarray
    words: np.ndarray
    shorter: np.ndarray

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        tokens: np.ndarray,
        rows: list[np.ndarray] | None = None,
        pause: Pause | None = None,
    ) -> "TokenEffects":
        """Measure a text with each of the tokens inserted, and return the effects. The measurement takes 0.3
        s for 2,048 tokens.

        rows: the measured rows of the first tokens, from an earlier call that was stopped; this call adds the
            rows of the other tokens to this list
        pause: a function that is called before each token and can raise an exception to stop
        """
        rows = [] if rows is None else rows
        without = measure_text(_BEFORE + _AFTER, False)
        texts = [tokenizer.token_bytes(int(token)).decode("utf-8", "replace") for token in tokens]
        for text in texts[len(rows) :]:
            if pause is not None:
                pause()
            rows.append(measure_text(_BEFORE + text + _AFTER, False) - without)
        half = measure_text(_BEFORE, False)
        return cls(
            np.where(_BY_WORD, np.stack(rows), 0),
            np.array([_word(text) for text in texts]),
            np.where(_OF_LENGTH, half - measure_text(_BEFORE + "\n\n" + _AFTER, False), 0),
        )

    def stars(self, taste: TasteModel, likely: np.ndarray) -> np.ndarray:
        """Return the stars [A] that a reply earns by the taste model if it has each token once more. The mean
        of the stars, weighted by `likely`, is 0.

        Noise in many weights adds up over the tokens. So all stars are multiplied by a factor (James & Stein
        1961),
            max(0, 1 - DOUBTED^2 noise / signal)
        where noise is the mean variance of a token's stars, and signal is the mean square of the stars.

        likely: [A], the mean probability of each token in answers of the reference text
        """
        weights = taste.token_weights()
        changes = np.zeros((len(self.words), weights.mean.size))
        changes[:, : self.measures.shape[1]] = self.measures
        of_word = weights.words >= 0
        changes[:, of_word] = self.words[:, None] == weights.words[of_word]
        changes -= likely @ changes
        stars = changes @ weights.mean
        noise = likely @ (changes @ weights.covariance * changes).sum(axis=1)
        return max(0.0, 1 - DOUBTED**2 * noise / max(likely @ stars**2, 1e-12)) * stars

    def end_stars(self, taste: TasteModel) -> float:
        """Return the stars that a reply earns by the taste model if it ends at half of its words. The result
        is multiplied by a factor that falls with the uncertainty of these stars. The shorter reply is
        complete, and it is compared with the mean of this user's replies, of which some are not complete."""
        weights = taste.token_weights()
        change = np.zeros(weights.mean.size)
        change[: self.shorter.size] = self.shorter
        change[_COMPLETE] = measure_text("", True)[_COMPLETE] - taste.fitted.scale.centre[_COMPLETE]
        mean, variance = float(change @ weights.mean), float(change @ weights.covariance @ change)
        return mean * max(0.0, 1 - DOUBTED**2 * variance / max(mean**2, 1e-12))


def _word(text: str) -> int:
    found = grams(text)
    return bucket(found[0]) if len(found) == 1 and text.startswith(" ") else -1


class TastePush:
    """The push of one user's taste. A rating uses the push that was computed from earlier ratings. The push
    is computed while the user reads, if there is time, because a fit of the taste model at the rating would
    delay the rating."""

    def __init__(self, tokenizer: Tokenizer, taste: UserTaste, directions: StoredDirections):
        self._tokenizer, self._taste, self._directions = tokenizer, taste, directions
        self._push = np.zeros(0, np.float32)
        # The adapter versions that can use the push: the version for which it was computed, then later
        # versions.
        self._versions: list[int] = []

    def prepare(self, version: int, adapter: MicroLoRA, probe: KLProbe, pause: Pause | None = None) -> None:
        """Compute the push for an adapter version, unless it was computed for this version before. The
        computation takes milliseconds. The first computation with a tokenizer takes 0.3 s, because it
        measures the effects of all movable tokens. pause: a function that can raise an exception to stop this
        measurement; the next call continues it."""
        if version not in self._versions[:1]:
            taste = self._taste.model
            if taste.ratings >= min(FIRST, FIRST_END):
                token_effects(self._tokenizer, probe.tokens, pause)
            self._push, self._versions = self.compute(adapter, probe, taste), [version]

    def of(
        self, version: int, adapter: MicroLoRA, probe: KLProbe, taste: TasteModel | None = None
    ) -> np.ndarray:
        """Return the push for an adapter version: the taste model's part [A] of the first row of lora_b, for
        the A movable tokens. At a rating, this part replaces the earlier push. taste: a taste model that is
        newer than the version; None for the version's own"""
        if taste is not None:
            return self.compute(adapter, probe, taste)
        if version not in self._versions:
            self.prepare(version, adapter, probe)
        return self._push

    def note_rating(self, before: int, after: int) -> None:
        """Note that a rating made the adapter version `after` from `before`, so that `after` can use the push
        of `before`. At most LAG ratings use the same push."""
        if before in self._versions[:LAG]:
            self._versions.append(after)

    def compute(self, adapter: MicroLoRA, probe: KLProbe, taste: TasteModel | None = None) -> np.ndarray:
        """Return the push of a taste (None: the taste of the ratings so far), as `of` does, without a note of
        the version. The KL of a base LoRA (probe.floor) makes the push smaller, because both changes share
        one cap."""
        taste = taste or self._taste.model
        logits, end_kl = self._end_push(taste, adapter, probe)
        if taste.ratings >= FIRST:
            total = LOGIT * token_effects(self._tokenizer, probe.tokens).stars(taste, probe.likely)
            if (known := self._directions.of(probe.tokens)) is not None:
                weights = taste.token_weights().mean[: len(MEASURES)]
                total = total + ALONG * known.logits(weights, probe.tokens)
            # Clip the logits before their KL is limited. The KL then spreads over more tokens, and the user
            # prefers the replies more often (docs/studies.md).
            others = np.clip(total, -MAX_LOWER_LOGITS, MAX_RAISE_LOGITS)
            others[probe.coordinates.ends] = 0
            logits += limit_kl(others, max(PUSH_KL / 4, PUSH_KL - end_kl - probe.floor), probe)
        return (logits / probe.reading).astype(np.float32)

    def end_kl(self, adapter: MicroLoRA, probe: KLProbe) -> float:
        """Return the KL of the whole change of end-of-reply tokens (the push, and the part from the
        gradients of rated replies), nats per token. The KL is 0 if no push is needed yet."""
        return self._end_push(self._taste.model, adapter, probe)[1]

    def _end_push(self, taste: TasteModel, adapter: MicroLoRA, probe: KLProbe) -> tuple[np.ndarray, float]:
        """Return the push on end-of-reply tokens as logits [A], and its KL (`limit_ends`)."""
        logits, end = np.zeros(probe.tokens.size, np.float32), STATED_END * taste.shorter
        if taste.ratings >= FIRST_END:
            end += END_LOGIT * token_effects(self._tokenizer, probe.tokens).end_stars(taste)
        elif not taste.shorter:
            return logits, 0.0
        logits[probe.coordinates.ends] = np.clip(end, -MOST_END, MOST_END)
        return limit_ends(logits, adapter, probe)


def limit_ends(logits: np.ndarray, adapter: MicroLoRA, probe: KLProbe) -> tuple[np.ndarray, float]:
    """Scale down a push on end-of-reply tokens, and return the scaled logits and their KL. The scale is the
    largest one at which the change of these tokens' logits has a KL of at most END_KL from the original
    model. The change also has a part that comes from the gradients of rated replies. The function does not
    scale that part.

    logits: [A], for each movable token the logits that the push adds; 0 for all but end-of-reply tokens
    """
    rated = np.zeros((adapter.rank, logits.size + 1), np.float32)
    ends = probe.coordinates.ends
    rated[:, ends] = block_of(adapter, stored_evidence(adapter, probe), probe)[:, ends]

    def kl_at(share: float) -> float:
        both = rated.copy()
        both[0, :-1] += share * logits / probe.reading
        return _block_kl(both, probe)

    whole, none = kl_at(1.0), kl_at(0.0)
    if whole <= END_KL or not logits.any():
        return logits, whole
    if none > END_KL:
        # No scale is within the limit, so the scale with the smallest KL is the best. If the push is opposite
        # to the part from rated replies, this is the full push: the two parts then cancel each other.
        kl, share = min((whole, 1.0), (none, 0.0), *((kl_at(tried), tried) for tried in (0.25, 0.5, 0.75)))
        return share * logits, kl
    kl, share, above = none, 0.0, 1.0
    for _ in range(END_HALVINGS):
        middle = (share + above) / 2
        if (found := kl_at(middle)) <= END_KL:
            kl, share = found, middle
        else:
            above = middle
    return share * logits, kl


def limit_kl(logits: np.ndarray, limit: float, probe: KLProbe) -> np.ndarray:
    """Return the logits [A] of a push, scaled down if their KL exceeds `limit` by more than 5%."""
    for _ in range(4):  # the KL is about a parabola, so a few steps reach the limit
        if (kl := _kl(logits, probe)) <= 1.05 * limit:
            break
        logits = logits * np.sqrt(limit / kl)
    return logits


def _kl(logits: np.ndarray, probe: KLProbe) -> float:
    """Return the KL divergence (nats per token) from the original model, in answers of the reference text, of
    a push that adds `logits` [A] to the movable tokens' logits in an answer."""
    block = np.zeros((probe.directions.shape[1], logits.size + 1), np.float32)
    block[0, :-1] = logits / probe.reading
    return _block_kl(block, probe)


def _block_kl(block: np.ndarray, probe: KLProbe) -> float:
    """Return the KL of `_kl` for the block [r, A + 1] of lora_b at a gain of 1."""
    return float(probe.answered_contexts[1].distance(block, ALPHA / len(block))[0])


@dataclass
class _Measurement:
    """A measurement of the effects of tokens. A call can stop, and the next call continues the
    measurement. tokens: the ids as bytes. rows: as in `TokenEffects.of`. effects: None until the measurement
    is complete."""

    tokens: bytes
    rows: list[np.ndarray] = field(default_factory=list)
    effects: TokenEffects | None = None


_known: "WeakKeyDictionary[Tokenizer, _Measurement]" = WeakKeyDictionary()


def token_effects(tokenizer: Tokenizer, tokens: np.ndarray, pause: Pause | None = None) -> TokenEffects:
    """Return the effects of the movable tokens [A] (ratings may change their logits). The effects are
    measured once for each tokenizer, because all adapters of a model have the same movable tokens. pause: as
    in `TokenEffects.of`; the next call continues the measurement."""
    name = tokens.tobytes()
    known = _known.get(tokenizer)
    if known is None or known.tokens != name:
        known = _known[tokenizer] = _Measurement(name)
    if known.effects is None:
        known.effects = TokenEffects.of(tokenizer, tokens, known.rows, pause)
        known.rows = []
    return known.effects
