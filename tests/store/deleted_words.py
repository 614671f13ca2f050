"""Deleted words that the search index still has."""

from ruvmlx.store import Store


def leave_words(store: Store) -> None:
    """Delete a chat, and leave its words in the search index."""
    chat = store.chats.new("m")
    store.messages.add_user(chat, "a secret word")
    store.chats.delete(chat, seconds=0)
    assert not store.search_index.is_clean()
