"""`config`: effective values, and the way back to the default."""

import json

import pytest

from ruvmlx import settings

from .verbs import one_line


def shown(out: str) -> dict[str, str]:
    """Setting -> its value, as the table prints it."""
    heading = next(line for line in out.splitlines() if "VALUE" in line and "MEANING" in line)
    start, end = heading.index("VALUE"), heading.index("MEANING")
    rows = (line for line in out.splitlines() if line[2:].split(" ")[0] in settings.SPECS)
    return {line[:start].strip(): line[start:end].strip() for line in rows}


def test_every_setting_has_a_value_and_a_meaning(run):
    """Never a dash: a default is in brackets."""
    found = shown(run("config", "show")[1])
    assert list(found) == list(settings.SPECS)
    assert all(value not in ("", "-", "None") for value in found.values())
    assert found["model"] == "(starter)" and found["system"] == "(none)" and found["max_tokens"] == "(512)"


def test_settings_without_a_default_say_what_applies():
    """A new one whose default is None needs the word for it."""
    for name, one in settings.resolve().items():
        assert one.value is not None or settings.SPECS[name].unset, name


def test_unset_takes_a_change_back_and_leaves_the_other_lines(run, home):
    run("config", "set", "max_tokens", "200")
    path = settings.user_file()
    path.write_text("# mine\n" + path.read_text("utf-8") + 'system = "Be brief."\n', "utf-8")
    code, out, _ = run("config", "unset", "max_tokens")
    assert code == 0 and "max_tokens = 512 again" in out
    assert path.read_text("utf-8") == '# mine\nsystem = "Be brief."\n'
    assert json.loads(run("config", "show", "--json")[1])["max_tokens"] == {"value": 512, "origin": "default"}
    code, out, _ = run("config", "unset", "max_tokens")
    assert code == 0 and "your settings file has no max_tokens" in out
    code, _, err = run("config", "unset", "colour")
    assert code == 2 and one_line(err)


def test_set_and_unset_print_json(run, home):
    """The values are those of `config show --json`; `removed` is false if there was nothing to take back."""
    path = str(settings.user_file())
    for name, typed, value in (("max_tokens", "200", 200), ("router", "on", "on")):
        code, out, err = run("config", "set", name, typed, "--json")
        assert code == 0 and json.loads(out) == {"name": name, "value": value, "path": path}, err
    unset = {"name": "max_tokens", "value": 512, "path": path}
    for removed in (True, False):
        assert json.loads(run("config", "unset", "max_tokens", "--json")[1]) == unset | {"removed": removed}


@pytest.mark.parametrize("words", ["unset max_tokens", "set max_tokens 200"])
def test_a_setting_is_changed_although_another_is_wrong(words, run, home):
    home.mkdir()
    settings.user_file().write_text('temperature = "hot"\nmax_tokens = 9\n')
    code, out, err = run("config", *words.split())
    assert code == 0 and "max_tokens = " in out, err
    code, _, err = run("config", "show")
    assert code == 2 and "temperature" in err


@pytest.mark.parametrize("value", ["200", "300"])
def test_a_variable_that_overrides_what_was_saved_is_told(value, run, monkeypatch):
    monkeypatch.setenv("RUVMLX_MAX_TOKENS", "100")
    code, out, err = run("config", "set", "max_tokens", value)
    assert code == 0 and f"max_tokens = {value}" in out
    assert "note: environment says max_tokens = 100, which overrides it here." in err


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("keys", "again=a", "are: stop, rate_up"),
        ("keys", "nosuch=f9", "are: stop, rate_up"),
        ("keys", "again=ctrl+zz", "'ctrl+zz' is no key for again"),
        ("keys", "again=ctrl+q", "ctrl+q is already the key of quit"),
        ("keys", "again=f9,chats=f9", "f9 is already the key of again"),
        ("theme", "nosuch", "there are: auto, dark, light, contrast, textual-dark"),
    ],
)
def test_a_value_that_the_chat_would_refuse_is_not_saved(name, value, words, run):
    code, out, err = run("config", "set", name, value)
    assert code == 2 and out == "" and one_line(err) and words in err
    assert not settings.user_file().exists()


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("model", "nosuch", ["note: no model is called 'nosuch'."]),
        (
            "model",
            "some/where",
            ["note: some/where is not on this machine; `ruvmlx pull some/where` fetches it."],
        ),
        (
            "auto_models",
            "nosuch, some/where",
            ["note: no model is called 'nosuch'.", "note: some/where is not"],
        ),
        ("draft_model", "nosuch", ["note: no model is called 'nosuch'."]),
        ("draft_model", "none", []),
        ("model", "auto", []),
        ("model", "", []),
    ],
)
def test_a_model_that_is_not_here_is_saved_and_told(name, value, told, run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    code, out, err = run("config", "set", name, value)
    assert code == 0 and f"{name} = {value}" in out and settings.resolve_one(name).value == value
    lines = err.splitlines()
    assert len(lines) == len(told) and all(map(str.startswith, lines, told)), err


def test_a_model_that_is_here_is_saved_without_a_note(run, tiny_folder):
    code, _, err = run("config", "set", "model", str(tiny_folder))
    assert (code, err) == (0, "")


def test_an_action_that_loses_its_key_is_told(run):
    code, _, err = run("config", "set", "keys", "again=ctrl+t")
    assert code == 0 and "effect has no key now: ctrl+t was its key" in err
    code, _, err = run("config", "set", "keys", "again=f9")
    assert code == 0 and err == ""
    assert run("config", "set", "theme", "nord")[0] == 0 and settings.load().theme == "nord"
