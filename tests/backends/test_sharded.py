"""One model over two or three processes writes what it writes in one: caches, adapters, ratings, batches.

Each check was seen to fail with a sum left out, and with a rank's part of the heads exchanged.
"""

import io
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ruvmlx.backends.mlx.plain_cache import MLXCache
from ruvmlx.backends.sharded import cluster
from ruvmlx.backends.sharded.backend import LeaderBackend
from ruvmlx.backends.sharded.cluster import PeerRefused
from ruvmlx.backends.sharded.follower import Follower, OpenShard
from ruvmlx.backends.sharded.shard import Part
from ruvmlx.errors import UnsupportedModel
from ruvmlx.memory.learning_room import LearningRoom
from ruvmlx.models.load import load_model
from ruvmlx.pausing import MemoryRanOut
from ruvmlx.sampling import Sampling
from tests.models.make_gguf import make_gguf_model
from tests.models.make_models import make_safetensors_model
from tests.test_runtime_mlx import chat_of
from tests.test_runtime_mlx import open_on as open_on

from .shared_model import (
    PROMPT,
    SMALL,
    WAIT,
    Pair,
    assert_same,
    go_on,
    greedy,
    joined_ranks,
    no_machine,
    over_ranks,
    random_base,
    random_micro,
)

K_QUANT = {"hidden_size": 256, "n_heads": 8, "n_kv_heads": 2, "head_dim": 64, "intermediate_size": 768}
SHAPES = {
    "llama": {"dtype": "float32"},
    "mistral": {"sliding_window": 64},
    "qwen2": {"family": "qwen2", "dtype": "bfloat16"},
    "qwen3-norms": {"family": "qwen3"},
    "all-biases": {"attention_bias": True, "mlp_bias": True, "tie": True},
    "4-bit": {"bits": 4},  # 192 neurons in groups of 64: one rank gets 64, the other 128
}


@pytest.fixture(scope="module")
def two():
    """The connection of two ranks."""
    with joined_ranks(2):
        yield


@pytest.fixture
def over_two(two):
    """The test is rank 0 of two."""
    with over_ranks():
        yield


@pytest.fixture(scope="module")
def pair(two, tmp_path_factory):
    return Pair(make_safetensors_model(tmp_path_factory.mktemp("sharded") / "m"))


