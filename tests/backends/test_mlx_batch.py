"""One graph for several sequences on MLX: each has the logits that it has alone."""

import numpy as np
import pytest

from ruvmlx.kv.policy import TierPolicy
from ruvmlx.lora.micro_lora import MicroLoRA
from ruvmlx.models.load import load_model
from tests.models.make_models import make_safetensors_model

from .test_tiered_mlx import SHAPES, TOKENS, opened, worst

POLICIES = {"plain": None, "cold": TierPolicy("tiered", (64, 128))}
# Largest difference of any logit over the largest: sums of several rows have another order, which moves a key
# across a quantiser's step now and then; 16-bit graphs round as they go.
TOLERANCE = {"cpu": 1e-3, "graph": 2e-2}


@pytest.fixture(scope="module", params=["d64-group3", "d128-group4", "d64-window", "d32-biased"])
def model(request, tmp_path_factory):
    shape = SHAPES[request.param]
    return load_model(str(make_safetensors_model(tmp_path_factory.mktemp(request.param), **shape)))


def adapters(backend, n):
    """Each its own; every third sequence has none."""
    c, found = backend.config, []
    for i in range(n):
        rng = np.random.default_rng(i)
        a, b = rng.normal(size=(c.hidden_size, 2)), rng.normal(size=(2, c.vocab_size))
        adapter = MicroLoRA(a.astype(np.float32), b.astype(np.float32) * 0.05)
        found.append(None if i % 3 == 2 else adapter)
    return found


def filled(backend, policy, n):
    """Caches of unequal lengths: within a page, at its end, over several tiers."""
    caches = [backend.new_cache(policy) for _ in range(n)]
    for i, cache in enumerate(caches):
        backend.prefill(TOKENS[i : i + (130, 1, 64, 300, 63, 127, 3)[i % 7]], cache)
    return caches


@pytest.mark.pairwise
@pytest.mark.parametrize("n", [1, 2, 7, 16])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", TOLERANCE)
def test_each_has_what_it_has_alone(model, way, policy, n, pytestconfig):
    """With its own adapter or none, over page boundaries."""
    if n != 7 and model.config.n_layers == 2 and not pytestconfig.getoption("--full"):
        pytest.skip("every number of sequences with every shape: --full")
    backend = opened(model, way)
    alone, together, own = (*(filled(backend, POLICIES[policy], n) for _ in range(2)), adapters(backend, n))
    for i in range(6 if n == 16 else 20):
        tokens = TOKENS[i : i + n]
        want = [backend.decode(*args).logits for args in zip(tokens, alone, own, strict=True)]
        got = backend.decode_batch(tokens, together, own)
        assert worst(np.stack([step.logits for step in got]), np.stack(want)) < TOLERANCE[way]
    assert [c.offset for c in together] == [c.offset for c in alone]
    assert [c.stats() for c in together] == [c.stats() for c in alone]
    plain = backend.decode_batch(tokens, together)
    assert n < 2 or worst(np.stack([s.logits for s in plain]), np.stack(want)) > 3 * TOLERANCE[way]


@pytest.mark.parametrize("way", TOLERANCE)
def test_sequences_come_and_go(model, way):
    """Other members, another order, forks and caches of another kind, step by step."""
    backend = opened(model, way)
    alone, together = (filled(backend, POLICIES["cold"], 5) for _ in range(2))
    for caches in (alone, together):
        caches += [caches[0].fork(), *filled(backend, None, 2)]
    for i in range(24):
        chosen = [k for k in range(8) if (i + k) % 3] if i % 2 else [7, 3, 0, 5][: 1 + i % 4]
        want = [backend.decode(TOKENS[i + k], alone[k]).logits for k in chosen]
        got = backend.decode_batch([TOKENS[i + k] for k in chosen], [together[k] for k in chosen])
        assert worst(np.stack([step.logits for step in got]), np.stack(want)) < TOLERANCE[way]
        if i == 12:
            for caches in (alone, together):
                caches[3].trim(7)
                backend.prefill(TOKENS[:70], caches[2])
    assert backend.pool.pages[2] and [c.offset for c in together] == [c.offset for c in alone]


class Broken(Exception):
    pass


@pytest.mark.parametrize("policy", POLICIES)
def test_a_failure_leaves_all_as_they_were(model, policy, monkeypatch):
    backend = opened(model)
    caches, fresh = (filled(backend, POLICIES[policy], 4) for _ in range(2))

    def broken(*_):
        raise Broken

    with monkeypatch.context() as patch, pytest.raises(Broken):
        patch.setitem(backend._graph.model.layers[1], "mlp", broken)
        backend.decode_batch(TOKENS[:4], caches)
    assert [c.offset for c in caches] == [c.offset for c in fresh]
    got, want = (backend.decode_batch(TOKENS[:4], c) for c in (caches, fresh))
    assert worst(np.stack([s.logits for s in got]), np.stack([s.logits for s in want])) < TOLERANCE["cpu"]


def test_the_weights_are_read_once(model, monkeypatch):
    """One product of the head for all rows, not one for each."""
    backend = opened(model)
    caches, rows = filled(backend, POLICIES["cold"], 5), []
    head = backend.output_head

    def counted(hidden):
        rows.append(hidden.shape[0])
        return head(hidden)

    monkeypatch.setattr(backend, "output_head", counted)
    backend.decode_batch(TOKENS[:5], caches)
    assert rows == [5]
