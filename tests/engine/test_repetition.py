"""Replies that repeat themselves are ended; texts that only look alike are not."""

import re

import pytest

from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.engine.repetition import Repetition, is_repeated_prose
from ruvmlx.engine.types import Begun

# What small models write, from the place where they no longer find out of it.
LOOPS = {
    "one word": "Lucky " * 200,
    "a line": "* 1 1/2 cups milk\n" * 40,
    "a sentence": "I am designed to assist with any topic that you can imagine. " * 30,
    "lines that take turns": (
        "I hope this message finds you well.\n\nThank you for your understanding and support.\n\n"
        "I hope this message finds you well.\n\nI hope this message finds you well.\n\n"
    )
    * 12,
    "a paragraph": (
        "The old dragon lived high up in the mountains, where nobody had ever been before. It was said that "
        "its scales could turn the light of the moon into silver, and that its tears could heal the sick. "
    )
    * 8,
}
NUMBERS = [str(i) for i in range(1, 60)]
ORDINARY = {
    "a table": "\n".join(f"| {n} | {int(n) ** 2} | {int(n) ** 3} |" for n in NUMBERS),
    "JSON": "\n".join(
        f'{{ "id" : {n} , "kind" : "city" , "country" : "Spain" , "open" : true , "tags" : [ ] }} ,'
        for n in NUMBERS
    ),
    "HTML": "\n".join(f'< li > < a href = "# item {n} " > Read more < / a > < / li >' for n in NUMBERS),
    "CSV of zeros": "\n".join(f"{n} , 0 , 0 , 0 , 0 , 0 , 0 , 0 , 0 , 0 , 0 , 0 , 0 , 0" for n in NUMBERS),
    "counting": " ".join(f"{n} sheep ," for n in NUMBERS),
    "code": "\n".join(
        f"self . assertEqual ( convert ( {n} , base = 10 ) , expected [ {n} ] )" for n in NUMBERS
    ),
    "a song": "\n".join(
        f"Verse {n} tells of road number {n} and its {n} bends .\n{'Row , row , row your boat gently . ' * 2}"
        for n in NUMBERS
    ),
}  # fmt: skip


def tokens(text):
    """Words, signs and line ends as numbers: coarser than any tokenizer, so that less is of a row's own."""
    names: dict[str, int] = {}
    return [names.setdefault(word, len(names)) for word in re.findall(r"\n|\S+", text)]


def ends_at(text):
    repetition = Repetition()
    for i, token in enumerate(tokens(text)):
        repetition.add(token)
        if repetition.is_loop:
            return i + 1
    return None


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_noticed_within_a_few_rounds(name):
    """Each loop is noticed, after whatever came before it, at the third or fourth time of its text."""
    before = "Here is what I can tell you about that, and I hope that it helps you a little. "
    at = ends_at(before + LOOPS[name])
    assert at is not None and at < len(tokens(before + LOOPS[name])) * 0.7


@pytest.mark.parametrize("name", ORDINARY)
def test_rows_that_look_alike_are_no_loop(name):
    """Tables, lists, code and refrains have something of their own in each row."""
    assert ends_at(ORDINARY[name]) is None


def looping(token, **more):
    """A request whose reply can only be one token, over and over."""
    sampling = Sampling(0.0, logit_bias=((token, 100.0),))
    return GenerationRequest(prompt="hello", sampling=sampling, max_new_tokens=200, **more)


@pytest.mark.parametrize("name", ORDINARY)
def test_rows_are_no_loop_in_a_model_s_own_tokens(name, starter):
    """The starter writes digits one by one, so a row of its words has even less of its own."""
    repetition = Repetition()
    text = ORDINARY[name]
    ids = starter.tokenizer.encode(text)
    for token in ids:
        repetition.add(token)
        assert not repetition.is_loop
    assert name == "a song" or not is_repeated_prose(ids, text)


def test_a_reply_that_says_the_same_with_small_changes_is_named_at_its_limit(starter):
    """What the starter wrote when it was asked how to tie a tie."""
    ways = [
        f"{opening} is to use a tie made from a fabric that is both durable and beautiful. This can be "
        f"achieved by {verb} a tie that is both functional and beautiful, such as a tie made from a fabric "
        "that is both durable and beautiful."
        for opening in ("One way to tie a tie", "Another way to tie a tie", "The key to tying a tie")
        for verb in ("using", "finding", "making")
    ]
    text = "\n\n".join(ways)
    assert is_repeated_prose(starter.tokenizer.encode(text), text)
    told = "".join(f"On day {day} the ship {verb} on. " for day, verb in enumerate(NUMBERS))
    assert not is_repeated_prose(starter.tokenizer.encode(told), told)


def test_a_reply_that_loops_ends_before_its_limit(engine):
    """The engine ends it and says why; its finish_reason is one that scripts know."""
    reply = engine.generate(looping(7))
    assert (reply.finish_reason, reply.repeats, reply.ending) == ("length", True, "repeats")
    assert 120 < reply.generation_tokens < 160


def test_who_wants_to_go_on_goes_on(engine):
    """With ignore_eos, and in a reply that the user asked to continue, a loop runs to the limit."""
    ids = engine.model.tokenizer.encode("hello")
    for more in ({"ignore_eos": True}, {"input_ids": ids, "begun": Begun("hello", tuple(ids[-1:]))}):
        reply = engine.generate(looping(7, **more))
        assert (reply.generation_tokens, reply.repeats, reply.ending) == (200, False, "length")
