"""The search for the scale of a style, on curves of the KL and of the perplexity that are known."""

from dataclasses import asdict
from types import SimpleNamespace

import pytest

from ruvmlx.sona.optional.style_scale import (
    AIM,
    CLOSE_ENOUGH,
    FAR,
    NEXT_GROWTH,
    RISE,
    STEPS,
    TRIES,
    USED,
    VARIETY_LOSS,
    MeasuredBase,
    ScaleSearch,
    UsedStyle,
    smaller_share,
)

WANTED = 0.04


def measurement(scale: float, kl: float, rise: float = 0.0) -> MeasuredBase:
    return MeasuredBase(scale, SimpleNamespace(probe=SimpleNamespace(floor=kl, rise=rise)))


def search(kl, measured_kl, rise=lambda s: 0.0, first=1.0, enough=None):
    """Return (the found scale or None, the measured scales)."""
    scales = []

    def measure(scale):
        scales.append(scale)
        return measurement(scale, kl(scale), rise(scale))

    found = ScaleSearch(measure, measured_kl, WANTED).run(first, lambda done: None, enough)
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


@pytest.mark.parametrize("first, measured", [(1.0, 2), (3.5, 1), (5.0, 1), (7.0, 2)])
def test_near_the_style_in_use_one_measurement_is_enough(first, measured):
    """The largest s is 6.3. Only a first s that is far too small is enlarged: else the next step does it."""

    def kl(s):
        return 0.001 * s**2

    found, scales = search(kl, pytest.fail, first=first, enough=2.0)
    assert len(scales) == measured and kl(found) <= WANTED
    assert measured == 2 or found == first


@pytest.mark.parametrize(
    "kl, rise, loss, factor",
    [
        (WANTED, 0.0, 0.0, AIM),
        (WANTED / 1.44, 0.0, 0.0, 1.2 * AIM),
        (WANTED / 4, -0.001, -0.02, NEXT_GROWTH),
        (WANTED / 100, RISE, 0.0, AIM),
        (WANTED / 2, 0.0, VARIETY_LOSS, AIM),
        (WANTED / 2, 0.0, 9 * VARIETY_LOSS, 1 / NEXT_GROWTH),
        (99 * WANTED, 0.0, 0.0, 1 / NEXT_GROWTH),
        (WANTED / 16, RISE / 2.5, 2 * VARIETY_LOSS, AIM * STEPS[-1] * 2.5),
        (WANTED / 6.25, -0.001, 2 * VARIETY_LOSS, AIM * STEPS[-1] * 2.5),
    ],
)
def test_the_next_style_is_near_the_style_in_use(kl, rise, loss, factor):
    """The smallest room of the three limits (KL, prose, variety) gives the factor of s. The predicted KL is
    proportional to s squared."""
    prediction, enough = UsedStyle(0.05, kl, rise, loss).next_start(WANTED)
    assert prediction == pytest.approx(0.05 * factor**2)
    assert enough == pytest.approx(max(FAR, FAR * min(WANTED / kl, RISE / max(rise, 1e-9)) ** 0.5 / factor))


@pytest.mark.parametrize("loss", [0.0, VARIETY_LOSS / 3])
def test_a_style_that_can_be_far_larger_than_the_style_in_use_is_searched(loss):
    """A style that grows by a quarter in each step would need ten steps to reach the limits."""
    assert UsedStyle(0.05, WANTED / 9, 0.0, loss).next_start(WANTED) is None


def test_a_report_without_a_style_in_use_is_no_start():
    style = UsedStyle(0.05, 0.04, 0.001, 0.02)
    assert UsedStyle.of_report({USED: asdict(style)}) == style
    changes = {"kl": "x"}, {"predicted": 0.0}, {"kl": 10**400}, {"rise": float("nan")}
    damaged = [{"kl": 1.0}, None, *(asdict(style) | change for change in changes)]
    assert UsedStyle.of_report({}) is None
    assert all(UsedStyle.of_report({USED: one}) is None for one in damaged)


def test_a_style_that_had_to_be_smaller_does_not_grow():
    found = measurement(2.0, WANTED / 3)
    assert UsedStyle.of(0.05, found, 0.01, 1.0).next_start(WANTED)[0] > 0.05
    assert UsedStyle.of(0.05, found, 0.01, 0.7).next_start(WANTED)[0] < 0.05
