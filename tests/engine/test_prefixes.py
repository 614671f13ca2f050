"""A prompt starts from the longest prefix that any earlier request with the same key has read."""

import itertools
import random

import numpy as np
import pytest

from ruvmlx.backends.base import PAUSED, with_lora
from ruvmlx.backends.mlx.backend import MLXBackend
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.backends.reference import ReferenceBackend
from ruvmlx.engine import GenerationRequest, LLMInferenceEngine, Sampling
from ruvmlx.engine.batch import generate_many
from ruvmlx.engine.session import common_prefix
from ruvmlx.engine.sessions import SessionManager
from ruvmlx.kv.cache import PagedCache
from ruvmlx.kv.chain import extend, root, shared_pages
from ruvmlx.kv.policy import F16, TIERED, TierPolicy
from ruvmlx.kv.pool import PagePool
from ruvmlx.lora.base_lora import BaseLoRA
from ruvmlx.models.load import load_model
from ruvmlx.pausing import Stopped
from ruvmlx.tiers import COLD, HOT, PAGE
from tests.models.make_models import make_safetensors_model
from tests.oracles.plain_storage import PlainStorage

from .conftest import SMALL


def tokens_of(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, n).tolist()


def greedy_request(prompt: list[int], **fields) -> GenerationRequest:
    fields = {"max_new_tokens": 6, "sampling": Sampling(0.0), "ignore_eos": True} | fields
    return GenerationRequest(input_ids=prompt, **fields)


@pytest.fixture
def packed_engine(packed_model):
    """A 4-bit model on the native backend, f16: rows of its batches have the same bits as alone."""
    return LLMInferenceEngine(packed_model, NativeBackend(packed_model, threads=1, chunk=64), F16)


# Which prefix ---------------------------------------------------------------------------------------


def test_a_chain_names_whole_prefixes():
    """Each name depends on the key, the salt and all tokens before; a page that is not full has none."""
    key, tokens = {"model": "m"}, tokens_of(5 * PAGE + 63)
    chain = extend([root(key)], tokens)
    assert len(chain) == 6 and extend(extend([root(key)], tokens[:100]), tokens) == chain
    assert len({root(key), root(key, "a"), root(key, "b"), root({"model": "n"})}) == 4
    for i in range(5):
        changed = [*tokens]
        changed[PAGE * i + i] += 1
        assert shared_pages(chain, extend([root(key)], changed)) == i
    assert shared_pages(chain, extend([root(key, "a")], tokens)) == -1


class ListBackend:
    """A backend without arithmetic: caches over a list."""

    name = kernels = "bare"
    lora = None

    def __init__(self, budget=0):
        self.pool = PagePool(PlainStorage(), budget, lambda: 0.0)

    def new_cache(self, policy):
        return PagedCache(self.pool, policy or F16)


def read(manager: SessionManager, prompt: list[int], salt: str = "", session_id: str | None = None):
    """A run's calls: find, trim, read the rest. -> (session, cached tokens)"""
    session = manager.get_or_create(session_id, prompt, salt)
    cached = manager.rewind(session, prompt)
    append(session, prompt[cached:])
    return session, cached


def append(session, tokens: list[int]) -> None:
    cache, storage = session.cache, session.cache.pool.storage
    cache.reserve(len(tokens))
    for i, token in enumerate(tokens):
        storage.write(cache, cache.offset + i, token)
    cache.advance(len(tokens))
    session.tokens += tokens


