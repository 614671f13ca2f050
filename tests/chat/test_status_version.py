"""/status names the version that the store has, also after another process changed it."""

from ruvmlx.apps.chat import describe

from ..test_runtime import say


def test_the_version_is_that_of_the_store(open_tiny):
    with open_tiny() as here, open_tiny() as elsewhere:
        chat = here.chats.new_chat()
        for _ in range(2):
            say(here, chat, "hello")
            here.rate("last", "down")
        elsewhere.rollback(1)
        assert "adapter   default, version 1" in describe.status_lines(here)
