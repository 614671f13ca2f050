"""What the public API takes and gives beside models, chats and replies."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..sona.state import PreferenceResult, RatingResult


@dataclass(frozen=True)
class Rating:
    """What a rating did to the weights.

    applied: whether they changed. logprob_before, logprob_after: log-probability of the rated reply, the mean
    per token, nats. kl: distance of the adapter to the frozen model on reference text, nats per token; never
    over kl_cap. adapter_version: the version that the rating made. seconds: what it took.
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
    """What a preference between two replies did to the weights.

    better, worse: ids of the replies; of an edit, `better` is the user's version. kind: "compare", "edit"
    or "regenerated". strength: 1 for a clear preference. margin_before, margin_after: mean log-probability
    per token of the better reply minus that of the worse one, nats. All else as in Rating.
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

    bits: stored bits per parameter. bytes: size on disk. problem: why it cannot be read; bits and parameters
    are then None.
    """

    name: str
    path: Path
    format: str
    bits: float | None
    parameters: int | None
    bytes: int
    problem: str


@dataclass(frozen=True)
class AdapterInfo:
    """What was learned under one name for one model. version: 0 is the untouched model. bytes: on disk."""

    name: str
    model: str
    version: int
    bytes: int