@pytest.mark.parametrize("seed", range(6))
def test_the_longest_prefix_is_found_wherever_it_is(seed):
    """Sessions, requests without one, running ones, two salts: as many tokens are found as the best of all
    sequences shares with the prompt, and they are the right ones."""
    rng, backend = random.Random(seed), ListBackend()
    manager, sequences = SessionManager(backend, capacity=10**6), []
    for _ in range(60):
        salt, prompt = rng.choice(["", "", "b"]), tokens_of(rng.randrange(1, 80), rng.randrange(3))
        for other_salt, session in rng.sample(sequences, min(len(sequences), 1)):
            if salt == other_salt:
                prompt = session.tokens[: rng.randrange(len(session.tokens) + 1)] + prompt
        known = [common_prefix(s.tokens, prompt) for its, s in sequences if its == salt]
        session_id = rng.choice([None, None, "s", "t"])
        session, cached = read(manager, prompt, salt, session_id)
        assert cached == min(max(known, default=0), len(prompt) - 1)
        assert backend.pool.storage.read(session.cache) == session.tokens == prompt
        append(session, tokens_of(rng.randrange(0, 100), rng.randrange(10**6)) or [5])
        if rng.random() < 0.7:
            manager.done(session)
        sequences = [row for row in sequences if row[1] is not session] + [(salt, session)]
    sequences.clear(), manager.clear()
    del session
    assert backend.pool.nbytes == 0 and backend.pool.storage.pages == {}


def test_a_long_conversation_does_not_spoil_its_beginning():
    """The point where two sequences part is kept: a third one finds it in the precision that it had then."""
    manager, system = SessionManager(ListBackend(), TIERED), tokens_of(4000)
    one, _ = read(manager, [*system, 1])
    append(one, tokens_of(90, seed=4))
    manager.done(one)
    two, cached = read(manager, [*system, 2, *tokens_of(100)])
    assert cached == 4000
    manager.done(two)
    for _ in range(3):
        goes_on, cached = read(manager, [*one.tokens, *tokens_of(1500, seed=5)])
        assert cached == len(one.tokens)
        manager.done(goes_on)
        one = goes_on
    third, cached = read(manager, [*system, 3])
    assert cached >= 4000 - PAGE
    alone, _ = read(SessionManager(ListBackend(), TIERED), [*system, 3])
    assert third.cache.stats().tokens[COLD] <= alone.cache.stats().tokens[COLD] + PAGE


# Whole requests -------------------------------------------------------------------------------------


def test_replies_with_reuse_are_those_without(packed_engine):
    """An agent's requests, in chats and outside: of each only what is new is read, and the tokens of the
    reply are those of an engine that has read nothing before."""
    engine, system = packed_engine, tokens_of(150)
    prompts = [system + tokens_of(10, seed=i) for i in range(2)]
    for turn in range(4):
        for i in (0, 1):
            got = engine.generate(greedy_request(prompts[i], session_id="chat" if i else None))
            new = LLMInferenceEngine(engine.model, engine.backend, F16).generate(greedy_request(prompts[i]))
            assert got.token_ids == new.token_ids and new.cached_tokens == 0
            assert got.cached_tokens >= (len(prompts[i]) - 22 if turn else 150 * i)
            prompts[i] += [*got.token_ids, *tokens_of(15, seed=10 * turn + i)]


def test_the_same_prompt_is_read_once(packed_engine):
    """Several replies to one prompt, one after the other or in one batch: each reads one token more."""
    prompt = tokens_of(200)
    seeded = [greedy_request(prompt, sampling=Sampling(0.9, seed=i)) for i in range(3)]
    apart = [packed_engine.generate(request) for request in seeded]
    assert [response.cached_tokens for response in apart] == [0, 199, 199]
    batch = {r.request_id: r for r in generate_many(packed_engine, seeded)}
    assert [batch[r.request_id].cached_tokens for r in seeded] == [199] * 3
    assert [batch[r.request_id].token_ids for r in seeded] == [r.token_ids for r in apart]
    packed_engine.sessions.clear()
    found = {r.request_id: r for r in generate_many(packed_engine, seeded)}
    assert [found[r.request_id].cached_tokens for r in seeded] == [0, 199, 199]


def test_a_request_that_was_cancelled_leaves_what_it_read(packed_engine):
    prompt = tokens_of(400)
    request = greedy_request(prompt)
    for chunk in packed_engine.stream(request):
        if chunk.prefilled >= 64:
            request.cancel.set()
    assert 64 <= packed_engine.generate(greedy_request(prompt)).cached_tokens <= 399


