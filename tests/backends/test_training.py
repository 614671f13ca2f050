"""Training: values against the oracle, gradients against finite differences, slices that can be stopped."""

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.backends.base import PAUSED
from ruvmlx.backends.mlx import backend as mlx
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.backends.reference import ReferenceBackend
from ruvmlx.lora import MicroLoRA
from ruvmlx.lora.base_lora import EMBEDDING, MODULES, BaseLoRA
from ruvmlx.models.load import load_model
from ruvmlx.platform.mx import mx
from ruvmlx.sampling import log_softmax
from ruvmlx.training import losses as values
from ruvmlx.training import slices
from ruvmlx.training import trainer as training
from ruvmlx.training.slices import TrainingText
from ruvmlx.training.trainer import Trainer
from tests.models.make_models import make_safetensors_model

from .test_agreement import SHAPES, STORED, TOKENS
from .test_lora import FAMILIES, random_base

TARGETS = (*MODULES[:7], "embed_tokens")  # attention, MLP and the embedding
TEXT = TrainingText(tuple(TOKENS[:83]), 71)


@pytest.fixture(
    params=["mistral-window-64", "llama3-scaled", "llama-tied-biased", "stablelm-biased", "mpt-grouped"]
)
def model(request, tmp_path):
    made = (SHAPES | FAMILIES)[request.param]
    return load_model(str(make_safetensors_model(tmp_path / "m", **made, **STORED["float32"])))


def micro(config, seed=0) -> MicroLoRA:
    rng = np.random.default_rng(seed)
    fresh = MicroLoRA.fresh(rng.normal(0, 0.1, (config.hidden_size, 2)), config.vocab_size)
    return replace(fresh, lora_b=rng.normal(0, 0.2, fresh.lora_b.shape).astype(np.float32))


def log_p(model, base, adapter, text) -> np.ndarray:
    """float64 [n, V], where something was said, by the oracle."""
    oracle = ReferenceBackend(model)
    oracle.set_lora(base)
    hidden = oracle.hidden_states(text.tokens[:-1])[text.first - 1 :]
    logits = oracle.head(hidden)
    if adapter is not None:
        adapter.add_to_logits(logits, hidden)
    return np.stack([log_softmax(row.astype(np.float64)) for row in logits])


