"""`log`: what it shows, filters, checks and exports."""
# ruff: noqa: F811 - fixtures of another file

import calendar
import hashlib
import json
import sqlite3
import time

import pytest

from ruvmlx.store import Store
from ruvmlx.store.audit_log import GENESIS, canonical

from .test_adapters import tiny_cli  # noqa: F401 - a fixture

DAY = 86400


@pytest.fixture
def filled(home, monkeypatch):
    """A store with 30 rows of three kinds, a day apart; the first is from 2026-01-01, noon."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    store = Store(home / "ruvmlx.db")
    first = 1_767_268_800  # 2026-01-01T12:00:00Z
    for i in range(30):
        now = (first + i * DAY) * 1_000_000_000 + i
        with monkeypatch.context() as patch:
            patch.setattr(time, "time_ns", lambda now=now: now)
            store.witness.note(("setting", "failure", "use")[i % 3], {"name": f"n{i}", "value": i})
    store.db.close()
    yield home / "ruvmlx.db"
    monkeypatch.delenv("TZ")
    time.tzset()


def shown(run, *args: str):
    code, out, err = run("log", *args, "--json")
    assert code == 0, err
    return json.loads(out)


def tamper(path, sql: str) -> None:
    """Run SQL without the log's guards."""
    db = sqlite3.connect(path)
    query = "SELECT name, sql FROM sqlite_master WHERE type = 'trigger' AND tbl_name = 'witness'"
    guards = db.execute(query).fetchall()
    for name, _ in guards:
        db.execute(f"DROP TRIGGER {name}")
    db.execute(sql)
    for _, text in guards:
        db.execute(text)
    db.commit()
    db.close()


def test_show_prints_the_newest_rows_and_no_more_than_asked(run, filled):
    found = shown(run, "show")
    assert [row["n"] for row in found["rows"]] == list(range(11, 31))
    assert found["unbroken"] and found["kinds"] == {"setting": 10, "failure": 10, "use": 10}
    row = found["rows"][-1]
    assert row["time"] == "2026-01-30T12:00:00.000000029Z" and row["detail"] == {"name": "n29", "value": 29}
    assert [row["n"] for row in shown(run, "show", "--limit", "2")["rows"]] == [29, 30]
    code, out, _ = run("log", "show", "--limit", "3")
    assert code == 0 and len(out.splitlines()) == 5 and "name=n29 value=29" in out
    assert "10 failures" in out and "10 uses" in out and "of 30 rows" in out


@pytest.mark.parametrize(
    ("flags", "numbers"),
    [
        (["--kind", "failure"], list(range(2, 31, 3))),
        (["--kind", "failure", "--kind", "use", "--until", "2026-01-04"], [2, 3]),
        (["--since", "2026-01-30"], [30]),
        (["--since", "2026-01-30 12:01"], []),
        (["--since", "2026-01-02", "--until", "2026-01-03T12:00:00"], [2]),
        (["--since", "2026-01-01T12:00:00", "--until", "2026-01-02"], [1]),
        (["--until", "2026-01-01T12:00:00"], []),
        (["--since", "2026-01-30", "--until", "9999-12-31"], [30]),
        (["--since", "9999-12-31"], []),
        (["--since", "1600-01-01", "--until", "2026-01-02"], [1]),
        (["--kind", "nothing"], []),
    ],
)
def test_rows_are_filtered_by_kind_and_date(run, filled, flags, numbers):
    """`since` itself is in, `until` is not; show and export agree."""
    assert [row["n"] for row in shown(run, "show", *flags)["rows"]] == numbers
    assert [row["n"] for row in shown(run, "export", *flags)["rows"]] == numbers
    code, out, _ = run("log", "export", *flags)
    assert code == 0 and [json.loads(line)["n"] for line in out.splitlines()] == numbers