def test_a_salt_keeps_others_out(packed_engine):
    """Nothing of a request with another salt is found, so its prompt cannot be guessed by the time taken."""
    prompt = tokens_of(200)
    found = [
        packed_engine.generate(greedy_request(prompt, cache_salt=salt, session_id=chat)).cached_tokens
        for salt, chat in [("", None), ("a", None), ("b", "s"), ("a", "s"), ("b", None), ("", "s")]
    ]
    assert found == [0, 0, 0, 199, 199, 199]


def test_only_what_keys_and_values_depend_on_separates(packed_model):
    """A base LoRA below the head and another policy do; a change of the head does not."""
    rng, c, prompt = np.random.default_rng(4), packed_model.config, tokens_of(200)

    def base(module: str, out: int) -> BaseLoRA:
        a = rng.normal(size=(c.hidden_size, 2)).astype(np.float32)
        return BaseLoRA({(module, 0): (a, rng.normal(size=(2, out)).astype(np.float32))}, 0.1)

    head, below = base("lm_head", c.vocab_size), base("v_proj", c.n_kv_heads * c.head_dim)
    backend = NativeBackend(packed_model, threads=1)
    engine = LLMInferenceEngine(packed_model, backend, F16)

    def cached_count(lora, policy=F16) -> int:
        engine.sessions.policy = policy
        with with_lora(backend, lora):
            return engine.generate(greedy_request(prompt)).cached_tokens

    assert [cached_count(None), cached_count(head), cached_count(below), cached_count(below)] == [
        0,
        199,
        0,
        199,
    ]
    assert [cached_count(None, SMALL), cached_count(None, SMALL), cached_count(head, F16)] == [0, 199, 199]


def change_of_a_layer(model) -> BaseLoRA:
    rng, c = np.random.default_rng(1), model.config
    a, b = rng.normal(size=(c.hidden_size, 2)), 0.3 * rng.normal(size=(2, c.n_kv_heads * c.head_dim))
    return BaseLoRA({("v_proj", 0): (a.astype(np.float32), b.astype(np.float32))}, 1.0)


@pytest.mark.parametrize("stops_after", [None, 0, 2])
def test_a_chat_is_read_again_after_a_change_of_the_layers(each, stops_after):
    """The next reply then finds all of the chat, and is that of a model that read the chat at once."""
    first = each.generate(greedy_request(tokens_of(150), session_id="chat"))
    prompt = [*tokens_of(150), *first.token_ids, *tokens_of(5, 2)]
    pauses = itertools.count()

    def pause():
        if next(pauses) == stops_after:
            raise Stopped

    with with_lora(each.backend, change_of_a_layer(each.model)):
        assert each.sessions.read_again("no such chat", pause) == 0
        if stops_after is not None:
            with pytest.raises(Stopped):
                each.sessions.read_again("chat", pause)
        read = each.sessions.read_again("chat", lambda: None)
        read_before = 0 if stops_after is None else PAUSED * (stops_after + 1)
        assert read == len(each.sessions.get("chat").tokens) - read_before
        assert each.sessions.read_again("chat", lambda: None) == 0
        again = each.generate(greedy_request(prompt, session_id="chat"))
        assert again.cached_tokens >= len(prompt) - 6
        fresh = each.generate(greedy_request(prompt, cache_salt="other"))
        assert fresh.cached_tokens == 0 and again.token_ids == fresh.token_ids
    assert each.sessions.read_again("chat", lambda: None) > 0


def test_what_failed_is_not_reused(packed_engine, monkeypatch):
    prompt = tokens_of(200)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(packed_engine.backend, "decode", lambda *_: 1 / 0)
        packed_engine.generate(greedy_request(prompt))
    assert packed_engine.generate(greedy_request(prompt)).cached_tokens == 0


KINDS = {
    "reference": lambda m: (ReferenceBackend(m), None),
    "native-plain": lambda m: (NativeBackend(m, threads=1), None),
    "mlx-plain": lambda m: (MLXBackend(m, device="cpu", threads=1), None),
    "mlx-tiered": lambda m: (MLXBackend(m, device="cpu", threads=1), SMALL),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 90])
