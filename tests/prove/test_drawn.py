"""Users drawn from a space of tastes: what they like, how they rate, their trials, and the report."""

import json
import time

import numpy as np
import pytest
from click.testing import CliRunner
from ruvmlx.apps.cli import prove as command

from apps.prove import drawn_report, drawn_suite, drawn_tastes
from apps.prove.as_chat import ChatSetup
from apps.prove.drawn_suite import DrawnRun
from apps.prove.drawn_tastes import HELD_OUT, PROPERTIES, DrawnTaste
from apps.prove.drawn_trial import DrawnSetup, FrozenReplies, UntouchedPart
from apps.prove.drawn_users import FLIPPED, DrawnStars, DrawnUser
from apps.prove.processes import Workers
from apps.prove.raters import RATERS
from apps.prove.statistics import judged_wins
from apps.prove.trial import Bench
from ruvmlx.sona.judge import TasteJudge
from tests.sona import simulated_tastes as sim

QUESTIONS = [f"{'How do I' if i % 2 else 'What is'} number {i}?" for i in range(12)]
RECORDED = ("+1.4 commas, -0.7 the, -1.5 -ly", "5511121452455534424143413535524232135321")


@pytest.fixture(scope="module")
def made_up_replies() -> dict[str, list[str]]:
    """40 made-up replies to each question."""
    rng = np.random.default_rng(0)
    return {question: [sim.reply(rng) for _ in range(40)] for question in QUESTIONS}


# -- tastes and stars ------------------------------------------------------------------------------------


def test_the_families_share_no_property_and_each_has_a_dozen():
    assert not set(PROPERTIES) & set(HELD_OUT) and min(len(PROPERTIES), len(HELD_OUT)) >= 12
    for held_out, family in ((False, PROPERTIES), (True, HELD_OUT)):
        users = [DrawnUser.draw(number, held_out) for number in range(30)]
        wanted = {name for user in users for taste in user.tastes for name in taste.names}
        assert wanted == set(family)
        assert all(0.5 <= abs(w) <= 1.5 for user in users for taste in user.tastes for w in taste.weights)


def test_thirty_users_differ_and_are_the_same_each_time():
    users = [DrawnUser.draw(number, False) for number in range(30)]
    assert users == [DrawnUser.draw(number, False) for number in range(30)]
    assert len({user.words for user in users}) == 30
    assert {user.kind for user in users} == {"mixed", "by topic"}
    assert {user.rater for user in users} == set(RATERS)
    noisy = DrawnUser.draw(0, False, "noisy")
    assert noisy.rater == "noisy" and noisy.tastes == DrawnUser.draw(0, False, "stars").tastes


@pytest.mark.parametrize("name", [*PROPERTIES, *HELD_OUT])
@pytest.mark.parametrize("text", ["", "...", "\n\n", "word " * 500, "1. Ünï: “no” -- it’s\n**x**"])
def test_a_property_of_any_text_is_a_number(name, text):
    assert np.isfinite(DrawnTaste((name,), (1.0,)).values(["What?"], [text])).all()


PAIRS = [
    ("sentence length", "One two three four five six.", "One two. Three four. Five six."),
    ("uneven sentences", "One. Two three four five six.", "One two three. Four five six."),
    ("last sentence", "One. Two three four.", "One two three. Four."),
    ("repeated words", "stone stone stone", "stone river cloud"),
    ("of", "a cup of tea", "a cup for tea"),
    ("a", "a cup, an egg", "the cup, the egg"),
    ("to", "to go to", "go on up"),
    ("can", "You can go.", "You do go."),
    ("not", "It isn't, and never was.", "It is, and often was."),
    ("-tion", "a nation of ability", "a land of skill"),
    ("-ed", "They walked and talked.", "They walk and talk."),
    ("colons", "Two: one; one", "Two, one, one"),
]


@pytest.mark.parametrize("name,more,less", PAIRS)
def test_a_held_out_property_is_what_its_name_says(name, more, less):
    high, low = DrawnTaste((name,), (1.0,)).values(["What?"] * 2, [more, less])[:, 0]
    assert high > low


@pytest.mark.parametrize("number", range(6))
def test_stars_use_the_whole_range_among_replies_to_one_question(made_up_replies, number):
    """A question whose replies are all long is not rated by its length."""
    longer = {
        q: [t + " word" * 10 * (i % 3) for t in texts] for i, (q, texts) in enumerate(made_up_replies.items())
    }
    for texts_of in (made_up_replies, longer):
        stars = DrawnStars(DrawnUser.draw(number, False), texts_of)
        given = [[stars(q, t, True) for t in texts] for q, texts in texts_of.items()]
        shares = np.array([[row.count(n) / len(row) for n in range(1, 6)] for row in given])
        assert shares.mean(axis=0).max() < 0.45 and (shares.max(axis=1) < 0.8).all()