@pytest.mark.parametrize("policy", [None, SMALL], ids=["plain", "tiered"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_tokens(two, tmp_path, shape, policy):
    pair = Pair(make_safetensors_model(tmp_path / "m", **SHAPES[shape]))
    assert_same(pair, lambda backend: greedy(backend, policy))


@pytest.mark.parametrize("quant", ["Q4_K", "Q6_K", "Q5_0", "Q8_0", "F16"])
def test_gguf_blocks_are_cut_at_their_bounds(two, tmp_path, quant):
    pair = Pair(make_gguf_model(tmp_path / "m.gguf", quant=quant, n_layers=1, **K_QUANT))
    assert_same(pair, lambda backend: greedy(backend, SMALL, n=4))


def test_adapters(pair):
    """MicroLoRA in the head; a base LoRA of all matrices, with 32 and 4 bits; and without them again."""
    micro = random_micro(pair.model)
    before = greedy(pair.many)
    for base in (None, random_base(pair.model), random_base(pair.model, packed=True), None):
        for backend in pair.both:
            backend.set_lora(base)
        assert_same(pair, lambda backend: greedy(backend, SMALL, micro))
    after = greedy(pair.many)
    assert before[0] == after[0]
    np.testing.assert_array_equal(before[1], after[1])


def test_a_batch_of_plain_and_tiered_caches(pair):
    def run(backend):
        caches = [backend.new_cache(policy) for policy in (None, SMALL, SMALL, None)]
        for i, cache in enumerate(caches):
            backend.prefill(PROMPT[i : 150 + 7 * i], cache)
        for token in (5, 6, 7):
            steps = backend.decode_batch([token + i for i in range(4)], caches)
        return [int(step.logits.argmax()) for step in steps], np.stack([step.logits for step in steps])

    assert_same(pair, run)


@pytest.mark.parametrize("policy", [None, SMALL], ids=["plain", "tiered"])
def test_trims_forks_dumps_and_restores(pair, policy):
    def run(backend):
        cache = backend.new_cache(policy)
        backend.prefill(PROMPT, cache)
        other = cache.fork()
        assert cache.trim(9)
        cache_tokens = go_on(backend, cache, backend.prefill(PROMPT[cache.offset :][:5], cache).logits, 70)
        dump = other.dump()
        parts = list(dump.parts)
        assert sum(part.nbytes for part in parts) == dump.nbytes
        data = io.BytesIO(b"".join(map(bytes, parts)))
        restored = backend.new_cache(policy)
        restored.restore(dump.facts, data.read)
        del other
        assert restored.offset == len(PROMPT)
        tokens, logits = go_on(backend, restored, backend.decode(3, restored).logits)
        return cache_tokens[0] + tokens, logits

    assert_same(pair, run)


def test_a_dump_that_nobody_reads_ends_with_its_cache():
    """Rank 0 reads no bytes if the file is on the disk already. The bytes are then those of the cache."""
    nobody: Any = SimpleNamespace(send=lambda facts: None)
    follower, shard = Follower(nobody, nobody, nobody), OpenShard(nobody, nobody)
    follower._models[1], shard.caches[7] = shard, MLXCache(2, None)
    follower._dump({"model": 1, "id": 7}, b"")
    assert shard.parts
    follower._drop("cache", 7)
    assert not shard.parts and not shard.caches


def test_a_dump_of_other_ranks_is_refused(pair):
    cache = pair.many.new_cache()
    pair.many.prefill(PROMPT[:9], cache)
    facts = cache.dump().facts
    with pytest.raises(ValueError, match="ranks"):
        pair.many.new_cache().restore(facts | {"ranks": facts["ranks"][:1]}, lambda n: b"")


def test_three_processes(tmp_path):
    folder = make_safetensors_model(tmp_path / "m", n_layers=1, n_heads=6, n_kv_heads=3)
    words = [sys.executable, "-m", "tests.backends.shared_model", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=4 * WAIT)
    assert done.stdout.strip() == "the same", done.stderr


def test_shards_hold_the_model_once(tmp_path):
    """The parts of all ranks together are the whole matrices, and a bias of a sum is in one part."""
    model = load_model(str(make_safetensors_model(tmp_path / "m", attention_bias=True, mlp_bias=True)))
    whole = model.load_weights()
    shards = [Part.of(model, rank, 2).shard(model).load_weights() for rank in (0, 1)]
    for name, axis in (("self_attn.k_proj.weight", 0), ("mlp.down_proj.weight", 1), ("mlp.up_proj.bias", 0)):
        name = f"model.layers.1.{name}"
        np.testing.assert_array_equal(np.concatenate([s[name] for s in shards], axis), whole[name])
    assert ["model.layers.0.self_attn.o_proj.bias" in shard for shard in shards] == [True, False]
    assert "lm_head.weight" not in shards[1]


def test_rank_0_has_the_changes_of_the_head_and_the_embedding(tmp_path):
    """Rank 0 has the whole changes. A rank can have fewer neurons than the embedding has columns."""
    model = load_model(str(make_safetensors_model(tmp_path / "m", intermediate_size=96)))
    base = random_base(model)
    parts = [Part.of(model, rank, 2).lora(base) for rank in (0, 1)]
    for module in ("lm_head", "embed_tokens"):
        assert [(module, 0) in part.pairs for part in parts] == [True, False]
        for got, want in zip(parts[0].pairs[module, 0], base.pairs[module, 0], strict=True):
            np.testing.assert_array_equal(got, want)
    assert parts[1].pairs["up_proj", 1][1].shape == (2, 48)


def test_a_chat_with_ratings(two, tiny, open_on):
    """The replies are equal before and after ratings, after an undo, and after a restart. After the restart,
    the cache comes from the disk."""
    pair = Pair(tiny.path)
    many, one = (chat_of(open_on, backend, backend.kernels) for backend in pair.both)
    for a, b in zip(many[0], one[0], strict=True):
        for name in ("token_ids", "cached_tokens", "applied", "adapter_version"):
            assert getattr(a, name, None) == getattr(b, name, None)
    micro, wanted = many[-1].lora_b, one[-1].lora_b
    np.testing.assert_allclose(micro, wanted, atol=1e-2 * np.abs(wanted).max())
    assert np.abs(wanted).max() > 0


def test_a_token_stream(two, tmp_path, monkeypatch):
    """With the layers that a GPU uses, MLX draws the tokens, one step ahead of the reader."""
    monkeypatch.setattr(cluster, "LeaderBackend", partial(LeaderBackend, own_layers=False))
    pair = Pair(make_safetensors_model(tmp_path / "m"))

    def run(backend):
        cache, drawn = backend.new_cache(SMALL), []
        for part in (PROMPT[:60], PROMPT[60:100]):  # the second stream begins after the first was closed
            stream = backend.stream(cache, None, Sampling(0.0), 20)
            stream.prefill(part)
            drawn += [stream.read() for _ in range(12)]
            stream.close()
        return drawn, stream.take_hidden()

    assert pair.many.streams
    assert_same(pair, run)


def test_all_ranks_are_measured_before_the_model_loads(over_two, pair, monkeypatch):
    said = []
    monkeypatch.setattr(cluster, "reports", [said.append])
    opened = []
    many = cluster.open_leader(pair.model, 1, lambda model, layers: opened.append((model, layers)))
    assert opened == [(pair.model, pair.model.config.n_layers)] and many.config == pair.model.config
    assert len(said) == 1 and said[0].startswith("2 machines: about ")
    assert said[0].endswith("the model does not fit one machine.")


@pytest.mark.parametrize(
    "change, said",
    [
        ({"content": lambda: "0" * 64}, "has other weights"),
        ({"path": Path("/nowhere"), "name": "no/such-model"}, "it has no model no/such-model"),
    ],
)
def test_a_rank_without_the_same_model_is_refused(over_two, pair, change, said):
    with pytest.raises(PeerRefused, match=f"rank 1 .*{said}"):
        cluster.open_leader(replace(pair.model, **change), 1, no_machine)


def test_a_rank_whose_model_has_another_configuration_is_refused(over_two, pair):
    """The weights alone can be the same."""
    other = replace(pair.model.config, rope_theta=2 * pair.model.config.rope_theta)
    with pytest.raises(PeerRefused, match=r"rank 1 .*has other weights or another config"):
        cluster.open_leader(replace(pair.model, shape=other), 1, no_machine)


@pytest.mark.parametrize(
    "shape, n, said",
    [
        ({}, 3, "4 heads and 2 key-value heads. Try 2 machines"),
        ({"family": "mpt", "intermediate_size": 256, "head_dim": 16}, 2, "ALiBi"),
        ({"bits": 4, "group_size": 32, "head_dim": 16, "n_heads": 2}, 2, "o_proj has blocks of 32 columns"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(tmp_path, shape, n, said):
    model = load_model(str(make_safetensors_model(tmp_path / "m", **shape)))
    with pytest.raises(UnsupportedModel, match=said):
        Part.of(model, 1, n)


def test_training_needs_the_whole_model(over_two, tiny):
    with pytest.raises(MemoryRanOut, match="training needs the whole model in one process"):
        LearningRoom(tiny, None).check()
