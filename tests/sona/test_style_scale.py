"""The search for the scale of a style, on curves of the KL and of the perplexity that are known."""

from types import SimpleNamespace

import pytest

from ruvmlx.sona.optional.style_scale import (
    CLOSE_ENOUGH,
    RISE,
    TRIES,
    MeasuredBase,
    ScaleSearch,
    smaller_share,
)

WANTED = 0.04


def measurement(scale: float, kl: float, rise: float = 0.0) -> MeasuredBase:
    return MeasuredBase(scale, SimpleNamespace(probe=SimpleNamespace(floor=kl, rise=rise)))


def search(kl, measured_kl, rise=lambda s: 0.0, first=1.0):
    """Return (the found scale or None, the measured scales)."""
    scales = []

    def measure(scale):
        scales.append(scale)
        return measurement(scale, kl(scale), rise(scale))

    found = ScaleSearch(measure, measured_kl, WANTED).run(first, lambda done: None)
    return found and found.scale, scales


def largest(kl, rise=lambda s: 0.0) -> float:
    """Return the largest s within the limits: the slow twin, which tries all."""
    return max(s / 100 for s in range(1, 3000) if kl(s / 100) <= WANTED and rise(s / 100) <= RISE)


@pytest.mark.parametrize("power", [1.5, 2, 3, 4])
@pytest.mark.parametrize("first", [0.1, 2.0, 20.0])
def test_one_measurement_is_enough_if_the_kl_is_the_narrower_limit(power, first):
    def kl(s):
        return 0.001 * s**power

    found, scales = search(kl, kl, first=first)
    assert CLOSE_ENOUGH * largest(kl) <= found <= largest(kl) + 0.01
    assert len(scales) == 1


@pytest.mark.parametrize("power", [2, 5])
@pytest.mark.parametrize("first", [0.1, 2.0, 20.0])
def test_prose_can_be_the_narrower_limit(power, first):
    def kl(s):
        return 1e-5 * s**2

    def rise(s):
        return RISE * (s / 3) ** power

    found, scales = search(kl, kl, rise, first)
    assert len(scales) <= TRIES
    assert found is not None and 0.3 * largest(kl, rise) <= found <= largest(kl, rise) + 0.01


def test_a_kl_that_says_nothing_ends_within_the_limits():
    def kl(s):
        return 0.001 * s**2

    for measured_kl in (lambda s: 0.0, lambda s: float("nan"), lambda s: 1.0):
        found, scales = search(kl, measured_kl)
        assert len(scales) <= TRIES and (found is None or kl(found) <= WANTED)


def test_no_scale_within_the_limits_is_none():
    found, scales = search(lambda s: 1.0, lambda s: 1.0)
    assert found is None and scales == sorted(scales, reverse=True)


def test_a_model_that_computes_no_number_has_no_room():
    assert measurement(1, float("nan")).room(WANTED) == measurement(1, 0.01, float("inf")).room(WANTED) == 0
    assert measurement(1, WANTED / 4).room(WANTED) == pytest.approx(2)
    assert measurement(1, WANTED / 4, 4 * RISE).room(WANTED) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("share", "is_worse", "loss", "smaller"),
    [
        (1.0, False, 0.0, 0), (1.0, False, -0.1, 0), (1.0, False, 0.042, 0), (1.0, False, 0.05, 0.8),
        (1.0, False, 0.5, 0.4), (0.4, False, 0.5, 0), (1.0, True, 0.0, 0.7), (0.8, True, 0.0, 0.7),
        (0.7, True, 0.2, 0.4), (0.4, True, 0.0, 0),
    ],
)  # fmt: skip
def test_a_smaller_share_follows_faults_and_the_lost_variety(share, is_worse, loss, smaller):
    assert smaller_share(share, is_worse, loss) == pytest.approx(smaller)