def test_a_taste_by_topic_asks_what_the_question_is_about(made_up_replies):
    short, long = DrawnTaste(("length",), (-1.0,)), DrawnTaste(("length",), (1.0,))
    stars = DrawnStars(DrawnUser(0, False, "stars", (short, long)), made_up_replies)
    assert (stars("How do I number 1?", "Yes.", True), stars("What is number 0?", "Yes.", True)) == (5, 1)


def test_a_mixed_taste_weighs_its_properties(made_up_replies):
    """Short and casual: a reply that is both is liked most, one that is neither least."""
    user = DrawnUser(0, False, "stars", (DrawnTaste(("length", "you"), (-1.0, 1.0)),))
    stars = DrawnStars(user, made_up_replies)
    both, one, none = "You do.", "It does.", "It is very long. " * 40
    assert stars(QUESTIONS[0], both, True) == 5 and stars(QUESTIONS[0], none, True) == 1
    taste, zero, ones = user.tastes[0], np.zeros(2), np.ones(2)
    scores = taste.score(taste.values([""] * 3, [both, one, none]), zero, ones)
    assert scores[0] > scores[1] > scores[2]


@pytest.mark.parametrize(
    "rater,pressed",
    [
        ("stars", ["1", "2", "3", "4", "5"]),
        ("thumbs", ["down", "down", None, "up", "up"]),
        ("only-up", [None, None, None, "up", "up"]),
        ("only-down", ["down", "down", None, None, None]),
    ],
)
def test_what_each_rater_presses(rater, pressed):
    user, rng = DrawnUser.draw(1, False, rater), np.random.default_rng(0)
    assert [user.rating(stars, rng) for stars in range(1, 6)] == pressed


def test_a_noisy_rater_turns_a_fifth_of_the_ratings_around():
    user, rng = DrawnUser.draw(1, False, "noisy"), np.random.default_rng(0)
    pressed = [user.rating(5, rng) for _ in range(2000)]
    assert set(pressed) == {"1", "5"} and pressed.count("1") / 2000 == pytest.approx(FLIPPED, abs=0.03)


def test_the_study_of_taste_models_has_the_users_that_it_had(made_up_replies):
    """Recorded before tastes became a class: docs/evidence.md has figures of these users."""
    pairs = [(q, t) for q, texts in made_up_replies.items() for t in texts]
    words, stars = drawn_tastes.stars(10, *zip(*pairs, strict=True))
    assert words == RECORDED[0] and "".join(str(int(s)) for s in stars[:40]) == RECORDED[1]


# -- trials ----------------------------------------------------------------------------------------------


def drawn_run(users: int, learn="instant", best_of=2, rater=None, presses=(1, 2), first=0) -> DrawnRun:
    chat = ChatSetup(QUESTIONS[first:4], QUESTIONS[4:7], presses, max_tokens=8, temperature=0.7)
    people = [DrawnUser.draw(number, False, rater) for number in range(users)]
    return DrawnRun(DrawnSetup(chat, learn, best_of), people, 1, rater)


def run(bench, run_, path=None) -> list[dict]:
    return drawn_suite.run_missing(bench, run_, path, "a machine", lambda line: None)


def test_a_run_that_was_stopped_is_continued(bench, tmp_path, monkeypatch):
    path = tmp_path / "drawn.jsonl"
    first = run(bench, drawn_run(2), path)
    path.open("a").write('{"user": 2, "fam')  # killed here
    every = run(bench, drawn_run(3), path)
    assert [r["user"] for r in every] == [0, 1, 2] and every[:2] == json.loads(json.dumps(first))
    monkeypatch.setattr(FrozenReplies, "sample", None)  # nothing is left to do
    assert run(bench, drawn_run(3), path) == json.loads(json.dumps(every))
    with pytest.raises(TypeError):  # other ratings are other trials
        run(bench, drawn_run(3, presses=(3,)), path)
    with pytest.raises(TypeError):  # so are other prompts
        run(bench, drawn_run(3, first=1), path)


