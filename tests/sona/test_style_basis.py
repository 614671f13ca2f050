"""The style basis: its formula, its gradients, and a computation that stops and goes on."""

import numpy as np
import pytest

from ruvmlx.backends.mlx import graph
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.lora.base_lora import BaseLoRA
from ruvmlx.pausing import Stopped
from ruvmlx.platform.mx import mx
from ruvmlx.sona.optional import style_bank
from ruvmlx.sona.optional.style_bank import BasisBuilder, StyleBank, leading
from ruvmlx.sona.optional.style_basis import (
    MODULE,
    BankGradients,
    StyleBasis,
    centre_by_question,
    inverse_information,
    ridge_directions,
    without_prose,
)
from ruvmlx.training.slices import TrainingText
from ruvmlx.training.trainer import Trainer


@pytest.fixture
def bank() -> BankGradients:
    """30 replies to 5 questions, 24 weights in 4 rows of different size, 3 measures."""
    rng = np.random.default_rng(1)
    gradients = rng.normal(size=(30, 24)) * np.repeat([1, 3, 0.2, 1], 6)
    question = np.arange(30) // 6
    measures = gradients[:, [1, 8, 20]] + rng.normal(size=(30, 3)) + question[:, None]
    prose = rng.normal(size=(2, 24))
    return BankGradients(
        *(x.astype(np.float32) for x in (gradients, measures)), question, rng.integers(5, 90, 30),
        prose.astype(np.float32),
    )  # fmt: skip


def test_a_direction_is_the_ridge_regression_in_the_space_of_weights(bank):
    """The kernel form, with one unknown a reply, equals the plain one, with one unknown a weight."""
    weight = inverse_information(bank.gradients, 4)
    measures = centre_by_question(bank.measures.astype(np.float64), bank.question)
    found = ridge_directions(bank, weight, measures, 0.3)
    g = centre_by_question(bank.gradients.astype(np.float64), bank.question)
    ridge = 0.3 * np.trace((g * weight) @ g.T) / len(g)
    slow = np.linalg.solve(g.T @ g + ridge * np.diag(1 / weight.astype(np.float64)), g.T @ measures).T
    assert found == pytest.approx(slow, rel=1e-3, abs=1e-5)


def test_directions_tell_styles_apart_and_not_questions(bank):
    """What differs between questions alone has no direction."""
    moved = bank.measures + 7.0 * bank.question[:, None].astype(np.float32)
    weight = inverse_information(bank.gradients, 4)
    both = [
        ridge_directions(bank, weight, centre_by_question(m.astype(np.float64), bank.question), 0.3)
        for m in (bank.measures, moved)
    ]
    assert both[0] == pytest.approx(both[1], rel=1e-3, abs=1e-5)


def test_prose_keeps_its_probability(bank):
    weight = inverse_information(bank.gradients, 4)
    directions = np.random.default_rng(2).normal(size=(3, 24)).astype(np.float32)
    kept = without_prose(directions, bank.prose, weight)
    assert np.abs(kept @ bank.prose.T).max() < 1e-3 * np.abs(directions @ bank.prose.T).max()
    assert not np.allclose(kept, 0)


def test_coefficients_add_up_and_survive_storage(bank):
    lora_a = np.random.default_rng(3).normal(size=(2, 5, 2)).astype(np.float32)
    basis = StyleBasis.of(bank, lora_a, (1, 4))
    loaded = StyleBasis.from_bytes(basis.to_bytes())
    assert loaded is not None and loaded.layers == (1, 4)
    beta = np.array([0.5, -1.0, 2.0])
    lora = loaded.lora(beta)
    assert set(lora.pairs) == {(MODULE, 1), (MODULE, 4)}
    alone = [basis.lora(np.eye(3)[k]).pairs[MODULE, 4][1] for k in range(3)]
    assert lora.pairs[MODULE, 4][1] == pytest.approx(np.tensordot(beta, alone, axes=1), rel=0.01, abs=0.01)
    assert loaded.kl(2 * beta) == pytest.approx(4 * loaded.kl(beta)) and loaded.kl(beta) > 0
    assert StyleBasis.from_bytes(basis.to_bytes()[:-30]) is None


