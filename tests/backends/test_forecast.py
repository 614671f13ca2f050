"""The forecast of tokens per second, on one machine and on all, and what it says to the user."""

from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.backends.mlx.backend import MLXBackend
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.backends.sharded.forecast import (
    LEAST,
    MOST,
    READ,
    WARM_UP,
    Forecast,
    decode_speed,
    pretend_layers,
)
from ruvmlx.models.load import load_model
from tests.models.make_models import make_safetensors_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forecast") / "m"
    return load_model(str(make_safetensors_model(folder, tie=True, n_layers=5)))


class CountingBackend:
    """A backend whose steps take the given seconds on its clock."""

    def __init__(self, seconds):
        self.now, self.steps, self._seconds = 0.0, 0, seconds

    def new_cache(self, policy):
        return None

    def prefill(self, tokens, cache):
        self.now += 1.0

    def decode(self, token, cache):
        self.now += self._seconds(self.steps)
        self.steps += 1


def test_the_median_step_without_the_first_ones():
    backend = CountingBackend(lambda i: 9.0 if i < WARM_UP or i == WARM_UP + 2 else 0.5)
    assert decode_speed(backend, lambda: backend.now) == 2.0
    assert backend.steps == WARM_UP + LEAST


def test_quick_steps_are_measured_more_often():
    backend = CountingBackend(lambda i: 1e-3)
    assert decode_speed(backend, lambda: backend.now) == pytest.approx(1000.0)
    assert backend.steps == WARM_UP + MOST


@pytest.mark.parametrize("make", [NativeBackend, MLXBackend])
def test_a_pretend_model_computes_its_layers_again_and_again(model, make):
    """Its logits are those of a model whose layers are these, in this order."""
    found = make(model, layers=2)
    again = replace(model, load_weights=lambda: RepeatedLayers(model.load_weights()))
    wanted = make(again)
    for tokens in ([3, 1, 4], [1, 5]):
        pair = [backend.prefill(tokens, backend.new_cache()).logits for backend in (found, wanted)]
        np.testing.assert_allclose(*pair, atol=1e-4)
    whole = make(model)
    assert np.abs(whole.prefill([1, 5], whole.new_cache()).logits - pair[0]).max() > 0.01


class RepeatedLayers(dict):
    """Weights whose layers are the first two, in turns."""

    def __init__(self, weights):
        super().__init__({name: weights[self._source(name)] for name in weights})

    @staticmethod
    def _source(name):
        words = name.split(".")
        if words[1] == "layers":
            words[2] = str(int(words[2]) % 2)
        return ".".join(words)


def test_so_many_layers_that_caches_do_not_hold_them(model):
    """A model of 4 GB, of which an eighth is the output head, has 80 layers of 43.75 MB."""
    shape = replace(model.config, n_layers=80, vocab_size=1000, hidden_size=500)
    large = replace(model, shape=shape, parameters=4_000_000)
    assert pretend_layers(large, 4 * 10**9, 1) == READ // 43_750_000 + 1
    assert pretend_layers(large, 4 * 10**9, 2) == 2 * READ // 43_750_000 + 1
    assert pretend_layers(model, 4 * model.parameters, 2) == 5


def test_it_says_where_one_machine_is_faster():
    assert Forecast(2, 25.0, 12.0).line == (
        "2 machines: about 12 tokens per second, one machine: about 25. One machine is faster: run without "
        "`launch`."
    )
    assert Forecast(2, 12.0, 20.0).line == ("2 machines: about 20 tokens per second, one machine: about 12.")


def test_a_model_that_does_not_fit_one_machine():
    line = Forecast(2, 0.0, 20.0).line
    assert line == "2 machines: about 20 tokens per second; the model does not fit one machine."