def test_several_processes_write_the_replies_that_the_trials_read(
    tiny, tiny_backend, bench, tmp_path, monkeypatch
):
    """The parts are all replies of the seeds with missing trials, so `sample` finds each in the file. Seed 0
    is always read, because its replies scale the stars."""
    shared = Bench(tiny, tiny_backend, kept_replies=tmp_path / "kept.db")
    asked = drawn_run(1)
    two, three = (DrawnRun(asked.setup, asked.users, seeds) for seeds in (2, 3))
    path, parts = tmp_path / "drawn.jsonl", []
    run(shared, two, path)  # the trials of the seeds 0 and 1 are finished

    class TwoProcesses(Workers):
        def results(self, work, given):
            given = list(given)
            parts.extend(one for one in given if isinstance(one, UntouchedPart))
            yield from (work(shared, one) for one in given)

    real, seen = type(shared.untouched)._write, []
    monkeypatch.setattr(type(shared.untouched), "_write", lambda *a: seen.append(len(a[2])) or real(*a))
    workers = TwoProcesses(lambda: shared, 2)
    drawn_suite.run_missing(shared, three, path, "a machine", lambda line: None, workers)
    assert [(part.seed, part.first) for part in parts] == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert sum(seen[:4]) > 0 and not any(seen[4:])


def test_users_in_one_batch_learn_what_each_learns_alone(bench):
    together = run(bench, drawn_run(3, rater="stars"))
    alone = drawn_run(3, rater="stars")
    by_itself = run(bench, DrawnRun(alone.setup, alone.users[2:], 1, "stars"))
    assert [c["stars"] for c in together[2]["checkpoints"]] == [
        c["stars"] for c in by_itself[0]["checkpoints"]
    ]


def test_best_of_n_shows_the_reply_with_the_most_predicted_stars(bench, monkeypatch):
    """A judge that knows the taste never picks less than the first reply; one that is wrong never more."""
    for sign in (1, -1):
        facts = []
        for number in range(3):
            one = drawn_run(number + 1, best_of=4, rater="stars")
            monkeypatch.setattr(TasteJudge, "score", _knowing(bench, one, number, sign))
            facts += run(bench, DrawnRun(one.setup, one.users[number:], 1, "stars"))
        pairs = [
            (c["stars"]["instant+best-of-4"], c["stars"]["instant"]) for f in facts for c in f["checkpoints"]
        ]
        gained = np.array(
            [sign * (a - b) for picked, single in pairs for a, b in zip(picked, single, strict=True)]
        )
        assert (gained >= 0).all() and gained.max() > 0


def test_the_judge_sees_as_many_replies_of_the_untouched_model_as_of_the_learned_one(bench, monkeypatch):
    seen = []
    monkeypatch.setattr(TasteJudge, "score", lambda self, of: seen.append(len(of)) or np.zeros(len(of)))
    (facts,) = run(bench, drawn_run(1, best_of=3, rater="stars", presses=(1,)))
    assert seen == [3] * 6  # three questions each
    stars = facts["checkpoints"][0]["stars"]
    assert stars["original+best-of-3"] == stars["original"]


def _knowing(bench, run_: DrawnRun, number: int, sign: int):
    stars = DrawnStars(run_.users[number], FrozenReplies.sample(bench, run_.setup, 0).texts)
    return lambda self, replies: np.array(
        [sign * stars(r.question, r.text, r.finish_reason == "stop") for r in replies]
    )


def test_the_full_loop_trains_when_the_chat_would_and_counts_its_seconds(bench, monkeypatch):
    due = "ruvmlx.chats.learning.Learning.is_due"
    monkeypatch.setattr(due, lambda self: len(self.learner.history.ratings()) == 2)
    trained = []
    monkeypatch.setattr(
        "ruvmlx.chats.learning.Learning.consolidate", lambda self: trained.append(self) or time.sleep(0.02)
    )
    found = run(bench, drawn_run(2, "full", rater="stars"))
    assert len(set(map(id, trained))) == len(trained) == 2
    assert all(
        f["seconds"]["training"] >= 0.02 and "full+best-of-2" in f["checkpoints"][0]["stars"] for f in found
    )


def test_who_finds_nothing_to_rate_stops_and_keeps_the_untouched_model(bench, monkeypatch):
    monkeypatch.setattr(DrawnUser, "rating", lambda *_: None)
    (facts,) = run(bench, drawn_run(1))
    for point in facts["checkpoints"]:
        assert point["given"] == 0 and point["read"] == 2 * point["ratings"]
        assert point["stars"]["instant"] == point["stars"]["original"]


# -- the report ------------------------------------------------------------------------------------------


def result(user: int, gained: float, reach=0.85, family="tuning", learn="instant", kl=0.01, **more) -> dict:
    """A user for whom `gained` of 20 pairs are won and the others lost."""
    base = [3] * 20
    stars = [4 if i < round(20 * gained) else 2 for i in range(20)]
    point = {
        "ratings": 30, "given": 30, "read": 40, "kl": kl, "ppl_change": 0.004,
        "stars": {"original": base, learn: stars, f"{learn}+best-of-4": [5] * 20},
    }  # fmt: skip
    return {
        "user": user, "family": family, "rater": "stars", "kind": "mixed", "taste": "+1.0 of", "learn": learn,
        "best_of": 4, "seed": 0, "reach": reach, "checkpoints": [point], "machine": "a machine",
        "seconds": {"ratings": 80.0, "training": 5.0, "replies": 4.0, "best_of": 12.0},
        "setting": {"model": "m", "raters": "each their own", "ratings": [30], "questions": 20,
                    "max_tokens": 96, "temperature": 0.7},
    } | more  # fmt: skip


