import numpy as np
import pytest

from ruvmlx.engine.perplexity import kl_divergence, perplexity
from ruvmlx.errors import UsageError
from ruvmlx.sampling import log_softmax


@pytest.mark.parametrize("context", [7, 20, 100])
def test_equals_the_likelihood_computed_by_hand(tiny_backend, context):
    """Windows start afresh: their first token is given."""
    tokens = [(i * 37) % 250 + 3 for i in range(41)]
    expected = []
    for start in range(0, len(tokens) - 1, context):
        window = tokens[start : start + context]
        logits = tiny_backend.verify(window, tiny_backend.new_cache())
        expected += [-log_softmax(row)[t] for row, t in zip(logits, window[1:], strict=False)]
    found = perplexity(tiny_backend, tokens, context)
    assert found.tokens == len(expected)
    assert found.nll == pytest.approx(np.mean(expected), abs=1e-5)
    assert found.ppl == pytest.approx(np.exp(found.nll))


@pytest.mark.parametrize(
    ("tokens", "context", "said"),
    [
        ([], 9, "the text has 0. Give a longer text."),
        ([5], 9, "the text has 1. Give a longer text."),
        ([5, 6, 7], 1, "not 1. Give a larger one."),
        ([5, 6, 7], 0, "not 0. Give a larger one."),
    ],
)
def test_without_a_token_to_predict_one_line_says_what_is_too_short(tiny_backend, tokens, context, said):
    with pytest.raises(UsageError, match=f"2 tokens or more.* {said}$"):
        perplexity(tiny_backend, tokens, context)


def test_kl_divergence_is_zero_only_between_equals():
    for z in np.random.default_rng(0).normal(size=(5, 33)).astype(np.float32):
        assert kl_divergence(log_softmax(z), log_softmax(z + 3)) == pytest.approx(0, abs=1e-6)
        assert kl_divergence(log_softmax(z), log_softmax(z * 1.1)) > 1e-4
