"""KL and perplexity of the neutral text: chunks of the head against whole logits of the whole text."""

from importlib import resources

import numpy as np
import pytest

from apps.prove.retention import NeutralText
from ruvmlx.backends.base import with_lora
from ruvmlx.lora import MicroLoRA
from ruvmlx.lora.base_lora import BaseLoRA
from ruvmlx.sampling import log_softmax


def slow_logprobs(backend, parts, adapter, lora):
    """Return all log-probabilities [N, V] with the adapter and the base LoRA, from `verify`."""
    with with_lora(backend, lora):
        logits = [z for part in parts for z in backend.verify(part[:-1], backend.new_cache(), adapter)]
    return np.stack([log_softmax(z) for z in logits])


@pytest.mark.parametrize("with_base", [False, True])
@pytest.mark.parametrize("with_adapter", [False, True])
def test_the_distance_is_that_of_whole_logits(tiny, tiny_backend, monkeypatch, with_base, with_adapter):
    monkeypatch.setattr("apps.prove.retention._PART", 101)
    monkeypatch.setattr("apps.prove.retention._ROWS", 7)
    rng, shape = np.random.default_rng(0), tiny.config
    micro = MicroLoRA.fresh(rng.normal(size=(shape.hidden_size, 2)).astype(np.float32), shape.vocab_size)
    micro.lora_b[:] = rng.normal(0, 0.3, micro.lora_b.shape)
    adapter = micro if with_adapter else None
    pair = rng.normal(0, 0.3, (shape.intermediate_size, 2)), rng.normal(0, 0.3, (2, shape.hidden_size))
    lora = BaseLoRA({("down_proj", 1): tuple(x.astype(np.float32) for x in pair)}) if with_base else None
    text = NeutralText(tiny_backend, tiny.tokenizer)
    old, new = (
        slow_logprobs(tiny_backend, text._parts, None, None),
        slow_logprobs(tiny_backend, text._parts, adapter, lora),
    )
    tokens = tiny.tokenizer.encode(resources.files("apps.prove").joinpath("data/neutral.txt").read_text())
    index = np.arange(len(new)), np.array([token for at, token in enumerate(tokens) if at % 101])
    kl, change = np.sum(np.exp(new) * (new - old), axis=1).mean(), np.expm1((old - new)[index].mean())
    with with_lora(tiny_backend, lora):
        assert text.compare(adapter) == pytest.approx((kl, change), rel=1e-3, abs=1e-6)
    assert bool(kl > 0.01) is (with_base or with_adapter)