def test_a_date_that_no_clock_shows_is_one_line(run, filled):
    for verb in ("show", "export"):
        code, out, err = run("log", verb, "--since", "0001-01-01")
        assert code == 2 and "out of range" in out + err and "internal error" not in out + err


def test_a_kind_that_is_not_there_names_those_that_are(run, filled, home, monkeypatch):
    assert "failure, setting, use" in run("log", "show", "--kind", "wrong")[1]
    monkeypatch.setenv("RUVMLX_HOME", str(home / "empty"))
    assert "The log is empty." in run("log", "show")[1]


def test_an_export_can_be_verified_without_ruvmlx(run, filled, tmp_path, monkeypatch):
    """Its lines have all that the hashes were computed from; a file that exists is not replaced."""
    monkeypatch.setattr("ruvmlx.store.audit_log._PAGE", 7)
    out = tmp_path / "log.jsonl"
    assert shown(run, "export", "--out", str(out)) == {"file": str(out), "count": 30}
    previous = GENESIS
    for line in out.read_text().splitlines():
        row = json.loads(line)
        at = calendar.timegm(time.strptime(row["time"][:19], "%Y-%m-%dT%H:%M:%S"))
        ns = at * 1_000_000_000 + int(row["time"][20:29])
        body = json.dumps([row["n"], ns, row["kind"], canonical(row["detail"]), previous])
        previous = hashlib.sha256(body.encode()).hexdigest()
        assert previous == row["hash"]
    code, _, err = run("log", "export", "--out", str(out))
    assert code == 2 and "exists already" in err and out.read_text().count("\n") == 30


def test_verify_names_the_row_that_was_changed(run, filled):
    sound = shown(run, "verify")
    assert sound["unbroken"] and sound["count"] == 30 and sound["disagreement"] == ""
    assert sound["head"] in run("log", "verify")[1]
    tamper(filled, """UPDATE witness SET body = '{"name":"n4","value":5}' WHERE seq = 5""")
    code, out, err = run("log", "verify", "--json")
    assert code == 4 and "breaks at row 5" in err and err.count("\n") == 1
    assert json.loads(out)["broken"] == 5
    assert not shown(run, "show")["unbroken"]


def test_verify_finds_a_hash_that_was_kept_elsewhere(run, filled):
    head = shown(run, "verify")["head"]
    assert shown(run, "verify", "--has", head[:16])["has"] == 30
    assert shown(run, "verify", "--has", head[:16].upper())["has"] == 30
    code, _, err = run("log", "verify", "--has", "0" * 20)
    assert code == 1 and "not the log" in err
    code, _, err = run("log", "verify", "--has", "0")
    assert code == 2 and "at least 12" in err


def test_a_row_that_cannot_be_read_is_one_line(run, filled):
    tamper(filled, "UPDATE witness SET body = '[1' WHERE seq = 30")
    code, _, err = run("log", "show")
    assert code == 4 and "row 30" in err and err.count("\n") == 1


def test_verify_compares_ratings_with_the_log(tiny_cli, home):
    """A rating that is gone from its table, though the chain is whole."""
    tiny_cli("generate", "hi", "--max-tokens", "4", "--ignore-eos", "--temp", "0")
    tiny_cli("rate", "last", "up")
    kinds = tiny_cli("log", "show", "--json")[1]["kinds"]
    assert {"reply", "rating", "version"} <= kinds.keys()
    tamper(home / "ruvmlx.db", "DELETE FROM ratings")
    code, out, err = tiny_cli("log", "verify", "--json")
    assert code == 4 and out["unbroken"] and "rating 1" in out["disagreement"] and "disagree" in err


def test_a_failed_generate_is_in_the_log(tiny_cli):
    code, _, _ = tiny_cli("generate", "word " * 20_000)
    assert code == 2
    (row,) = tiny_cli("log", "show", "--kind", "failure", "--json")[1]["rows"]
    assert row["detail"]["error"] == "PromptTooLong"
