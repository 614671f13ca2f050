"""The measurement for a large store runs, here on a small one; tests/chat/large_store.py is the report."""

from ruvmlx.store import Store

from . import large_store
from .large_store import Figures, Size, fill, measure


def test_a_store_of_that_size_is_made(tmp_path):
    """All chats and replies, one chat with a needle, and a rating for each so many replies."""
    store = Store(tmp_path / "ruvmlx.db")
    fill(store, Size(8, 200, 10), "f", "m", b"state")
    turns = [chat.turns for chat in store.chats.all()]
    assert len(turns) == 8 and sum(turns) == 400
    assert len({hit.session.id for hit in store.search.find("needle")}) == 1
    assert len(store.db.rows("SELECT 1 FROM ratings")) == 10


async def test_every_screen_is_measured(open_tiny, monkeypatch):
    monkeypatch.setattr(large_store, "REST", 0.0)
    with open_tiny() as runtime:
        fill(runtime.store, Size(6, 120, 0), runtime.model.fingerprint, "m", None)
    figures = await measure(open_tiny, times=1, keys=3)
    names = [line[:34].strip() for line in figures.lines()]
    for name in ("start", "list of chats", "search: needle", "open a chat", "find in it", "key"):
        assert any(said.startswith(name) for said in names)
    assert len(figures.found["key in the longest chat: p99"]) == 3


def test_what_is_over_its_limit_is_marked():
    lines = Figures({"list": [(90.0, 100.0), (300.0, 200.0), (200.0, 160.0)], "key": [(1.0, 1.0)]}).lines()
    assert lines[1].split() == ["list", "200", "160", "150", "OVER"] and lines[2].split()[-1] == "50"
