"""Everything one user has open: store, model, engine and learner, behind plain calls for the apps."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """One message of a saved chat, as the apps show it."""

    role: str  # "user" | "assistant" | "system"
    content: str
    reply_id: str | None = None  # assistant turns can be rated
    rating: str | None = None  # "up" | "down" | "1".."5"
    finish_reason: str | None = None


@dataclass(frozen=True)
class RatingResult:
    """What a rating did. Log-probabilities are means per token of the rated reply."""

    reply_id: str
    rating: str
    applied: bool
    apply_us: float  # the weight update alone
    total_us: float  # ... with the commit
    logprob_before: float
    logprob_after: float
    kl: float  # KL(new || frozen), nats per token, on neutral text
    kl_cap: float
    micro_norm: float
    adapter_version: int


@dataclass(frozen=True)
class LearnStatus:
    ratings: int
    updates: int
    adapter_version: int
    kl: float
    kl_cap: float
    micro_norm: float
