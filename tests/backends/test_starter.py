"""The starter model on real text, judged by llama.cpp and by NumPy."""

from pathlib import Path

import numpy as np
import pytest

from ruvmlx.backends.reference import ReferenceBackend
from ruvmlx.models.config.model import Message
from tests.oracles.divergence import log_softmax, mean_kl

TEXT = Path(__file__).parents[1] / "data" / "teacher_forced.txt"


@pytest.fixture(scope="module")
def tokens(starter):
    ids = starter.tokenizer.encode(TEXT.read_text())
    assert len(ids) >= 500
    return ids


@pytest.fixture(scope="module")
def ours(starter_backend, tokens):
    """Logits after every token of the text, [T, V]."""
    return starter_backend.verify(tokens, starter_backend.new_cache())


def test_kl_to_llama_cpp(starter, tokens, ours, record_property):
    """Same file, same ids: the mean divergence of the next-token distributions is at most 0.01 nats."""
    llama_cpp = pytest.importorskip(
        "llama_cpp", reason="llama-cpp-python is not installed (uv sync --group oracle)"
    )
    judge = llama_cpp.Llama(
        str(starter.path), n_ctx=len(tokens) + 8, n_batch=512, n_threads=2, logits_all=True, verbose=False
    )
    judge.eval(tokens)
    theirs = np.array(judge.scores[: len(tokens)])
    kl = mean_kl(theirs, ours)
    agree = float((theirs.argmax(-1) == ours.argmax(-1)).mean())
    record_property("kl_nats", kl)
    print(
        f"\nmean KL(llama.cpp || ours) over {len(tokens)} tokens: {kl:.6f} nats; same top token: {agree:.1%}"
    )
    assert 0 <= kl <= 0.01
    assert agree > 0.9


def test_kl_to_numpy(starter, tokens, ours, record_property):
    """Against the oracle, in the same precision, the divergence is rounding alone."""
    n = 64
    numpy = ReferenceBackend(starter)
    kl = mean_kl(numpy.verify(tokens[:n], numpy.new_cache()), ours[:n])
    record_property("kl_nats", kl)
    print(f"\nmean KL(NumPy || ours) over {n} tokens: {kl:.2e} nats")
    assert abs(kl) < 1e-6


def test_answers_paris(starter, starter_backend):
    """Greedy decoding through the chat template knows the capital of France."""
    ids = starter.tokenizer.encode_chat([Message("user", "What is the capital of France?")])
    cache, out = starter_backend.new_cache(), []
    step = starter_backend.prefill(ids, cache)
    while len(out) < 24 and int(step.logits.argmax()) not in starter.tokenizer.eos_ids:
        out.append(int(step.logits.argmax()))
        step = starter_backend.decode(out[-1], cache)
    assert "Paris" in starter.tokenizer.decode(out)


def test_perplexity_is_sane(tokens, ours):
    """A model that had forgotten its weights would sit near the vocabulary size."""
    logp = log_softmax(ours[:-1])[np.arange(len(tokens) - 1), tokens[1:]]
    assert 5 < np.exp(-logp.mean()) < 60
