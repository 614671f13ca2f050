"""ALiBi's slopes, against numbers that others published and against transformers' formula."""

import numpy as np
import pytest

from ruvmlx.models.config.alibi import alibi_slopes
from tests.oracles import mpt

# Press et al. 2022, section 3: 8 heads 1/2 .. 1/256; 16 heads 1/2^0.5, 1/2^1 .. 1/2^8. 12 heads: what the
# code of the paper returns.
PUBLISHED = {
    1: [1 / 256],
    8: [2.0**-k for k in range(1, 9)],
    12: [
        *(2.0**-k for k in range(1, 9)),
        *(0.7071067811865476, 0.35355339059327384, 0.17677669529663692, 0.08838834764831849),
    ],
    16: [2.0 ** (-k / 2) for k in range(1, 17)],
}


@pytest.mark.parametrize("n_heads", PUBLISHED)
def test_slopes_are_the_published_ones(n_heads):
    np.testing.assert_allclose(alibi_slopes(n_heads), PUBLISHED[n_heads], rtol=1e-7)


@pytest.mark.parametrize("bias_max", [8.0, 5.0])
@pytest.mark.parametrize("n_heads", [1, 2, 3, 5, 6, 7, 12, 20, 31, 32, 33, 71, 112])
def test_any_number_of_heads(n_heads, bias_max):
    """transformers begins at the next higher power of two, the paper at the next lower one."""
    np.testing.assert_allclose(alibi_slopes(n_heads, bias_max), mpt.slopes(n_heads, bias_max), rtol=1e-7)
    assert alibi_slopes(n_heads, bias_max).dtype == np.float32
