import threading
from dataclasses import FrozenInstanceError, fields

import pytest
from ruvmlx.apps.cli.chat import chat

from ruvmlx import settings
from ruvmlx.errors import UsageError
from ruvmlx.settings import settings_file


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_precedence_flag_environment_project_user_default(monkeypatch, home, folder):
    def now(**flags):
        found = settings.resolve(flags)["max_tokens"]
        return found.value, found.origin

    assert now() == (512, "default")
    settings_file.save("max_tokens", "5")
    assert now() == (5, str(home / "config.toml"))
    (folder / "ruvmlx.toml").write_text("max_tokens = 6\n")
    assert now() == (6, "ruvmlx.toml")
    monkeypatch.setenv("RUVMLX_MAX_TOKENS", "7")
    assert now() == (7, "environment")
    assert now(max_tokens=8) == (8, "flag")
    assert now(max_tokens=None) == (7, "environment")


def test_saved_text_comes_back_whole():
    hard = 'say "hi" \\ and\n\ttab é\x01'
    settings_file.save("system", hard)
    settings_file.save("temperature", "0.25")
    found = settings.load()
    assert (found.system, found.temperature) == (hard, 0.25)


def test_a_file_that_begins_with_a_byte_order_mark_is_read_and_changed(home):
    """Some editors write the mark."""
    home.mkdir()
    (home / "config.toml").write_bytes(b"\xef\xbb\xbfmax_tokens = 6\n# my words\n")
    assert settings.load().max_tokens == 6
    settings_file.save("max_tokens", "7")
    assert settings.load().max_tokens == 7 and "# my words" in (home / "config.toml").read_text("utf-8")


def test_only_the_user_can_read_the_settings():
    path = settings_file.save("system", "my words")
    path.chmod(0o644)
    settings_file.save("system", "more of my words")
    assert path.stat().st_mode & 0o777 == 0o600 and [f.name for f in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("change", [settings_file.save, lambda name, value: settings_file.remove(name)])
def test_two_changes_at_once_are_both_kept(change, monkeypatch):
    """Another process changes the file between the reading and the writing of this one."""
    settings_file.save("temperature", "0.5")
    write, other = settings_file._write, threading.Thread(target=settings_file.save, args=("top_p", "0.5"))

    def write_late(*arguments):
        monkeypatch.setattr(settings_file, "_write", write)
        other.start()
        other.join(0.3)
        write(*arguments)

    monkeypatch.setattr(settings_file, "_write", write_late)
    change("temperature", "0.25")
    other.join()
    found = settings.load()
    assert found.top_p == 0.5 and found.temperature in (0.25, None)


@pytest.mark.parametrize(
    "name,value",
    [
        ("max_tokens", "many"),
        ("temperature", "hot"),
        ("colour", "red"),
        ("kv_tiers", "64"),
        ("kv_tiers", "1024,256"),
        ("kv_tiers", "100,256"),
        ("learn_targets", "head,q_proj:29-20"),
        ("base_targets", "v_proj:1-0"),
        ("temperature", "nan"),
        ("temperature", "inf"),
        ("temperature", "-1"),
        ("top_p", "0"),
        ("top_p", "7"),
        ("min_p", "1"),
        ("top_k", "-3"),
        ("presence_penalty", "2.1"),
        ("frequency_penalty", "3"),
        ("repetition_penalty", "0"),
    ],
)
def test_bad_values_are_refused_and_nothing_is_written(name, value):
    with pytest.raises(UsageError):
        settings_file.save(name, value)
    assert not settings.user_file().exists()


def test_a_value_at_its_bound_is_allowed():
    for name, value in (("temperature", 0.0), ("top_p", 1.0), ("min_p", 0.0), ("frequency_penalty", -2.0)):
        assert settings.SPECS[name].parse(str(value)) == value


def test_the_bounds_are_said_in_words():
    said = {name: settings.SPECS[name].allowed_values for name in ("top_p", "min_p", "top_k", "examples")}
    assert said == {
        "top_p": "over 0 and at most 1", "min_p": "0 or more and under 1", "top_k": "from 0 to 2,147,483,647",
        "examples": "from 0 to 8",
    }  # fmt: skip
    with pytest.raises(ValueError, match="a whole number, from 1 to 2,147,483,647"):
        settings.SPECS["max_tokens"].parse("many")


@pytest.mark.parametrize("text", ["max_tokens = ", "colour = 1", "max_tokens = true", "max_tokens = 1.5"])
def test_a_bad_file_names_itself(folder, text):
    (folder / "ruvmlx.toml").write_text(text)
    with pytest.raises(UsageError, match=r"ruvmlx\.toml"):
        settings.load()


def test_a_setting_is_one_frozen_valid_value():
    with pytest.raises(UsageError, match=r"examples = 9: expected from 0 to 8\."):
        settings.Settings(examples=9)
    with pytest.raises(FrozenInstanceError):
        settings.Settings().model = "another"


def test_the_table_of_meanings_explains_each_setting_once():
    """A setting without a meaning would have no rules: `meanings` and `Settings` list the same names."""
    explained = [name for group in settings.GROUPS.values() for name in group]
    assert sorted(explained) == sorted(field.name for field in fields(settings.Settings))
    assert len({settings.SPECS[name].doc for name in explained}) == len(explained)
    assert all(len(settings.SPECS[name].doc.split()) > 3 for name in explained)


@pytest.mark.parametrize(
    ("given", "value", "shown"),
    [("2GB", 1908, "2.0 GB"), ("500 MB", 477, "500 MB"), ("1.5GB", 1431, "1.5 GB"), ("1024", 1024, "1.1 GB")],
)
def test_a_size_has_a_decimal_unit_and_a_bare_number_means_what_it_meant(given, value, shown):
    settings_file.save("kv_disk", given)
    found = settings.load().kv_disk
    assert found == value and settings.SPECS["kv_disk"].display(found) == shown


@pytest.mark.parametrize("given", ["2 TB", "GB", "2GiB", "-1GB", "5MB"])
def test_a_size_that_is_not_allowed_names_those_that_are(given):
    with pytest.raises(UsageError, match="a size, as in 500MB or 2GB, 67 MB or more"):
        settings_file.save("server_memory", given)


def test_every_default_is_allowed_and_every_setting_is_explained():
    for name, spec in settings.SPECS.items():
        default = getattr(settings.Settings(), name)
        assert spec.doc and (default is None or spec.parse(settings.setting_text(default)) == default), name


@pytest.mark.parametrize("value, meant", [("on", True), ("off", False), (True, True)])
def test_a_switch_is_on_or_off(value, meant):
    assert settings.load({"router": value}).router is meant
    with pytest.raises(UsageError, match="expected on or off"):
        settings.load({"router": "yes"})


def test_flags_of_the_command_line_derive_from_the_settings():
    """What a flag shows as its help is what the setting says."""
    flags = {o.name: o for o in chat.params if o.name in settings.SPECS}
    assert flags.keys() >= {"model", "kv", "temperature", "examples", "theme", "learn_when_idle"}
    sentences = {name: f"{settings.SPECS[name].doc}." for name in flags}
    assert all(
        option.help == sentences[name][0].upper() + sentences[name][1:] for name, option in flags.items()
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("server_unload", "nan"),
        ("server_unload", "-1"),
        ("server_unload", "inf"),
        ("kv_limit", "-3"),
        ("kv_limit", "nan"),
        ("kv_limit", "11"),
        ("kv_budget", "-1"),
        ("kv_disk", "-1"),
        ("kv_disk", "9" * 20),
        ("temperature", "1e9"),
        ("max_tokens", "9" * 20),
        ("max_context", "9" * 20),
        ("top_k", "9" * 20),
    ],
)
def test_a_senseless_number_is_not_saved(name, value):
    with pytest.raises(UsageError, match=f"^{name} = .*: expected .*[.]$"):
        settings_file.save(name, value)
    assert not settings.user_file().exists()


