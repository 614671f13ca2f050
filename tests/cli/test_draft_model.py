"""`--draft-model`: the same reply, or one line that says why not."""
# ruff: noqa: F811 - fixtures of another file

import pytest

from tests.models.make_models import make_safetensors_model

from .test_adapters import tiny_cli  # noqa: F401 - a fixture

REPLY = (
    "generate",
    "name a river",
    "--backend",
    "native",
    "--max-tokens",
    "40",
    "--ignore-eos",
    "--seed",
    "3",
    "--json",
)


@pytest.fixture
def small(tmp_path):
    return str(make_safetensors_model(tmp_path / "small", seed=31))


def test_the_reply_is_the_plain_one(tiny_cli, small):
    _, plain, _ = tiny_cli(*REPLY, "--speculate", "off")
    code, drafted, err = tiny_cli(*REPLY, "--draft-model", small, "--speculate", "4")
    assert code == 0, err
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["speculation"]["drafted"] > 0 == plain["speculation"]["drafted"]


def test_without_guesses_the_draft_model_is_not_read(tiny_cli):
    code, _, err = tiny_cli(*REPLY, "--draft-model", "nothing-here", "--speculate", "off")
    assert code == 0, err


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--draft-model", "nothing-here"), "no model is called 'nothing-here'"),
        (("--draft-model", "{small}", "--backend", "reference"), "cannot check guessed tokens"),
        (("--draft-model", "{starter}"), "has other tokens than"),
    ],
)
def test_what_cannot_be_is_one_line(tiny_cli, small, starter_file, flags, message):
    code, _, err = tiny_cli(*REPLY, *(flag.format(small=small, starter=starter_file) for flag in flags))
    assert code != 0 and message in err and len(err.strip().splitlines()) == 1


def test_the_setting_has_the_same_effect(tiny_cli, small, monkeypatch):
    monkeypatch.setenv("RUVMLX_DRAFT_MODEL", small)
    code, drafted, err = tiny_cli(*REPLY, "--speculate", "3")
    assert code == 0 and drafted["speculation"]["drafted"] > 0, err
