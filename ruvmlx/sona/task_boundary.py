"""This module finds task boundaries: the ratings at which the user begins to ask about other things, or to
judge replies differently.

Each rating gives two values: its reward, and the dissimilarity of its question to the task so far (1 - cosine
with the mean of the task's questions). The module tests the rewards and the dissimilarities separately, in
blocks of BLOCK values, because one unusual question is not a new task. After WARM values of a task, a block
begins a new task if it deviates from the task's mean by more than Z standard errors,
    z = mean over block of clip((value - mean) / deviation, -CLIP, CLIP) * sqrt(BLOCK) > Z

The task's mean and standard deviation are computed by Welford's method (1962). A reward can deviate upwards
or downwards; of a dissimilarity, only an upward deviation begins a task. If the task has not changed, one
block in forty still exceeds Z = 2 on each side by chance. A boundary that was found by chance costs at most
one EWC anchor (deep.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z = 2.0
WARM = 50  # the number of values of a task before the first test
BLOCK = 16  # the number of values in one test
CLIP = 3.0  # the maximum deviation of one value, in standard deviations; larger deviations are clipped
# the minimum standard deviation to divide by; a smaller standard deviation is a rounding error
_MIN_DEVIATION = 1e-3


@dataclass
class Moments:
    """The running mean and standard deviation of a stream of values."""

    count: int = 0
    mean: float = 0.0
    square: float = 0.0  # the sum of the squared deviations from the mean

    def add(self, value: float) -> None:
        self.count += 1
        step = value - self.mean
        self.mean += step / self.count
        self.square += step * (value - self.mean)

    @property
    def deviation(self) -> float:
        return math.sqrt(self.square / (self.count - 1)) if self.count > 1 else 0.0

    def z(self, values: Sequence[float]) -> float:
        """Return by how many standard errors the mean of new values exceeds the running mean; 0 if the
        running mean has fewer than WARM values."""
        if self.count < WARM:
            return 0.0
        off = (np.asarray(values) - self.mean) / max(self.deviation, _MIN_DEVIATION)
        return float(np.mean(np.clip(off, -CLIP, CLIP)) * math.sqrt(len(values)))


def boundaries(rewards: Sequence[float], questions: np.ndarray) -> list[int]:
    """Return the indices of the ratings at which a new task begins. The same ratings always give the same
    boundaries, even if the user has undone other ratings in the meantime.

    rewards: the rewards of n ratings
    questions: [n, E], the unit vectors of the ratings' questions; zeros for an unknown question
    """
    found: list[int] = []
    first = 0
    while (at := _find_task_end(rewards, questions, first)) is not None:
        found.append(at)
        first = at
    return found


def _find_task_end(rewards: Sequence[float], questions: np.ndarray, first: int) -> int | None:
    """Return the index at which the task that begins at index `first` ends; None if this task does not
    end."""
    reward, unlike = Moments(), Moments()
    total = np.zeros(questions.shape[1])
    for start in range(first, len(rewards) - BLOCK + 1, BLOCK):
        block = slice(start, start + BLOCK)
        away = _unlike(questions[block], total)
        if abs(reward.z(rewards[block])) > Z or (away and unlike.z(away) > Z):
            return start
        for i in range(start, start + BLOCK):
            reward.add(rewards[i])
            for value in _unlike(questions[i : i + 1], total):
                unlike.add(value)
            total += questions[i]
    return None


def _unlike(questions: np.ndarray, total: np.ndarray) -> list[float]:
    """Return 1 - cosine of each known question with `total`, the sum of the questions so far."""
    length = float(np.linalg.norm(total))
    return [1.0 - float(q @ total) / length for q in questions if length > 0 and q.any()]
