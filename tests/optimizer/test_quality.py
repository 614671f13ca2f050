"""The estimated quality of a reply: loops, cut replies and wrong lengths score lower."""

from dataclasses import replace

import pytest

from ruvmlx.engine.types import GenerationResponse
from ruvmlx.kv.cache import KVStats
from ruvmlx.optimizer.asked_length import AskedLength, asked_length
from ruvmlx.optimizer.quality import WEIGHTS, PredictedStars, combine, estimate

GOOD = "The Nile is in Africa. The Amazon is in South America. The Rhine is in Europe."


def response(text=GOOD, tokens=None, **fields) -> GenerationResponse:
    ids = list(range(len(text.split()))) if tokens is None else tokens
    known = dict(
        request_id="r", session_id=None, text=text, token_ids=ids, prompt_tokens=5, cached_tokens=0,
        generation_tokens=len(ids), finish_reason="stop", ttft_ms=1.0, latency_ms=2.0, prompt_tps=1.0,
        generation_tps=1.0, cache_tokens=9, kv=KVStats.all_f16("f16", 9, 1, 1),
    )  # fmt: skip
    return GenerationResponse(**known | fields)


def value(question="Tell me about rivers", reply=None, **more) -> float:
    return estimate(question, reply or response(), **more).value


def test_a_plain_reply_is_good():
    found = estimate("Tell me about rivers", response())
    assert found.value == 1.0 and dict(found.parts) == {"repetition": 1.0, "ending": 1.0}


def test_a_loop_scores_lowest():
    """Half of the newest tokens may repeat, as in tables; from there on the score falls to that of a loop."""
    fresh, loop = list(range(128)), [1, 2, 3, 4] * 32
    half = list(range(64)) + [1, 2, 3, 4] * 16
    scores = [value(reply=response(tokens=ids)) for ids in (fresh, half, loop)]
    assert scores[0] == scores[1] == 1.0 and scores[2] < 0.2
    assert value(reply=response(tokens=fresh, repeats=True, finish_reason="length")) < 0.1


def test_a_reply_that_its_limit_cut_off_scores_lower():
    whole = value()
    after_sentence = value(reply=response(finish_reason="length"))
    inside = value(reply=response("The Nile is in", finish_reason="length"))
    assert inside < after_sentence < whole
    assert value(reply=response(" ", tokens=[1])) < inside


def test_a_stopped_reply_is_not_judged_by_its_end():
    assert "ending" not in estimate("Hello", response(finish_reason="cancelled")).parts


@pytest.mark.parametrize(
    "question,asked",
    [
        ("Name three rivers.", AskedLength(3, "item")),
        ("Please list at most 5 old towns", AskedLength(5, "item", "most")),
        ("Explain gravity in one sentence.", AskedLength(1, "sentence")),
        ("Explain gravity in a sentence.", AskedLength(1, "sentence")),
        ("Write a two-sentence story", AskedLength(2, "sentence")),
        ("Write at least 100 words about cats", AskedLength(100, "word", "least")),
        ("A poem of 4 lines, please", AskedLength(4, "line")),
        ("What is a word?", None),
        ("Why do we have 2 eyes?", None),
        ("Describe rain in a few words", None),
        ("Tell me a joke", None),
    ],
)
def test_the_length_that_a_question_asks_for(question, asked):
    assert asked_length(question) == asked


@pytest.mark.parametrize(
    "question,right,wrong",
    [
        ("Name three rivers.", "The Nile, the Amazon and the Rhine.", "The Nile."),
        ("List 4 tips.", "1. a\n2. b\n3. c\n4. d", "1. a\n2. b\n3. c\n4. d\n5. e\n6. f\n7. g"),
        ("Explain it in one sentence.", "It pulls.", "It pulls. It is weak. It is far."),
        ("Say it in at most 10 words.", "It is a force.", "It is a force " * 5),
        ("Write at least 20 words.", "word " * 20, "word " * 9),
    ],
)
def test_a_wrong_length_scores_lower(question, right, wrong):
    good, bad = (estimate(question, response(text)) for text in (right, wrong))
    assert good.parts["length"] == 1.0 > bad.parts["length"] and bad.value < good.value


def test_the_taste_counts_only_if_it_is_clear():
    unclear, liked, disliked = PredictedStars(3.4, 0.8), PredictedStars(4.6, 0.5), PredictedStars(1.2, 0.5)
    assert "taste" not in estimate("Hi", response(), unclear).parts
    assert value(taste=disliked) < value(taste=liked) < value(taste=unclear) == 1.0


def test_other_samples_count_where_they_exist():
    same, other = value(others=[GOOD, GOOD]), value(others=["Something else entirely"] * 2)
    assert other < same == 1.0


def test_a_call_of_a_tool_has_no_length():
    called = replace(response(""), calls=("a call",), token_ids=[7])
    assert estimate("Name three rivers.", called).parts == {"repetition": 1.0, "ending": 1.0}


def test_the_value_is_the_weighted_geometric_mean():
    assert combine({"repetition": 0.25, "ending": 1.0}) == pytest.approx(0.25 ** (3 / 5), abs=1e-4)
    assert combine(dict.fromkeys(WEIGHTS, 0.0)) == pytest.approx(0.02)
