"""A chart of predicted against given stars, for the terminal and as SVG."""

from collections import Counter

from ruvmlx.sona.taste_record import TasteRecord

from ..charts import Axis, scatter

TITLE = "Stars that were predicted before each rating, against those that were given"
STEP = 0.5  # stars in one row
ROWS = [5 - STEP * i for i in range(9)]


def plot(record: TasteRecord) -> list[str]:
    """Counts of ratings: a column for the stars given, a row for the stars predicted; then what they say."""
    columns = sorted({1.0, 2.0, 3.0, 4.0, 5.0, *(r.given for r in record.ratings)})
    counts = Counter((_row(r.predicted), r.given) for r in record.ratings)
    width = max(4, 1 + max((len(str(n)) for n in counts.values()), default=0))
    lines = ["predicted"]
    for row in ROWS:
        cells = "".join(f"{counts[row, given] or '.':>{width}}" for given in columns)
        lines.append(f"{row:>9g} |{cells}")
    lines.append(" " * 10 + "+" + "-" * width * len(columns))
    lines.append(f"{'given':>10} " + "".join(f"{given:>{width}g}" for given in columns))
    return [*lines, *summary(record)]


def _row(predicted: float) -> float:
    """The nearest row."""
    return min(ROWS, key=lambda row: abs(row - predicted))


def summary(record: TasteRecord) -> list[str]:
    """What the chart shows, in words."""
    if record.error is None:
        return ["No ratings yet."]
    count, known = len(record.ratings), record.correlation
    said = f"{count} rating{'' if count == 1 else 's'}, each predicted from those before it: off by "
    said += f"{record.error:.2f} stars on average; the mean of those before it, by {record.usual_error:.2f}."
    return [said, f"Correlation of predicted and given stars: {known:.2f}."] if known is not None else [said]


def svg(record: TasteRecord) -> str:
    """The chart as SVG: one circle for each combination of given and predicted stars. The circle's area is
    proportional to the number of ratings."""
    axis = Axis(0.5, 5.5, (1, 2, 3, 4, 5))
    counts = Counter((r.given, round(min(5.5, max(0.5, r.predicted)), 1)) for r in record.ratings)
    points = [(given, predicted, float(n)) for (given, predicted), n in sorted(counts.items())]
    return scatter(TITLE, " ".join(["given", *summary(record)]), points, axis, axis)
