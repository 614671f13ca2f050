"""`learn status` and `rate` for people who know neither KL nor adapters."""

from dataclasses import asdict
from types import SimpleNamespace

import pytest
from ruvmlx.apps.learning_words import (
    HOW_TO_RATE,
    detail_rows,
    nothing_in_use,
    preference_line,
    rating_line,
    status_facts,
    status_lines,
)

from ruvmlx.ratings import FACTS
from ruvmlx.sona.adapter_history import signal_groups

from ..sona.feedback import reply

NOTHING = {
    "ratings": 0, "updates": 0, "pending": 0, "consolidations": 0, "adapter_version": 0, "kl": 0.0,
    "kl_cap": 0.1, "versions": [], "promoted": None, "reason": None, "targets": "head",
}  # fmt: skip
LEARNED = NOTHING | {"ratings": 3, "updates": 3, "pending": 3, "adapter_version": 3, "kl": 0.012}
KLS = (0.0, 0.00004, 0.0001, 0.012)
NEEDS = (
    "The background learning reads all ratings together. It needs 10 ratings or preferences; you have "
    "{given}. Then `ruvmlx learn consolidate` starts it. The side panel of the chat (F2) says after how many "
    "more the chat starts it in your pauses."
)


def test_an_imported_adapter_has_no_ratings_and_nothing_to_undo():
    lines = status_lines(NOTHING | {"adapter_version": 1, "versions": [1], "kl": 0.05})
    assert lines[0] == (
        "No ratings yet: this adapter was imported, or its ratings are gone. "
        "50% of the allowed change is used."
    )
    assert lines[1].endswith("`ruvmlx learn rollback V` goes to version V (0: the original model).")
    assert "undo" not in " ".join(lines)


def test_what_waits_is_counted_in_words():
    waiting = LEARNED | {"ratings": 10, "pending": 1, "consolidations": 1}
    assert "1 rating waits for" in status_lines(waiting)[2]
    assert "1 ratings and preferences wait for" in status_lines(waiting | {"preferences": 2})[2]


def test_ratings_that_a_training_cannot_use_do_not_wait(open_tiny):
    """Before, 12 ratings waited, and `learn consolidate` said that there were 6."""
    with open_tiny() as runtime:
        for i in range(12):
            runtime.rate(reply(runtime, seed=i), "down", FACTS if i % 2 else "")
        facts = status_facts(runtime.status())
        assert "there are 6" in runtime.learning.consolidate()["reason"]
    assert (facts["ratings"], facts["pending"]) == (12, 6) and NEEDS.format(given=6) in status_lines(facts)


def test_a_refused_result_is_not_followed_by_the_proposal_to_try_again():
    """`learn consolidate` has said the result itself, so the lines do not repeat it."""
    refused = LEARNED | {"ratings": 10, "pending": 10, "promoted": False, "reason": ""}
    assert status_lines(refused)[2] == "The background learning tries again after some more ratings."


def test_nothing_learned_is_said_with_the_next_step():
    assert status_lines(NOTHING) == [
        "No ratings yet: replies are the original model's.",
        "Rate a reply in `ruvmlx chat`, or with `ruvmlx rate last up`.",
        "Ratings change the output layer, which chooses each next word.",
    ]


def test_after_a_rollback_to_the_original_nobody_is_told_that_there_are_no_ratings():
    first, way_back, _ = status_lines(NOTHING | {"versions": [0, 1, 2]})
    assert first == "Nothing that was learned is in use: replies are the original model's."
    assert way_back == "`ruvmlx learn rollback V` uses version V of the adapter again: 1 or 2."


def test_what_was_learned_has_its_distance_and_the_way_back():
    assert status_lines(LEARNED)[:3] == [
        "Learned from 3 ratings. 12% of the allowed change is used: a limit keeps the model near the "
        "original one.",
        "The adapter (what was learned) is at version 3. `ruvmlx learn undo` takes the last rating back; "
        "`ruvmlx learn rollback V` goes to version V (0: the original model).",
        NEEDS.format(given=3),
    ]
    assert status_lines(LEARNED | {"ratings": 10, "updates": 10, "pending": 10})[2] == (
        "10 ratings wait for the background learning: `ruvmlx learn consolidate` starts it now."
    )


def test_the_taste_is_a_sentence_once_ratings_support_one():
    taste = {"sentence": "shorter replies, more 'you'", "turned": 0}
    assert status_lines(LEARNED | {"taste": taste})[1] == "You seem to like: shorter replies, more 'you'."
    turned = taste | {"turned": 40}
    assert status_lines(LEARNED | {"taste": turned})[1].startswith("You seem to like lately: ")
    assert status_lines(LEARNED | {"taste": taste | {"sentence": ""}}) == status_lines(LEARNED)


def test_preferences_are_counted_beside_the_ratings():
    facts = LEARNED | {"preferences": 1, "updates": 3, "pending": 4}
    lines = status_lines(facts)
    assert lines[0].startswith("Learned from 3 ratings and 1 preference; 1 changed nothing. ")
    assert "takes the last rating or preference back" in lines[1]
    assert lines[2] == NEEDS.format(given=4)
    enough = status_lines(facts | {"ratings": 9, "pending": 10})
    assert enough[2].startswith("10 ratings and preferences wait for the background learning")
    only = status_lines(facts | {"ratings": 0, "preferences": 2, "updates": 2})
    assert only[0].startswith("Learned from 2 preferences. ")


