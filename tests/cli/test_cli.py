"""Verbs as scripts call them: JSON fields, exit codes, one line for every error."""

import gc
import json
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
from ruvmlx.apps.cli.output import print_json

from ruvmlx.models.load import load_model
from ruvmlx.platform import cpu
from ruvmlx.store import Store

from .verbs import one_line


def test_bad_input_is_one_line_with_the_right_code(run, tmp_path, tiny_folder):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\x03\0\0\0" + b"\xff" * 40)
    shapes = tmp_path / "shapes"
    shapes.mkdir()
    for file in tiny_folder.iterdir():
        (shapes / file.name).write_bytes(file.read_bytes())
    config = json.loads((shapes / "config.json").read_text())
    (shapes / "config.json").write_text(json.dumps(config | {"intermediate_size": 999}))
    model = ("--model", str(tiny_folder))
    cases = [
        (("generate", "hi", "--model", "nope"), 3),
        (("generate", "hi", "--model", str(broken)), 4),
        (("generate", "hi", "--model", str(shapes)), 4),
        (("generate", ""), 2),
        (("generate", "word " * 900, *model), 2),
        (("generate", "hi", "--temp", "-1", *model), 2),
        (("generate", "hi", "--temp", "warm"), 2),
        (("generate", "hi", "--adapter", "../x", *model), 2),
        (("generate", "hi", "--no-such-flag"), 2),
        (("no-such-verb",), 2),
        (("rate", "last", "great"), 2),
        (("rate", "last"), 2),
        (("rate", "--better", "x"), 2),
        (("rate", "last", "--better", "x", "--worse", "y"), 2),
        (("rate", "--better", "x", "--worse", "y", *model), 1),
        (("rate", "last", "up", *model), 1),
        (("learn", "undo", *model), 1),
        (("learn", "rollback", "7", *model), 1),
        (("sessions", "show", "nope"), 1),
        (("config", "set", "colour", "red"), 2),
        (("rm", "nope"), 2),
    ]
    for args, expected in cases:
        code, out, err = run(*args)
        assert (code, out) == (expected, ""), (args, code, err)
        assert one_line(err), (args, err)