@pytest.mark.parametrize("inputs", [9, 200])
def test_the_leading_directions_are_large_in_replies_and_small_in_prose(inputs):
    """The same as the eigenvectors of M^-1 C, of the whole matrices."""
    rng = np.random.default_rng(4)
    rows, prose = (rng.normal(size=(40, inputs)) * rng.uniform(1, 9, inputs) for _ in range(2))
    found = leading(rows, prose, 2)
    second, other = rows.T @ rows / len(rows), prose.T @ prose / len(prose)
    other += style_bank._PROSE_RIDGE * np.trace(other) / inputs * np.eye(inputs)
    values, vectors = np.linalg.eig(np.linalg.solve(other, second))
    for k, at in enumerate(np.argsort(-values.real)[:2]):
        slow = vectors[:, at].real
        slow /= np.sqrt(slow @ second @ slow)
        assert abs(found[:, k]) == pytest.approx(abs(slow), rel=1e-4, abs=1e-6)


def test_scores_are_the_slope_of_the_log_probability(tiny):
    """Finite differences through the model, at a temperature, with two layers changed at once."""
    rng, trainer = np.random.default_rng(5), Trainer(tiny, "cpu")
    text = TrainingText(tuple(rng.integers(3, 90, 23).tolist()), 9)
    width = tiny.config.intermediate_size
    lora_a = {(MODULE, layer): rng.normal(size=(width, 2)).astype(np.float32) for layer in (0, 1)}
    found = trainer.scores(lora_a, text, 0.7)
    change = {place: rng.normal(size=g.shape).astype(np.float32) for place, g in found.items()}

    def total(share: float) -> float:
        """log p of the answer at temperature 0.7, in float64."""
        base = BaseLoRA({p: (lora_a[p], np.float32(share) * change[p]) for p in lora_a})
        z = np.asarray(graph.head(trainer._graph, mx.array(trainer.states(base, text))))
        z = z.astype(np.float64) / 0.7
        z -= z.max(axis=1, keepdims=True)
        said = np.asarray(text.tokens[text.first :])
        return float((z[np.arange(len(said)), said] - np.log(np.exp(z).sum(axis=1))).sum())

    slope = sum(float(np.vdot(found[p], change[p])) for p in found)
    step = 0.02 / max(1.0, abs(slope))
    assert (total(step) - total(-step)) / (2 * step) == pytest.approx(slope, rel=0.02)
    trainer.close()


class Clock:
    """A pause that stops the work after ever more calls, so that each part is done at last."""

    def __init__(self) -> None:
        self.wait = self.left = 20

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.wait = self.left = 2 * self.wait
            raise Stopped


def test_a_computation_that_is_stopped_again_and_again_ends_with_the_same_basis(tiny, monkeypatch):
    monkeypatch.setattr(style_bank, "REPLIES", 3)
    monkeypatch.setattr(style_bank, "MAX_REPLY_TOKENS", 7)
    questions, prose = ["What is a pond?", "How do bees fly?"], ["A plain text.", "Another one."]
    backend = NativeBackend(tiny, threads=1)

    def build(bank: StyleBank, pause) -> bytes:
        return BasisBuilder(tiny, backend, bank, questions, prose).run(lambda *_: None, pause).to_bytes()

    whole, bank, clock, stops = build(StyleBank(), lambda: None), StyleBank(), Clock(), 0
    while True:
        try:
            found = build(bank, clock)
            break
        except Stopped:
            stops, bank = stops + 1, StyleBank.from_bytes(bank.to_bytes())
    assert stops >= 2
    one, two = StyleBasis.from_bytes(whole), StyleBasis.from_bytes(found)
    assert one is not None and two is not None
    assert two.directions == pytest.approx(one.directions, rel=1e-3, abs=1e-6)
    assert backend.lora is None
