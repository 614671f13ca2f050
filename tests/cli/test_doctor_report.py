"""`doctor --report`: what it contains, what it never contains, and that it ends in time."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from ruvmlx.apps import privacy
from ruvmlx.apps.bench import machine
from ruvmlx.apps.bench.stage import PlayerError
from ruvmlx.apps.cli import doctor
from ruvmlx.apps.report import facts, kernels, make, page, speed

from ruvmlx.errors import StoreError
from ruvmlx.kernels.library import LibraryError
from ruvmlx.store import Store

PERSON, HOST, TOKEN = "annakowalczyk", "annas-laptop", "hf_Ab1Cd2Ef3Gh4Ij5Kl6Mn7Op8"
CHAT, TITLE, SYSTEM, ADAPTER = "zebrafinch divorce lawyer", "quarrelsome", "plumtree", "lovesick"
SECRETS = (PERSON, "kowalczyk", HOST, TOKEN, *CHAT.split(), TITLE, SYSTEM, ADAPTER, "payslips", "embezzled")


@pytest.fixture
def planted(tiny_folder, tmp_path, monkeypatch):
    """Plant personal data in all names and words of a user; return the model's folder."""
    home = tmp_path / PERSON
    model = home / "payslips 2024" / "embezzled-llm"
    shutil.copytree(tiny_folder, model)
    for name, value in {"USER": PERSON, "LOGNAME": PERSON, "HOSTNAME": HOST, "HF_TOKEN": TOKEN}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("RUVMLX_HOME", str(home / "payslips data"))
    monkeypatch.setenv("RUVMLX_MODEL", str(model))
    monkeypatch.setenv("RUVMLX_ADAPTER", ADAPTER)
    monkeypatch.setenv("RUVMLX_SYSTEM", SYSTEM)
    monkeypatch.setattr(socket, "gethostname", lambda: HOST + ".lan")
    store = Store(home / "payslips data" / "ruvmlx.db")
    chat = store.chats.new(str(model), SYSTEM, TITLE)
    store.messages.add_user(chat, CHAT)
    store.close()
    return model


def report(text: str) -> dict:
    return json.loads(re.search(r"```json\n(.*)\n```", text, re.DOTALL)[1])


def tells(text: str) -> list[str]:
    return [secret for secret in SECRETS if secret.lower() in text.lower()]


def test_a_report_tells_machine_and_speed_and_nothing_of_the_user(run, planted, tmp_path, monkeypatch):
    """With the second net switched off: the facts themselves are free of it."""
    monkeypatch.setattr(privacy, "clean_json", lambda value, names: value)
    file = tmp_path / "report.md"
    code, out, err = run("doctor", "--report", str(file), "--json")  # so small a model takes seconds
    text = file.read_text()
    told = report(text)
    assert code == 0 and told == json.loads(out) and not tells(text)
    assert all(c["ok"] for c in told["checks"]) and told["failed"] == {}
    assert told["machine"]["memory"] > 1 << 28 and told["machine"]["versions"]["mlx"].startswith("0.32")
    assert told["model"]["shape"]["n_layers"] == 2 and not told["model"]["starter"]
    for length in told["speed"]["lengths"]:
        assert (
            length["rates"]["mlx-lm"]["prefill"]["median"] > 0
            and length["ratios"].keys() < length["rates"].keys()
        )
        assert all(held["resident"] > 0 for held in length["memory"].values())
    assert {"ruvmlx mlx tiered", "ruvmlx mlx f16", "mlx-lm"} <= told["speed"]["lengths"][0]["rates"].keys()
    assert "speed ..." in err and ("NO GPU" in text.split("\n\n")[1]) != told["gpu"]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != PERSON) == ["report.md"]


