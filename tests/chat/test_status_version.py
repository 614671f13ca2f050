"""/status names the version that the store has, also after another process changed it."""

from ruvmlx.apps.chat import describe
from ruvmlx.apps.chat.view_model import RatingPlace

from ..test_runtime import say


def test_the_version_is_that_of_the_store(open_tiny):
    with open_tiny() as here, open_tiny() as elsewhere:
        chat = here.chats.new_chat()
        for _ in range(2):
            say(here, chat, "hello")
            here.rate("last", "down")
        elsewhere.rollback(1)
        assert "adapter   default, version 1" in describe.status_lines(here)


def test_an_undo_says_that_it_took_back_a_reason(open_tiny):
    """The reason of an older rating: the rating itself stays, and is taken back by a later undo."""
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        say(runtime, chat, "hello")
        first = runtime.chats.turns(chat)[-1].reply_id
        runtime.rate(first, "down")
        say(runtime, chat, "and you?")
        runtime.rate("last", "down")
        runtime.choices.give_reason(first, "long")
        taken = runtime.undo()
        assert taken.undone == "change of a rating" and taken.ratings == 2
        said = describe.undone(taken, RatingPlace("hello", ""))
        assert said == "Rating change taken back: “hello”; 2 left, version 2."
        assert [runtime.undo().undone for _ in range(2)] == ["rating", "rating"]
        assert runtime.status().ratings == 0
