"""NaN, infinity and absurd numbers in every array of an update: nothing is committed, nothing changes."""

import numpy as np
import pytest

from ruvmlx.errors import RuvmlxError

from .feedback import reply, weights

POISONS = (np.nan, np.inf, -np.inf, 1e30, -1e30)


def arrays(runtime, trace) -> dict[str, np.ndarray]:
    """The arrays that a rating reads, by name; each may be overwritten."""
    micro, said = runtime.learner.micro, trace.stats
    return {
        "hidden": trace._hidden[len(trace._hidden) // 2],
        "grad_a": trace.grad_a,
        "grad_b": trace.grad_b,
        "gradient": said.gradient,
        "information": said.information,
        "beside": said.beside,
        "lora_a": micro.lora_a,
        "lora_b": micro.lora_b,
        "evidence": micro.evidence,
    }


def state(runtime) -> tuple:
    """Everything that a rating would change."""
    store = runtime.store
    tables = ("ratings", "adapters", "witness")
    return runtime.status(), *(store.db.value(f"SELECT COUNT(*) FROM {table}") for table in tables)


@pytest.fixture
def runtime_and_reply(open_tiny):
    """A runtime that has learned something, and a reply that waits for its rating."""
    with open_tiny() as runtime:
        for i in range(3):
            runtime.rate(reply(runtime, seed=i), "up" if i % 2 else "down")
        yield runtime, reply(runtime, seed=9)


def assert_refused(runtime, reply_id, rating) -> None:
    """The rating fails with one line, and everything stays as it was."""
    before, bytes_before = state(runtime), runtime.learner.micro.to_bytes()
    with pytest.raises(RuvmlxError) as error:
        runtime.rate(reply_id, rating)
    assert "\n" not in str(error.value)
    assert state(runtime) == before and runtime.learner.micro.to_bytes() == bytes_before


def test_a_thousand_poisoned_updates(runtime_and_reply, full):
    """Layer, place, value and rating by chance. What a reply left and the adapter's weights are read when
    the reply is prepared for its rating, before that or, as here, with it."""
    runtime, reply_id = runtime_and_reply
    rng, stored = np.random.default_rng(0), weights(runtime)
    trace = runtime.learner.traces.held[reply_id]
    for i in range(1000 if full else 200):
        layers = arrays(runtime, trace)
        name = list(layers)[i % len(layers)]
        array = layers[name]
        at = tuple(int(rng.integers(n)) for n in array.shape)
        poison, known = POISONS[rng.integers(len(POISONS))], array[at].copy()
        prepared, array.flags.writeable = trace.stats, True
        array[at] = poison
        if name in ("hidden", "grad_a", "grad_b", "lora_a", "lora_b") or (name == "evidence" and i % 20 < 10):
            trace.stats = None
        try:
            assert_refused(runtime, reply_id, ("up", "down", "5", "1")[rng.integers(4)])
        except BaseException as error:
            raise AssertionError(f"{poison} in {name}{list(at)}") from error
        finally:
            array[at], trace.stats = known, prepared
    assert weights(runtime) == stored
    assert runtime.rate(reply_id, "up").applied


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_the_praise_of_an_end(runtime_and_reply, poison):
    """Only a rating down is sure to read it."""
    runtime, reply_id = runtime_and_reply
    praise = runtime.learner.traces.held[reply_id].stats.praise
    praise[1, 5] = poison
    assert_refused(runtime, reply_id, "down")


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_logits_of_the_reply(open_tiny, monkeypatch, poison):
    """A backend that lets a bad logit through: the reply or its rating is an error, nothing is learned."""
    from ruvmlx.lora import MicroLoRA

    with open_tiny() as runtime:
        runtime.rate(reply(runtime), "up")
        before = runtime.status()
        plain = MicroLoRA.add_to_logits

        def add_poison(self, logits, hidden):
            plain(self, logits, hidden)
            logits[..., 7] = poison

        monkeypatch.setattr(MicroLoRA, "add_to_logits", add_poison)
        with pytest.raises(RuvmlxError):
            runtime.rate(reply(runtime, seed=4), "up")
        monkeypatch.undo()
        assert runtime.status() == before


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("where", ["value", "logprob"])
def test_the_objectives_numbers(runtime_and_reply, monkeypatch, poison, where):
    """An infinite V(x) or log-ratio is clipped to a whole push; NaN is no rating."""
    runtime, reply_id = runtime_and_reply
    if where == "value":
        monkeypatch.setattr(runtime.learner.rating_index, "reward_and_value", lambda *a: (0.5, poison))
    else:
        runtime.learner.traces.held[reply_id].logprob = poison
    if np.isnan(poison):
        assert_refused(runtime, reply_id, "up")
    else:
        assert runtime.rate(reply_id, "up").kl <= 0.1
