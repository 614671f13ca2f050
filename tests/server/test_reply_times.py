"""How long a client is told to wait: from the times of replies, by a clock that the test turns."""

import pytest
from ruvmlx.apps.server.errors import busy
from ruvmlx.apps.server.reply_times import ReplyTimes


@pytest.fixture
def times():
    found = ReplyTimes(clock=lambda: found.now)  # type: ignore[attr-defined]
    found.now = 0.0
    return found


def wrote(times, seconds, error=None):
    with times.reply():
        times.now += seconds
        if error:
            raise error


def test_nothing_is_known(times):
    assert times.until_free(1.0) == 1


def test_the_share_of_the_mean_time(times):
    wrote(times, 10)
    wrote(times, 30)
    assert [times.until_free(share) for share in (0.0, 0.1, 0.5, 1.0, 7.0)] == [1, 2, 10, 20, 20]


def test_replies_in_progress_count_and_failed_ones_do_not(times):
    with times.reply():
        times.now = 8.0
        assert times.until_free(1.0) == 8
    with pytest.raises(ValueError):
        wrote(times, 100, ValueError())
    assert times.until_free(1.0) == 8


def test_at_most_a_minute(times):
    wrote(times, 5000)
    assert times.until_free(1.0) == 60 == busy("x", times.until_free(1.0)).retry_after