def test_what_fails_is_a_line_without_the_words_of_the_error(run, planted, tmp_path, monkeypatch):
    """A model that no runtime loads, a broken store and a full disk: places in the code, not what was said
    there."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1 << 40, 0, 0))
    weights = next(planted.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-64])
    data = tmp_path / PERSON / "payslips data"
    for leftover in data.glob("ruvmlx.db-*"):
        leftover.unlink()  # SQLite would mend the file from its log
    (data / "ruvmlx.db").write_bytes(b"junk" * 999)
    file = tmp_path / "report.md"
    code, _, err = run("doctor", "--report", str(file), "--seconds", "10")
    told = report(file.read_text())
    failed = {c["name"]: c["error"] for c in told["checks"] if not c["ok"]}
    assert code == 1 and failed.keys() >= {"store", "witness log", "disk space"} and "Traceback" not in err
    assert all(re.fullmatch(r"\w+ at (apps|ruvmlx)/[\w/]+\.py:\d+", error) for error in failed.values())
    assert re.match(r"CorruptFile at ruvmlx/models/", told["failed"]["model"]) and "speed" not in told
    assert not tells(file.read_text()) and not tells(err.replace(str(file), ""))


def test_a_report_is_made_where_nothing_works(monkeypatch):
    """No C library, no model, no MLX that answers: each is a line, the rest is told."""

    def missing(*_):
        raise LibraryError(CHAT)

    for module, name in ((machine.matmul, "peak"), (facts, "has_gpu")):
        monkeypatch.setattr(module, name, missing)
    log: list[str] = []
    told = make.make([], missing, 10, log.append)
    assert told["failed"].keys() == {"gpu", "clock", "model"}
    assert told["machine"]["memory"] > 0 and told["slower_at_the_end"] == 0
    assert "NO GPU" in page.markdown(told) and not tells(page.markdown(told)) and not tells("".join(log))


def test_a_compiler_s_whole_message_is_in_the_report_and_no_path_of_it(monkeypatch):
    """Each line is cleaned alone: an apostrophe in one and a slash in another are no quoted path."""
    lines = [
        f"/Users/{PERSON}/a.metal:9: error: unknown type 'half4'",
        "    x = a / b;",
        "note: 'x' declared here",
    ]
    found = [{"name": name, "ok": False, "why": "w", "message": lines} for name in ("append", "gather")]
    found.append({"name": "demote", "ok": True, "message": []})
    monkeypatch.setattr(facts, "has_gpu", lambda: True)
    monkeypatch.setattr(kernels, "of_the_starter", lambda _: found)
    monkeypatch.setattr(kernels, "of_all", lambda *_: [])
    text = page.markdown(make.make([], None, 10, lambda _: None))
    shown = "<removed> error: unknown type 'half4'\n        x = a / b;\n    note: 'x' declared"
    assert f"append, gather:\n\n    {shown}" in text and not tells(text)


def test_every_kind_of_head_is_checked_and_each_pair_in_the_first_half():
    wanted = [(s.head_dim, s.dtype, s.n_heads // s.n_kv_heads) for s in kernels.shapes()]
    assert set(wanted) == set(product((64, 80, 128, 256), ("float16", "bfloat16"), (1, 3, 4, 7, 8)))
    assert len(wanted) == 40
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert {(w[one], w[other]) for w in wanted[:20]} == {(w[one], w[other]) for w in wanted}


class ShortOfTime:
    """A player that checks one kind of head, crashes on the second, and uses up the time on the third."""

    def __init__(self, kind: str):
        self.calls = 0

    def call(self, deadline, method, *shapes):
        self.calls += 1
        if self.calls == 2:
            raise PlayerError("", "its process ended")
        if self.calls == 3:
            deadline._until = 0
        ratio = {"name": "attend_decode_256", "ok": True, "why": "", "ratio": 1.5, "message": []}
        return [ratio, {"name": "gather", "ok": False, "why": f"NaN {shapes[0]}", "message": []}]

    def leave(self):
        pass


def test_a_shape_that_fails_or_has_no_time_hides_no_other(monkeypatch):
    monkeypatch.setattr(kernels, "PlayerProcess", ShortOfTime)
    found = kernels.of_all(kernels.shapes()[:5], speed.Deadline(60))
    rows = [page._shape_row(shape) for shape in found]
    assert [row[3] for row in rows] == [
        "gather: NaN 64",
        "its process ended",
        "gather: NaN 64",
        *["not checked: no time was left (--seconds)"] * 2,
    ]
    assert rows[0][-1] == 1.5 and rows[1][-1] == ""


def test_heat_is_told_where_the_system_tells_it(monkeypatch):
    monkeypatch.setattr(facts.sensors, "thermal_state", lambda: "fair")
    monkeypatch.setattr(facts.sensors, "low_power_mode", lambda: True)
    text = page.markdown(make.make([], None, 10, lambda _: None))
    assert "Thermal state: fair before, fair after; low-power mode: on." in text


def test_macos_is_named_by_sw_vers(monkeypatch):
    """Python's own answer may be 16.0 on macOS 26."""
    said = {"-productVersion": "26.1", "-buildVersion": "25B78"}
    monkeypatch.setattr(facts.sys, "platform", "darwin")
    monkeypatch.setattr(facts.machine, "output", lambda program, name: said[name])
    monkeypatch.setattr(facts.platform, "mac_ver", lambda: ("16.0", ("", "", ""), "arm64"))
    assert facts._system_build() == "macOS 26.1 (25B78)"


