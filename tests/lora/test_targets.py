"""learn_targets: what the words mean, and what is refused."""

import pytest

from ruvmlx import settings
from ruvmlx.errors import UsageError
from ruvmlx.lora.base_lora import EMBEDDING
from ruvmlx.lora.targets import Targets, parse
from tests.models.shapes import Shape

LLAMA, MPT = Shape().config(), Shape(family="mpt", n_heads=2, n_kv_heads=2).config()
ATTENTION = [(m, layer) for layer in range(2) for m in ("q_proj", "k_proj", "v_proj", "o_proj")]
FFN = [(m, layer) for layer in range(2) for m in ("gate_proj", "up_proj", "down_proj")]


def test_the_head_is_the_default():
    assert parse(settings.Settings().learn_targets, LLAMA) == Targets(True, (), 0)


@pytest.mark.parametrize(
    "text,head,places,top",
    [
        ("head", True, [], 0),
        ("attention", False, ATTENTION, 0),
        ("ffn", False, FFN, 0),
        ("all", True, ATTENTION + FFN, 0),
        ("head,v_proj", True, [("v_proj", 0), ("v_proj", 1)], 0),
        ("v_proj:1,q_proj:0-1", False, [("q_proj", 0), ("q_proj", 1), ("v_proj", 1)], 0),
        ("top:3", False, ATTENTION + FFN, 3),
        ("lm_head,ffn,top:2", True, FFN, 2),
        ("embedding", False, [EMBEDDING], 0),
        ("ffn,head,embed_tokens", True, [EMBEDDING, *FFN], 0),
        ("embedding,top:1", False, [EMBEDDING], 1),
    ],
)
def test_what_the_words_mean(text, head, places, top):
    found = parse(text, LLAMA)
    assert (found.head, set(found.places), found.top) == (head, set(places), top)
    assert len(found.places) == len(places)
    assert settings.parse("learn_targets", text, "a test") == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "heads",
        "top:0",
        "top",
        "q_proj,",
        "lm_head:0",
        "q_proj:1-",
        "attention:3",
        "head ffn",
        "embedding:0",
    ],
)
def test_what_is_no_target(text):
    for refuse in (lambda: parse(text, LLAMA), lambda: settings.parse("learn_targets", text, "a test")):
        with pytest.raises(UsageError, match="expected head, attention") as error:
            refuse()
        assert "\n" not in str(error.value)


def test_places_are_in_the_models_order():
    found = parse("v_proj,embedding,down_proj:0,q_proj:1", LLAMA).places
    layers = [("v_proj", 0), ("down_proj", 0), ("q_proj", 1), ("v_proj", 1)]
    assert found == (EMBEDDING, *layers)


@pytest.mark.parametrize("text", ["q_proj:2", "v_proj:1-2", "v_proj:1-0"])
def test_layers_that_the_model_does_not_have(text):
    with pytest.raises(UsageError, match="0 to 1"):
        parse(text, LLAMA)


def test_modules_that_the_model_does_not_have():
    """An MPT has no gate: groups leave it out, and its name is refused in one line."""
    assert set(parse("ffn", MPT).places) == {place for place in FFN if place[0] != "gate_proj"}
    assert len(parse("top:2", MPT).places) == len(ATTENTION + FFN) - 2
    with pytest.raises(UsageError, match=r"gate_proj.*mpt"):
        parse("q_proj,gate_proj:1", MPT)
