"""The sampler in MLX against the engine's in NumPy, and both against the exact distribution."""

import itertools

import numpy as np
import pytest

from ruvmlx import sampling as sampler
from ruvmlx.backends.mlx import sampler as mlx_sampler
from ruvmlx.backends.mlx.sampler import MLXSampler
from ruvmlx.engine.types import Sampling
from ruvmlx.errors import UsageError
from ruvmlx.platform.mx import mx
from ruvmlx.sampling import Sampler

EDGE = 2e-5  # of probability: sums of float32 may pass top_p, or u, this much sooner or later
SETTINGS = [
    Sampling(top_p=p, top_k=k, min_p=m) for p, k, m in itertools.product((1, 0.9, 0.3), (0, 5, 40), (0, 0.05))
]


def random(seed: int, size: int = 1237, spread: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32) * np.float32(spread)


ADVERSARIAL = {
    "flat": np.zeros(300, np.float32),
    "one far above": np.r_[np.zeros(99), 80.0, np.zeros(100)].astype(np.float32),
    "two equal on top": np.r_[np.zeros(50), 9, np.zeros(9), 9, np.zeros(50)].astype(np.float32),
    "steps of ties": np.repeat(np.arange(12), 11).astype(np.float32) / 2,
    "huge": random(1, 500, 3e4),
    "tiny differences": random(2, 500, 1e-5),
    "far down": random(3, 500) - 1e4,
    "one id": np.zeros(1, np.float32),
    "rising": np.linspace(-20, 20, 700, dtype=np.float32),
}
LOGITS = ADVERSARIAL | {f"random {seed}": random(seed) for seed in range(3)}


def ours(logits: np.ndarray, sampling: Sampling) -> list[int]:
    ids, kept = mlx_sampler.candidates(mx.array(logits[None]), sampling)
    allowed = np.isfinite(np.array(kept)[0])
    order = np.arange(logits.size) if ids is None else np.array(ids)[0]
    return order[allowed].tolist()


@pytest.mark.parametrize("name", LOGITS)
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_candidates_and_their_order(name, sampling):
    """Ids whose own probability, or the sum before them, is within rounding of the edge may be on either
    side; they are at the end of a sorted list."""
    logits = LOGITS[name]
    theirs = sampler.candidates(logits, sampling)[0].tolist()
    found = ours(logits, sampling)
    if found == theirs:
        return
    p = np.exp(sampler.log_softmax(logits).astype(np.float64))
    shorter, longer = sorted((found, theirs), key=len)
    assert longer[: len(shorter)] == shorter
    assert p[longer[len(shorter) :]].sum() < EDGE or len(longer) - len(shorter) == 1
    assert abs(p[shorter].sum() - sampling.top_p) < EDGE


@pytest.mark.parametrize("size", [320, 49_152, 50_001])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(0.7, seed=5), Sampling(1.3, top_p=0.9, seed=6), Sampling(0.8, top_k=40, min_p=0.01, seed=7)],
    ids=str,
)
def test_a_seed_draws_what_it_draws_in_numpy(size, sampling):
    """Another token comes only where u is within rounding of the edge between the two."""
    one, two, again, n = MLXSampler(sampling), Sampler(sampling), MLXSampler(sampling), 200
    uniforms, drawn, others = mlx_sampler.uniforms(np.random.default_rng(sampling.seed)), set(), 0
    for i in range(n):
        z = random(i % 7, size)
        token, u = int(one(mx.array(z[None])).item()), next(uniforms)
        drawn.add(token)
        others += token != two(z)
        assert token == int(again(mx.array(z[None])).item())
        assert off_by(z, sampling, token, u) < EDGE
    print(f"{others} of {n} draws differ")
    assert others <= 2
    assert len(drawn) > 20


def off_by(logits, sampling: Sampling, token: int, u: float) -> float:
    """How far u is from the token's stretch of the line, in float64."""
    ids, logprobs = sampler.candidates(logits, sampling)
    mass = np.cumsum(np.exp(logprobs.astype(np.float64) / sampling.temperature))
    mass /= mass[-1]
    at = int(np.flatnonzero(ids == token)[0])
    return max(0.0, (mass[at - 1] if at else 0.0) - u, u - mass[at])


def test_other_seeds_draw_other_tokens():
    z = mx.zeros((1, 1000))
    one, two = ([int(draw(z).item()) for _ in range(9)] for draw in map(MLXSampler, map(seeded, (1, 2))))
    assert one != two


def seeded(seed: int) -> Sampling:
    return Sampling(1.0, seed=seed)


@pytest.mark.parametrize("size", [12, 49_152])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_draws_follow_the_exact_distribution(size, temperature):
    """20,000 draws against the exact distribution: chi-square over ids, or over 96 groups of them."""
    z, n = random(8, size, 1.5), 20_000
    exact = np.exp((z.astype(np.float64) - z.max()) / temperature)
    uniforms = mlx_sampler.uniforms(np.random.default_rng(3))
    drawn = []
    for _ in range(n // 250):
        u = mx.array([[next(uniforms)] for _ in range(250)])
        drawn.append(np.array(mlx_sampler.draw_index(mx.array(z[None]), temperature, u)))
    groups = np.arange(size) * min(size, 96) // size
    expected = n * np.bincount(groups, exact / exact.sum())
    counts = np.bincount(groups[np.concatenate(drawn)], minlength=len(expected))
    assert counts.sum() == n
    chi2, free = float(((counts - expected) ** 2 / expected).sum()), len(expected) - 1
    assert chi2 < free + 5 * np.sqrt(2 * free)
    shifted = np.roll(expected, 1)  # the test can fail
    assert ((counts - shifted) ** 2 / shifted).sum() > free + 5 * np.sqrt(2 * free)


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53, mlx_sampler.BELOW_ONE])
def test_the_ends_of_the_line(u):
    """u = 0 is the first id that has a probability; the largest u the last one, never a forbidden one."""
    z = np.full(1000, -np.inf, np.float32)
    z[[7, 500, 993]] = 0
    draw = MLXSampler(Sampling(1.0), mlx_sampler.uniforms(Fixed(u)))
    assert int(draw(mx.array(z[None])).item()) == (7 if u == 0 else 993)


class Fixed:
    """A generator of one number."""

    def __init__(self, u: float):
        self.u = u

    def random(self, n: int) -> np.ndarray:
        return np.full(n, self.u)


@pytest.mark.parametrize("temperature", [0.0, 1e-320, 1e-40, 1e-6, 0.009])
def test_the_coldest_are_greedy(temperature):
    for seed in range(5):
        z = random(seed)
        drawn = MLXSampler(Sampling(temperature, seed=1))(mx.array(z[None]))
        assert int(drawn.item()) == int(z.argmax())


def test_values_that_mean_nothing_are_refused():
    with pytest.raises(UsageError, match="it must be"):
        MLXSampler(Sampling(top_p=0))
