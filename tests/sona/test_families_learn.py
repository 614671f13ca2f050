"""Ratings on models with LayerNorms, RoPE over a part of each head, ALiBi, and an MLP without a gate."""

from threading import Event

import numpy as np
import pytest

from ruvmlx.backends.select import open_backend
from ruvmlx.engine import Sampling
from ruvmlx.models.load import load_model
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.store import Store
from tests.models.make_models import make_safetensors_model

SHAPES = {
    "stablelm": {"rope_dims": 8, "attention_bias": True},
    "mpt": {"hidden_size": 96, "n_heads": 3, "n_kv_heads": 3},
}
TOKENS = list(range(20, 60))


@pytest.mark.parametrize("family", SHAPES)
def test_a_rating_changes_the_model_and_undo_takes_it_back(tmp_path, home, family):
    """The C decoder's hidden state is the input of the head. After undo the logits have the same bits."""
    model = load_model(str(make_safetensors_model(tmp_path / "m", family=family, **SHAPES[family])))
    backend = open_backend("native", model, threads=1)
    with Runtime(Store(home / "ruvmlx.db"), model, backend, Settings(kv_disk=None)) as runtime:
        chat = runtime.chats.new_chat()
        how = {"sampling": Sampling(0.0), "max_new_tokens": 12, "cancel": Event()}
        *_, last = runtime.chats.say(chat, "hello", **how)

        def logits() -> np.ndarray:
            return backend.prefill(TOKENS, backend.new_cache(), runtime.learner.micro).logits

        before = logits().copy()
        assert runtime.rate(last.response.request_id, "down").applied
        assert np.abs(logits() - before).max() > 1e-4
        runtime.undo()
        runtime.learner.sync()  # as the next message does
        np.testing.assert_array_equal(logits(), before)
