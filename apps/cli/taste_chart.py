"""This module draws a chart of the user's ratings for the terminal and as SVG. The chart compares the stars
that the user gave with the stars that were predicted before."""

from collections import Counter
from statistics import fmean, stdev

from ruvmlx.sona.taste_record import TasteRecord

from ..charts import Axis, scatter
from ..learning_words import HOW_TO_RATE
from .text_output import count

TITLE = "Stars that were predicted before each rating, against those that were given"
MIN_RATINGS = 10  # `summary` compares the errors of fewer ratings in no words
STEP = 0.5  # the number of stars between two rows of the chart
ROWS = [5 - STEP * i for i in range(9)]


def plot(record: TasteRecord) -> list[str]:
    """Return the lines of a chart whose cells are numbers of ratings. The chart has a column for each number
    of given stars, and a row for each half star of the prediction, from 5 down to 1."""
    columns = sorted({1.0, 2.0, 3.0, 4.0, 5.0, *(r.given for r in record.ratings)})
    counts = Counter((_row(r.predicted), r.given) for r in record.ratings)
    width = max(4, 1 + max((len(str(n)) for n in counts.values()), default=0))
    lines = ["predicted"]
    for row in ROWS:
        cells = "".join(f"{counts[row, given] or '.':>{width}}" for given in columns)
        lines.append(f"{row:>9g} |{cells}")
    lines.append(" " * 10 + "+" + "-" * width * len(columns))
    lines.append(f"{'given':>10} " + "".join(f"{given:>{width}g}" for given in columns))
    return lines


def _row(predicted: float) -> float:
    """Return the row of the chart, as its number of stars, that is nearest to a predicted number of stars."""
    return min(ROWS, key=lambda row: abs(row - predicted))


def summary(record: TasteRecord, nothing: str = "") -> str:
    """Return sentences that say what the chart shows. nothing: the sentences to return if there is nothing to
    show; "" for the usual ones."""
    if record.error is None or record.usual_error is None:
        return nothing or f"There is no rating to compare. {HOW_TO_RATE}"
    errors = (
        f"For {count(len(record.ratings), 'rating')}, the guess of ruvmlx was off by {record.error:.1f} "
        "stars. "
        f"The average of your earlier ratings was off by {record.usual_error:.1f} stars."
    )
    return f"{errors} {_comparison(record)}"


def _comparison(record: TasteRecord) -> str:
    """Return a sentence that says which of the two predictions is better, if the ratings show it: the mean
    difference of the errors is then more than two of its standard errors from zero."""
    number = len(record.ratings)
    if number < MIN_RATINGS:
        return f"Fewer than {MIN_RATINGS} ratings cannot show which is better."
    gains = [abs(r.given - r.usual) - abs(r.given - r.predicted) for r in record.ratings]
    mean, doubt = fmean(gains), 2 * stdev(gains) / number**0.5
    if abs(mean) <= doubt:
        return "So few ratings do not show which is better."
    return f"So ruvmlx knows your taste {'better' if mean > 0 else 'worse'} than the average does."


def svg(record: TasteRecord) -> str:
    """Return the chart as SVG, with one circle for each pair of given and predicted stars; the prediction is
    rounded to tenths. The area of a circle is proportional to the number of ratings with this pair."""
    axis = Axis(0.5, 5.5, (1, 2, 3, 4, 5))
    counts = Counter((r.given, round(min(5.5, max(0.5, r.predicted)), 1)) for r in record.ratings)
    points = [(given, predicted, float(n)) for (given, predicted), n in sorted(counts.items())]
    return scatter(TITLE, f"given {summary(record)}", points, axis, axis)
