"""The monitor's window: figures of each reply, and the speed of those that nothing disturbed."""

from dataclasses import replace

from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.optimizer.monitor import JUDGED, WINDOW, LoadWatch, PerformanceMonitor
from ruvmlx.store import SpeedRow

ROW = SpeedRow(20_000.0, 150.0, 40, 1, 0.0, 0.3, 1000, 0.8, 10.0)  # 50 tokens a second


def monitor(*rows) -> PerformanceMonitor:
    return PerformanceMonitor(rows)


def test_the_window_is_bounded():
    full = monitor(*[replace(ROW, created=float(i)) for i in range(WINDOW + 5)])
    assert len(full) == WINDOW and full.newest().created == WINDOW + 4
    full.add(replace(ROW, created=99.5))
    assert len(full) == WINDOW and full.newest().created == 99.5


def test_the_speed_is_a_median_of_the_newest():
    assert monitor(*[ROW] * (JUDGED - 1)).speed() is None
    rows = [replace(ROW, us_per_token=1.0)] * 9 + [ROW] * JUDGED
    assert monitor(*rows).speed() == 50.0
    rows[-1] = replace(ROW, us_per_token=1e9)  # one pause of the machine
    assert monitor(*rows).speed() == 50.0


def test_disturbed_replies_do_not_say_how_fast_the_model_is():
    """Other programs, memory pressure, a few tokens, replies in a batch."""
    slow = replace(ROW, us_per_token=1e6)
    disturbed = [
        replace(slow, others=1.5),
        replace(slow, pressure=0.95),
        replace(slow, written=3),
        replace(slow, replies=4),
        replace(slow, us_per_token=0.0),
    ]
    known = monitor(*[ROW] * JUDGED, *disturbed * JUDGED)
    assert known.speed() == 50.0
    assert known.shared_speed() == 1.0
    assert known.speed(since=11.0) is None


def test_facts_of_an_empty_window_and_of_a_full_one():
    assert monitor().facts["quality"] is None and monitor().facts["ttft_ms"] is None
    facts = monitor(*[ROW] * JUDGED, replace(ROW, quality=None)).facts
    assert (facts["tokens_per_second"], facts["quality"], facts["ttft_ms"]) == (50.0, 0.8, 150.0)


def test_the_load_of_others_is_what_this_process_did_not_use():
    samples = iter([(0.0, 10.0, 1.0), (2.0, 14.0, 2.0)])
    assert LoadWatch.begin(lambda: next(samples)).others() == 1.5


def write(runtime, i: int, **fields) -> None:
    request = GenerationRequest(
        request_id=f"reply-{i}", prompt="name three rivers", max_new_tokens=20, sampling=Sampling(seed=i),
        ignore_eos=True, **fields,
    )  # fmt: skip
    for _ in runtime.writer.generate(request):
        pass


def test_each_reply_is_a_row_with_its_quality(open_tiny):
    """The figures outlive the process: a new monitor reads them from the store."""
    with open_tiny() as runtime:
        write(runtime, 1)
        write(runtime, 2)
        newest, stored = runtime.optimizer.monitor.newest(), runtime.store.replies.get("reply-2")
        assert newest.written == 20 and newest.ttft_ms > 0 and newest.us_per_token > 0
        assert newest.replies == 1 and newest.kv_bytes > 0
        assert newest.quality == stored.quality and 0 < stored.quality < 1  # its limit cut it off
        assert stored.quality_parts.keys() >= {"ending", "repetition", "length"}
    with open_tiny() as again:
        rows = list(again.optimizer.monitor._rows)
        assert len(rows) == 2 and rows[-1].quality == stored.quality
        assert rows[-1].us_per_token == newest.us_per_token and rows[-1].written == 20


def test_replies_beside_each_other_are_counted(open_tiny):
    with open_tiny() as runtime:
        write(runtime, 1, best_of=3)
        newest = runtime.optimizer.monitor.newest()
        assert newest.replies == 3
        assert "agreement" in runtime.store.replies.get("reply-1").quality_parts
