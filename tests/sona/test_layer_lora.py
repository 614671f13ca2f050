"""What was learned below the head beside the rest: the KV cache, the base LoRA, the store."""

from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.backends.select import open_backend
from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.errors import CorruptFile
from ruvmlx.lora import MicroLoRA
from ruvmlx.lora.layer_lora import base_part, combine_loras, fold_layers, pack_adapter, unpack_layers
from ruvmlx.lora.targets import Targets
from ruvmlx.sona.optional import layer_update
from ruvmlx.sona.trace import LayerGradient

from ..backends.test_lora import random_base
from .feedback import reply
from .layers_below import WIDE, random_body, true_logprob
from .training_runs import steady, tiny_backend  # noqa: F401 - fixtures

# -- the KV cache ------------------------------------------------------------------------------------


def talk(runtime, session, text, seed=5) -> tuple[list[int], int]:
    """Token ids of a reply, and how many of the prompt came from the cache."""
    request = GenerationRequest(
        prompt=text, session_id=session, max_new_tokens=12, sampling=Sampling(seed=seed), ignore_eos=True
    )
    for chunk in runtime.writer.generate(request):
        response = chunk.response
    return response.token_ids, response.cached_tokens


@pytest.mark.parametrize(
    "targets,stale", [("attention", True), ("all", True), ("embedding", True), ("head", False)]
)
def test_pages_of_the_old_version_are_not_used(open_tiny, targets, stale):
    """After a rating the next turn reads its prompt anew, if the layer LoRA has changed, and says what a run
    without any cache says."""
    with open_tiny(learn_targets=targets) as runtime:
        text = "a prompt that is long enough to be worth keeping"
        talk(runtime, "s", text)
        runtime.learning.settle()
        runtime.rate(runtime.writer.last_reply_id, "down")
        ids, cached = talk(runtime, "s", text + " and on")
        assert (cached == 0) == stale
        assert ids == talk(runtime, None, text + " and on")[0]
        again, cached = talk(runtime, "s", text + " and on")
        assert cached > 0 and again == ids  # and is kept until the next rating


def test_a_reply_in_flight_keeps_its_adapter(open_tiny):
    """Two ratings in the middle of a reply: its words are those of an undisturbed one."""
    request = {"prompt": "hello", "max_new_tokens": 24, "sampling": Sampling(seed=3), "ignore_eos": True}
    with open_tiny(learn_targets="all") as runtime:
        ids = [reply(runtime, seed=i) for i in range(2)]
        for chunk in runtime.writer.generate(GenerationRequest(**request)):
            wanted = chunk.response
        for i, chunk in enumerate(runtime.writer.generate(GenerationRequest(**request))):
            if 2 <= i < 4:
                lora = runtime.backend.lora
                runtime.rate(ids[i - 2], "down")
                assert runtime.backend.lora is lora
            found = chunk.response
        assert found.token_ids == wanted.token_ids
        runtime.learner.sync()
        assert runtime.backend.lora is not lora


# -- one adapter with the rest -----------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2])
def test_body_and_base_together_are_both(tiny, rank):
    """Their sum, matrix by matrix; the gradients of the base's own factors are found again."""
    layer_lora, base = random_body(tiny.config, rank=rank), random_base(tiny.config, size=0.1)
    both = combine_loras(base, layer_lora)
    for place in both.pairs:
        whole = base.scale * base.pairs[place][0] @ base.pairs[place][1] if place in base.pairs else 0
        whole = whole + (
            layer_lora.pairs[place][0] @ layer_lora.pairs[place][1] if place in layer_lora.pairs else 0
        )
        a, b = both.pairs[place]
        np.testing.assert_allclose(both.scale * a @ b, whole, atol=1e-5)
    for place, (a, b) in base_part(both.pairs, base).items():
        np.testing.assert_array_equal(a, base.pairs[place][0])
        np.testing.assert_array_equal(b, base.pairs[place][1])
    assert combine_loras(base, layer_lora.with_zero_b()) is base and combine_loras(None, None) is None


