"""This module fits one adapter's taste model (taste.py) to the store's ratings, again when a caller needs the
model after a change of the ratings. The taste model is fitted to the ratings in force (the ratings that were
not taken back), also after an undo."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..backends.base import Backend
from ..models.config.model import Model
from ..models.text import thinking
from ..pausing import Pause
from ..ratings import reason_of
from ..store import ReplyRow, ReplyWords
from .adapter_history import AdapterHistory
from .taste import Given, PreferredFeatures, RatedFeatures, TasteModel, background_counts
from .taste_features import ReplyFeatures, features_of
from .taste_reasons import asked_for
from .taste_record import TasteRecord, predicted_before
from .taste_words import Liking, sentence

# Unshown replies are other replies to a question, which the user does not see (unshown.py). In idle time, the
# model writes unshown replies to the questions of this number of the newest rated replies.
COMPARED = 200
BACKGROUND = 200  # the number of newest unrated replies in a fit if nearly all ratings are up, or down
COMPARED_UNRATED = 60  # the number of the newest unrated replies for which the model writes unshown replies


@dataclass(frozen=True)
class TasteStatus:
    """The status of the taste model.

    ratings: the number of ratings and preferences to which the taste model was fitted
    turned: the number of the oldest ratings and preferences to which the model's weights are no longer
        fitted, because the taste changed
    preferences: the likings that the ratings show clearly, the strongest first
    """

    ratings: int
    turned: int
    preferences: tuple[Liking, ...]

    @property
    def sentence(self) -> str:
        """The likings as a sentence, for example "shorter replies, more 'you'"; "" if there are none."""
        return sentence(self.preferences)


class UserTaste:
    """The taste model of one adapter. The taste model is fitted when a caller asks for the model, not when a
    rating is given. The fitted model is kept until the adapter version in use changes, or until new unshown
    replies are measured."""

    def __init__(self, history: AdapterHistory):
        self._history = history
        # {id of a reply with a rating or a preference: the bytes of the reply's features}; b"" if the reply's
        # text was deleted
        self._features: dict[str, bytes] = {}
        # {id of a rated reply: mean measures [M] of the unshown replies to its question}; None before the
        # measures are loaded
        self._usual: dict[str, np.ndarray] | None = None
        self._without_question: set[str] = (
            set()
        )  # ids of rated replies without unshown replies, because the question was deleted or is too long
        # ((adapter version, `AdapterHistory.failures`) at the time of the fit, the fitted model)
        self._fitted: tuple[tuple[int, int], TasteModel] | None = None
        self._status: TasteStatus | None = None  # the status of the fitted model; None before it is computed

    def compare(self, model: Model, backend: Backend, pause: Pause) -> None:
        """Let the model write unshown replies to the questions of the newest rated replies, so that the taste
        model can compare the rated replies with the unshown replies. If nearly all ratings are up, or nearly
        all are down, the model also writes unshown replies to the questions of unrated replies. The work
        takes long (UnshownReplies.complete), so call this function in idle time."""
        known = self._usual_measures().keys() | self._without_question
        newest = [reply_id for reply_id, *_ in self._history.labels()][-COMPARED:]
        newest += [reply_id for reply_id, _ in self._unrated_replies(self.evidence()[0])[:COMPARED_UNRATED]]
        missing = [reply_id for reply_id in newest if reply_id not in known]
        if missing:
            if self._history.unshown.complete(model, backend, missing, pause):
                self._usual = self._fitted = None
            self._without_question.update(set(missing) - self._usual_measures().keys())

    def add_unshown(self, measures: Mapping[str, np.ndarray]) -> None:
        """Store measures of unshown replies that the caller already has: {id of a rated reply: measures
        [REPLIES, M]}."""
        self._history.unshown.add(measures)
        self._usual = self._fitted = None

    def forget_features(self) -> None:
        """Drop the features and the measures in memory, and the model that was fitted to them. The store has
        those of the replies that were not deleted."""
        self._features, self._usual, self._fitted = {}, None, None

    @property
    def model(self) -> TasteModel:
        mark = self._mark()
        if self._fitted is None or self._fitted[0] != mark:
            self._fitted, self._status = (mark, self._fit()), None
        return self._fitted[1]

    @property
    def fitted_model(self) -> TasteModel | None:
        """The model, if it is fitted to the ratings in force; None while a fit is needed."""
        return self._fitted[1] if self._fitted is not None and self._fitted[0] == self._mark() else None

    @property
    def status(self) -> TasteStatus:
        model = self.model
        if self._status is None:
            # The texts are needed only to find the names of words, because the model has only hashes of
            # words.
            texts = self._texts() if model.has_words else []
            likings = model.preferences(*self.evidence(), texts)
            self._status = TasteStatus(model.ratings, model.ratings_before_turn, tuple(likings))
        return self._status

    def model_after(self, given: Sequence[tuple[ReplyRow, str, str]]) -> TasteModel | None:
        """Return the model that includes new ratings. The store does not have the new ratings yet. If a reply
        has an earlier rating, the new rating replaces it. Return None if neither a new rating nor a replaced
        rating has one of the reasons "long", "short" and "tone".

        given: (reply, rating, note) of each new rating
        """
        reasons = [reason_of(rating, note) for _, rating, note in given]
        earlier = filter(None, (self._history.reasons.rating_of(reply.id) for reply, *_ in given))
        if not {"long", "short", "tone"} & {*reasons, *(reason_of(*replaced[:2]) for replaced in earlier)}:
            return None
        new: list[Given] = []
        for (reply, rating, _), reason in zip(given, reasons, strict=True):
            if reason != "facts" and (features := _features_of(reply)) is not None:
                stated = asked_for(features, reason)
                new += [RatedFeatures(features, rating), *([stated] if stated else [])]
        return TasteModel.fit(*self.evidence({reply.id for reply, *_ in given}, new))

    def record(self) -> TasteRecord:
        """Return each rating with its prediction from earlier ratings. The function fits the taste model many
        times, so it takes seconds for hundreds of ratings."""
        return predicted_before([(reply_id, one) for reply_id, _, one in self._rated_features()])

    def _mark(self) -> tuple[int, int]:
        return self._history.version(), self._history.failures

    def _texts(self) -> list[tuple[str, str]]:
        """Return (question, reply) texts of every rating and preference in force whose chat was not
        deleted."""
        rated = [(asked, said) for asked, said, _ in self._history.examples()]
        return rated + [(asked, said) for asked, *both in self._history.pairs.texts() for said in both]

    def _fit(self) -> TasteModel:
        return TasteModel.fit(*self.evidence())

    def evidence(
        self, without: Collection[str] = (), new: Sequence[Given] = ()
    ) -> tuple[list[Given], Sequence[RatedFeatures]]:
        """Return the ratings and preferences in force (also the preferences that reasons state), the oldest
        first, and unrated replies. The function returns unrated replies only if nearly all ratings are up or
        nearly all are down, because only then are unrated replies evidence.

        without: the ids of replies whose ratings and reasons are left out
        new: ratings and preferences that the store does not have yet
        """
        rated = [(version, one) for id_, version, one in self._rated_features() if id_ not in without]
        given: list[tuple[int, Given]] = [*rated, *self._preferred_features(), *self._reasons(without)]
        evidence = [*(one for _, one in sorted(given, key=lambda pair: pair[0])), *new]
        return evidence, [one for id_, one in self._unrated_replies(evidence) if id_ not in without]

    def _rated_features(self) -> list[tuple[str, int, RatedFeatures]]:
        """Return (reply id, adapter version that the rating made, features and rating) of each rating in
        force, the oldest first. A rating is left out if its reply has no features."""
        labels = self._history.labels()
        self._load_features(reply_id for reply_id, *_ in labels)
        known = [
            (reply_id, version, self._features_in_memory(reply_id), rating)
            for reply_id, rating, version in labels
        ]
        usual = self._usual_measures()
        return [
            (id_, version, RatedFeatures(f, rating, usual.get(id_)))
            for id_, version, f, rating in known
            if f is not None
        ]

    def _usual_measures(self) -> dict[str, np.ndarray]:
        if self._usual is None:
            self._usual = self._history.unshown.usual()
        return self._usual

    def _preferred_features(self) -> list[tuple[int, Given]]:
        """Return (adapter version that the preference made, preference) of each preference in force.
        A preference is left out if one of its replies has no features."""
        pairs = self._history.pairs.in_force()
        self._load_features(id_ for pair in pairs for id_ in (pair.better, pair.worse))
        found: list[tuple[int, Given]] = []
        for pair in pairs:
            better, worse = self._features_in_memory(pair.better), self._features_in_memory(pair.worse)
            if better is not None and worse is not None:
                found.append((pair.version, PreferredFeatures(better, worse, pair.strength)))
        return found

    def _reasons(self, without: Collection[str]) -> list[tuple[int, Given]]:
        """Return (adapter version that the rating made, preference that its reason states) for each rating in
        force with the reason "long", "short" or "tone". without: the ids of replies that are left out"""
        stated = [
            (version, asked_for(features, reason))
            for reply_id, reason, version in self._history.reasons.in_force()
            if reply_id not in without and (features := self._features_in_memory(reply_id)) is not None
        ]
        return [(version, one) for version, one in stated if one is not None]

    def _unrated_replies(self, given: Sequence[Given]) -> list[tuple[str, RatedFeatures]]:
        """Return (reply id, features) of the newest unrated replies if nearly all ratings are up or nearly
        all are down; else an empty list."""
        if not background_counts(given):
            return []
        usual, rows = self._usual_measures(), self._history.unrated_words(BACKGROUND)
        found = [(row.id, _features_of(row)) for row in rows]
        return [(id_, RatedFeatures(f, "", usual.get(id_))) for id_, f in found if f is not None]

    def _load_features(self, ids: Iterable[str]) -> None:
        """Load the features of the replies with these ids that are not in memory yet."""
        if missing := set(ids) - self._features.keys():
            for row in self._history.words(missing):
                features = _features_of(row)
                self._features[row.id] = features.data if features is not None else b""

    def _features_in_memory(self, reply_id: str) -> ReplyFeatures | None:
        """Return the features of a reply that `_load_features` has loaded; None if its text was deleted."""
        return ReplyFeatures.from_bytes(self._features.get(reply_id))


def reply_features(question: str, text: str, finish_reason: str) -> ReplyFeatures:
    """Return the features of a reply. If the reply has a thought (reasoning before the answer), only its
    answer is used."""
    return features_of(question, thinking.split(text).answer, finish_reason == "stop")


def _features_of(row: ReplyWords | ReplyRow) -> ReplyFeatures | None:
    """Return the features of a reply. If the reply has no stored features in the current format, the function
    computes them. Return None if the reply's text was deleted, or if ruvmlx must not learn from the
    reply."""
    stored = ReplyFeatures.from_bytes(row.features)
    if stored is None and row.text and row.features != b"":
        return reply_features(row.prompt, row.text, row.finish_reason)
    return stored
