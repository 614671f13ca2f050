"""`ruvmlx.MicroAdapter`: ratings that make one update, the switch, the counters."""

import pytest

import ruvmlx
from ruvmlx.errors import NotFound, UsageError


@pytest.fixture
def model(tiny_folder, home):
    with ruvmlx.open(tiny_folder, backend="reference", temperature=0, max_tokens=6) as opened:
        yield opened


def test_ratings_wait_for_one_update(model):
    """Two replies, one version, one undo."""
    adapter = ruvmlx.MicroAdapter(model)
    replies = [model.reply(f"hello {i}") for i in range(2)]
    assert [adapter.accumulate(reply, "up") for reply in replies] == [1, 2]
    assert (adapter.pending, adapter.status.pending, model.learned().ratings) == (2, 2, 0)
    done = adapter.apply()
    assert (done.ratings, done.applied, done.adapter_version) == (2, True, 1)
    assert 0 < done.kl <= done.kl_cap and done.seconds > 0
    assert (adapter.pending, model.learned().ratings) == (0, 2)
    assert model.undo().ratings == 0


def test_a_penalty_protects_an_earlier_version(model):
    adapter = ruvmlx.MicroAdapter(model)
    first = model.reply("hello").rate("up").adapter_version
    adapter.accumulate(model.reply("goodbye"), 1)
    assert adapter.apply_with_ewc(first, 50.0).adapter_version == first + 1
    adapter.accumulate(model.reply("again"), "up")
    with pytest.raises(NotFound):
        adapter.apply_with_ewc(99)
    adapter.reset()
    with pytest.raises(UsageError):
        adapter.apply()


def test_the_switch(model):
    """Switched off, the model writes as the original; switched on, as it learned to."""
    adapter = ruvmlx.MicroAdapter(model)
    plain = model.reply("hello").text
    for seed in range(3):
        model.reply("hello", temperature=1.0, seed=seed).rate("down" if seed else "up")
    model.rate(model.reply("hello"), "down")
    learned = model.reply("hello").token_ids
    adapter.disable()
    adapter.disable()
    assert not adapter.is_enabled and not adapter.status.enabled and model.adapter is None
    assert model.reply("hello").text == plain
    adapter.enable()
    assert adapter.is_enabled and model.reply("hello").token_ids == learned


def test_another_adapter_learns_while_one_is_in_use(model):
    work = ruvmlx.MicroAdapter(model, "work")
    work.accumulate(model.reply("hello"), "up")
    assert work.apply().adapter_version == 1 and not work.is_enabled
    assert model.adapter == "default@0" and work.status.version == 1


def test_starting_over_keeps_the_versions(model):
    adapter = ruvmlx.MicroAdapter(model)
    model.reply("hello").rate("up")
    adapter.accumulate(model.reply("hello"), "up")
    status = adapter.start_over()
    assert (status.adapter_version, adapter.pending, adapter.status.ratings) == (0, 0, 0)
    assert model.learned().versions == [1]


def test_the_counters(tiny_folder, home):
    """Matrices with their own sizes, and what was done with the adapter."""
    with ruvmlx.open(
        tiny_folder, temperature=0, max_tokens=6, micro_rank=1, learn_targets="head,v_proj:1,down_proj:0"
    ) as model:
        adapter, config = ruvmlx.MicroAdapter(model), model._runtime.model.config
        model.reply("hello").rate("up")
        model.reply("goodbye")
        found = adapter.status
        sizes = {(m.module, m.layer): (m.inputs, m.outputs, m.rank, m.made_by) for m in found.matrices}
        d, ffn, kv = config.hidden_size, config.intermediate_size, config.n_kv_heads * config.head_dim
        assert sizes == {
            ("lm_head", 0): (d, config.vocab_size, 1, "rating"),
            ("down_proj", 0): (ffn, d, 1, "rating"),
            ("v_proj", 1): (d, kv, 1, "rating"),
        }
        assert (found.name, found.enabled, found.rank, found.alpha) == ("default", True, 1, 4.0)
        assert (found.ratings, found.updates, found.replies, found.pending) == (1, 1, 2, 0)
        assert found.uses >= found.loads == 1 and found.bytes > 4 * (d + config.vocab_size)


def test_no_adapter_in_use_is_said(tiny_folder, home):
    with ruvmlx.open(tiny_folder, backend="reference", adapter="none") as model:
        with pytest.raises(NotFound):
            ruvmlx.MicroAdapter(model)
        assert ruvmlx.MicroAdapter(model, "work").status.version == 0
