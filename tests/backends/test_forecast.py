"""The forecast of tokens per second, on one machine and on all, and what it says to the user."""

from dataclasses import replace

import pytest

from ruvmlx.backends.sharded.forecast import Forecast
from ruvmlx.models.load import load_model
from tests.models.make_models import make_safetensors_model

GB = 1e9


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of which an eighth of the weights is the output head: 80 layers, 4 GB."""
    made = load_model(str(make_safetensors_model(tmp_path_factory.mktemp("forecast") / "m", tie=True)))
    shape = replace(made.config, n_layers=80, vocab_size=1000, hidden_size=500)
    return replace(made, shape=shape, parameters=4_000_000)


def test_the_slowest_rank_and_the_sums_decide(model):
    """Rank 0 reads half of the layers and the head; 161 sums come on top."""
    found = Forecast.of(model, int(4 * GB), 100 * GB, [80 * GB, 100 * GB], 1e-4, int(10 * GB))
    assert found.alone == pytest.approx(100 / 4)
    assert found.together == pytest.approx(1 / ((3.5 / 2 + 0.5) / 80 + 161e-4))
    slower = Forecast.of(model, int(4 * GB), 100 * GB, [80 * GB, 20 * GB], 0.0, int(10 * GB))
    assert slower.together == pytest.approx(20 / (3.5 / 2))


def test_it_says_where_one_machine_is_faster(model):
    line = Forecast(2, 25.0, 12.0, 2e-3).line
    assert line == (
        "2 machines: about 12 tokens per second, one machine: about 25. One machine is faster (a sum over "
        "the connection takes 2 ms): run without `launch`."
    )
    assert (
        Forecast(2, 12.0, 20.0, 1e-4).line == "2 machines: about 20 tokens per second, one machine: about 12."
    )


def test_a_model_that_does_not_fit_one_machine(model):
    found = Forecast.of(model, int(4 * GB), 100 * GB, [80 * GB] * 2, 1e-4, int(3 * GB))
    assert found.alone == 0 and found.line.endswith("tokens per second; the model does not fit one machine.")
