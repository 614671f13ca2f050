"""Trains three tastes in a row, and measures how much of each remains: with replay, with EWC, with both and
with neither.

    python -m tests.sona.three_tastes [--seeds 0,1,2] [--strengths 0,1e5,1e6] [--steps N] [--kept FILE]

The starter model learns to answer questions about food IN CAPITALS, then questions about the sky as a list,
then questions about animals as a letter. Each style excludes the two others. Everything else is as in
ewc_sweep.py: the background loop's settings, its KL to the frozen model on plain text, and the deep loop's
anchor after each taste. Replay draws the old replies of a step from all earlier tastes. The table has the
mean over the seeds, and in brackets the smallest and the largest value.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ruvmlx.lora.base_lora import BaseLoRA
from ruvmlx.models.config.model import Model
from ruvmlx.sona.background import TrainingSettings

from .ewc_sweep import FIRST, SECOND, Pairs, Sweep, Task, measure_seeds

ANIMALS = [
    (
        "How do bees make honey?",
        "They collect nectar. They dry it with their wings. They close the cell with wax.",
    ),
    ("Why do birds migrate?", "Food becomes rare in winter. They fly to warm places. In spring they return."),
    (
        "How do fish breathe?",
        "Water flows through their gills. The gills take out oxygen. Then the water leaves.",
    ),
    ("Why do cats purr?", "They feel well. Sometimes they are in pain. The sound calms them."),
    (
        "What do wolves eat?",
        "They hunt deer together. They eat smaller animals too. In need they eat berries.",
    ),
    ("How do spiders make webs?", "They make silk in glands. They fix the first line. Then they go around."),
    ("Why do dogs wag their tails?", "They show what they feel. A high tail is proud. A low one is shy."),
    (
        "How do bats find their way?",
        "They call in high tones. The echo comes back. So they hear where things are.",
    ),
    ("What is a mammal?", "It is warm. It has hair. It feeds its young with milk."),
    ("How do frogs grow?", "They begin as eggs. Tadpoles swim out. Legs grow, and the tail goes."),
    (
        "Why do bears sleep in winter?",
        "There is little to eat. They live on their fat. Their hearts beat slowly.",
    ),
]


def letter(answer: str) -> str:
    return f"Dear friend,\n\n{answer}\n\nWith love,\nyour assistant"


THIRD = [(q, letter(a)) for q, a in ANIMALS]


class Tastes(Sweep):
    """One model, and the tastes as token ids."""

    def __init__(
        self, model: Model, settings: TrainingSettings, tastes: Sequence[Pairs] = (FIRST, SECOND, THIRD)
    ):
        super().__init__(model, settings, tastes[0], tastes[1])
        self.tasks = [self._task(pairs) for pairs in tastes]

    def measure(self, base: BaseLoRA) -> dict[str, float | list[float]]:
        """Return the nll per token of each taste's held-out replies, and the mean KL on plain text."""
        return {"nll": [self.nll(base, task) for task in self.tasks], "kl": self.kl(base)}

    def learn(self, base: BaseLoRA, taste: int, replayed: bool, anchors: Sequence, seed: int) -> BaseLoRA:
        """Train one taste after those before it."""
        earlier = [text for task in self.tasks[:taste] for text in task.train]
        old = Task(earlier, []) if replayed and earlier else None
        return self.train(base, self.tasks[taste], old, anchors, seed + 100 * taste)


def run(
    model: Model, settings: TrainingSettings, strengths: Sequence[float], seed: int,
    log: Callable[[dict], None] = lambda row: None, tastes: Sequence[Pairs] = (FIRST, SECOND, THIRD),
) -> list[dict]:  # fmt: skip
    """Return one row for each stage: the untouched model, after the first taste, and for each strength,
    without and with replay, after the second and after the third taste. nll and KL are in nats."""
    one, rows = Tastes(model, settings, tastes), []

    def note(after: int, replayed: bool, strength: float, base: BaseLoRA) -> None:
        stage = {"after": after, "seed": seed, "replay": replayed, "ewc": strength}
        rows.append({**stage, **one.measure(base)})
        log(rows[-1])

    start = one.fresh(seed)
    note(0, False, 0.0, start)
    first = one.learn(start, 0, False, [], seed)
    note(1, False, 0.0, first)
    anchor = one.anchor(first, one.tasks[0])
    for strength in strengths:
        one.settings = replace(settings, ewc=strength)
        for replayed in (False, True):
            base, anchors = first, [anchor]
            for taste in range(1, len(one.tasks)):
                base = one.learn(base, taste, replayed, anchors if strength else [], seed)
                note(taste + 1, replayed, strength, base)
                if strength and taste + 1 < len(one.tasks):
                    anchors = [*anchors, one.anchor(base, one.tasks[taste])]
    return rows


def table(rows: Sequence[dict]) -> str:
    """Return the rows as a table in Markdown, with one line for each stage, over all seeds."""
    lines = ["| after | replay | EWC | nll of each taste | KL, plain |", "|---|---|---|---|---|"]
    stages = dict.fromkeys((r["after"], r["replay"], r["ewc"]) for r in rows)
    for after, replayed, strength in sorted(stages):
        mine = [r for r in rows if (r["after"], r["replay"], r["ewc"]) == (after, replayed, strength)]
        nll, kl = np.array([r["nll"] for r in mine]), np.array([r["kl"] for r in mine])
        each = ", ".join(_spread(nll[:, i]) for i in range(nll.shape[1]))
        with_replay = "yes" if replayed else "no"
        lines.append(f"| {after} | {with_replay} | {strength:g} | {each} | {kl.mean():.3f} |")
    return "\n".join(lines)


def _spread(values: np.ndarray) -> str:
    return f"{values.mean():.3f} ({values.min():.3f} to {values.max():.3f})"


def main() -> None:
    print(table(measure_seeds(__doc__, "0,1e5,1e6", "0,1,2", run)))


if __name__ == "__main__":
    main()