def test_an_absent_model_offline_is_code_3(run, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    code, _, err = run("generate", "hi", "--model", "some-owner/some-model")
    assert code == 3 and one_line(err) and "some-owner/some-model" in err


def test_an_unwritable_data_folder_loses_nothing(run, tmp_path, monkeypatch, tiny_folder):
    """The data folder's place is taken by a file (root may write anywhere else)."""
    (tmp_path / "taken").write_text("precious")
    monkeypatch.setenv("RUVMLX_HOME", str(tmp_path / "taken"))
    code, _, err = run("generate", "hi", "--model", str(tiny_folder))
    assert code == 1 and one_line(err) and "RUVMLX_HOME" in err
    assert (tmp_path / "taken").read_text() == "precious"


def test_a_full_disk_is_one_line(run, monkeypatch, tiny_folder, home):
    """SQLite refuses to grow: the reply, too long for the free space of a page, cannot be kept."""

    real = Store.__init__

    def small(self, path):
        real(self, path)
        pages = self.db.execute("PRAGMA page_count").fetchone()[0]
        self.db.execute(f"PRAGMA max_page_count = {pages}")

    monkeypatch.setattr(Store, "__init__", small)
    long = ("--max-tokens", "90", "--ignore-eos")
    for _ in range(6):  # the first ones fit into the free space of pages
        code, _, err = run("generate", "hello " * 60, "--model", str(tiny_folder), *long)
        if code:
            break
    assert code == 1 and one_line(err) and "full" in err


def test_an_unexpected_error_is_still_one_line(run, monkeypatch):
    monkeypatch.setattr("ruvmlx.settings.resolve", lambda *_: 1 / 0)
    code, _, err = run("config", "show")
    assert code == 1 and one_line(err) and "RUVMLX_DEBUG" in err


def test_text_that_is_not_utf8_is_refused_before_anything_runs(process):
    done = subprocess.run(
        [sys.executable, "-m", "ruvmlx", "generate", b"a\xffb"], capture_output=True, timeout=600
    )
    assert done.returncode == 2 and one_line(done.stderr.decode())


def test_closed_and_full_outputs_are_one_line(process):
    for command in ("ls > /dev/full", "generate - <&-", "perplexity - <&-"):
        done = subprocess.run(
            f"{sys.executable} -m ruvmlx {command}", shell=True, capture_output=True, text=True, timeout=600
        )
        assert done.returncode in (1, 2) and one_line(done.stderr), (command, done.stderr)
        assert "internal error" not in done.stderr


@pytest.mark.parametrize("flags", ["", "--json"])
def test_a_closed_output_is_refused_before_a_model_is_opened(process, flags):
    line = f"{sys.executable} -m ruvmlx generate hi --model nothing-there {flags} >&-"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and one_line(done.stderr) and "standard output is closed" in done.stderr


def test_a_bare_verb_shows_its_help_as_help(run):
    for args in ((), ("learn",), ("config",)):
        code, out, err = run(*args)
        assert code == 2 and out.count("\n") > 5 and not err


def test_ctrl_c_is_one_line_from_the_first_moment():
    """Interrupted at ten moments of the start: 130 and one line, or killed before Python can listen."""
    for delay in range(10):
        child = subprocess.Popen(
            [sys.executable, "-c", "print(flush=True); from ruvmlx.apps.main import main; main()", "ls"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        child.stdout.readline()
        time.sleep(0.02 * delay)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=600)
        if child.returncode == 130:
            assert one_line(err.removeprefix("\n"))  # click ends the line of ^C
        elif delay > 1:  # it was done already, or on its way out
            assert child.returncode in (0, -signal.SIGINT), err


def test_control_characters_are_escaped_in_json(run, tiny_folder):
    model = ("--model", str(tiny_folder))
    assert run("generate", "C1\u009b31m\x7f", "--max-tokens", "3", *model)[0] == 0
    assert run("rate", "last", "up", *model)[0] == 0
    out = run("learn", "export", *model)[1]
    assert "\u009b" not in out and "\x7f" not in out
    assert json.loads(out)["prompt"] == "C1\u009b31m\x7f"


@pytest.mark.parametrize("char", ["\u202e", "\u200b", "\u2028", "\u2066", "\U000e0041", "\uffff"])
def test_json_holds_no_character_that_misleads_the_reader_of_a_terminal(capsys, char):
    print_json({"title": f"a{char}b é👍"})
    out = capsys.readouterr().out
    assert char not in out and "é👍" in out and json.loads(out)["title"] == f"a{char}b é👍"


def test_settings_of_the_working_folder_are_named(run, tiny_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ruvmlx.toml").write_text(f'model = "{tiny_folder}"\nsystem = "Praise me."\n')
    code, _, err = run("generate", "hello", "--max-tokens", "2")
    assert code == 0 and "note: ruvmlx.toml in this folder sets model, system." in err
    assert (
        "ruvmlx.toml"
        not in run("generate", "hello", "-m", str(tiny_folder), "--system", "", "--max-tokens", "2")[2]
    )


def test_settings_keep_the_users_comments(run, home):
    run("config", "set", "max_tokens", "5")
    (home / "config.toml").write_text("# mine\nmax_tokens = 5\n# the end")
    assert run("config", "set", "max_tokens", "7")[0] == 0
    assert run("config", "set", "system", "U+E0001: \U000e0001")[0] == 0
    assert (home / "config.toml").read_text().startswith("# mine\nmax_tokens = 7\n# the end\n")
    assert json.loads(run("config", "show", "--json")[1])["system"]["value"] == "U+E0001: \U000e0001"
    for bad in (("backend", "foo"), ("adapter", "a b")):
        code, _, err = run("config", "set", *bad)
        assert code == 2 and one_line(err)


def test_backup_and_restore(run, home, tmp_path, tiny_folder):
    """What was rated after the backup is gone after the restore, and kept beside it."""
    model, file = ("--model", str(tiny_folder)), str(tmp_path / "my saved.db")
    assert run("backup", file)[0] == 1
    for rating in ("up", "down"):
        assert run("generate", "hello", "--max-tokens", "5", "--ignore-eos", *model)[0] == 0
        if rating == "down":
            code, out, err = run("backup", file)
            assert code == 0 and "1 rating and 1 adapter are in" in out
            assert f"`ruvmlx restore {shlex.quote(file)}`" in out + err
        assert run("rate", "last", rating, *model)[0] == 0
    assert run("backup", file)[0] == 2
    code, out, _ = run("restore", file)
    assert code == 0 and ": 0 chats, 1 rating and 1 adapter.\n" in out
    assert json.loads(run("learn", "status", "--json", *model)[1])["ratings"] == 1
    kept = home / "ruvmlx.db.before-restore-1"
    gc.collect()  # `run` stays in this process, and the verb's store with it
    assert json.loads(run("restore", str(kept), "--json")[1])["ratings"] == 2
    assert json.loads(run("backup", file, "--replace", "--json")[1])["ratings"] == 2
    assert json.loads(run("learn", "status", "--json", *model)[1])["ratings"] == 2


def test_doctor_says_what_is_sound_and_what_is_broken(run, tiny_folder, monkeypatch, home):
    monkeypatch.setenv("RUVMLX_MODEL", str(tiny_folder))
    code, out, _ = run("doctor", "--json")
    checks = {c["name"]: c for c in json.loads(out)["checks"]}
    assert code == 0 and all(c["ok"] for c in checks.values())
    assert any(name in checks["backend"]["detail"] for name in ("(native ", "metal", "cuda"))
    monkeypatch.setenv("RUVMLX_MODEL", "nope")
    for leftover in home.glob("ruvmlx.db-*"):
        leftover.unlink()  # SQLite would mend the file from its log
    (home / "ruvmlx.db").write_bytes(b"junk" * 999)
    code, out, _ = run("doctor", "--json")
    broken = {c["name"] for c in json.loads(out)["checks"] if not c["ok"]}
    assert code == 1 and broken == {"store", "deleted chats", "witness log", "model", "adapter"}
    code, out, err = run("doctor")  # it tells people each cause once
    assert code == 1 and re.search("- +adapter +not checked: see store\n", out), out
    failed = len(re.findall("^FAIL", out, re.MULTILINE))
    assert f"{failed} check" in (out + err).splitlines()[-1] and failed < 3


def test_doctor_checks_the_largest_model_of_auto(run, tiny_folder, monkeypatch):
    monkeypatch.setenv("RUVMLX_MODEL", "auto")
    monkeypatch.setenv("RUVMLX_AUTO_MODELS", str(tiny_folder))
    monkeypatch.setenv("RUVMLX_BACKEND", "hybrid")
    code, out, _ = run("doctor", "--json")
    found = {c["name"]: c["detail"] for c in json.loads(out)["checks"]}
    assert code == 0 and tiny_folder.name in found["model"] and "sides" in found
    assert found["memory"] != "not known without the model"


def test_doctor_shows_which_side_does_which_work(run, tiny_folder, monkeypatch):
    """Only with the backend hybrid; the memory is that of both copies."""
    monkeypatch.setenv("RUVMLX_MODEL", str(tiny_folder))
    one = {c["name"]: c["detail"] for c in json.loads(run("doctor", "--json")[1])["checks"]}
    monkeypatch.setenv("RUVMLX_BACKEND", "hybrid")
    two = {c["name"]: c["detail"] for c in json.loads(run("doctor", "--json")[1])["checks"]}
    assert two.keys() - one.keys() == {"sides"} and one["memory"] != two["memory"]
    for kind in ("replies", "questions", "kl", "samples"):
        assert re.search(
            rf"{kind} on (native|mlx) \((native|mlx) [\d.]+, (native|mlx) [\d.]+ ms", two["sides"]
        )


def test_doctor_shows_which_layers_a_side_has(run, tiny_folder, monkeypatch):
    """Two copies of the model do not fit: the plan has one copy, and the layers are divided."""
    model = load_model(str(tiny_folder))
    monkeypatch.setattr(cpu, "memory_limit", lambda metal: 5 * model.parameters)
    monkeypatch.setenv("RUVMLX_MODEL", str(tiny_folder))
    monkeypatch.setenv("RUVMLX_BACKEND", "hybrid")
    found = {c["name"]: c["detail"] for c in json.loads(run("doctor", "--json")[1])["checks"]}
    assert "divided: layers 1-1: native" in found["sides"] and "; layers 2-2: cpu+" in found["sides"]


def test_config_show_says_where_a_value_comes_from(run, monkeypatch):
    monkeypatch.setenv("RUVMLX_TEMPERATURE", "0.1")
    shown = json.loads(run("config", "show", "--json")[1])
    assert shown["temperature"] == {"value": 0.1, "origin": "environment"}
    assert "environment" in run("config", "show", "--origin")[1]


def test_help_is_quick(process):
    """No model, no MLX, no tokenizers are imported for --help."""
    code = "import sys; sys.argv = ['ruvmlx', '--help']\nfrom ruvmlx.apps.main import main\n"
    code += (
        "try: main()\nexcept SystemExit: pass\nheavy = {'mlx', 'tokenizers', 'textual', 'huggingface_hub'}\n"
    )
    code += "print('HEAVY', sorted(heavy & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.rstrip().endswith("HEAVY []"), done.stdout + done.stderr


@pytest.mark.parametrize("verb", [["perplexity", __file__], ["prove", "--ratings", "1"]])
def test_a_model_without_room_is_refused_before_its_weights_are_read(run, tiny_folder, monkeypatch, verb):
    monkeypatch.setattr("ruvmlx.platform.cpu.available_memory", lambda: 1000)

    def read(self, name):
        raise AssertionError("weights were read")

    monkeypatch.setattr("ruvmlx.models.weights.safetensors_model.FolderWeights.__getitem__", read)
    code, _, err = run(*verb, "--model", str(tiny_folder), "--backend", "native")
    assert code == 1 and "needs about" in err and len(err.splitlines()) == 1


def test_perplexity_of_a_file(run, tiny_folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the thin thing and the other " * 9)
    code, out, _ = run("perplexity", str(text), "--model", str(tiny_folder), "--ctx", "64", "--json")
    found = json.loads(out)
    assert code == 0 and found["ppl"] > 1 and found["tokens"] > 100
    empty = tmp_path / "empty"
    empty.touch()
    for bad in (str(tmp_path / "none"), str(tmp_path), str(empty)):
        code, _, err = run("perplexity", bad, "--model", str(tiny_folder))
        assert code == 2 and one_line(err)
