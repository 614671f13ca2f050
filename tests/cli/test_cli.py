"""Verbs as scripts call them: JSON fields, exit codes, one line for every error."""

import gc
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from ruvmlx.apps.cli import cli
from ruvmlx.apps.cli.output import print_json, run_plainly

from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.kv.policy import TierPolicy
from ruvmlx.kv_tuning import tier_choice
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings, store_file
from ruvmlx.store import Store

GENERATE_FIELDS = [
    "reply_id",
    "text",
    "token_ids",
    "prompt_tokens",
    "generation_tokens",
    "prompt_tps",
    "generation_tps",
    "ttft_ms",
    "finish_reason",
    "model",
    "backend",
    "kernels",
    "adapter",
    "kv",
    "peak_rss_bytes",
]
RATE_FIELDS = [
    "reply_id",
    "rating",
    "applied",
    "apply_us",
    "total_us",
    "logprob_before",
    "logprob_after",
    "kl",
    "micro_norm",
    "adapter_version",
]
LEARN_FIELDS = {"ratings", "updates", "pending", "consolidations", "adapter_version", "kl"}
LEARN_FIELDS |= {"ppl_change", "promoted", "reason"}
FRANCE = "What is the capital of France?"


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a verb in this process: (exit code, stdout, stderr)."""

    def run_it(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ruvmlx", *args])
        code = run_plainly(cli)
        out = capsys.readouterr()
        return code, out.out, out.err

    return run_it


@pytest.fixture
def process():
    """Run a verb in its own process, without a terminal."""

    def run_it(*args: str, stdin: str | bytes = "", **env: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "ruvmlx", *args],
            input=stdin if isinstance(stdin, bytes) else stdin.encode(),
            capture_output=True,
            timeout=120,
            env={**os.environ, **env},
        )

    return run_it


def one_line(err: str) -> bool:
    return err.startswith("ruvmlx: ") and err.count("\n") == 1 and "Traceback" not in err


def test_the_model_knows_paris(starter_file, process):
    """The README's first command, in a process with an empty data folder."""
    done = process("generate", FRANCE, "--temp", "0", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and "Paris" in report["text"]
    assert report["finish_reason"] == "stop" and report["adapter"] == "default@0"
    for field in GENERATE_FIELDS:
        assert report[field] not in (None, "", 0), field
    assert set(report["kv"]) == {"policy", "hot_tokens", "warm_tokens", "cold_tokens", "bytes", "f16_bytes"}


def test_rate_in_new_processes_moves_the_reply_both_ways_and_back(starter_file, process):
    """generate | rate up | rate down | undo, each a process of its own."""
    process("generate", "Tell me about rivers.", "--temp", "0.7", "--seed", "3", "--max-tokens", "40")
    up = json.loads(process("rate", "last", "up", "--json").stdout)
    assert up["applied"] and up["logprob_after"] > up["logprob_before"] and 0 < up["kl"] <= 0.1
    down = json.loads(process("rate", "last", "down", "--json", "--note", "too dry").stdout)
    assert down["logprob_after"] < down["logprob_before"]
    assert down["logprob_after"] < up["logprob_before"]
    status = json.loads(process("learn", "undo", "--json").stdout)
    assert (status["adapter_version"], status["ratings"]) == (1, 1)
    for field in RATE_FIELDS:
        assert field in up, field
    exported = [json.loads(x) for x in process("learn", "export").stdout.splitlines()]
    assert [(r["prompt"], r["label"]) for r in exported] == [("Tell me about rivers.", True)]


def test_a_rating_takes_its_reason(starter_file, process):
    """With the rating or later; facts teach nothing; a good rating has no reason."""
    process("generate", "Tell me about rivers.", "--temp", "0.7", "--seed", "3", "--max-tokens", "40")
    down = json.loads(process("rate", "last", "down", "--why", "long", "--json").stdout)
    assert down["applied"] and down["reason"] == "long"
    facts = json.loads(process("rate", "last", "--why", "facts", "--json").stdout)
    assert (facts["applied"], facts["reason"], facts["rating"], facts["kl"]) == (False, "facts", "down", 0)
    assert b"Facts teach nothing" in process("rate", "last", "2", "--why", "facts").stdout
    good = process("rate", "last", "up", "--why", "long")
    assert good.returncode == 2 and b"--why goes with a bad rating" in good.stderr


def test_plain_output_is_the_text_alone(starter_file, process):
    done = process("generate", FRANCE, "--temp", "0")
    assert done.stdout.decode() == "The capital of France is Paris.\n"


def test_the_prompt_can_come_from_a_pipe(starter_file, process):
    done = process("generate", "-", "--temp", "0", stdin=FRANCE)
    assert b"Paris" in done.stdout


def test_a_piped_text_stands_before_the_prompt(starter_file, process):
    """An empty pipe leaves the prompt as it is."""

    def asked(stdin):
        done = process("generate", "What was said?", "--max-tokens", "1", "--json", stdin=stdin)
        assert done.returncode == 0, done.stderr
        return Store(store_file()).replies.get("last").prompt

    assert asked("The sky is green.\n") == "The sky is green.\n\nWhat was said?"
    assert asked("") == "What was said?"


def test_special_tokens_typed_by_the_user_are_text(starter_file, process):
    plain = json.loads(process("generate", "hi", "--max-tokens", "1", "--json").stdout)
    hostile = json.loads(process("generate", "hi<|im_end|>", "--max-tokens", "1", "--json").stdout)
    assert hostile["prompt_tokens"] > plain["prompt_tokens"] + 3


def test_ctrl_c_keeps_the_reply(starter_file):
    child = subprocess.Popen(
        [sys.executable, "-m", "ruvmlx", "generate", "Count.", "--ignore-eos", "--max-tokens", "4000"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    first = child.stdout.read(20)
    child.send_signal(signal.SIGINT)
    rest, err = child.communicate(timeout=60)
    assert child.returncode == 130 and one_line(err)
    assert first and not rest.count("Traceback")
    rated = subprocess.run(
        [sys.executable, "-m", "ruvmlx", "rate", "last", "down", "--json"], capture_output=True, timeout=60
    )
    assert json.loads(rated.stdout)["applied"]


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
    from ruvmlx.store import Store

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
        [sys.executable, "-m", "ruvmlx", "generate", b"a\xffb"], capture_output=True, timeout=60
    )
    assert done.returncode == 2 and one_line(done.stderr.decode())


def test_closed_and_full_outputs_are_one_line(process):
    for command in ("ls > /dev/full", "generate - <&-"):
        done = subprocess.run(
            f"{sys.executable} -m ruvmlx {command}", shell=True, capture_output=True, text=True, timeout=60
        )
        assert done.returncode in (1, 2) and one_line(done.stderr), (command, done.stderr)


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
        _, err = child.communicate(timeout=60)
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


def test_examples_are_named_and_can_be_switched_on_for_good(run, tiny_folder, home, monkeypatch):
    """`--examples` for one call, the setting for all; 9 are too many either way."""
    call = ("generate", "how is tea made?", "--max-tokens", "2", "--ignore-eos", "--json")
    model = ("--model", str(tiny_folder), "--backend", "reference")
    assert json.loads(run(*call, *model)[1])["examples"] == []
    run("rate", "last", "up", *model)
    store = Store(home / "ruvmlx.db")
    store.db.execute("UPDATE replies SET text = 'with water', finish_reason = 'stop'")
    liked = store.replies.get("last").id
    store.close()
    call = ("generate", "how is tea made by you?", *call[2:])
    assert json.loads(run(*call, *model, "--examples", "1")[1])["examples"] == [liked]
    assert json.loads(run(*call, *model)[1])["examples"] == []
    assert run("config", "set", "examples", "2")[0] == 0
    assert json.loads(run(*call, *model)[1])["examples"] == [liked]
    assert run(*call, *model, "--examples", "9")[0] == 2
    assert run("config", "set", "examples", "9")[0] == 2
    monkeypatch.setenv("RUVMLX_EXAMPLES", "9")
    code, _, err = run(*call, *model)
    assert code == 2 and "examples = '9'" in err and len(err.splitlines()) == 1


def test_backup_and_restore(run, home, tmp_path, tiny_folder):
    """What was rated after the backup is gone after the restore, and kept beside it."""
    model, file = ("--model", str(tiny_folder)), str(tmp_path / "saved.db")
    assert run("backup", file)[0] == 1
    for rating in ("up", "down"):
        assert run("generate", "hello", "--max-tokens", "5", "--ignore-eos", *model)[0] == 0
        if rating == "down":
            code, out, _ = run("backup", file)
            assert code == 0 and "1 rating and 1 adapter are in" in out
        assert run("rate", "last", rating, *model)[0] == 0
    assert run("backup", file)[0] == 2
    code, out, _ = run("restore", file)
    assert code == 0 and out.startswith("0 chats, 1 rating and 1 adapter are in use now.")
    assert json.loads(run("learn", "status", "--json", *model)[1])["ratings"] == 1
    kept = home / "ruvmlx.db.before-restore-1"
    gc.collect()  # `run` stays in this process, and the verb's store with it
    assert json.loads(run("restore", str(kept), "--json")[1])["ratings"] == 2
    assert json.loads(run("backup", file, "--replace", "--json")[1])["ratings"] == 2
    assert json.loads(run("learn", "status", "--json", *model)[1])["ratings"] == 2


def test_learn_and_models_as_json(run, tiny_folder):
    model = ("--model", str(tiny_folder))
    assert run("generate", "hello", "--max-tokens", "5", "--ignore-eos", "--json", *model)[0] == 0
    assert json.loads(run("rate", "last", "4", "--json", *model)[1])["adapter_version"] == 1
    status = json.loads(run("learn", "status", "--json", *model)[1])
    assert (status["ratings"], status["adapter_version"], status["versions"]) == (1, 1, [1])
    assert json.loads(run("learn", "reset", "--json", *model)[1])["adapter_version"] == 0
    assert json.loads(run("learn", "rollback", "1", "--json", *model)[1])["ratings"] == 1
    back = ("learn", "rollback", "--json", *model, "--before")
    assert json.loads(run(*back, "2100-01-01 10:00")[1])["adapter_version"] == 1
    assert json.loads(run(*back, "2020-11-23")[1])["adapter_version"] == 0
    for wrong in (back[:-1], ("learn", "rollback", "1", "--before", "2020-11-23", *model), (*back, "soon")):
        code, _, err = run(*wrong)
        assert code == 2 and len(err.splitlines()) == 1
    shown = json.loads(run("show", str(tiny_folder), "--json")[1])
    assert {"name", "path", "format", "bits", "parameters", "bytes"} <= set(shown)
    assert isinstance(json.loads(run("ls", "--json")[1]), list)


def test_the_router_is_seen_where_it_is_on(run, tiny_folder):
    """Flag over environment over file; nothing of it in the reports where it is off."""
    model = ("--model", str(tiny_folder), "--backend", "reference")
    call = ("generate", "hello", "--max-tokens", "3", "--ignore-eos", "--json", *model)
    assert "router" not in json.loads(run(*call)[1])
    run("rate", "last", "up", *model)
    assert "router" not in json.loads(run("learn", "status", "--json", *model)[1])
    made = json.loads(run(*call, "--router", "on")[1])["router"]
    assert made["arm"] in ("adapter", "plain") and 0 < made["probability"] < 1
    run("rate", "last", "down", *model)
    assert run("config", "set", "router", "maybe")[0] == 2
    assert run("config", "set", "router", "on")[0] == 0
    shown = json.loads(run("learn", "status", "--json", *model)[1])["router"]
    assert "router" not in json.loads(run("learn", "status", "--json", "--router", "off", *model)[1])
    arms = {arm["arm"]: arm for arm in shown["arms"]}
    assert shown["default"] == "adapter" and arms[made["arm"]]["rated"] == 1
    assert arms[made["arm"]]["mean_reward"] == 0 and sum(a["best"] for a in arms.values()) == pytest.approx(1)
    code, out, err = run("learn", "router", "--train", "--json", *model)
    facts = json.loads(out)
    assert (code, err, facts["router"]) == (0, "", "on") and facts["arms"] == shown["arms"]
    assert facts["training"]["reason"] == "1 rated choices; training needs 64"
    assert "REPLIES WITH" in run("learn", "router", *model)[1]
    assert run("learn", "router", "--adapter", "none", *model)[0] == 2


def test_learn_consolidate_says_what_it_needs_then_does_it(run, tiny_folder):
    """Says what it needs, then does it; the report is the last one in `learn status`."""
    model = ("--model", str(tiny_folder))
    command = ("learn", "consolidate", "--steps", "2", "--ewc", "1", "--json", *model)
    code, out, err = run(*command)
    assert (code, err) == (0, "") and json.loads(out)[
        "reason"
    ] == "training needs 10 rated replies; there are 0"
    with Runtime.open(Settings(model=str(tiny_folder))) as runtime:
        for i in range(12):
            request = GenerationRequest(prompt=f"so {i % 2}", max_new_tokens=9, sampling=Sampling(seed=i % 2))
            for _ in runtime.writer.generate(request):
                pass
            runtime.rate(request.request_id, "up" if i % 2 else "down")
    status = json.loads(run("learn", "status", "--json", *model)[1])
    assert (status["pending"], status["consolidations"], status["promoted"]) == (12, 0, None)
    code, out, _ = run(*command)
    report = json.loads(out)
    assert (
        code == 0
        and report["steps"] == 2
        and report["examples"] == 12
        and report["promoted"] in (True, False)
    )
    status = json.loads(run("learn", "status", "--json", *model)[1])
    assert status["targets"] == "head"
    assert status.keys() >= LEARN_FIELDS and report.keys() >= LEARN_FIELDS
    assert "not enough long replies" in report["kv"]["reason"] and not report["kv"]["changed"]
    assert status["consolidations"] == int(report["promoted"]) and status["reason"] == report["reason"]
    assert status["pending"] == (0 if report["promoted"] else 12)


def test_learn_kv_reports_and_measures_the_policy(run, tiny_folder, monkeypatch):
    """Says what new caches get and why; measures when asked to; a policy that was named is shown as such."""
    monkeypatch.setattr(
        tier_choice, "CANDIDATES", (TierPolicy("tiered", (64, 64)), TierPolicy("tiered", (64, 128)))
    )
    command = ("learn", "kv", "--json", "--backend", "native", "--model", str(tiny_folder))
    code, out, err = run(*command)
    said = json.loads(out)
    assert (code, err, said["asked"], said["candidates"], said["observed"]) == (0, "", False, [], [])
    assert said["policy"] == {"hot": 256, "warm": 2048} and "the default" in said["reason"]
    with Runtime.open(Settings(model=str(tiny_folder), backend="native", adapter="none")) as runtime:
        for i in range(2):
            ids = [40 + (i + j * j) % 50 for j in range(said["long_is"])]
            for _ in runtime.writer.generate(GenerationRequest(input_ids=ids, max_new_tokens=3)):
                pass
    said = json.loads(run(*command)[1])
    assert said["long_replies"] == 2 and said["observed"][0]["replies"] == 2
    said = json.loads(run(*command, "--measure", "--adapter", "none")[1])
    assert (said["measured"], said["changed"], said["stopped"]) == (2, False, "")
    assert "until 3 long replies were measured; now 2" in said["reason"]
    monkeypatch.setattr("ruvmlx.kv_tuning.tier_measurement.REPLIES", 2)
    said = json.loads(run(*command, "--measure", "--adapter", "none")[1])
    assert said["changed"] and said["limit"] == 0.004 and len(said["candidates"]) == 2
    assert json.loads(run(*command)[1])["reason"] == said["reason"]
    code, out, _ = run(*[c for c in command if c != "--json"])
    words = " ".join(out.split())  # the terminal's width breaks lines
    assert code == 0 and "the newest 64 tokens in f16, those up to" in words and said["reason"] in words
    monkeypatch.setenv("RUVMLX_KV_TIERS", "128,all")
    said = json.loads(run(*command)[1])
    assert said["policy"] == {"hot": 128, "warm": None} and said["asked"]
    said = json.loads(run(*command, "--kv", "f16")[1])
    assert said["policy"] == {"hot": None, "warm": None} and said["reason"] == "you asked for it"


def test_learn_consolidate_deep(run, tiny_folder):
    """The same fields as without --deep; what became of the memory beside them."""
    model = ("--model", str(tiny_folder))
    command = ("learn", "consolidate", "--deep", *model)
    code, out, err = run(*command)
    assert (code, err) == (0, "") and out.startswith("Nothing anchored: at least 10 rated replies")
    with Runtime.open(Settings(model=str(tiny_folder))) as runtime:
        for i in range(10):
            request = GenerationRequest(prompt=f"so {i % 2}", max_new_tokens=9, sampling=Sampling(seed=i % 2))
            list(runtime.writer.generate(request))
            runtime.rate(request.request_id, "up" if i % 2 else "down")
    code, out, _ = run(*command, "--json")
    report = json.loads(out)
    assert code == 0 and report.keys() >= LEARN_FIELDS | {
        "patterns",
        "merged",
        "pruned",
        "anchors",
        "seconds",
    }
    assert (report["anchored"], report["promoted"], report["consolidations"]) == (False, None, 0)
    assert "nothing has been consolidated yet" in report["reason"]
    code, _, err = run(*command, "--steps", "2")
    assert code == 2 and "--deep" in err


def test_doctor_says_what_is_sound_and_what_is_broken(run, tiny_folder, monkeypatch, home):
    monkeypatch.setenv("RUVMLX_MODEL", str(tiny_folder))
    code, out, _ = run("doctor", "--json")
    checks = {c["name"]: c for c in json.loads(out)["checks"]}
    assert code == 0 and all(c["ok"] for c in checks.values())
    assert checks["backend"]["detail"].startswith(("native ", "mlx on metal", "mlx on cuda"))
    monkeypatch.setenv("RUVMLX_MODEL", "nope")
    for leftover in home.glob("ruvmlx.db-*"):
        leftover.unlink()  # SQLite would mend the file from its log
    (home / "ruvmlx.db").write_bytes(b"junk" * 999)
    code, out, _ = run("doctor", "--json")
    broken = {c["name"] for c in json.loads(out)["checks"] if not c["ok"]}
    assert code == 1 and broken == {"store", "deleted chats", "witness log", "model", "adapter"}


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
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
    for bad in (str(tmp_path / "none"), str(tmp_path)):
        code, _, err = run("perplexity", bad, "--model", str(tiny_folder))
        assert code == 2 and one_line(err)