def test_a_preference_is_told_by_the_lead_of_the_better_reply():
    done = SimpleNamespace(
        applied=True, margin_before=-0.01, margin_after=0.25, kl=0.01, kl_cap=0.1, adapter_version=4
    )
    said = preference_line(done)
    assert "more like the better one" in said and "`ruvmlx learn undo` takes it back" in said
    assert preference_line(SimpleNamespace(applied=False, adapter_version=4)).startswith(
        "Kept your preference"
    )


def test_nothing_in_use_has_the_true_next_step():
    """After a rollback the ratings are there, so nobody is told to rate."""
    facts = NOTHING | {"preferences": 0}
    assert nothing_in_use(facts | {"ratings": 1}) == nothing_in_use(facts | {"preferences": 1}) == ""
    assert nothing_in_use(facts) == f"No rating is in use. {HOW_TO_RATE}"
    assert nothing_in_use(facts | {"versions": [0, 1, 2]}) == (
        "No rating is in use. `ruvmlx learn rollback V` uses version V of the adapter again: 1 or 2."
    )
    assert nothing_in_use(facts | {"versions": [1, 2, 5]}).endswith(" again: 1 to 5.")
    assert nothing_in_use(facts | {"versions": [0, 1]}).endswith(" again: 1.")
    imported = {"adapter_version": 1, "versions": [0, 1]}
    assert nothing_in_use(facts | imported) == f"No rating is in use. {HOW_TO_RATE}"


def test_a_small_distance_is_not_written_as_none():
    facts = LEARNED | {"adapter": "default", "signals": []}
    shown = {kl: dict(detail_rows(facts | {"kl": kl}))["distance"].split(";")[0] for kl in KLS}
    assert shown == {0.0: "0.0000", 0.00004: "less than 0.0001", 0.0001: "0.0001", 0.012: "0.0120"}


def test_the_quality_of_rated_replies_is_a_rank(open_tiny):
    """Before, `learn status --details` said that 5 stars are 100%. A user of only 5 stars saw 77%."""
    with open_tiny() as runtime:
        for i in range(12):
            runtime.rate(reply(runtime, seed=i), "5")
        runtime.learning.settle()
        groups = [asdict(group) for group in signal_groups(runtime.learner.history)]
    rows = dict(detail_rows(LEARNED | {"adapter": "default", "signals": groups}))
    assert 0.5 < groups[0]["quality"] < 0.8
    assert rows["rated replies"].endswith("(up is 100%, down is 0%, and 50% is the middle of your stars)")


def test_a_refused_training_says_why():
    """No command is named that would be refused again."""
    facts = LEARNED | {
        "ratings": 12,
        "consolidations": 1,
        "promoted": False,
        "reason": "held-out ratings prefer it not",
    }
    assert status_lines(facts | {"pending": 1})[2] == (
        "The background learning changed the model once. "
        "The newest result of the background learning is not in use: held-out ratings prefer it not. "
        "The background learning tries again after some more ratings."
    )


def test_a_reset_names_the_version_to_return_to():
    lines = status_lines(NOTHING | {"ratings": 2, "versions": [0, 1, 2]})
    assert lines[0] == "2 ratings given, none in use: replies are the original model's."
    assert lines[1] == "`ruvmlx learn rollback V` uses version V of the adapter again: 1 or 2."


def test_a_rating_that_changes_nothing_is_no_lesson():
    lines = status_lines(LEARNED | {"ratings": 5})
    assert lines[0].startswith("Learned from 5 ratings; 2 changed nothing. ")


@pytest.mark.parametrize(
    ("rating", "after", "effect"),
    [
        ("up", -0.2, ": more like this."),
        ("down", -0.9, ": less like this."),
        ("3", -0.9, ": less like this."),
        ("down", -0.5002, "; it changed next to nothing."),
        ("up", -0.5, "; it changed next to nothing."),
        ("up", -0.9, ". Your ratings together still ask for other replies than this one."),
        ("4", -0.9, ". Your ratings together still ask for other replies than this one."),
        ("1", -0.2, ". Your ratings together still ask for more replies like this one."),
    ],
)
def test_a_rating_says_what_it_did(rating, after, effect):
    """If the ratings together push the other way, it is not told as the wish of this rating."""
    result = SimpleNamespace(
        rating=rating,
        reason="",
        applied=True,
        logprob_before=-0.5,
        logprob_after=after,
        kl=0.09,
        kl_cap=0.1,
        adapter_version=4,
        replaces="",
    )
    line = rating_line(result)
    given = f"{rating} of 5" if rating.isdigit() else rating
    assert f"Learned from your rating ({given}){effect} 90% of the allowed change is used." in line
    assert "changed nothing" in rating_line(SimpleNamespace(**vars(result) | {"applied": False}))
    for changed in ({}, {"applied": False}):
        long = SimpleNamespace(**vars(result) | {"reason": "long"} | changed)
        assert f"your rating ({given}, too long)" in rating_line(long)
    assert "replaces" not in line
    for changed in ({}, {"applied": False}, {"reason": "facts"}):
        again = rating_line(SimpleNamespace(**vars(result) | {"replaces": "down"} | changed))
        assert "This rating replaces your earlier one (down)." in again
