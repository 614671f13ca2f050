"""Replies that no user sees are drawn as the chat draws its replies."""

from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.models.config.model import Message
from ruvmlx.sampling import Sampling
from ruvmlx.sona.sampled_replies import BegunReply, begin_replies, sampled_replies, sampling_of


def distribution(logits, ids, penalty, top_p):
    """The slow twin: the probabilities [V] of the next token, step by step as docs/chat.md says."""
    z = logits.astype(np.float64)
    for token in set(ids):
        z[token] = z[token] / penalty if z[token] > 0 else z[token] * penalty
    p = np.exp(z - z.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = order[: int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1]
    found = np.zeros_like(p)
    found[kept] = p[kept] ** (1 / 0.7)
    return found / found.sum()


@pytest.mark.parametrize("penalty, top_p", [(1.0, 1.0), (1.1, 0.9), (1.9, 0.5)])
def test_each_token_is_drawn_after_penalty_and_filter(tiny, penalty, top_p):
    backend, prompt = (
        NativeBackend(tiny, threads=1),
        tiny.tokenizer.encode_chat([Message("user", "A river?")]),
    )
    sampling = Sampling(0.7, top_p=top_p, repetition_penalty=penalty)
    seen, begun = [], [BegunReply.of(backend, prompt, lambda: None)]
    ((ids, ended),) = sampled_replies(
        backend, tiny.tokenizer, begun, [np.random.default_rng(5)], 37, sampling,
        lambda: None, note=lambda i, token, ids, p, hidden: seen.append((token, ids, p, hidden)),
    )  # fmt: skip
    begun = [BegunReply.of(backend, prompt, lambda: None)]
    drawn_in_c = sampled_replies(
        backend, tiny.tokenizer, begun, [np.random.default_rng(5)], 37, sampling, lambda: None
    )
    assert drawn_in_c == [(ids, ended)]
    rng, told = np.random.default_rng(5), [token for token, *_ in seen]
    assert told[: len(ids)] == ids and len(told) == len(ids) + ended
    for at, (token, candidates, p, hidden) in enumerate(seen):
        logits = backend.prefill([*prompt, *told[:at]], backend.new_cache()).logits
        want = distribution(logits, told[:at], penalty, top_p)
        got = np.zeros_like(want)
        got[candidates] = p
        np.testing.assert_allclose(got, want, atol=2e-3)
        chosen = candidates[np.searchsorted(np.cumsum(p), rng.random(), side="right").clip(max=len(p) - 1)]
        assert token == chosen
        np.testing.assert_allclose(backend.head(hidden[None])[0], logits, atol=1e-3)


def test_the_sampling_is_the_chats_for_the_model_with_more_chance(tiny):
    assert sampling_of(replace(tiny, default_sampling={})) == Sampling(0.7)
    own = {"temperature": 0.2, "top_p": 0.9, "top_k": 20.0, "repetition_penalty": 1.1, "diversity": 3.0}
    want = Sampling(0.7, top_p=0.9, top_k=20, repetition_penalty=1.1)
    assert sampling_of(replace(tiny, default_sampling=own)) == want


def test_replies_that_begin_together_have_the_bits_that_they_have_alone(tiny):
    """The model reads only once what the prompts have in common."""
    backend, read = NativeBackend(tiny, threads=1), []
    prompts = [tiny.tokenizer.encode_chat([Message("user", text)]) for text in ("A river?", "A rat", "Bees?")]
    prompts.append(prompts[0][:-2])  # a part of another prompt
    together = begin_replies(backend, prompts, lambda: read.append(1))
    for prompt, begun in zip(prompts, together, strict=True):
        alone = BegunReply.of(backend, prompt, lambda: None)
        assert begun.cache.offset == len(prompt)
        np.testing.assert_array_equal(begun.last.logits, alone.last.logits)
        np.testing.assert_array_equal(
            backend.decode(5, begun.cache).logits, backend.decode(5, alone.cache).logits
        )
    assert len(read) == 1 + len(prompts)