def test_the_worst_user_is_named_with_the_lower_end_of_the_interval():
    results = [result(0, 0.9), result(1, 0.5), result(2, 0.1, kl=0.07), result(3, 0.0, reach=0.6)]
    spread = next(a for a in drawn_report.distributions(results) if a.arm == "instant")
    assert (spread.users, spread.win_rate, spread.quantiles[2]) == (3, 0.5, 0.5)
    assert spread.worst.user == 2 and spread.worst.win_ci[0] == 0 and spread.kl == 0.07
    assert (spread.better, spread.worse) == (1, 1)
    said = drawn_report.text(results)
    assert "model's for 1 of 3 users, and worse for 1. For 1, this run cannot tell." in said
    text = drawn_report.markdown(results, "x.svg")
    assert "3 of 4 users are within reach" in text and "10.0% (0.0% to 25.0%), user 2" in text
    assert "60%, out of reach" in text and "ruvmlx prove --drawn 4 --ratings 30 --questions 20" in text


def test_a_user_of_several_seeds_counts_once():
    results = [result(0, 0.9), result(0, 0.5, seed=1), result(1, 0.3)]
    spread = drawn_report.distributions(results)[0]
    assert spread.users == 2 and spread.win_rate == pytest.approx((0.7 + 0.3) / 2)


def test_costs_are_for_a_reply_and_for_the_median_user():
    """A machine that slept during one user's trial does not change them."""
    slept = result(2, 0.5)
    slept["seconds"]["ratings"] = 9999.0
    (cost,) = drawn_report.costs([result(0, 0.5), result(1, 0.5), slept])
    assert (cost.rating, cost.training, cost.reply, cost.best_of) == (2.0, 5.0, 0.2, 0.6)


def test_families_and_other_settings_are_not_mixed():
    results = [result(0, 0.9), result(0, 0.1, family="held-out")]
    text = drawn_report.markdown(results, "x.svg")
    assert text.count("1 of 1 user is within reach") == 2 and "--drawn 1 --held-out" in text
    other = result(1, 0.9) | {"setting": results[0]["setting"] | {"questions": 5}}
    assert drawn_report.markdown([*results, other], "x.svg").count("1 of 1 user is") == 3


def test_the_picture_has_every_user_of_every_arm():
    svg = drawn_report.picture([result(n, n / 10) for n in range(10)])
    assert svg.count("<circle") == 20 and "instant+best-of-4" in svg


def test_a_perfect_judge_wins_less_where_replies_are_alike():
    rng = np.random.default_rng(0)
    varied, alike = rng.integers(1, 6, (40, 8)), np.full((40, 8), 3)
    assert judged_wins(alike, alike) == 0.5 and judged_wins(varied, varied) > 0.75


def test_the_command_writes_results_and_report(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "open_bench", lambda settings, say: bench)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q").write_text("\n".join(QUESTIONS))
    flags = ["--drawn", "2", "--prompts", "q", "--heldout", "q", "--questions", "3", "--ratings", "2"]
    flags += ["--max-tokens", "6", "--best-of", "2", "--suite", "d.jsonl", "--held-out"]
    done = CliRunner().invoke(command.prove, [*flags, "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["drawn"] == 2 and facts["family"] == "held-out" and len(facts["users"]) == 2
    assert "2 trials in " in done.stderr
    assert CliRunner().invoke(command.prove, [*flags, "--report", "D.md"]).exit_code == 0
    assert "The held-out family" in (tmp_path / "D.md").read_text()
    assert (tmp_path / "D.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    "flags,expected",
    [
        (["--learn", "off"], "something must learn"),
        (["--shuffle"], "--shuffle is not for drawn users"),
        (["--as-chat"], "--as-chat is not for drawn users"),
        (["--report", "D.md"], "--report goes with --suite"),
        (["--suite", "no.jsonl", "--report", "D.md"], "no.jsonl has no results for the report"),
    ],
)
def test_what_drawn_users_cannot_do_is_said(flags, expected):
    done = CliRunner().invoke(command.prove, ["--drawn", "1", *flags])
    assert type(done.exception).__name__ == "UsageError" and expected in str(done.exception)


def test_one_user_is_singular():
    said = drawn_report.text([result(0, 0.9)])
    assert said.splitlines()[0].endswith("family is within reach") and "for 1 of 1 user, and" in said
