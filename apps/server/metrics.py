"""This module counts events for the endpoint `/metrics`, in the text format of Prometheus. No label of a
counter has text of a user."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Labels = tuple[tuple[str, str], ...]

COUNTERS = {
    "ruvmlx_requests_total": "Answers, by endpoint and status.",
    "ruvmlx_request_seconds_total": "Time of all answers, by endpoint.",
    "ruvmlx_prompt_tokens_total": "Tokens of prompts.",
    "ruvmlx_cached_tokens_total": "Tokens of prompts that were in a KV cache already.",
    "ruvmlx_generated_tokens_total": "Tokens that were written, those of cancelled replies included.",
    "ruvmlx_drafted_tokens_total": "Guessed tokens that were checked.",
    "ruvmlx_accepted_tokens_total": "Guessed tokens that a reply has.",
    "ruvmlx_cancelled_total": "Replies that ended because their client left.",
    "ruvmlx_refused_total": "Requests that were refused before they reached an endpoint, by reason.",
    "ruvmlx_model_loads_total": "Models that were opened because a request named them, by model.",
    "ruvmlx_model_unloads_total": "Models that were closed, by model and reason: room, idle, or asked.",
    "ruvmlx_ratings_total": "Ratings and preferences that were learned from.",
}


HISTOGRAMS = {
    "ruvmlx_first_token_seconds": "Time from a request to its first token, waits included.",
    "ruvmlx_reply_quality": "Estimated quality of the replies, 0 to 1.",
}
# upper bounds of the bins of the histograms: seconds, and a quality from 0 to 1
BOUNDS = {
    "ruvmlx_first_token_seconds": (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0),
    "ruvmlx_reply_quality": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
}


@dataclass
class Metrics:
    """Counters and histograms since the start of the server. Only one thread can use an object of this
    class."""

    counts: Counter[tuple[str, Labels]] = field(default_factory=Counter)
    observed: dict[str, list[float]] = field(
        default_factory=dict
        # Histograms by name: [sum of the values, number of values up to each bound, number of all values].
    )

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        assert name in COUNTERS, name
        self.counts[name, tuple(sorted(labels.items()))] += amount  # type: ignore[assignment]

    def observe(self, name: str, value: float) -> None:
        """Add a value to the histogram `name`: a time in seconds, or a quality."""
        assert name in HISTOGRAMS, name
        row = self.observed.setdefault(name, _empty_histogram(name))
        row[0] += value
        for i, bound in enumerate((*BOUNDS[name], float("inf")), 1):
            row[i] += value <= bound

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """Return all counters, histograms and gauges as text. gauges: name -> (meaning, value)."""
        lines: list[str] = []
        for name, meaning in COUNTERS.items():
            found = sorted((labels, value) for (of, labels), value in self.counts.items() if of == name)
            lines += _family(name, "counter", meaning, found or [((), 0)])
        for name, meaning in HISTOGRAMS.items():
            lines += _histogram(name, meaning, self.observed.get(name, _empty_histogram(name)))
        for name, (meaning, value) in gauges.items():
            lines += _family(name, "gauge", meaning, [((), value)])
        return "\n".join(lines) + "\n"


def family(name: str, meaning: str, values: Mapping[Labels, float]) -> str:
    """Return the text of a gauge (a value that can go up and down) with labels. values: a value for each set
    of labels."""
    return "\n".join(_family(name, "gauge", meaning, sorted(values.items()))) + "\n"


def _family(name: str, kind: str, meaning: str, values: Iterable[tuple[Labels, float]]) -> list[str]:
    lines = [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
    for labels, value in values:
        inside = ",".join(f'{label}="{_escape_label(text)}"' for label, text in labels)
        lines.append(f"{name}{{{inside}}} {_number(value)}" if inside else f"{name} {_number(value)}")
    return lines


def _empty_histogram(name: str) -> list[float]:
    """Return a row of `Metrics.observed` without values."""
    return [0.0] * (len(BOUNDS[name]) + 2)


def _histogram(name: str, meaning: str, row: list[float]) -> list[str]:
    total, *counts = row
    lines = [f"# HELP {name} {meaning}", f"# TYPE {name} histogram"]
    for bound, count in zip([*map(_number, BOUNDS[name]), "+Inf"], counts, strict=True):
        lines.append(f'{name}_bucket{{le="{bound}"}} {_number(count)}')
    return [*lines, f"{name}_sum {_number(total)}", f"{name}_count {_number(counts[-1])}"]


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _escape_label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
