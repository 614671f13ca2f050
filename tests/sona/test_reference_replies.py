"""The replies that the model writes to be calibrated."""

import numpy as np
import pytest

from apps.prove import prompts
from apps.prove.retention import NeutralText
from ruvmlx.backends.base import original_model
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.models.config.model import Message
from ruvmlx.pausing import Stopped
from ruvmlx.sona import calibration, reference_text
from ruvmlx.sona.calibration import Measured, Measurement
from ruvmlx.sona.reference_replies import MAX_TOKENS, ReferenceReplies


def by_one(backend, tokenizer, question, limit):
    """The slow twin: one reply, and its states by reading it again."""
    prompt = tokenizer.encode_chat([Message("user", question)])
    left = min(MAX_TOKENS, limit - len(prompt))
    if left <= 0:
        return np.zeros((0, 0), np.float32)
    cache = backend.new_cache()
    logits, ids = backend.prefill(prompt, cache).logits, []
    while True:
        ids.append(int(np.argmax(logits)))
        if ids[-1] in tokenizer.eos_ids or len(ids) == left:
            break
        logits = backend.decode(ids[-1], cache).logits
    return backend.hidden_states([*prompt, *ids[:-1]])[len(prompt) - 1 :]


@pytest.fixture
def backend(tiny):
    return NativeBackend(tiny, threads=1)


def write(replies, pause=lambda: None, enough=lambda: False):
    noted = []
    replies.write(pause, noted.append, enough)
    return noted


@pytest.mark.parametrize("limit", [2048, 61])
def test_the_states_are_those_of_replies_written_one_by_one(tiny, backend, limit, whole_text):
    replies = ReferenceReplies(backend, tiny.tokenizer, limit)
    assert sum(write(replies)) == replies.done == len(reference_text.questions())
    each = [by_one(backend, tiny.tokenizer, q, limit) for q in reference_text.questions()]
    assert len(replies.states) == sum(map(len, each)) > 0
    wanted = np.concatenate([states for states in each if len(states)])
    order = np.lexsort(wanted.T[:3])
    found = np.stack(replies.states)
    np.testing.assert_allclose(found[np.lexsort(found.T[:3])], wanted[order], atol=2e-3)


def test_an_interrupted_writing_goes_on(tiny, backend, whole_text):
    whole, stopped = (ReferenceReplies(backend, tiny.tokenizer, 2048) for _ in range(2))
    write(whole)
    calls = iter(range(10**9))

    def pause():
        if next(calls) % 5 == 4:
            raise Stopped

    noted = []
    while stopped.done < len(reference_text.questions()):
        try:
            stopped.write(pause, noted.append, lambda: False)
        except Stopped:
            continue
    assert sum(noted) == len(reference_text.questions())
    np.testing.assert_array_equal(np.stack(stopped.states), np.stack(whole.states))


def test_enough_time_ends_it(tiny, backend, whole_text):
    replies = ReferenceReplies(backend, tiny.tokenizer, 2048)
    steps = iter([False] * 20 + [True] * 10)
    write(replies, enough=lambda: next(steps))
    assert 0 < len(replies.states) < 20 * 8 and replies.done < len(reference_text.questions())


@pytest.mark.parametrize("parameters, writes", [(10**6, True), (10**10, False)])
def test_a_large_model_writes_for_a_bounded_time(tiny, backend, monkeypatch, parameters, writes):
    monkeypatch.setattr("ruvmlx.sona.calibration.PATIENCE", -1.0)
    measurement = Measurement(Measured(backend, tiny.tokenizer, 2, 2048, parameters))
    with original_model(backend):
        measurement.run()
    assert bool(measurement._replies.states) is writes


def test_the_reading_finds_replies_to_other_questions(starter, whole_text):
    """lora_a reads about 1 in each reply to a question that is not in the reference, and little in other
    prose. Fitted to the reference text alone it read 0.2 in one reply, and 0.37 in prose."""
    backend, tokenizer = NativeBackend(starter, threads=1), starter.tokenizer
    probe = calibration.measure(backend, tokenizer, 2, 2048)
    asked = prompts.own("heldout")[:12]
    replies = [by_one(backend, tokenizer, question, 2048) @ probe.directions[:, 0] for question in asked]
    each = np.array([reading.mean() for reading in replies]) / np.concatenate(replies).mean()
    prose = NeutralText(backend, tokenizer)._frozen @ probe.directions[:, 0]
    assert each.min() > 0.5 and np.sqrt((prose**2).mean()) / np.concatenate(replies).mean() < 0.25
