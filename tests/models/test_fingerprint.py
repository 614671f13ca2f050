"""Adapters belong to a fingerprint: it stays as in earlier versions, and tells new families apart."""

from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.models.config.fingerprint import content_hash, fingerprint
from ruvmlx.models.config.model import QueryScale
from ruvmlx.models.config.rope_scaling import DynamicRope, LinearRope
from ruvmlx.models.load import load_model

from .make_models import make_safetensors_model
from .shapes import Shape

OF_VERSION_1 = [
    ({}, "c751f8a6bfb95991b3c30e7dc30963f8"),
    ({"sliding_window": 64}, "b3b0fb7c61514feccc52b92b7fa45000"),
    ({"llama3": True}, "7fbb4148b558956933917f28fe4511b2"),
    ({"attention_bias": True, "mlp_bias": True}, "059047bf102a3ecdaafacc7b496512db"),
    ({"mlp_bias": True}, "322290ed160ca1d890e9d235713a0c37"),
    ({"rope": LinearRope(4.0)}, "588a8c712874abb1f3cffdfe8ab47166"),
]


@pytest.mark.parametrize(("shape", "kept"), OF_VERSION_1)
def test_fingerprints_of_version_1_stay(shape, kept):
    """Computed before families had a row each."""
    assert fingerprint(Shape(**shape).config(), {}, []) == kept


def test_what_families_change_is_part_of_it():
    """One configuration after the other, all different, and the same in another order of a set."""
    config = Shape().config()
    changes = [
        {"biases": frozenset({"q_proj", "k_proj"})},
        {"biases": frozenset({"q_proj", "v_proj"})},
        {"head_norms": True},
        {"layers_without_rope": frozenset({1})},
        {"query_scale": QueryScale(0.1, 64)},
        {"rope_scaling": DynamicRope(2.0)},
        {"rope_scaling": DynamicRope(3.0)},
    ]
    found = [fingerprint(replace(config, **change), {}, []) for change in [{}, *changes]]
    assert len(set(found)) == len(found)
    again = replace(config, biases=frozenset({"k_proj", "q_proj"}))
    assert fingerprint(again, {}, []) == found[1]


def test_the_content_depends_on_every_tensor():
    tensors = {name: np.arange(size, dtype=np.uint8) for name, size in (("a", 0), ("b", 7), ("c", 5000))}
    found = {content_hash(tensors, tensors.get)}
    for name in ("b", "c"):
        changed = tensors | {name: tensors[name] ^ 1}
        found.add(content_hash(changed, changed.get))
    renamed = {"a": tensors["a"], "b": tensors["b"], "d": tensors["c"]}
    found.add(content_hash(renamed, renamed.get))
    assert len(found) == 4
    backwards = dict(reversed(tensors.items()))
    assert content_hash(backwards, tensors.get) == content_hash(tensors, tensors.get)


MPT = {"family": "mpt", "n_heads": 2, "n_kv_heads": 2}


@pytest.mark.parametrize("shape", [{"family": "mistral", "wrapped": True}, MPT])
def test_models_whose_tensors_have_other_names_in_the_file_have_a_content(tmp_path, shape):
    """Of a model for text and images, only the text part counts."""
    found = [
        load_model(str(make_safetensors_model(tmp_path / str(seed), seed=seed, **shape))).content()
        for seed in (0, 1)
    ]
    assert found[0] != found[1]
