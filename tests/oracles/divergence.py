"""Log-probabilities and their mean divergence, in float64."""

import numpy as np


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """log(e^x / sum e^x) over the last axis."""
    x = logits.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def mean_kl(p_logits: np.ndarray, q_logits: np.ndarray) -> float:
    """Mean over rows of KL(p || q), nats.  p_logits, q_logits: [T, V]."""
    p, q = log_softmax(p_logits), log_softmax(q_logits)
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())
