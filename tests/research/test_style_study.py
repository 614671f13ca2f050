"""The study of the style basis, from an empty file to the users' win-rates."""

import numpy as np
import pytest

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.sona.optional import style_bank
from ruvmlx.sona.taste_measures import MEASURES
from tests.research import style_study
from tests.research.style_study import StyleStudy

QUESTIONS = [f"What is number {i}?" for i in range(4)]


@pytest.fixture
def study(tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(style_bank, "REPLIES", 3)
    monkeypatch.setattr(style_bank, "MAX_REPLY_TOKENS", 9)
    given = {"style_questions": QUESTIONS, "style_prose": ["A plain text."]}
    monkeypatch.setattr(style_study, "texts", given.__getitem__)
    monkeypatch.setattr("apps.prove.retention._PART", 40)
    return lambda: StyleStudy(tiny, NativeBackend(tiny, threads=1), tmp_path / "bank.npz")


def test_a_study_continues_its_file_and_tests_users(study, capsys):
    study().build()
    again = study()
    assert len(again.bank.gradients) == len(again.replies) == 12 and again.bank.lora_a is not None
    assert again.correlations().shape == (len(MEASURES),)
    pairs = [(0.02, 0.0), (0.0, 0.05), (0.02, 0.02)]
    rates = again.users(2, 5, ["Why?", "How do I go?"], pairs)
    said = capsys.readouterr().out
    assert [*rates] == pairs and all(0 <= rate <= 1 for of in rates.values() for rate in of)
    assert said.count("user ") == 6 and again.backend.lora is None


def test_the_change_of_weights_is_scaled_to_the_target(study):
    """KL in replies is at most the target, and a user without ratings changes nothing."""
    one = study()
    one.build()
    basis = one.builder.basis()
    rng = np.random.default_rng(1)
    choice = style_study.StyleChoice(rng.normal(size=len(MEASURES)), 1.0)
    lora = one._change(basis, choice, style_study.KL)
    assert 0 < one._reply_kl(lora) <= 1.3 * style_study.KL and one.backend.lora is None
    nothing = style_study.StyleChoice(np.zeros(len(MEASURES)), 0.0)
    assert all(np.allclose(b, 0) for _, b in one._change(basis, nothing, style_study.KL).pairs.values())
    assert one._change(basis, choice, 0.0) is None