LONG = 'system = """\nYou are brief.\ntemperature = 3 is warm.\n"""  # mine\n'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"temperature" = 0.5\n', "temperature = 0.25\n"),
        ("top_p = 0.5\n'temperature' = 0.5 # warm\n# end\n", "top_p = 0.5\ntemperature = 0.25\n# end\n"),
        ('temperature = """\n0.5"""\ntop_p = 0.5\n', "temperature = 0.25\ntop_p = 0.5\n"),
        (LONG, f"{LONG}temperature = 0.25\n"),
        (f"temperature = 1\n{LONG}", f"temperature = 0.25\n{LONG}"),
        ("top_p = 0.5", "top_p = 0.5\ntemperature = 0.25\n"),
    ],
)
def test_a_change_leaves_what_else_the_file_says(home, before, after):
    """Keys in quotation marks, values of several lines, text that looks like a setting."""
    home.mkdir()
    path = home / "config.toml"
    path.write_text(before)
    settings_file.save("temperature", "0.25")
    assert path.read_text() == after and settings.load().temperature == 0.25
    settings_file.remove("temperature")
    assert path.read_text() == after.replace("temperature = 0.25\n", "")


def test_a_file_that_cannot_be_changed_by_statements_stays_as_it_is(home):
    """What follows a table's head belongs to the table."""
    home.mkdir()
    path = home / "config.toml"
    path.write_text("top_p = 0.5\n[system]\n")
    with pytest.raises(UsageError, match="Change it in an editor"):
        settings_file.save("temperature", "0.25")
    assert path.read_text() == "top_p = 0.5\n[system]\n"


def test_an_unknown_user_in_the_home_is_named(monkeypatch):
    monkeypatch.setenv("RUVMLX_HOME", "~nobody-of-this-name/data")
    with pytest.raises(UsageError, match="has no such user"):
        settings.home()


def test_a_settings_file_that_is_a_link_stays_a_link(home, tmp_path):
    """People keep their settings in a folder of their own, and link to it."""
    real = tmp_path / "dotfiles.toml"
    real.write_text("threads = 2\n")
    home.mkdir()
    settings.user_file().symlink_to(real)
    settings_file.save("temperature", "0.5")
    assert settings.user_file().is_symlink() and real.read_text() == "threads = 2\ntemperature = 0.5\n"
    settings_file.remove("threads")
    assert settings.user_file().is_symlink() and real.read_text() == "temperature = 0.5\n"