@pytest.mark.parametrize("verb", ["doctor", "bench"])
def test_a_report_that_cannot_be_written_is_refused_at_once(run, tmp_path, verb):
    """A measurement takes minutes. A file of the user stays as it is."""
    code, _, err = run(verb, "--report", str(tmp_path / "none" / "r.md"))
    assert code == 2 and "there is no folder" in err
    (tmp_path / "mine.md").write_text("my words")
    code, _, err = run(verb, "--report", str(tmp_path / "mine.md"))
    assert code == 2 and "exists already" in err and (tmp_path / "mine.md").read_text() == "my words"


def test_doctor_alone_prints_json_as_before(run, planted):
    code, out, _ = run("doctor", "--json")
    assert code == 0 and {frozenset(c) for c in json.loads(out)["checks"]} == {
        frozenset({"name", "ok", "detail"})
    }


def test_an_interrupt_leaves_no_file_and_no_folder(planted, tmp_path):
    out, temporary = tmp_path / "out", tmp_path / "temporary"
    out.mkdir(), temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "ruvmlx", "doctor", "--report", str(out / "r.md")],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(temporary)},
        text=True,
    )
    said = iter(process.stderr.readline, "")
    assert next(line for line in said if "round 1" in line)
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(30) == 130 and "Traceback" not in rest and rest.endswith("interrupted.\n")
    assert list(out.iterdir()) == [] and list(temporary.glob("ruvmlx-report-*")) == []


# ---- the second net


@pytest.mark.parametrize(
    "text",
    [
        f"cannot open /Users/{PERSON}/x.gguf",
        f"[load] Failed to open '/mnt/disk/my {TITLE} papers/x' here",
        f"~/{TITLE}/x",
        f"C:\\\\{TITLE}\\\\x",
        f"https://example.org/{TITLE}",
        f"{TITLE}@example.org",
        f"token {TOKEN}",
        f"on {HOST.upper()}",
        f"user {PERSON}: no",
        f"adapter {ADAPTER!r} is missing",
        "payslips 2024",
    ],
)
def test_paths_addresses_and_known_names_are_taken_out(planted, text):
    found = privacy.clean_json({"a": [text]}, privacy.known_names())["a"][0]
    assert not tells(found) and privacy.REMOVED in found


@pytest.mark.parametrize(
    "text",
    [
        "StoreError at ruvmlx/store/database.py:88",
        "Apple M3 Max, 12 cores",
        "program_source:12:5: error: variable must reside in constant address space",
        "commit 00015ca4b222+",
        "a / b",
        "ruvmlx 0.1.0, macOS 15.1 (24B83)",
    ],
)
def test_what_belongs_to_nobody_stays(planted, text):
    assert privacy.clean_json(text, privacy.known_names()) == text


def test_an_error_keeps_the_words_of_mlx_alone(planted):
    def raised(error: Exception) -> str:
        return doctor._run_check("x", lambda: (_ for _ in ()).throw(error))

    metal = RuntimeError(f"[metal::Device] Unable to build /Users/{PERSON}/a.metal: error: no such type")
    assert "Unable to build <removed> error: no such type" in privacy.public_error(raised(metal)["error"])
    for error in (StoreError(CHAT), LibraryError(CHAT), KeyError(CHAT), OSError(2, CHAT), ValueError(CHAT)):
        assert not tells(privacy.public_error(raised(error)["error"]))


# ---- time


def test_a_player_that_takes_too_long_is_ended_and_opened_again(tiny_folder):
    player = speed.PlayerProcess("ruvmlx", model=str(tiny_folder), backend="reference", threads=1)
    try:
        with pytest.raises(PlayerError) as late:
            player.call(speed.Deadline(0), "generate", [60, 61], 4, "f16")
        assert late.value.public == "took too long"
        first, others = player.call(speed.Deadline(60), "generate", [60, 61], 4, "f16")
        assert first > 0 and len(others) == 3
        with pytest.raises(PlayerError) as failed:  # a token outside the vocabulary
            player.call(speed.Deadline(60), "generate", [10**6], 4, "f16")
        assert re.fullmatch(r"UsageError at ruvmlx/backends/\w+\.py:\d+", failed.value.public)
    finally:
        player.leave()


class Steady:
    """A runtime of known speed, in seconds a token, which never sleeps."""

    def __init__(self, reading: float, decoding: float):
        self.reading, self.decoding = reading, decoding

    def call(self, deadline, method, *arguments):
        if method != "generate":
            return {} if method == "held" else None
        tokens, decoded, _ = arguments
        return self.reading * len(tokens), [self.decoding] * (decoded - 1)


