import json
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from ruvmlx.apps.cli.prove import _show_points, prove

from apps import charts
from apps.prove import claims, suite
from apps.prove.report import Point, verdict
from apps.prove.trial import Checkpoint, TrialSetup
from ruvmlx.errors import UsageError


def checkpoint(ratings: int, gained: float, n: int = 20) -> Checkpoint:
    """A model that wins `gained` of all pairs and loses the others."""
    base = np.full(n, 3)
    scores = np.where(np.arange(n) < gained * n, 4, 2)
    return Checkpoint(ratings, scores, base, 0.05, 0.01, 60.0, 90.0, 0.99, "Yes.")


def write(path, key: str, seed: int, gained: float, reach=True, at=(30, 100)) -> None:
    points = [suite._plain(checkpoint(r, gained)) for r in at]
    with path.open("a") as f:
        f.write(json.dumps({"key": key, "seed": seed, "reach": reach, "checkpoints": points}) + "\n")


def test_a_result_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "results.jsonl"
    write(path, "brevity, instant", 1, 0.7)
    write(path, "brevity, instant", 0, 0.9)
    path.open("a").write('{"key": "lists, ins')  # killed here
    found = suite.checkpoints(suite.results(path))
    assert [seed[0].scores.mean() for seed in found] == [pytest.approx(3.8), pytest.approx(3.4)]
    assert [c.ratings for c in found[0]] == [30, 100]


