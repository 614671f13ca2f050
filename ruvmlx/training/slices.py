"""This module evaluates a forward and backward pass over a text slice by slice, so that the caller can pause
or stop the pass between slices.

MLX is lazy: it builds a graph of the pass, and evaluates a part of the graph when the part is needed. So a
slice is a part of the graph: a few stages of a layer, or the output head at some positions. The slices are
the same with and without a pause.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from ..pausing import Pause
from ..platform.mx import mx

# The maximum number of tokens in a text. This number is small, because the attention scores of every layer
# stay in memory for the backward pass.
MAX_TOKENS = 512
# the work of a slice: the number of tokens times the number of layers; 20 ms with the starter model
SLICE = 150


@dataclass(frozen=True)
class TrainingText:
    """A text to train on.

    tokens: the T token ids of the text
    first: the index of the first token that the loss includes (the first token of the answer); at least 1
    """

    tokens: tuple[int, ...]
    first: int

    @classmethod
    def cut(cls, prompt: Sequence[int], said: Sequence[int], limit: int = MAX_TOKENS) -> "TrainingText":
        """Return a text of at most `limit` tokens: the end of a prompt, and then a reply (`said`). If prompt
        and reply are too long together, the reply is cut first, but at least `limit` / 2 tokens of the reply
        stay."""
        said = said[: max(limit // 2, limit - len(prompt))]
        prompt = prompt[-(limit - len(said)) :]
        return cls((*prompt, *said), len(prompt))

    @property
    def answer_tokens(self) -> int:
        return len(self.tokens) - self.first


class Stops:
    """The stages of a forward pass in their order, each with its work (the number of tokens times the stage's
    share of a layer). A stage is a part of a layer, such as the attention. A pass can stop between stages."""

    def __init__(self) -> None:
        self._stages: list[tuple[float, Sequence[mx.array]]] = []

    def add(self, *made: mx.array, work: float = SLICE) -> None:
        """Add a stage. made: the outputs of the stage: all arrays that the next stage reads."""
        self._stages.append((work, made))

    def slices(self) -> Iterator[Sequence[mx.array]]:
        """Divide the stages into slices, and yield the outputs of each slice's last stage. This object drops
        its references to the stages, so that their memory can be freed."""
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
    """Divide the numbers 0 ... count - 1 into nearly equal slices of at most `most` numbers, and yield
    them."""
    parts = -(-count // most)
    for i in range(parts):
        yield slice(count * i // parts, count * (i + 1) // parts)


def evaluate(slices: Iterable[Sequence[mx.array]], pause: Pause | None) -> None:
    """Evaluate the slices in order, and call `pause` (if it is not None) after each slice. slices: the arrays
    of each slice."""
    for arrays in slices:
        mx.eval(*arrays)
        if pause is not None:
            pause()


def stage_work(tokens: int) -> dict[str, float]:
    """Return {stage: work} of the stages of a layer; the work is the number of tokens times the stage's share
    of a layer. A stage has the name of one of its modules. The attention is a part of the stage q_proj.
    tokens: the number of tokens of the text."""
    return {
        "v_proj": 0.15 * tokens,
        "q_proj": (0.1 + tokens / 1000) * tokens,
        "o_proj": 0.1 * tokens,
        "up_proj": 0.4 * tokens,
        "down_proj": 0.25 * tokens,
    }


STAGES = (
    ("down_proj",),
    ("gate_proj", "up_proj"),
    ("o_proj",),
    ("q_proj", "k_proj", "v_proj"),
    ("embed_tokens",),
)


def from_the_last(grads: Mapping[str, mx.array], text: TrainingText) -> Iterator[list[str]]:
    """Divide the gradients into slices, in the order of the backward pass, and yield the names of each
    slice's gradients. grads: {"<layer>.<module>...": gradient}."""
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
