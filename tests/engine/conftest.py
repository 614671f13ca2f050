"""Engines that the tests of batches share."""

import pytest

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.engine import LLMInferenceEngine
from ruvmlx.kv.policy import TierPolicy
from ruvmlx.models.load import load_model
from tests.models.make_models import make_safetensors_model

SMALL = TierPolicy("tiered", (64, 128))


@pytest.fixture(scope="module")
def packed_model(tmp_path_factory):
    """A 4-bit model: with it, a row of the native backend's batch has the same bits as alone."""
    folder = tmp_path_factory.mktemp("packed") / "m"
    return load_model(str(make_safetensors_model(folder, max_context=512, bits=4, group_size=32)))


@pytest.fixture(params=["reference", "native", "native-tiered"])
def each(request, engine, packed_model):
    if request.param == "reference":
        return engine
    policy = SMALL if request.param == "native-tiered" else None
    return LLMInferenceEngine(packed_model, NativeBackend(packed_model, threads=2, chunk=32), policy)