def test_every_kind_of_cache_is_forked_or_left_alone(kind, window, tmp_path):
    """Copies, slices and windows that have forgotten the beginning: the logits are those without reuse."""
    sizes = {"head_dim": 64, "n_heads": 4, "n_kv_heads": 2, "sliding_window": window, "max_context": 1024}
    model = load_model(str(make_safetensors_model(tmp_path / "m", **sizes)))
    backend, policy = KINDS[kind](model)
    engine, system = LLMInferenceEngine(model, backend, policy), tokens_of(700)
    found = []
    for n, seed in ((700, 1), (700, 2), (300, 3), (700, 4)):
        request = greedy_request(system[:n] + tokens_of(20, seed), logprobs=1)
        got = engine.generate(request)
        want = LLMInferenceEngine(model, backend, policy).generate(request)
        np.testing.assert_allclose(
            [t.logprob for t in got.logprobs[:1]], [t.logprob for t in want.logprobs[:1]], atol=5e-2
        )
        found.append(got.cached_tokens)
    assert found[0] == 0 and 600 <= found[1] <= 700 and 600 <= found[3] <= 700
    assert window or (192 if policy else 300) <= found[2] <= 300


# Limits ---------------------------------------------------------------------------------------------


def test_forks_share_their_pages():
    manager, system = SessionManager(ListBackend(), F16), tokens_of(10 * PAGE)
    sessions = [read(manager, [*system, i])[0] for i in range(5)]
    assert manager.nbytes < 11 * 400 + 5 * (400 + 16 * 11)
    for session in sessions:
        manager.done(session)
    assert len(manager) == 5


def test_the_least_recently_used_go_first():
    backend = ListBackend()
    manager = SessionManager(backend, F16, capacity=3)
    prompts = [[i, *tokens_of(100, seed=i)] for i in range(4)]
    for prompt in (prompts[0], prompts[1], prompts[2], [*prompts[0], 7], prompts[3]):
        manager.done(read(manager, prompt)[0])
    assert [read(manager, prompt)[1] for prompt in prompts] == [100, 0, 100, 100]


def test_a_sequence_that_contains_another_takes_its_place():
    manager, prompt = SessionManager(ListBackend(), F16), []
    for turn in range(10):
        prompt += tokens_of(50, seed=turn)
        manager.done(read(manager, prompt)[0])
    assert len(manager) == 1


def test_bytes_are_limited_and_running_ones_stay():
    backend = ListBackend()
    manager = SessionManager(backend, F16)
    manager.limit = 20 * 400
    running = read(manager, tokens_of(640, seed=99))[0]
    for i in range(20):
        manager.done(read(manager, [i, *tokens_of(200, seed=i)])[0])
        assert manager.nbytes <= manager.limit
    assert backend.pool.storage.read(running.cache) == running.tokens


def test_the_budget_takes_kept_caches_before_precision():
    backend = ListBackend(budget=30 * 400)
    manager = SessionManager(backend, TIERED)
    for i in range(6):
        manager.done(read(manager, [i, *tokens_of(250, seed=i)])[0])
    session, _ = read(manager, [77, *tokens_of(250, seed=77)])
    append(session, tokens_of(900))
    assert backend.pool.level == 0 and backend.pool.nbytes <= backend.pool.budget
    append(session, tokens_of(5000))
    assert backend.pool.level > 0 and len(manager) == 0


def test_a_run_that_is_dropped_leaves_nothing():
    backend = ListBackend()
    manager = SessionManager(backend, F16)
    session, _ = read(manager, tokens_of(500))
    del session
    assert backend.pool.pages[HOT] == 0 and manager.nbytes == 0


def test_dropping_a_chat_drops_what_was_forked_from_it():
    manager = SessionManager(ListBackend(), TierPolicy("tiered", (64, 128)))
    session, _ = read(manager, tokens_of(300), session_id="chat")
    manager.done(manager.fork(session))
    manager.done(session)
    manager.drop("chat")
    del session
    assert len(manager) == 0 and manager.nbytes == 0
