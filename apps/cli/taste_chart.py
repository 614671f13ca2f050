"""Charts of predicted and given stars, for the terminal and as SVG."""

from collections import Counter
from dataclasses import dataclass

from ruvmlx.sona.taste_record import TasteRecord

from ..charts import Axis, lines, scatter, ticks
from .text_output import count

TITLE = "Stars that were predicted before each rating, against those that were given"
FELT = 0.05  # stars: less is no difference
STEP = 0.5  # stars in one row
TIME_TITLE = "Your ratings over time, and how far the guesses made before them were off"
BLOCK, MOST_BLOCKS = 10, 20  # ratings in a row that become one mean; more where there are many
ROWS = [5 - STEP * i for i in range(9)]


def plot(record: TasteRecord) -> list[str]:
    """Counts of ratings: a column for the stars given, a row for the stars predicted."""
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
    """The nearest row."""
    return min(ROWS, key=lambda row: abs(row - predicted))


def summary(record: TasteRecord) -> str:
    """What the chart shows, in words."""
    if record.error is None or record.usual_error is None:
        return "No ratings yet."
    gain = record.usual_error - record.error
    how = "about as well as" if abs(gain) < FELT else "better than" if gain > 0 else "worse than"
    return (
        f"ruvmlx guesses your ratings {how} the average of your earlier ones does: of "
        f"{count(len(record.ratings), 'rating')}, it was off by {record.error:.1f} stars, the average by "
        f"{record.usual_error:.1f}."
    )


def svg(record: TasteRecord) -> str:
    """The chart as SVG: one circle for each combination of given and predicted stars. The circle's area is
    proportional to the number of ratings."""
    axis = Axis(0.5, 5.5, (1, 2, 3, 4, 5))
    counts = Counter((r.given, round(min(5.5, max(0.5, r.predicted)), 1)) for r in record.ratings)
    points = [(given, predicted, float(n)) for (given, predicted), n in sorted(counts.items())]
    return scatter(TITLE, f"given {summary(record)}", points, axis, axis)


@dataclass(frozen=True)
class TimeBlock:
    """Ratings number `first` to `last`: the mean of their stars, and of the guesses' errors."""

    first: int
    last: int
    given: float
    error: float


def blocks(record: TasteRecord) -> list[TimeBlock]:
    """The ratings in the order in which they were given, some in a row at a time."""
    size = max(BLOCK, -(-len(record.ratings) // MOST_BLOCKS))
    found = list[TimeBlock]()
    for begin in range(0, len(record.ratings), size):
        part = TasteRecord(record.ratings[begin : begin + size])
        given = sum(r.given for r in part.ratings) / len(part.ratings)
        found.append(TimeBlock(begin + 1, begin + len(part.ratings), given, part.error or 0.0))
    return found


def plot_time(record: TasteRecord) -> list[str]:
    """A line for each block: a bar of the stars given, and the error of the guesses."""
    rows = [f"{'ratings':<11} {'stars given':<21} guesses off by"]
    for block in blocks(record):
        bar = "█" * round(3 * block.given)
        rows.append(f"{f'{block.first}-{block.last}':<11} {bar:<15}  {block.given:.1f}  {block.error:.1f}")
    return rows


def svg_time(record: TasteRecord) -> str:
    """The same as SVG: two lines over the number of ratings."""
    found = blocks(record)
    series = {
        "stars given": [(float(b.last), b.given, b.given, b.given) for b in found],
        "guesses off by": [(float(b.last), b.error, b.error, b.error) for b in found],
    }
    most = max(1.0, float(len(record.ratings)))
    return lines(
        TIME_TITLE, "ratings", series if found else {}, Axis(0, most, ticks(most)), Axis(0, 5, range(6))
    )
