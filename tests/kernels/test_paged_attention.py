"""Pages and attention of the C library under somebody else's matrix products, against the twin."""

import numpy as np
import pytest

from ruvmlx.kernels import layers, paged_attention
from ruvmlx.kernels.page_table import NativePageTable, PageMemory
from ruvmlx.kernels.paged_attention import PagedAttention
from ruvmlx.tiers import COLD, HOT, WARM
from tests.oracles import pages

SHAPES = [(1, 1, 2), (3, 1, 30), (6, 2, 64), (4, 4, 80), (9, 3, 64), (8, 1, 128), (2, 1, 256), (2, 2, 512)]
LAYERS = 2
# Largest error over the largest value. Queries become integers, of 15 bits for warm pages, 7 for cold ones.
TOLERANCE = {HOT: 2e-3, WARM: 2e-3, COLD: 2e-2}


class Sequence:
    """Pages of one sequence, and what was appended to it."""

    def __init__(self, kernels: PagedAttention, seed: int = 0):
        self.kernels, self.table, self.made = kernels, NativePageTable(), []
        self.rng, self.rows = np.random.default_rng(seed), np.zeros((0, 0), np.float32)
        frequencies = 1e4 ** (-np.arange(0, kernels.head_dim, 2) / kernels.head_dim)
        self.turn = layers.turns(np.arange(1000), frequencies)

    def page(self, index: int, tier: int) -> int:
        self.made.append(PageMemory.make(self.kernels.page_bytes(tier)))
        self.table.set(index, self.made[-1], tier)
        return self.made[-1]

    def step(self, n: int, window: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """What the kernels and the twin say of n more tokens, of the last layer: [n, H, D]."""
        k, offset = self.kernels, len(self.rows)
        for index in range(-(-offset // 64), -(-(offset + n) // 64)):
            self.page(index, HOT)
        width = (k.n_heads + 2 * k.n_kv_heads) * k.head_dim
        new = self.rng.normal(size=(LAYERS, n, width)).astype(np.float32)
        turn = np.ascontiguousarray(self.turn[offset : offset + n])
        for layer in range(LAYERS):
            ours = k.run(layer, self.table, offset, new[layer], turn, window)
        self.rows = np.concatenate([self.rows.reshape(-1, width), new[-1]])
        return ours.reshape(n, k.n_heads, -1), self.twin(n, window)

    def twin(self, n: int, window: int) -> np.ndarray:
        k, d = self.kernels, self.kernels.head_dim
        parts = self.rows.reshape(len(self.rows), -1, d)
        q, keys, values = np.split(parts, [k.n_heads, k.n_heads + k.n_kv_heads], axis=1)
        group, at = k.n_heads // k.n_kv_heads, len(parts) - n
        heads = [
            layers.attend_ref(
                q[at:, head * group : (head + 1) * group],
                keys[:, head],
                values[:, head],
                self.turn,
                at,
                window,
            )
            for head in range(k.n_kv_heads)
        ]
        return np.concatenate(heads, axis=1)

    def close(self) -> None:
        for page in self.made:
            page.free()


@pytest.fixture
def sequence(request):
    found = Sequence(PagedAttention(LAYERS, *request.param))
    yield found
    found.close()


def relative_error(ours, want) -> float:
    return float(np.abs(ours - want).max() / np.abs(want).max())


@pytest.mark.parametrize("window", [0, 1, 50, 200])
@pytest.mark.parametrize("sequence", SHAPES, indirect=True, ids=str)
def test_attention_over_hot_pages_matches_the_twin(sequence, window):
    """Chunks and single tokens, across page ends."""
    for n in (1, 62, 1, 1, 70, 129, 1, 3):
        assert relative_error(*sequence.step(n, window)) < TOLERANCE[HOT]


@pytest.mark.parametrize("tier", [WARM, COLD])
@pytest.mark.parametrize("sequence", [s for s in SHAPES if s[2] >= 30], indirect=True, ids=str)
def test_attention_over_lowered_pages_matches_the_twin(sequence, tier):
    """The twin reads the numbers that the lowered pages hold."""
    sequence.step(150)
    k, d = sequence.kernels, sequence.kernels.head_dim
    source, at = int(sequence.table.rows[0]["data"]), HOT
    while at > tier:
        target = sequence.page(0, at - 1)
        k.demote(source, at, target, at - 1)
        source, at = target, at - 1
    held = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * k.page_bytes(tier)).from_address(source))
    last = held.reshape(LAYERS, k.n_kv_heads, -1)[-1]
    rows = sequence.rows.reshape(150, -1, d)
    unturned = sequence.turn[:64] * np.repeat([1, -1], d // 2).astype(np.float32)
    for head in range(k.n_kv_heads):
        keys, values = pages.numbers_ref(tier, pages.canonical(tier, last[head], d), d)
        keys = pages.rotate_ref(keys) if tier == COLD else keys
        rows[:64, k.n_heads + head] = layers.rope_ref(keys[:, None], unturned)[:, 0]
        rows[:64, k.n_heads + k.n_kv_heads + head] = values
    for n in (1, 5, 64, 1):
        assert relative_error(*sequence.step(n)) < TOLERANCE[tier]


@pytest.mark.parametrize("sequence", [(9, 3, 64)], indirect=True)
def test_threads_change_no_bit(sequence, monkeypatch):
    other = Sequence(sequence.kernels)
    for n in (100, 1, 30):
        alone = sequence.step(n)[0]
        monkeypatch.setattr(paged_attention, "SHARED", 0)
        assert np.array_equal(alone, other.step(n)[0])
        monkeypatch.undo()
    other.close()


@pytest.mark.parametrize("sequence", [(2, 1, 32)], indirect=True)
def test_what_is_refused(sequence):
    sequence.step(64)
    hot, turn = sequence.table.rows[0]["data"], sequence.turn[:1]
    row = np.zeros((1, 128), np.float32)
    sequence.table.set(0, int(hot), WARM)
    with pytest.raises(ValueError, match="position 5 has no hot page"):
        sequence.kernels.run(0, sequence.table, 5, row, turn)
    with pytest.raises(ValueError, match="position 64 has no hot page"):
        sequence.kernels.run(0, sequence.table, 64, row, turn)
    for bad in (3, 514):
        with pytest.raises(ValueError, match="head_dim"):
            PagedAttention(1, 1, 1, bad)
