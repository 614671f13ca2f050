"""The write-ahead log of the store, which a rating must not copy."""

from ruvmlx.store import Store
from ruvmlx.store.database import COPY_EVERY


def test_the_log_is_copied_while_the_user_reads(home):
    """The database file alone, without its log, then has the chat. A reader does not stop the copy."""
    path = home / "chats.db"
    store, reader = Store(path), Store(path, reading=True)
    store.chats.new("tiny", title="about rivers")
    for _ in range(COPY_EVERY):
        assert b"about rivers" not in path.read_bytes() and reader.chats.ids()
        store.db.copy_log_early()
    assert b"about rivers" in path.read_bytes()
    store.close()
    reader.close()
