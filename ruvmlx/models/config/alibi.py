"""This module computes the slopes of ALiBi. With ALiBi, the attention score falls linearly with the distance
between the query at position i and the key at position j. (Press et al. 2022, section 3)

    score(i, j) = q_i . k_j / sqrt(d) + slope_h (j - i)        j <= i

Each query head h has its own slope. If the number of heads n is a power of two, the slopes are 2^(-m k / n)
for k = 1 to n; m is `bias_max` (8 in the paper). If n is no power of two, the first p slopes are the slopes
of a model with p heads, where p is the largest power of two below n. The other n - p slopes are 2^(-m k / 2p)
for k = 1, 3, 5 and so on (as in the paper's code).
"""

import numpy as np


def alibi_slopes(n_heads: int, bias_max: float = 8.0) -> np.ndarray:
    """Return the slope of each head: float32 [n_heads]."""
    p = 1 << (n_heads.bit_length() - 1)
    steps = np.arange(1, p + 1, dtype=np.float64) / p
    more = np.arange(1, 2 * p, 2, dtype=np.float64)[: n_heads - p] / (2 * p)
    return (2.0 ** (-bias_max * np.concatenate([steps, more]))).astype(np.float32)
