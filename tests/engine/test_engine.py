"""Requests and streams; the tokens are the same with and without a session's KV cache."""

import random

import numpy as np
import pytest

from ruvmlx.engine import GenerationRequest, LLMInferenceEngine, Sampling, run
from ruvmlx.engine.detokenize import StopStrings, StreamDecoder
from ruvmlx.errors import PromptTooLong, UsageError
from ruvmlx.models.config.model import Message

GREEDY = Sampling(temperature=0)


def request(**fields) -> GenerationRequest:
    return GenerationRequest(
        **{"prompt": "hello", "max_new_tokens": 12, "sampling": GREEDY, "ignore_eos": True} | fields
    )


def test_chunks_add_up_to_the_response(engine):
    chunks = list(engine.stream(request()))
    response = chunks[-1].response
    assert [c.response for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert "".join(c.text for c in chunks) == response.text
    assert response.generation_tokens == len(response.token_ids) == 12
    assert response.finish_reason == "length"
    assert response.ttft_ms > 0 and response.generation_tps > 0 and response.prompt_tps > 0


def test_same_seed_same_reply(engine):
    one, two, three = (engine.generate(request(sampling=Sampling(1.0, seed=s))).token_ids for s in (1, 1, 2))
    assert one == two != three


@pytest.mark.parametrize("words", [600, 9000])
def test_a_prompt_that_is_too_long_names_no_more_tokens_than_it_has(engine, tiny, words):
    """A long text is not read to its end, so the number is a lower bound, and the message says so."""
    prompt = "word " * words
    with pytest.raises(PromptTooLong, match="at least") as caught:
        list(engine.stream(request(prompt=prompt)))
    assert 511 < caught.value.tokens <= len(tiny.tokenizer.encode(prompt))


def test_eos_ends_the_reply_and_is_not_part_of_it(engine, tiny, monkeypatch):
    ids = engine.generate(request()).token_ids
    end = next(i for i in range(1, 12) if ids[i] not in ids[:i])
    monkeypatch.setattr(tiny.tokenizer, "eos_ids", frozenset([ids[end]]))
    response = engine.generate(request(ignore_eos=False))
    assert (response.finish_reason, response.token_ids) == ("stop", ids[:end])


def test_stop_string_is_cut_off(engine):
    text = engine.generate(request(max_new_tokens=40)).text
    stop = text[5:8]
    response = engine.generate(request(max_new_tokens=40, stop=(stop,)))
    assert response.text == text[: text.index(stop)]
    assert response.finish_reason == "stop"


def test_cancel_keeps_the_text_so_far(engine):
    r = request(max_new_tokens=200)
    seen = ""
    for chunk in engine.stream(r):
        seen += chunk.text
        if chunk.generated == 5:
            r.cancel.set()
    assert chunk.response.finish_reason == "cancelled"
    assert chunk.response.text == seen and chunk.response.generation_tokens == 5


def test_cancel_during_prefill(engine):
    r = request(prompt="word " * 90)
    r.cancel.set()
    response = engine.generate(r)
    assert (response.finish_reason, response.text, response.prompt_tps) == ("cancelled", "", 0)


def test_a_prompt_that_was_read_in_part_has_the_speed_of_this_part(engine):
    """The speed counted the whole prompt: millions of tokens per second."""
    asked = request(prompt="word " * 90)
    cancelled = engine.run(asked)
    read = cancelled.read_piece(most=32).prefilled
    asked.cancel.set()
    response = cancelled.end().response
    assert 0 < read < response.prompt_tokens
    assert response.prompt_tps == pytest.approx(1e3 * read / response.latency_ms)


def test_logprobs_are_those_of_the_distribution(engine):
    response = engine.generate(request(logprobs=3))
    assert len(response.logprobs) == 12
    for token, entry in zip(response.token_ids, response.logprobs, strict=True):
        assert entry.token_id == token == entry.top[0][0]
        assert entry.logprob == entry.top[0][1] >= entry.top[1][1] >= entry.top[2][1]
        assert np.exp([p for _, p in entry.top]).sum() <= 1 + 1e-6


def test_next_turn_prefills_only_what_is_new(engine):
    first = engine.generate(request(session_id="s", prompt="one two three"))
    prompt = engine.prompt_ids(request(prompt="one two three")) + first.token_ids[:-1]
    again = engine.generate(request(session_id="s", prompt=None, input_ids=[*prompt, 40, 41, 42]))
    assert again.cached_tokens == len(prompt)
    assert again.token_ids == engine.generate(request(prompt=None, input_ids=[*prompt, 40, 41, 42])).token_ids


def test_random_edits_stops_and_branches_equal_an_uncached_run(engine):
    """50 random turns on one session: extended, cut, branched, cancelled; always the uncached tokens."""
    rng = random.Random(4)
    prompt = [rng.randrange(3, 250) for _ in range(20)]
    for _ in range(50):
        prompt = prompt[: rng.randrange(1, len(prompt) + 1)] + [
            rng.randrange(3, 250) for _ in range(rng.randrange(5))
        ]
        r = request(prompt=None, input_ids=prompt, session_id="s", max_new_tokens=5)
        stop_at = rng.choice([None, 1, 3])
        for chunk in engine.stream(r):
            if chunk.generated == stop_at:
                r.cancel.set()
        got = chunk.response.token_ids
        fresh = engine.generate(request(prompt=None, input_ids=prompt, max_new_tokens=5)).token_ids
        assert got == fresh[: len(got)] and len(got) >= 1
        prompt = prompt + got


def test_old_sessions_make_room(engine):
    engine.sessions.capacity = 4
    for i in range(9):
        engine.generate(request(session_id=f"s{i}", max_new_tokens=1))
    assert len(engine.sessions) == 4


def test_reply_is_limited_by_the_context(engine, tiny):
    ids = [5] * (tiny.config.max_context - 3)
    response = engine.generate(request(prompt=None, input_ids=ids, max_new_tokens=50))
    assert (response.generation_tokens, response.finish_reason) == (3, "length")


@pytest.mark.parametrize(
    "bad,message",
    [
        ({"prompt": "  "}, "empty"),
        ({"prompt": None, "messages": [Message("user", "\n")]}, "empty"),
        ({"prompt": None, "input_ids": []}, "empty"),
        ({"prompt": None, "input_ids": [99999]}, "token ids run from 0 to 319"),
        ({"prompt": "word " * 600}, "reads at most 511"),
        ({"max_new_tokens": 0}, "1 or more"),
    ],
)
def test_bad_requests_are_refused_in_one_line(engine, bad, message):
    with pytest.raises(UsageError, match=message) as e:
        engine.generate(request(**bad))
    assert "\n" not in str(e.value)


def test_a_backend_that_fails_midway_leaves_no_half_cache(engine, tiny_backend, monkeypatch):
    engine.generate(request(session_id="s"))

    def fails(*_):
        raise RuntimeError("device lost")

    with monkeypatch.context() as m:
        m.setattr(tiny_backend, "decode", fails)
        with pytest.raises(RuntimeError):
            engine.generate(request(session_id="s"))
    expected = LLMInferenceEngine(engine.model, engine.backend).generate(request()).token_ids
    assert engine.generate(request(session_id="s")).token_ids == expected


class Bytes:
    """A tokenizer of 256 byte tokens."""

    strips_leading_space = False

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


def test_the_space_before_a_continued_text_stays():
    """SentencePiece puts a space before a text; in a reply that goes on, it parts two words."""

    class Words:
        strips_leading_space = True

        def token_bytes(self, token):
            return b" word"

    assert StreamDecoder(Words()).add(1) == "word"
    assert StreamDecoder(Words(), is_at_start=False).add(1) == " word"


@pytest.mark.parametrize(
    "text", ["plain", "naïve café", "日本語と中文", "👩‍👩‍👧‍👦 family 🇫🇷", "mixed é漢🙂z"]
)
def test_utf8_is_never_broken(text):
    decoder = StreamDecoder(Bytes())
    pieces = [decoder.add(b) for b in text.encode()]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_reply_that_ends_within_a_character_ends_before_it(engine, tiny, monkeypatch):
    """The reply and its text in the store ended in U+FFFD."""
    asked = request(max_new_tokens=4, sampling=Sampling(1.0, seed=3))
    parts = dict(zip(engine.generate(asked).token_ids, (b"a", b"\xc3", b"\xa9", b"\xe6\x9d"), strict=True))
    assert len(parts) == 4
    monkeypatch.setattr(tiny.tokenizer, "token_bytes", lambda token: parts.get(token, b""))
    assert engine.generate(asked).text == "a\u00e9"


@pytest.mark.parametrize("seed", range(20))
def test_stop_strings_over_any_chunking(seed):
    """However the text is cut, what is shown is the text before the first stop string."""
    rng = random.Random(seed)
    text = "".join(rng.choice("abc\n") for _ in range(200))
    stops = ("abca", "\n\nc", "cccc")
    stop, shown, at = StopStrings(stops), "", 0
    begins: list[int] = []
    while at < len(text) and not stop.hit:
        size = rng.randrange(6)
        begins.append(at)
        shown += stop.add(text[at : at + size])
        at += size
        told = begins[: stop.shown_count]  # the texts that begin in what is shown
        assert told == [b for b in begins if b < len(shown)]
    shown += stop.flush()
    assert stop.hit or stop.shown_count is None
    ends = [text.find(s) for s in stops if s in text]
    # A chunk may hold two stops: the first place in the text counts among those seen so far.
    assert text.startswith(shown) and shown == text[: min(ends, default=len(text))]


def test_a_request_that_fails_as_it_begins_keeps_no_session(engine, monkeypatch):
    """A running session can never be evicted."""
    engine.generate(request(session_id="a"))

    def out_of_memory(*_):
        raise MemoryError

    with monkeypatch.context() as m, pytest.raises(MemoryError):
        m.setattr(run, "new_drafts", out_of_memory)
        engine.generate(request(session_id="a"))
    assert not engine.sessions._running
    assert engine.generate(request(session_id="a")).finish_reason == "length"
