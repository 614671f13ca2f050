"""Replies that no user sees are drawn as the chat draws its replies."""

from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.models.config.model import Message
from ruvmlx.sampling import Sampling
from ruvmlx.sona.sampled_replies import BegunReply, sampled_replies, sampling_of


def by_hand(backend, prompt, eos, rng, longest, penalty):
    """The slow twin for one reply: the whole text is read again for each token."""
    ids = []
    while len(ids) < longest:
        logits = backend.prefill([*prompt, *ids], backend.new_cache()).logits.astype(np.float64)
        for token in set(ids):
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        token = int(np.argmax(logits / 0.7 + rng.gumbel(size=logits.shape)))
        if token in eos:
            break
        ids.append(token)
    return ids


@pytest.mark.parametrize("penalty", [1.0, 1.1, 1.9])
def test_a_reply_is_drawn_with_the_repetition_penalty(tiny, penalty):
    backend, prompt = (
        NativeBackend(tiny, threads=1),
        tiny.tokenizer.encode_chat([Message("user", "A river?")]),
    )
    sampling = Sampling(0.7, repetition_penalty=penalty)
    seen = []
    ((ids, ended),) = sampled_replies(
        backend, tiny.tokenizer, [BegunReply.of(backend, prompt)], np.random.default_rng(5), 37, sampling,
        lambda: None, note=lambda i, token, logits, hidden: seen.append((token, logits.copy(), hidden)),
    )  # fmt: skip
    assert ids == by_hand(backend, prompt, tiny.tokenizer.eos_ids, np.random.default_rng(5), 37, penalty)
    assert len(seen) == len(ids) + ended
    for _, logits, hidden in seen:  # the function gets the logits of the model, without the penalty
        np.testing.assert_allclose(logits, backend.head(hidden[None])[0], atol=1e-4)


def test_the_penalty_is_the_chats_penalty_for_the_model(tiny):
    assert sampling_of(tiny) == Sampling(0.7)
    assert sampling_of(replace(tiny, default_sampling={"repetition_penalty": 1.1, "top_p": 0.9})) == Sampling(
        0.7, repetition_penalty=1.1
    )