@pytest.mark.parametrize("rank", [1, 2])
def test_consolidation_keeps_the_outputs(tiny, rank):
    backend = open_backend("reference", tiny)
    layer_lora, base = random_body(tiny.config, rank=rank), random_base(tiny.config, size=0.1)
    tokens = list(range(3, 40))
    backend.set_lora(combine_loras(base, layer_lora))
    wanted = backend.hidden_states(tokens)
    asked: list[int] = []
    backend.set_lora(fold_layers(base, layer_lora, 64, lambda: asked.append(1)))
    assert len(asked) == len(layer_lora.pairs)
    np.testing.assert_allclose(backend.hidden_states(tokens), wanted, atol=1e-5 * abs(wanted).max())
    backend.set_lora(base)
    assert abs(backend.hidden_states(tokens) - wanted).max() > 1e-3 * abs(wanted).max()
    left = layer_lora.with_zero_b()
    assert not left.moves and np.array_equal(left.evidence, layer_lora.evidence)


def test_a_promotion_takes_the_body_along(open_tiny, monkeypatch):
    """By the background loop itself: the base holds what ratings had moved; the layer LoRA starts at zero."""
    from ruvmlx.sona.background import Background, TrainingSettings

    with open_tiny(learn_targets="all") as runtime:
        for i in range(4):
            runtime.rate(reply(runtime, seed=i % 2), "up" if i % 2 else "down")
        layer_lora = runtime.learner.state.layer_lora
        monkeypatch.setattr("ruvmlx.sona.promotion.objection", lambda *a: "")
        quick = TrainingSettings(steps=1, lr=1e-9, warmup=1, rank=3, minimum=3)
        before = true_logprob(runtime, runtime.writer.last_reply_id)
        monkeypatch.setattr("ruvmlx.sona.promotion.ROOM", 1e6)
        report = Background(runtime.learner, runtime.model, quick).run()
        assert report["promoted"], report
        learner = runtime.learner
        assert not learner.state.layer_lora.moves and np.array_equal(
            learner.state.layer_lora.evidence, layer_lora.evidence
        )
        assert true_logprob(runtime, runtime.writer.last_reply_id) == pytest.approx(before, abs=1e-3)
        assert runtime.rate(reply(runtime, seed=7), "up").applied and learner.state.layer_lora.moves


@pytest.mark.parametrize("rank", [1, 2])
def test_it_is_stored_beside_the_head(tiny, rank):
    micro = MicroLoRA.fresh(np.ones((tiny.config.hidden_size, 2)), tiny.config.vocab_size)
    layer_lora = random_body(tiny.config, rank=rank)
    data = pack_adapter(micro, layer_lora)
    again = unpack_layers(data, tiny.config)
    stored = MicroLoRA.from_bytes(data, tiny.config.hidden_size, tiny.config.vocab_size)
    assert pack_adapter(stored, again) == data
    assert (again.frame, again.places) == (layer_lora.frame, layer_lora.places)
    assert unpack_layers(micro.to_bytes(), tiny.config) is None
    for name in ("lora_a", "lora_b", "evidence", "fisher"):
        broken = replace(layer_lora, **{name: np.full_like(getattr(layer_lora, name), np.nan)})
        with pytest.raises(CorruptFile):
            unpack_layers(pack_adapter(micro, broken), tiny.config)


def test_a_top_k_that_changes_gives_up_what_it_leaves(tiny):
    """The place with the largest gradients is moved; one that loses its rank goes back."""
    places = (("q_proj", 0), ("v_proj", 1))
    layer_lora = random_body(tiny.config, places=places)
    layer_lora = replace(layer_lora.with_zero_b(), evidence=np.zeros_like(layer_lora.evidence), tokens=0.0)
    targets, n = Targets(False, places, 1), layer_lora.lora_b.size
    first, second = np.zeros(n, np.float32), np.zeros(n, np.float32)
    first[: layer_lora.starts[1]], second[layer_lora.starts[1] :] = 1.0, 9.0
    one = layer_update.update(layer_lora, LayerGradient(layer_lora.frame, first, 5), 1.0, 1.0, targets, WIDE)
    assert one.pairs[places[0]][1].any() and not one.pairs[places[1]][1].any()
    two = layer_update.update(one, LayerGradient(layer_lora.frame, second, 5), 1.0, 1.0, targets, WIDE)
    np.testing.assert_allclose(two.pairs[places[0]][1], 0, atol=1e-6)
    assert two.pairs[places[1]][1].any()
