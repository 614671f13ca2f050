"""ALiBi: scores that fall with the distance between query and key. (Press et al. 2022, section 3)

    score(i, j) = q_i . k_j / sqrt(d) + slope_h (j - i)        j <= i

For n heads, n a power of two, the slopes are 2^(-m k / n), k = 1 .. n, with m = `bias_max` (8 in the paper).
For another n they are those of the next lower power of two, p, followed by every second slope of 2 p heads:
2^(-m k / 2p), k = 1, 3, 5 .. (the paper's code).
"""

import numpy as np


def alibi_slopes(n_heads: int, bias_max: float = 8.0) -> np.ndarray:
    """Return the slope of each head: float32 [n_heads]."""
    p = 1 << (n_heads.bit_length() - 1)
    steps = np.arange(1, p + 1, dtype=np.float64) / p
    more = np.arange(1, 2 * p, 2, dtype=np.float64)[: n_heads - p] / (2 * p)
    return (2.0 ** (-bias_max * np.concatenate([steps, more]))).astype(np.float32)
