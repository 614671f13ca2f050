"""Evaluates a pass over a text slice by slice, so that the caller can pause or stop it between slices.

A slice is a few stages of a layer, or some rows of the head. The slices are the same with and without a
pause.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from ..pausing import Pause
from ..platform.mx import mx

# the maximum length of a text: the attention scores of every layer are kept for the backward pass
MAX_TOKENS = 512
SLICE = 150  # tokens x layers between two pauses: 20 ms with the starter model


@dataclass(frozen=True)
class TrainingText:
    """A text to train on.

    tokens: [T]
    first: the loss is over the tokens from this index on; at least 1
    """

    tokens: tuple[int, ...]
    first: int

    @classmethod
    def cut(cls, prompt: Sequence[int], said: Sequence[int], limit: int = MAX_TOKENS) -> "TrainingText":
        """Return at most `limit` tokens: the end of the prompt, then the reply or its first `limit` / 2
        tokens."""
        said = said[: max(limit // 2, limit - len(prompt))]
        prompt = prompt[-(limit - len(said)) :]
        return cls((*prompt, *said), len(prompt))

    @property
    def answer_tokens(self) -> int:
        return len(self.tokens) - self.first


class Stops:
    """The stages of a pass in order, each with its work in tokens x layers."""

    def __init__(self) -> None:
        self._stages: list[tuple[float, Sequence[mx.array]]] = []

    def add(self, *made: mx.array, work: float = SLICE) -> None:
        """Add a stage. made: its outputs, which are all arrays that the next stage reads."""
        self._stages.append((work, made))

    def slices(self) -> Iterator[Sequence[mx.array]]:
        """Yield the outputs of the last stage of each slice. A yielded stage is no longer referenced here."""
        held: Sequence[mx.array] = ()
        stages, self._stages, total = deque(self._stages), [], 0.0
        while stages:
            work, made = stages.popleft()
            if held and total + work > SLICE:
                yield held
                total = 0.0
            held, total = made, total + work
        if held:
            yield held


def evenly(count: int, most: int) -> Iterator[slice]:
    """Split 0 ... count - 1 into nearly equal slices of at most `most` numbers."""
    parts = -(-count // most)
    for i in range(parts):
        yield slice(count * i // parts, count * (i + 1) // parts)


def evaluate(slices: Iterable[Sequence[mx.array]], pause: Pause | None) -> None:
    """Evaluate the slices in order. Call `pause` after each."""
    for arrays in slices:
        mx.eval(*arrays)
        if pause is not None:
            pause()


def stage_work(tokens: int) -> dict[str, float]:
    """Return the work of each stage in tokens x layers, by the name of one of its modules. Attention is under
    q_proj."""
    return {
        "v_proj": 0.15 * tokens,
        "q_proj": (0.1 + tokens / 1000) * tokens,
        "o_proj": 0.1 * tokens,
        "up_proj": 0.4 * tokens,
        "down_proj": 0.25 * tokens,
    }


STAGES = (("down_proj",), ("gate_proj", "up_proj"), ("o_proj",), ("q_proj", "k_proj", "v_proj"))


def from_the_last(grads: Mapping[str, mx.array], text: TrainingText) -> Iterator[list[str]]:
    """Yield the names of the gradients, slice by slice, in the order of the backward pass."""
    of: dict[tuple[int, str], list[str]] = {}
    for name in grads:
        at, module = name.split(".")[:2]
        of.setdefault((int(at), module), []).append(name)
    work, total, names = stage_work(len(text.tokens)), 0.0, list[str]()
    for layer, stage in product(sorted({layer for layer, _ in of}, reverse=True), STAGES):
        cost = sum(work.get(module, 0.0) for module in stage)
        if names and total + cost > SLICE:
            yield names
            names, total = [], 0.0
        names = names + [name for module in stage for name in of.get((layer, module), ())]
        total += cost
    if names:
        yield names
