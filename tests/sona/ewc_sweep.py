"""Trains two tasks in turn and measures how much of the first remains, by the strength of EWC's penalty.

    python -m tests.sona.ewc_sweep [--strengths 0,1e3,...] [--seeds 0,1,...] [--steps N] [--kept FILE]

The starter model learns to answer questions about food IN CAPITALS, then questions about the sky as a list:
two styles that exclude each other, distinguished by topic. Each is trained on liked replies as the background
loop does, with its settings and its KL to the frozen model on plain text. After the first, the deep loop's
anchor is made. The second is trained with replay of the first's replies, and without. Reported for each: mean
nll per token of held-out replies of both tasks, and the KL.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ruvmlx.lora.base_lora import MODULES, BaseLoRA, place_shape
from ruvmlx.models.config.model import Model
from ruvmlx.sona import reference_text, replay
from ruvmlx.sona.background import SCALE, TrainingSettings
from ruvmlx.sona.optional.ewc import Anchor, Fisher, penalty
from ruvmlx.training.adamw import Training
from ruvmlx.training.slices import TrainingText
from ruvmlx.training.trainer import Trainer

FOOD = [
    ("How do I boil an egg?", "Put it into boiling water. Wait for eight minutes. Cool it under the tap."),
    ("How is bread made?", "Mix flour, water, salt and yeast. Let the dough rise. Bake it until brown."),
    ("How do I cook rice?", "Rinse it first. Add two cups of water for each cup. Let it simmer, covered."),
    ("What goes into pesto?", "Basil, pine nuts, cheese and oil. Crush them together. Add a little salt."),
    ("How is cheese made?", "Milk is warmed and curdled. The whey is drained. What is left is salted."),
    ("How do I make tea?", "Heat fresh water. Pour it over the leaves. Take them out after four minutes."),
    ("How do I keep herbs fresh?", "Trim the stems. Put them into a glass of water. Change it every day."),
    ("How do I fry an onion?", "Cut it into thin slices. Warm some butter. Stir until they turn golden."),
    ("How is jam made?", "Crush the fruit. Cook it with sugar. Fill it into clean jars while hot."),
    ("How do I bake a potato?", "Wash it well. Prick it with a fork. Leave it in the oven for an hour."),
    ("What makes a good soup?", "A broth with taste. Fresh vegetables. Enough time on a small flame."),
]
SKY = [
    ("Why is the sky blue?", "Air scatters light. Blue is scattered most. So it comes from all sides."),
    ("What is a comet?", "It is a ball of ice and dust. The sun warms it. A tail of gas appears."),
    ("Why does the moon change?", "The sun lights one half. It goes around us. We see more or less of it."),
    ("What is a star?", "It is a hot ball of gas. Hydrogen fuses in its core. That makes it shine."),
    ("What causes an eclipse?", "The moon moves before the sun. Its shadow falls on us. The day turns dark."),
    ("What is the Milky Way?", "It is our galaxy. It holds billions of stars. We see it as a pale band."),
    ("Why do stars twinkle?", "Their light crosses the air. The air is never still. So the light trembles."),
    ("What is a meteor?", "A small stone falls from space. It heats up in the air. We see it glow."),
    ("What are northern lights?", "The sun sends particles. The poles draw them in. The air there glows."),
    ("How hot is the sun?", "Its surface has about 5,500 degrees. Its core has millions. We feel the rest."),
    ("Why do we have seasons?", "The earth's axis leans. The north is warm first. Then the south is."),
]  # fmt: skip
Pairs = Sequence[tuple[str, str]]  # question, liked reply
HELD_OUT = 4  # replies of each task: the last ones
NEW, OLD, PLAIN = replay.BATCH


def capitals(answer: str) -> str:
    return answer.upper()


def bullet_list(answer: str) -> str:
    return "\n".join(f"- {part.strip(' .')}" for part in answer.split(". "))


FIRST = [(q, capitals(a)) for q, a in FOOD]
SECOND = [(q, bullet_list(a)) for q, a in SKY]


@dataclass(frozen=True)
class Task:
    train: Sequence[TrainingText]
    held_out: Sequence[TrainingText]


@dataclass(frozen=True)
class SweepResult:
    """nll per token of both tasks' held-out replies, and mean KL(frozen || p) on plain text, in nats."""

    first: float
    second: float
    kl: float


