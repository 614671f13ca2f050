"""The native backend on the starter model and real text."""

import time

import numpy as np
import pytest

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.models.config.model import Message
from tests.oracles.divergence import log_softmax, mean_kl

from .exact_prompts import ExactPrompts
from .test_starter import TEXT


@pytest.fixture(scope="module")
def native(starter):
    return NativeBackend(starter)


@pytest.fixture(scope="module")
def tokens(starter):
    return starter.tokenizer.encode(TEXT.read_text())


def test_kl_to_mlx(starter_backend, native, tokens, record_property):
    """Over the whole text, against float32 arithmetic: 15-bit activations and float16 keys cost nothing."""
    judge = starter_backend.verify(tokens, starter_backend.new_cache())
    ours = native.verify(tokens, native.new_cache())
    kl = mean_kl(judge, ours)
    ppl = [np.exp(-log_softmax(z[:-1])[np.arange(len(tokens) - 1), tokens[1:]].mean()) for z in (judge, ours)]
    record_property("kl_nats", kl)
    print(
        f"\nmean KL(mlx || native) over {len(tokens)} tokens: {kl:.2e} nats; "
        f"perplexity {ppl[0]:.4f} and {ppl[1]:.4f}"
    )
    assert abs(kl) < 2e-5
    assert abs(ppl[1] / ppl[0] - 1) < 1e-3
    gap = np.sort(judge, axis=-1)
    tied = gap[:, -1] - gap[:, -2] < 0.05
    assert ((judge.argmax(-1) == ours.argmax(-1)) | tied).all()


def test_answers_paris(starter, native):
    ids = starter.tokenizer.encode_chat([Message("user", "What is the capital of France?")])
    cache, out = native.new_cache(), []
    step = native.prefill(ids, cache)
    while len(out) < 24 and int(step.logits.argmax()) not in starter.tokenizer.eos_ids:
        out.append(int(step.logits.argmax()))
        step = native.decode(out[-1], cache)
    assert starter.tokenizer.decode(out) == "The capital of France is Paris."


def test_trim_and_continue(native, tokens):
    """Forgetting 100 tokens and reading others equals never having read them."""
    cache, fresh = native.new_cache(), native.new_cache()
    native.prefill(tokens[:300], cache)
    assert cache.trim(100)
    got = native.prefill(tokens[400:420], cache).logits
    want = native.prefill(tokens[:200] + tokens[400:420], fresh).logits
    np.testing.assert_allclose(got, want, atol=2e-2)
    assert got.argmax() == want.argmax()


def test_it_opens_quickly(starter):
    """Half a second on two idle cores: one pass over 97 MB."""
    times = []
    for _ in range(3):
        start = time.process_time()
        NativeBackend(starter)
        times.append(time.process_time() - start)
    assert min(times) < 1.5


QUESTIONS = (
    "What is the capital of France?", "Why is the sky blue?", "Name three fruits.", "How do I boil an egg?",
    "Write a short poem about rain.", "What is a prime number?", "Who wrote Hamlet?", "What does a bee eat?",
    "Explain gravity to a child.", "Give me a tip for sleeping well.", "What is 7 times 8?",
    "Say hello in Spanish.",
)  # fmt: skip


def greedy(backend, prompt: list[int], length: int = 32) -> tuple[list[int], list[np.ndarray]]:
    """Token ids, and the logits that each was chosen from."""
    cache, ids, logits = backend.new_cache(), [], []
    step = backend.prefill(prompt, cache)
    for _ in range(length):
        ids.append(int(step.logits.argmax()))
        logits.append(step.logits)
        step = backend.decode(ids[-1], cache)
    return ids, logits


def test_greedy_text_is_mlx_text_or_a_near_tie(starter, starter_backend, native, record_property):
    """Most replies are equal to MLX's. At the first different token, MLX has almost equal logits for both."""
    exact, equal = ExactPrompts(starter), [0, 0]
    for question in QUESTIONS:
        prompt = starter.tokenizer.encode_chat([Message("user", question)])
        theirs, logits = greedy(starter_backend, prompt)
        for i, (backend, tie) in enumerate(((exact, 0.05), (native, 0.2))):
            ours, _ = greedy(backend, prompt)
            equal[i] += ours == theirs
            if ours != theirs:
                at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
                gap = float(logits[at][theirs[at]] - logits[at][ours[at]])
                assert gap < tie, (question, at, gap)
    record_property("equal_replies", f"{equal} of {len(QUESTIONS)}")
    print(f"greedy replies equal: {equal[0]} of {len(QUESTIONS)} with exact prompts, else {equal[1]}")
    assert min(equal) > len(QUESTIONS) / 2
