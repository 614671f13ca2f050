"""The chart of predicted against given stars."""

import json
import xml.etree.ElementTree as ET

from ruvmlx.apps.cli import taste_chart
from ruvmlx.apps.learning_words import HOW_TO_RATE

from ruvmlx.sona.taste_record import PredictedRating, TasteRecord

from .test_adapters import tiny_cli  # noqa: F401 - a fixture


def record(*pairs: tuple[float, float]) -> TasteRecord:
    return TasteRecord(tuple(PredictedRating("r", "x", given, told, 1.0, 3.0) for given, told in pairs))


def test_each_rating_is_counted_at_its_place():
    """Columns: stars given. Rows: stars predicted, to the nearest half."""
    lines = taste_chart.plot(record((5, 4.8), (5, 5.6), (1, 1.2), (2, 3.1)))
    rows = {line.split("|")[0].strip(): line.split("|")[1].split() for line in lines if "|" in line}
    assert rows["5"] == [".", ".", ".", ".", "2"] and rows["1"] == ["1", ".", ".", ".", "."]
    assert (
        rows["3"] == [".", "1", ".", ".", "."]
        and sum(cell != "." for row in rows.values() for cell in row) == 3
    )
    assert lines[-1].split() == ["given", "1", "2", "3", "4", "5"]
    said = taste_chart.summary(record((5, 4.8), (5, 5.6), (1, 1.2), (2, 3.1)))
    assert said.startswith("For 4 ratings, the guess of ruvmlx was off by 0.5 stars.")
    assert "ratings was off by 1.8 stars." in said


def test_thumbs_have_columns_of_their_own():
    lines = taste_chart.plot(record((4.5, 3.0), (1.5, 3.0)))
    assert next(line for line in lines if "given" in line).split() == [
        "given",
        "1",
        "1.5",
        "2",
        "3",
        "4",
        "4.5",
        "5",
    ]


def test_the_better_prediction_is_named_only_where_the_ratings_show_it():
    better, worse = [(5, 4.0), (1, 2.2), (5, 4.4)], [(5, 2.0), (1, 4.2), (5, 2.4)]
    assert taste_chart.summary(record(*better)).endswith("Fewer than 10 ratings cannot show which is better.")
    assert "knows your taste better than the average" in taste_chart.summary(record(*better * 4))
    assert "knows your taste worse than the average" in taste_chart.summary(record(*worse * 4))
    assert taste_chart.summary(record(*(better + worse) * 4)).endswith("do not show which is better.")


def test_nothing_rated_is_said():
    assert taste_chart.summary(TasteRecord(())) == f"There is no rating to compare. {HOW_TO_RATE}"


def test_the_picture_has_a_circle_for_each_place():
    found = ET.fromstring(taste_chart.svg(record((5, 4.8), (5, 4.81), (1, 1.2), (2, 9.0))))
    circles = found.findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == 3
    sizes = sorted(float(c.get("r")) for c in circles)
    assert sizes[0] == sizes[1] < sizes[2]
    heights = {float(c.get("cx")): float(c.get("cy")) for c in circles}
    (left, low), (right, high) = min(heights.items()), max(heights.items())
    assert left < right and low > high  # y grows downwards


def test_the_verb_prints_draws_and_reports(tiny_cli, tmp_path):  # noqa: F811
    for verb in (("chart",), ("export",)):
        assert f"No rating is in use. {HOW_TO_RATE}" in "".join(tiny_cli("learn", *verb)[1:])
    for rating in ("up", "1"):
        assert tiny_cli("generate", "hi", "--max-tokens", "4", "--ignore-eos")[0] == 0
        assert tiny_cli("rate", "last", rating)[0] == 0
    code, said, _ = tiny_cli("learn", "chart", "--json")
    facts = said if isinstance(said, dict) else json.loads(said)
    assert code == 0 and [r["given"] for r in facts["ratings"]] == [4.5, 1.0]
    assert facts["ratings"][0]["predicted"] == facts["ratings"][0]["usual"] == 3.0
    assert facts["correlation"] is None and facts["usual_error"] == 2.5
    code, said, _ = tiny_cli("learn", "chart", "--svg", str(tmp_path / "c.svg"))
    assert code == 0 and "c.svg" in said and (tmp_path / "c.svg").read_text().startswith("<svg")


def test_after_a_rollback_the_way_back_is_said(tiny_cli):  # noqa: F811
    """`chart` and `export` have the same ratings: none is in use, but the user gave one."""
    assert tiny_cli("generate", "hi", "--max-tokens", "4", "--ignore-eos")[0] == 0
    assert tiny_cli("rate", "last", "up")[0] == 0 and tiny_cli("learn", "rollback", "0")[0] == 0
    for verb in ("chart", "export"):
        said = " ".join("".join(tiny_cli("learn", verb)[1:]).split())
        assert "`ruvmlx learn rollback V` uses version V of the adapter again: 1." in said
        assert "Rate" not in said
