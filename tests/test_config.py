import pytest

from ruvmlx import settings
from ruvmlx.errors import UsageError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_precedence_flag_environment_project_user_default(monkeypatch, home, folder):
    def now(**flags):
        found = settings.load(flags)["max_tokens"]
        return found.value, found.origin

    assert now() == (512, "default")
    settings.save("max_tokens", "5")
    assert now() == (5, str(home / "config.toml"))
    (folder / "ruvmlx.toml").write_text("max_tokens = 6\n")
    assert now() == (6, "ruvmlx.toml")
    monkeypatch.setenv("RUVMLX_MAX_TOKENS", "7")
    assert now() == (7, "environment")
    assert now(max_tokens=8) == (8, "flag")
    assert now(max_tokens=None) == (7, "environment")


def test_saved_text_comes_back_whole():
    hard = 'say "hi" \\ and\n\ttab é\x01'
    settings.save("system", hard)
    settings.save("temperature", "0.25")
    found = settings.load()
    assert (found["system"].value, found["temperature"].value) == (hard, 0.25)


@pytest.mark.parametrize(
    "name,value", [("max_tokens", "many"), ("temperature", "hot"), ("colour", "red"), ("kv_tiers", "64")]
)
def test_bad_values_are_refused_and_nothing_is_written(name, value):
    with pytest.raises(UsageError):
        settings.save(name, value)
    assert not settings.user_file().exists()


@pytest.mark.parametrize("text", ["max_tokens = ", "colour = 1", "max_tokens = true", "max_tokens = 1.5"])
def test_a_bad_file_names_itself(folder, text):
    (folder / "ruvmlx.toml").write_text(text)
    with pytest.raises(UsageError, match=r"ruvmlx\.toml"):
        settings.load()
