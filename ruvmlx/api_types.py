"""What the public API takes and gives beside models, chats and replies."""

from dataclasses import dataclass
from pathlib import Path


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
