"""The signals about replies: how many are kept."""

from ruvmlx.store import SignalRow, Store

from .test_store import a_reply


def test_ten_thousand_signals_are_kept(home):
    store = Store(home / "ruvmlx.db")
    store.replies.add(a_reply(), None)
    store.signals.add([SignalRow("r1", "implicit", "copied", 1, 0, 1, 0, n) for n in range(10_003)])
    assert store.signals.count() == 10_000 and store.signals.dropped_count() == 3
    assert store.signals.all("f")[0].context_tokens == 3