def test_values_are_the_oracles(model):
    """With a micro and a base on every layer and on the head, against the untouched model."""
    base, adapter, trainer = random_base(model.config, size=0.05), micro(model.config), Trainer(model, "cpu")
    trainer.set_head(base, adapter)
    now, frozen = log_p(model, base, adapter, TEXT), log_p(model, None, None, TEXT)
    said = list(TEXT.tokens[TEXT.first :])
    assert trainer.reply(base, TEXT)[0] == pytest.approx(now[np.arange(len(said)), said].mean(), abs=1e-4)
    kl = np.mean(np.sum(np.exp(frozen) * (frozen - now), axis=1))
    assert trainer.kl(base, TEXT, trainer.states(None, TEXT))[0] == pytest.approx(kl, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("kind", ["reply", "neutral"])
@pytest.mark.parametrize("how", ["cpu", "as on a gpu"])
def test_gradients_are_finite_differences(model, monkeypatch, kind, how):
    """Along a random direction of both factors of one module at a time, all layers together."""
    base, trainer = random_base(model.config, modules=TARGETS, size=0.05), Trainer(model, "cpu")
    if how == "as on a gpu":
        trainer._own = False
    trainer.set_head(None, micro(model.config))
    frozen = trainer.states(None, TEXT)
    run = trainer.reply if kind == "reply" else functools.partial(trainer.kl, frozen=frozen)
    _, grads = run(base, TEXT)
    assert grads.keys() == base.pairs.keys()
    rng = np.random.default_rng(1)
    for module in TARGETS:
        way = {
            p: [rng.normal(0, 1, w.shape).astype(np.float32) for w in base.pairs[p]]
            for p in grads
            if p[0] == module
        }
        slope = sum(np.vdot(d, g) for p, ds in way.items() for d, g in zip(ds, grads[p], strict=True))
        values = [run(_moved(base, way, step), TEXT)[0] for step in (-2e-3, 2e-3)]
        assert (values[1] - values[0]) / 4e-3 == pytest.approx(slope, rel=3e-2, abs=2e-3)


def _moved(base, way, step) -> BaseLoRA:
    pairs = dict(base.pairs)
    for place, ds in way.items():
        pairs[place] = tuple(w + np.float32(step) * d for w, d in zip(base.pairs[place], ds, strict=True))
    return BaseLoRA(pairs, base.scale)


def test_packed_weights_as_on_a_gpu(tmp_path, monkeypatch):
    """4-bit weights stay packed, activations are half as wide: the same gradients, roughly."""
    path = make_safetensors_model(tmp_path / "m", **SHAPES["llama3-scaled"], **STORED["4-bit"])
    model = load_model(str(path))
    base = random_base(model.config, modules=TARGETS, size=0.05)
    exact = Trainer(model, "cpu").reply(base, TEXT)
    as_on_metal = functools.partial(mlx.plan, device="metal")
    monkeypatch.setattr(training, "plan", lambda weights, _: as_on_metal(weights))
    trainer = Trainer(model, "cpu")
    assert trainer._dtype == mx.float16
    rough = trainer.reply(base, TEXT)
    assert rough[0] == pytest.approx(exact[0], rel=2e-2)
    one, other = (np.concatenate([g.ravel() for pair in r[1].values() for g in pair]) for r in (exact, rough))
    assert np.dot(one, other) / np.linalg.norm(one) / np.linalg.norm(other) > 0.99


def test_a_graph_that_is_lent(model, monkeypatch):
    """A GPU's backend holds mlx-lm's modules: no second copy, and the base that it runs is not in the way."""
    as_on_metal = functools.partial(mlx.plan, device="metal")
    monkeypatch.setattr(mlx, "plan", lambda weights, _: as_on_metal(weights))
    backend, base = mlx.MLXBackend(model, device="cpu"), random_base(model.config, modules=TARGETS, size=0.05)
    backend.set_lora(random_base(model.config, 5))
    want, lent = Trainer(model, "cpu").reply(base, TEXT), Trainer(model, "cpu", backend)
    assert lent._graph is backend._graph
    got = lent.reply(base, TEXT)
    assert got[0] == pytest.approx(want[0], abs=1e-5)
    for place in base.pairs:
        np.testing.assert_allclose(got[1][place][0], want[1][place][0], rtol=1e-3, atol=1e-5)
    lent.close()
    assert np.isfinite(backend.verify(TOKENS[:9], backend.new_cache())).all()


def test_a_pass_can_be_left_between_slices(model, monkeypatch):
    """Of one layer each here; what was left does not disturb the next pass."""
    monkeypatch.setattr(slices, "SLICE", 1)
    base, trainer = random_base(model.config, modules=TARGETS), Trainer(model, "cpu")
    calls = []
    want = trainer.reply(base, TEXT, pause=lambda: calls.append(1))
    assert len(calls) >= 2 * model.config.n_layers

    def stop():
        calls.pop()
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer.reply(base, TEXT, pause=stop)
    again = trainer.reply(base, TEXT)
    assert again[0] == pytest.approx(want[0], abs=1e-5)


def test_weights_and_the_upper_layers_alone(model):
    """A weight scales the gradients, 0 spares the way back; what lies below is read once."""
    whole, trainer = random_base(model.config, modules=TARGETS, size=0.05), Trainer(model, "cpu")
    value, _ = trainer.reply(whole, TEXT)
    seen = []
    again, none = trainer.reply(whole, TEXT, lambda v: seen.append(v) or 0.0)
    assert again == pytest.approx(value, abs=1e-5) and none == {} and seen == [again]
    last = model.config.n_layers - 1
    upper = BaseLoRA({p: pair for p, pair in whole.pairs.items() if p[1] == last}, whole.scale)
    lower = BaseLoRA({p: (a, 0 * b) for p, (a, b) in whole.pairs.items()} | dict(upper.pairs), whole.scale)
    for _ in range(2):
        got, want = trainer.reply(upper, TEXT, lambda v: -2.5), trainer.reply(lower, TEXT)
        assert got[0] == pytest.approx(want[0], abs=1e-5)
        for place in upper.pairs:
            for x, y in zip(got[1][place], want[1][place], strict=True):
                np.testing.assert_allclose(x, -2.5 * y, rtol=1e-3, atol=1e-5)


def test_only_named_places_have_gradients(model):
    base = random_base(model.config, modules=("v_proj", "down_proj", "lm_head"))
    trainer = Trainer(model, "cpu")
    trainer.set_head(base, None)
    places = {(m, i) for m in ("v_proj", "down_proj") for i in range(model.config.n_layers)}
    assert trainer.reply(base, TEXT)[1].keys() == places


@pytest.mark.parametrize(("prompt", "said"), [(5, 3), (500, 3), (5, 500), (500, 500), (3, 512), (600, 300)])
def test_long_texts_are_cut(prompt, said):
    """To 512 tokens: the end of the prompt, the beginning of the reply, half of it at least."""
    text = TrainingText.cut(list(range(prompt)), list(range(1000, 1000 + said)))
    assert len(text.tokens) == min(512, prompt + said) and text.first >= 1
    assert text.answer_tokens >= min(said, 256) and text.tokens[text.first] == 1000
    assert text.tokens[text.first - 1] == prompt - 1


@pytest.mark.parametrize("how", ["cpu", "as on a gpu"])
def test_squares_are_those_of_the_full_gradient(model, how):
    """lora_a beside the identity, lora_b above zeros: the same change; lora_b's gradient there is dW's."""
    base, trainer = random_base(model.config, modules=TARGETS, size=0.05), Trainer(model, "cpu")
    if how == "as on a gpu":
        trainer._own = False
    trainer.set_head(None, micro(model.config))
    got = trainer.squares(base, TEXT)
    assert got.keys() == base.pairs.keys()
    for module in TARGETS:
        pairs = dict(base.pairs)
        for place in (p for p in pairs if p[0] == module):
            (a, b), eye = pairs[place], np.eye(len(pairs[place][0]), dtype=np.float32)
            pairs[place] = (np.hstack([a, eye]), np.vstack([b, np.zeros((len(a), b.shape[1]), np.float32)]))
        _, grads = trainer.reply(BaseLoRA(pairs, base.scale), TEXT)
        for place in (p for p in pairs if p[0] == module):
            full = grads[place][1][base.pairs[place][0].shape[1] :] / base.scale
            for axis in (1, 0):
                want = (full**2).sum(axis=axis)
                np.testing.assert_allclose(got[place][1 - axis], want, rtol=1e-2, atol=1e-4 * want.max())


def test_the_embedding_has_gradients_at_the_texts_tokens_alone(model):
    """A token that occurs three times has one row, the sum of three. Other tokens' rows are zeros."""
    base, trainer = random_base(model.config, modules=("embed_tokens",), size=0.05), Trainer(model, "cpu")
    text = TrainingText((*TOKENS[:40], TOKENS[3], *TOKENS[40:60], TOKENS[3], *TOKENS[60:70]), 61)
    _, grads = trainer.reply(base, text)
    (by_a, _), (a, b) = grads[EMBEDDING], base.pairs[EMBEDDING]
    seen = np.unique(text.tokens[:-1])
    assert len(seen) < model.config.vocab_size - 9
    np.testing.assert_array_equal(np.flatnonzero(by_a.any(axis=1)), seen)
    step = np.zeros_like(a)
    step[TOKENS[3]] = 3e-2 * np.sign(by_a[TOKENS[3]])
    values = [trainer.reply(BaseLoRA({EMBEDDING: (w, b)}, base.scale), text)[0] for w in (a - step, a + step)]
    slope = np.abs(by_a[TOKENS[3]]).sum()
    assert (values[1] - values[0]) / 6e-2 == pytest.approx(slope, rel=3e-2, abs=2e-3)


def test_the_mean_input_of_the_embedding_is_a_share_of_each_token(model):
    text = TrainingText((5, 9, 5, 5, 7, 2, 5, 9, 3), 3)
    got = Trainer(model, "cpu").inputs([EMBEDDING, ("v_proj", 1)], text)
    want = np.zeros(model.config.vocab_size)
    for token in (5, 5, 7, 2, 5, 9):  # the tokens at which the answer's six tokens are predicted
        want[token] += 1 / 6
    np.testing.assert_allclose(got[EMBEDDING], want, atol=1e-6)
    assert got["v_proj", 1].shape == (model.config.hidden_size,)


def test_squares_can_be_left_between_slices(model, monkeypatch):
    monkeypatch.setattr(slices, "SLICE", 1)
    base, trainer, calls = random_base(model.config, modules=TARGETS), Trainer(model, "cpu"), []
    trainer.squares(base, TEXT, lambda: calls.append(1))
    assert len(calls) >= 2 * model.config.n_layers

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer.squares(base, TEXT, stop)


@pytest.mark.parametrize(("tokens", "n_in", "n_out"), [(1, 7, 5), (3, 64, 33), (40, 7, 5), (8, 32, 32)])
def test_sums_of_squares_either_way(tokens, n_in, n_out):
    """Few tokens by their products, many by the full gradient; the last case is on the line."""
    rng = np.random.default_rng(tokens)
    x, g = rng.normal(0, 1, (tokens, n_in)), rng.normal(0, 3, (tokens, n_out))
    rows, columns = values.sums(mx.array(x.astype(np.float32)), mx.array(g.astype(np.float32)))
    full = (x.T @ g) ** 2
    np.testing.assert_allclose(np.array(rows), full.sum(axis=1), rtol=1e-3)
    np.testing.assert_allclose(np.array(columns), full.sum(axis=0), rtol=1e-3)


def test_a_slice_is_bounded(model, monkeypatch):
    """Stages are evaluated together only as far as a slice goes; a pass has a pause for each slice."""
    stops = slices.Stops()
    for work in (0.4, 0.5, 0.3, 2.0, 0.1, 0.9):
        stops.add(mx.array(work), work=work * slices.SLICE)
    assert [x.item() for (x,) in stops.slices()] == pytest.approx([0.5, 0.3, 2.0, 0.9])
    assert list(stops.slices()) == []
    base, trainer = random_base(model.config, modules=TARGETS), Trainer(model, "cpu")
    tokens, layers = len(TEXT.tokens), model.config.n_layers
    for size in (tokens * layers, tokens, 1):
        monkeypatch.setattr(slices, "SLICE", size)
        calls = itertools.count()
        trainer.reply(base, TEXT, pause=functools.partial(next, calls))
        assert next(calls) >= 2 * sum(slices.stage_work(tokens).values()) * layers / (2 * size + tokens)


def test_slices_change_nothing(model, monkeypatch):
    """Stages: not a bit, on one thread of BLAS. Rows of the head: the order of a sum."""
    monkeypatch.setattr(training.BLAS, "fixed", True)
    training.BLAS.set_threads(1)
    base, trainer = random_base(model.config, modules=TARGETS, size=0.05), Trainer(model, "cpu")
    trainer.set_head(base, micro(model.config))
    frozen = trainer.states(None, TEXT, lambda: None)
    runs = [trainer.reply, functools.partial(trainer.kl, frozen=frozen)]
    wanted = [run(base, TEXT) for run in runs]
    for slice_, logits, exact in ((1, training.LOGITS, True), (10**9, 3 * model.config.vocab_size, False)):
        monkeypatch.setattr(slices, "SLICE", slice_)
        monkeypatch.setattr(training, "LOGITS", logits)
        for run, want in zip(runs, wanted, strict=True):
            got = run(base, TEXT, pause=lambda: None)
            assert got[0] == want[0] if exact else got[0] == pytest.approx(want[0], abs=1e-5)
            for place in base.pairs.keys() & want[1].keys():
                for x, y in zip(got[1][place], want[1][place], strict=True):
                    if exact:
                        np.testing.assert_array_equal(x, y)
                    np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)