def turns(**speeds: tuple[float, float]) -> speed.Beside:
    made = [speed.TimedRuntime(name.replace("_", "-"), Steady(*each), "") for name, each in speeds.items()]
    for turn in made:
        turn.estimate(speed.Deadline(1))
    return speed.Beside(made, {})


def test_prompts_get_shorter_until_three_rounds_fit():
    def fitting(beside, seconds):
        return speed._fitting(beside, (2048, 96), speed.Deadline(seconds), print)

    assert fitting(turns(ours=(1e-4, 1e-3)), 100) == (2048, 96)
    assert fitting(turns(ours=(1e-2, 1e-2)), 30) == (512, 24)
    slow = turns(ours=(1e-3, 1e-3), mlx_lm=(1.0, 1.0))
    assert fitting(slow, 10) == (2048, 96) and [t.name for t in slow.turns] == ["ours"]
    assert "1.0 tokens a second read" in slow.left_out["mlx-lm"]
    assert fitting(turns(ours=(1.0, 1.0)), 10) == speed.SHORT


def test_ratios_are_to_mlx_lm_in_the_same_round_and_the_first_does_not_count():
    beside = turns(ours=(1e-3, 1e-2), mlx_lm=(2e-3, 5e-3))
    log: list[str] = []
    found = speed._length(beside, 64, 8, speed.Deadline(5), speed.Deadline(5), log.append)
    assert found["ratios"] == {"ours": {"prefill": 2.0, "decode": 0.5}}
    assert found["rates"]["ours"] == {
        "rounds": speed.ROUNDS - 1,
        "prefill": {"median": 1000, "least": 1000, "most": 1000},
        "decode": {"median": 100, "least": 100, "most": 100},
    }


def test_a_runtime_that_failed_is_compared_in_the_rounds_that_both_ran():
    """The runtime failed after its first round. In the first round, mlx-lm was slow, too."""
    ours, peer = turns(ours=(1e-3, 1e-2), mlx_lm=(1e-3, 1e-2)).turns
    ours.rounds, peer.rounds = [(2.0, 2.0)], [(4.0, 4.0), (1.0, 1.0), (1.0, 1.0)]
    assert speed._summary([ours, peer], 64)["ratios"] == {"ours": {"prefill": 2.0, "decode": 2.0}}


# ---- facts and page


def test_the_commit_is_told_where_there_is_one(tmp_path):
    assert facts.commit(tmp_path) is None
    assert re.fullmatch(r"[0-9a-f]{12}\+?", facts.commit(Path(__file__).parents[2]))


def test_a_page_shows_failures_and_cells_never_break_their_row():
    checks = [{"name": "store", "ok": False, "error": "a|b\nc"}]
    told = {
        "format": make.FORMAT,
        "made": "2025-01-01",
        "checks": checks,
        "seconds": 1,
        "slower_at_the_end": 0.0,
    }
    text = page.markdown(
        told | {"failed": {"machine": "OSError"}, "kernels": [{"kernel": "append", "ok": True}]}
    )
    assert (
        "| store | FAIL | a\\|b c |" in text and "* machine: OSError" in text and "| append | True |" in text
    )
    assert report(text)["checks"] == checks


@pytest.mark.parametrize(("free", "ok", "told"), [(49_900_000, False, "50 MB"), (60_000_000, True, "60 MB")])
def test_a_full_disk_fails_a_check_with_the_number(run, planted, monkeypatch, free, ok, told):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1 << 40, 0, free))
    code, out, _ = run("doctor", "--json")
    found = next(c for c in json.loads(out)["checks"] if c["name"] == "disk space")
    assert (code, found["ok"]) == (0 if ok else 1, ok) and told in found["detail"]


@pytest.mark.parametrize(
    ("failed", "line"),
    [
        (0, "All is well."),
        (1, "1 check failed; its line says what to do."),
        (2, "2 checks failed; their lines say what to do."),
    ],
)
def test_the_last_line_counts_what_failed(failed, line):
    assert doctor._summary(failed) == line


def test_what_was_not_checked_is_not_called_ok():
    """The JSON has the value `ok`, which scripts know. The text has a dash."""
    for ok, detail, mark in (
        (True, "no GPU: kernels not checked here", "-"),
        (True, "not known without the model", "-"),
        (True, "none", "ok"),
        (False, "kernels not checked", "FAIL"),
    ):
        assert doctor._mark({"ok": ok, "detail": detail}) == mark
