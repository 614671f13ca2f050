"""Faults of replies: each kind is found in a reply that has it, and in no sound one."""

import numpy as np
import pytest

from ruvmlx.sona import faults
from ruvmlx.sona.faults import Faults, is_foreign, is_loop, variety

SOUND = "Bread keeps for two days in a cloth bag. After that you can toast it, or freeze it in slices."


class Letters:
    """A tokenizer: a token is a letter."""

    def decode(self, ids):
        return "".join(map(chr, ids))


def replies(*texts, ended=True):
    return [([*map(ord, text)], ended) for text in texts]


def faults_of(*texts, ended=True, beside=SOUND):
    return Faults.of(replies(*texts, ended=ended), replies(*[beside] * len(texts)), Letters())


@pytest.mark.parametrize(
    ("text", "name"),
    [("", "empty"), (" \n", "empty"), ("and again " * 9, "loops"), ("Хлеб лежит два дня.", "foreign")],
)
def test_a_fault_is_counted_once_and_named(text, name):
    one = faults_of(SOUND, text)
    assert getattr(one, name) == 1 and sum((one.empty, one.loops, one.foreign, one.endless)) == 1
    many = faults_of(SOUND, *[text] * 3)
    assert many.worse_than(faults_of(*[SOUND] * 4)).startswith("3 ")


def test_sound_replies_have_no_fault():
    """Another language of the same script is none either, nor is a foreign word."""
    one = faults_of(SOUND, "The Greek word for bread is psomi (ψωμί), and there are many kinds of it.", "Ja.")
    assert one == Faults(variety=pytest.approx(one.variety)) and one.variety > 0.9
    assert not one.worse_than(faults_of(*[SOUND] * 3))


def test_a_fault_that_the_untouched_model_has_as_often_is_none():
    loop = "on and on and on " * 9
    before = Faults.of(replies(loop), replies(loop), Letters())
    assert before.loops == 1 and not before.worse_than(before)


@pytest.mark.parametrize(
    ("name", "old", "chance"), [("endless", 10, 5), ("endless", 0, 2), ("endless", 22, 2), ("loops", 0, 2)]
)
def test_loops_and_replies_without_an_end_may_grow_by_chance_only(name, old, chance):
    """`chance`: 1.5 standard deviations of the difference of two draws of 24, for example
    1.5 sqrt(2 24 15/48 33/48) = 4.8 for 5 more than 5."""
    plain = Faults(**{name: old})
    assert not Faults(**{name: old + chance}).worse_than(plain)
    assert Faults(**{name: old + chance + 1}).worse_than(plain).startswith(f"{old + chance + 1} replies")


def test_a_user_who_likes_long_replies_may_get_replies_without_an_end_but_no_loops():
    assert not Faults(endless=24).worse_than(Faults(), may_be_longer=True)
    assert Faults(loops=24).worse_than(Faults(), may_be_longer=True)


@pytest.mark.parametrize("name", ["empty", "foreign"])
def test_chance_makes_no_reply_empty_or_foreign(name):
    assert Faults(**{name: 1}).worse_than(Faults()).startswith("1 ")


def test_variety_is_that_of_equally_long_parts():
    same, varied = [1, 2] * 20, [*range(40)]
    assert variety([varied], [varied]) == variety([varied[:9]], [varied]) == 1
    assert variety([same], [varied]) < 0.1
    assert variety([[1, 2, 3]], [[1, 2, 3, 1, 2, 3]]) == 1
    assert variety([[7, 7, 7, 7]], [[1, 2, 3, 4]]) == pytest.approx(1 / 3)
    assert "less variety" in Faults(variety=0.5).worse_than(Faults())


def test_loops_need_repetition_and_not_length():
    rng = np.random.default_rng(1)
    assert not is_loop(rng.integers(0, 500, 400).tolist()) and not is_loop([])
    assert is_loop([*rng.integers(0, 500, 30).tolist(), *[7, 8, 9] * 40])


def test_scripts_are_compared_with_the_untouched_reply():
    assert is_foreign("これはパンです", SOUND) and not is_foreign("これはパンです", "パンは新しいです")
    assert not is_foreign("12:30", SOUND)


def test_a_broken_adapter_is_noticed(tiny, tiny_backend, monkeypatch):
    """Real samples of a model: one whose head only knows one token writes loops."""
    monkeypatch.setattr(faults, "MAX_REPLY_TOKENS", 40)
    monkeypatch.setattr(faults, "questions", lambda: ("Why?", "How do bees fly?", "When?"))

    class OneToken:
        def add_to_logits(self, logits, hidden):
            logits[..., 65] += 1e4

    def sample(adapter):
        return faults.sample(tiny, tiny_backend, adapter, lambda: None)

    plain, broken = sample(None), sample(OneToken())
    assert sample(None) == plain
    assert Faults.of(broken, plain, tiny.tokenizer).loops == 3
    assert "repeat" in Faults.of(broken, plain, tiny.tokenizer).worse_than(
        Faults.of(plain, plain, tiny.tokenizer)
    )