def test_a_graph_is_built_in_blocks(model, monkeypatch):
    """The same weights, and the caller may leave between tensors and within large ones."""
    want = Trainer(model, "cpu").states(None, TEXT)
    monkeypatch.setattr(training.graph, "BLOCK", 1000)
    calls = []
    trainer = Trainer(model, "cpu", pause=lambda: calls.append(1))
    np.testing.assert_array_equal(trainer.states(None, TEXT), want)
    largest = model.config.vocab_size * model.config.hidden_size
    assert len(calls) > largest // 1000

    def stop():
        calls.pop()
        if len(calls) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trainer(model, "cpu", pause=stop)


BACKENDS = (ReferenceBackend, NativeBackend, functools.partial(mlx.MLXBackend, device="cpu"))


@pytest.mark.parametrize("open_it", BACKENDS, ids=("reference", "native", "mlx"))
def test_hidden_states_with_pauses(model, open_it):
    """One for each few tokens, within a long text too; leaving one leaves the backend usable."""
    backend, calls = open_it(model), []
    want = backend.hidden_states(TOKENS)
    got = backend.hidden_states(TOKENS, lambda: calls.append(1))
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)
    if isinstance(backend, NativeBackend):
        np.testing.assert_array_equal(got, want)
    assert len(calls) == -(-len(TOKENS) // PAUSED) > 1

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backend.hidden_states(TOKENS, stop)
    np.testing.assert_allclose(backend.hidden_states(TOKENS), want, rtol=1e-3, atol=1e-4)
