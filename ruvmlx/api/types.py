"""This module defines the result types of the public API: ratings, preferences, models and adapters."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..sona.state import PreferenceResult, RatingResult


@dataclass(frozen=True)
class Rating:
    """The effect of a rating on the weights of the adapter.

    applied: True if the weights changed.
    logprob_before, logprob_after: mean log-probability per token of the rated reply before and after the
        change, in nats.
    kl: KL divergence between the model with and without the adapter on a reference text, in nats per token;
        the learner scales an update down if kl would exceed `kl_cap`.
    adapter_version: the version of the adapter after the rating.
    seconds: the number of seconds that the rating took.
    """

    reply_id: str
    rating: str
    applied: bool
    logprob_before: float
    logprob_after: float
    kl: float
    kl_cap: float
    adapter_version: int
    seconds: float

    @classmethod
    def of(cls, done: "RatingResult") -> "Rating":
        return cls(
            done.reply_id, done.rating, done.applied, done.logprob_before, done.logprob_after,
            done.kl, done.kl_cap, done.adapter_version, done.total_us / 1e6,
        )  # fmt: skip


@dataclass(frozen=True)
class Preference:
    """The effect of a preference between two replies on the weights of the adapter.

    better, worse: the ids of the replies; after an edit, `better` is the user's text.
    kind: "compare", "edit" or "regenerated".
    strength: 1 if the user stated the preference or edited a reply; less than 1 if another action implies it.
    margin_before, margin_after: the mean log-probability per token of the better reply minus the mean of the
        worse reply, in nats. The class Rating explains the other fields.
    """

    better: str
    worse: str
    kind: str
    strength: float
    applied: bool
    margin_before: float
    margin_after: float
    kl: float
    kl_cap: float
    adapter_version: int
    seconds: float

    @classmethod
    def of(cls, done: "PreferenceResult") -> "Preference":
        return cls(
            done.better, done.worse, done.kind, done.strength, done.applied, done.margin_before,
            done.margin_after, done.kl, done.kl_cap, done.adapter_version, done.total_us / 1e6,
        )  # fmt: skip


@dataclass(frozen=True)
class ModelInfo:
    """A model on this machine.

    bits: the number of stored bits per parameter.
    bytes: the number of bytes on the disk.
    problem: the reason why ruvmlx cannot read the model, or ""; if there is a problem, bits and parameters
        are None.
    embeds: True if the model is trained to make vectors of texts.
    """

    name: str
    path: Path
    format: str
    bits: float | None
    parameters: int | None
    bytes: int
    problem: str
    embeds: bool = False


@dataclass(frozen=True)
class AdapterInfo:
    """An adapter: the trained weights for one model under one name. version: the number of the version in
    use; 0: the adapter has learned nothing yet. bytes: the size on disk."""

    name: str
    model: str
    version: int
    bytes: int