@pytest.mark.parametrize(
    "flags,expected",
    [
        (["--report", "R.md"], "--report goes with --suite"),
        (["--suite", "no.jsonl", "--report", "R.md"], "no.jsonl has no results for the report"),
    ],
)
def test_a_report_needs_results(flags, expected, tmp_path, monkeypatch):
    """The command simulates no user and writes no file."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(prove, flags)
    assert isinstance(done.exception, UsageError) and expected in str(done.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags",
    [
        ["--ratings", "30"], ["--every", "5"], ["--shuffle"], ["--flip", "0.2"], ["--json"], ["--as-chat"],
        ["--jobs", "2"], ["--scorer", "taste.py:stars"], ["--best-of", "4"],
    ],
    ids=lambda flags: flags[0],
)  # fmt: skip
def test_flags_that_the_suite_would_ignore_are_refused(flags, tmp_path, monkeypatch):
    """The trials of the suite have their own values, and run in one process."""
    monkeypatch.setattr("ruvmlx.apps.cli.prove.open_bench", None)
    done = CliRunner().invoke(prove, ["--suite", str(tmp_path / "results.jsonl"), *flags])
    assert isinstance(done.exception, UsageError)
    assert str(done.exception).startswith(f"{flags[0]} is not for the suite")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("drawn", [[], ["--drawn", "1"]], ids=["suite", "drawn"])
def test_a_report_does_not_replace_the_results(drawn, tmp_path):
    path = tmp_path / "results.jsonl"
    write(path, "brevity, instant", 0, 0.9)
    before = path.read_text()
    done = CliRunner().invoke(prove, [*drawn, "--suite", str(path), "--report", str(path)])
    assert isinstance(done.exception, UsageError) and "would replace" in str(done.exception)
    assert path.read_text() == before


@pytest.mark.parametrize(
    "content, said",
    [(b'3\n"checkpoints of"\n', "has no results for the report"), (b"\xff\xfe", "is not UTF-8 text")],
)
def test_another_file_is_refused_in_one_line(content, said, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    done = CliRunner().invoke(prove, ["--suite", str(path), "--report", str(tmp_path / "R.md")])
    assert isinstance(done.exception, UsageError) and said in str(done.exception)


@pytest.mark.parametrize(
    "drawn, result, said",
    [
        (["--drawn", "1"], {"user": 0, "seed": 0, "checkpoints": []}, "the field 'family' is missing"),
        (["--drawn", "1"], {"user": 0, "seed": 0, "setting": {}, "checkpoints": [{}]}, "the field '"),
        ([], {"key": "brevity, instant", "reach": True, "checkpoints": [{}]}, "the field 'seed' is missing"),
        ([], {"key": "brevity, instant", "seed": 0, "reach": 1, "checkpoints": [{"ratings": 3}]}, "missing"),
        ([], {"key": "brevity, instant", "seed": 0, "reach": 1, "checkpoints": 3}, "not iterable"),
    ],
)
def test_a_damaged_result_is_refused_in_one_line(drawn, result, said, tmp_path):
    """The user can have written it by hand."""
    path = tmp_path / "results.jsonl"
    path.write_text(f"\n{json.dumps(result)}\n")
    done = CliRunner().invoke(prove, [*drawn, "--suite", str(path), "--report", str(tmp_path / "R.md")])
    assert isinstance(done.exception, UsageError) and "\n" not in str(done.exception)
    assert f"{path}: a result is damaged" in str(done.exception) and said in str(done.exception)


def test_every_cell_has_its_own_name():
    keys = [cell.key for cell in suite.cells()]
    assert len(set(keys)) == len(keys)


def test_a_suite_can_be_limited_to_one_user_and_one_way_to_learn(tmp_path, monkeypatch):
    path, ran = tmp_path / "results.jsonl", []
    write(path, "brevity, style", 0, 0.9)

    def result(_bench, _setting, cell, seed, _log):
        ran.append((cell.key, seed))
        return {"key": cell.key, "seed": seed, "reach": None, "checkpoints": []}

    monkeypatch.setattr(suite, "_result", result)
    bench, setting = (
        SimpleNamespace(model=SimpleNamespace(name="tiny")),
        TrialSetup(len, ["a"], ["b"], 1, [1]),
    )
    suite.run(bench, setting, 2, "brevity", "style", path, lambda line: None)
    assert ran == [("brevity, style + shuffled", 0), ("brevity, style", 1), ("brevity, style + shuffled", 1)]


def test_a_suite_without_trials_is_refused(tmp_path):
    with pytest.raises(UsageError, match="the suite has no trial of the user random with learning full"):
        suite.run(
            SimpleNamespace(model=SimpleNamespace(name="tiny")), TrialSetup(len, ["a"], ["b"], 1, [1]),
            1, "random", "full", tmp_path / "results.jsonl", lambda line: None,
        )  # fmt: skip


def test_results_of_another_model_or_setting_are_not_mixed(tmp_path, monkeypatch):
    """Else the suite takes them for its own, and says nothing."""
    path, ran = tmp_path / "results.jsonl", []

    def result(bench, setting, cell, seed, log):
        ran.append(cell.key)
        return {"key": cell.key, "seed": seed, "reach": None, "checkpoints": []}

    monkeypatch.setattr(suite, "_result", result)

    def run(model="tiny", tokens=96, heldout="b"):
        setting = TrialSetup(len, ["a"], [heldout], 1, [1], tokens)
        bench = SimpleNamespace(model=SimpleNamespace(name=model))
        suite.run(bench, setting, 1, "lists", "full", path, lambda line: None)

    run()
    run()
    for other in ({"model": "large"}, {"tokens": 32}, {"heldout": "c"}):
        with pytest.raises(UsageError, match=r"results with model tiny, prompts .*; this run has model"):
            run(**other)
    assert ran == ["lists, full"]


def test_the_report_says_what_holds_and_what_does_not(tmp_path):
    path = tmp_path / "results.jsonl"
    for seed in range(3):
        write(path, "brevity, instant", seed, 0.9)
        write(path, "lists, instant", seed, 0.9)
        write(path, "casual, instant", seed, 0.5)
        write(path, "spanish, instant", seed, 0.9, reach=False)
    text = suite.markdown(path, "ruvmlx prove --suite results.jsonl", "curves.svg")
    lines = text.splitlines()
    assert "| brevity after 100 ratings: at least 85% | 90.0% (75.0% to 100.0%) | yes |" in lines
    assert any("two other users" in x and "| lists | **no** |" in x for x in lines)
    assert any("reversed" in x and "not measured" in x for x in lines)
    assert "| spanish, instant (out of reach) | 3 | 30 |" in text
    assert "spanish" not in suite.picture(path) and "brevity" in suite.picture(path)


def test_a_report_does_not_take_the_name_of_its_picture(tmp_path):
    path = tmp_path / "results.jsonl"
    write(path, "brevity, instant", 0, 0.9)
    flags = ["--suite", str(path), "--report"]
    assert CliRunner().invoke(prove, [*flags, str(tmp_path / "R.md")]).exit_code == 0
    assert (tmp_path / "R.md").read_text().startswith("# ") and (tmp_path / "R.svg").exists()
    done = CliRunner().invoke(prove, [*flags, str(tmp_path / "x.svg")])
    assert isinstance(done.exception, UsageError) and "REPORT.md" in str(done.exception)


@pytest.mark.parametrize(
    ("key", "field", "bad", "claim"),
    [
        ("brevity, instant", "kl", 0.11, "KL at most 0.1"),
        ("brevity, instant", "ppl_change", 0.021, "perplexity at most +2%"),
        ("brevity, instant", "variety", 0.9, "distinct-2, mean of seeds: at most 5% lost"),
        ("random, instant", "ppl_change", 0.06, "hostile ratings: perplexity within 5%"),
    ],
)
def test_one_bad_checkpoint_is_enough(key, field, bad, claim):
    good = Point(30, 3, 3, 0.9, (0.8, 1), 0.05, 0.01, 60, 90, 1.0, 0.9, "")
    worse = Point(**(vars(good) | {"ratings": 100, field: bad}))
    for points, met in (([good], True), ([good, worse], False)):
        verdict = next(v for v in claims.verdicts({key: points}) if v.claim == claim)
        assert verdict.met is met and (field != "variety" or "worst seed of all 10.0%" in verdict.figure)


def test_names_of_the_plot_do_not_cover_each_other():
    apart = charts._separate_labels([100, 101, 50, 99])
    assert min(np.diff(sorted(apart))) >= 14 and sorted(range(4), key=lambda i: apart[i]) == [2, 3, 0, 1]


def test_arms_are_compared_on_the_seeds_that_both_have(tmp_path):
    """The third seed of the instant loop is the best one; the full loop has not been run with it."""
    path = tmp_path / "results.jsonl"
    for seed, gained in ((0, 0.2), (1, 0.2), (2, 1.0)):
        write(path, "brevity, instant", seed, gained)
    for seed in (0, 1):
        write(path, "brevity, full", seed, 0.4)
    text = suite.markdown(path, "x", "y.svg")
    line = next(x for x in text.splitlines() if "full loop against the instant loop (brevity)" in x)
    assert line.endswith("| yes |"), line


def test_questions_that_were_rated_are_not_called_unseen(capsys):
    """The same file may be given for --prompts and --heldout."""
    point = Point(1, 3.0, 2.0, 0.675, (0.5, 0.8), 0.01, 0.0, 90.0, 80.0, 1.0, 1.0, "Yes.")
    facts = {"user": "brevity", "arm": "instant", "seeds": 1}
    for rated, said in ((0, "no rating was about them"), (1, "1 of them was rated"), (2, "2 of them were")):
        _show_points([point], facts, 2, rated)
        assert f"The test has 2 questions; {said}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("interval", "said"),
    [
        ((0.55, 0.8), "replies are better than the original model's in 68% of the comparisons"),
        ((0.2, 0.45), "replies are worse than the original model's"),
        ((0.5, 0.8), "cannot tell"),
        ((0.3, 0.6), "cannot tell"),
    ],
)
def test_a_trial_ends_with_a_verdict_in_words(interval, said):
    point = Point(1, 3.0, 2.0, 0.675, interval, 0.01, 0.0, 90.0, 80.0, 1.0, 1.0, "Yes.")
    assert said in verdict(point) and verdict(point).startswith("After 1 rating, ")