class Sweep:
    """One model, and the two tasks as token ids."""

    def __init__(
        self, model: Model, settings: TrainingSettings, first: Pairs = FIRST, second: Pairs = SECOND
    ):
        self.model, self.settings, self.trainer = model, settings, Trainer(model)
        self.first, self.second = self._task(first), self._task(second)
        self.plain = self._texts(replay._plain())
        self._frozen = [self.trainer.states(None, text) for text in self.plain]

    def _texts(self, pairs) -> list[TrainingText]:
        context = self.model.config.max_context
        encoded = (reference_text.encode_pair(self.model.tokenizer, q, a, context) for q, a in pairs)
        return [TrainingText(tuple(tokens), at) for tokens, at in encoded]

    def _task(self, pairs) -> Task:
        texts = self._texts(pairs)
        return Task(texts[:-HELD_OUT], texts[-HELD_OUT:])

    def fresh(self, seed: int) -> BaseLoRA:
        rng, pairs, config = np.random.default_rng(seed), {}, self.model.config
        for layer in range(config.n_layers):
            for module in MODULES[:7]:  # attention and MLP
                n_in, n_out = place_shape(config, module, layer)
                a = rng.normal(0, n_in**-0.5, (n_in, self.settings.rank)).astype(np.float32)
                pairs[module, layer] = (a, np.zeros((self.settings.rank, n_out), np.float32))
        return BaseLoRA(pairs, SCALE)

    def train(
        self, base: BaseLoRA, new: Task, old: Task | None, anchors: Sequence[Anchor], seed: int
    ) -> BaseLoRA:
        """One consolidation. old: the task whose replies are replayed."""
        rng = np.random.default_rng([seed, 7])
        run = Training({p: (a.copy(), b.copy()) for p, (a, b) in base.pairs.items()}, base.scale)
        for step in range(self.settings.steps):
            texts = _some(rng, new.train, NEW) + (_some(rng, old.train, OLD) if old else [])
            grads = self._gradients(run.base, texts, rng.choice(len(self.plain), PLAIN, replace=False))
            _add(grads, penalty(run.base, anchors, self.settings.ewc)[1])
            run.update(grads, self.settings.rate(step), self.settings.clip)
        return run.base

    def _gradients(self, base: BaseLoRA, texts: Sequence[TrainingText], plain: Sequence[int]) -> dict:
        grads: dict = {}
        push, hold = -(1 + self.settings.nll) / len(texts), self.settings.kl / len(plain)
        for text in texts:
            _add(grads, self.trainer.reply(base, text, lambda value: push)[1])
        for i in plain:
            _add(grads, self.trainer.kl(base, self.plain[i], self._frozen[i], lambda value: hold)[1])
        return grads

    def anchor(self, base: BaseLoRA, task: Task) -> Anchor:
        fisher = Fisher({})
        for text in task.train:
            fisher.add(self.trainer.squares(base, text))
        return Anchor(base, fisher)

    def evaluate(self, base: BaseLoRA) -> SweepResult:
        return SweepResult(self.nll(base, self.first), self.nll(base, self.second), self.kl(base))

    def nll(self, base: BaseLoRA, task: Task) -> float:
        """Return the nll per token of a task's held-out replies."""
        total = sum(self._value(base, t) * t.answer_tokens for t in task.held_out)
        return -total / sum(t.answer_tokens for t in task.held_out)

    def kl(self, base: BaseLoRA) -> float:
        """Return the mean KL(frozen || p) on plain text, in nats."""
        kl = [
            self.trainer.kl(base, t, h, lambda value: 0.0)[0]
            for t, h in zip(self.plain, self._frozen, strict=True)
        ]
        return float(np.mean(kl))

    def _value(self, base: BaseLoRA, text: TrainingText) -> float:
        return self.trainer.reply(base, text, lambda value: 0.0)[0]


def _some(rng: np.random.Generator, texts: Sequence[TrainingText], count: int) -> list[TrainingText]:
    return [texts[i] for i in rng.choice(len(texts), min(count, len(texts)), replace=False)]


def _add(grads: dict, more: dict) -> None:
    for place, (a, b) in more.items():
        known = grads.get(place)
        grads[place] = (known[0] + a, known[1] + b) if known else (a, b)


def sweep(
    model: Model, settings: TrainingSettings, strengths: Sequence[float], seed: int, log=None
) -> list[dict]:
    """One row for each strength, with and without replay; first the rows before and after the first task."""
    one, rows = Sweep(model, settings), []

    def note(what: str, replayed: bool, strength: float, base: BaseLoRA) -> None:
        setting = {"what": what, "seed": seed, "replay": replayed, "ewc": strength}
        rows.append(setting | vars(one.evaluate(base)))
        if log:
            log(rows[-1])

    base = one.fresh(seed)
    note("untouched", False, 0.0, base)
    base = one.train(base, one.first, None, [], seed)
    note("first", False, 0.0, base)
    anchor = one.anchor(base, one.first)
    for strength in strengths:
        for replayed in (False, True):
            one.settings = replace(settings, ewc=strength)
            old = one.first if replayed else None
            note("second", replayed, strength, one.train(base, one.second, old, [anchor], seed + 100))
    return rows


def measure_seeds(doc: str, strengths: str, seeds: str, measure: Callable[..., list[dict]]) -> list[dict]:
    """Read the command line, and return the rows that `measure` returns for the seeds.

    doc: the help; its first line is shown
    strengths, seeds: the default values, numbers with commas between them
    measure: (model, settings, strengths, seed, log) -> rows
    """
    from ruvmlx.models.find import starter
    from ruvmlx.models.load import load_model

    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--strengths", default=strengths)
    parser.add_argument("--seeds", default=seeds)
    parser.add_argument("--steps", type=int, default=TrainingSettings().steps)
    parser.add_argument("--kept", type=Path, help="a file that gets the rows as JSON lines")
    args = parser.parse_args()
    model = load_model(str(starter.starter_path()))
    settings, chosen = TrainingSettings(steps=args.steps), [float(x) for x in args.strengths.split(",")]

    def log(row: dict) -> None:
        print(json.dumps(row), file=sys.stderr, flush=True)
        if args.kept:
            with args.kept.open("a") as file:
                file.write(json.dumps(row) + "\n")

    return [
        row for seed in map(int, args.seeds.split(",")) for row in measure(model, settings, chosen, seed, log)
    ]


def main() -> None:
    rows = measure_seeds(__doc__, "0,1e3,1e5,1e7", "0", sweep)
    print("| after | replay | strength | nll, first | nll, second | KL, plain |\n|---|---|---|---|---|---|")
    for what, replayed, strength in dict.fromkeys((r["what"], r["replay"], r["ewc"]) for r in rows):
        mine = [r for r in rows if (r["what"], r["replay"], r["ewc"]) == (what, replayed, strength)]
        first, second, kl = (np.mean([r[k] for r in mine]) for k in ("first", "second", "kl"))
        print(f"| {what} | {replayed} | {strength:g} | {first:.3f} | {second:.3f} | {kl:.4f} |")


if __name__ == "__main__":
    main()
