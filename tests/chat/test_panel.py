"""The side panel: what was learned and what the machine does."""

import re

import pytest
from ruvmlx.apps.chat.panel import View, lines, size

from .helpers import ask, screen_text, until
from .test_branches import BOTH_SIZES, chatting, plain, send  # noqa: F401


@BOTH_SIZES
async def test_the_panel_follows_what_is_learned(chatting, size):  # noqa: F811
    """F2 shows it; a rating, undo and rollback change it; F2 hides it."""
    async with chatting(size) as (app, pilot):
        await ask(app, pilot, "What is blue?")
        await pilot.press("f2")
        await until(pilot, lambda: "default, version 0" in screen_text(app))
        assert "after 16 more" in screen_text(app) and "iB at most" in screen_text(app)
        await send(app, pilot, "/rate up very\x1b[2J clear")
        await until(pilot, lambda: "default, version 1" in screen_text(app))
        await until(pilot, lambda: "after 15 more" in screen_text(app))
        assert "very clear" in screen_text(app) and "versions 0, 1" in screen_text(app)
        await send(app, pilot, "/rollback 0")
        await until(pilot, lambda: "default, version 0" in screen_text(app))
        await send(app, pilot, "/rollback x")
        await until(pilot, lambda: "a version is a number" in screen_text(app))
        await pilot.press("f2")
        await until(pilot, lambda: "default, version" not in screen_text(app))


async def test_without_an_adapter(open_tiny, chatting):  # noqa: F811
    async with chatting() as (app, pilot):
        await send(app, pilot, "/adapter none")
        await until(pilot, lambda: "does not learn" in screen_text(app))
        await pilot.press("f2")
        await until(pilot, lambda: "Learning" in screen_text(app) and "Machine" in screen_text(app))


def test_the_same_in_words(open_tiny):
    with open_tiny() as runtime:
        _, said = plain(runtime, "Hi", "/down too short", "/learning", "/rollback 0")
    assert "Learning: adapter default, version 1" in said
    assert "Recent ratings: ▼ down too short" in said
    assert re.search(r"Machine: memory [\d.]+ [MG]iB at most", said)
    assert "Version 0 is in use, from 0 ratings." in said


def test_a_rating_counts_down_to_the_training(open_tiny):
    """As many ratings are missing as the loop then waits for; `due` is when none is."""
    with open_tiny() as runtime:
        chat = runtime.new_chat()
        from ..test_runtime import say

        for left in range(16, 0, -1):
            assert runtime.learning().missing == left and not runtime.background_due()
            say(runtime, chat, "hello", n=2)
            runtime.rate("last", "up" if left % 2 else "down")
        state = runtime.learning(recent=3)
        assert state.missing == 0 and runtime.learner.ledger.due()
        assert [r.rating for r in state.recent] == ["up", "down", "up"]
        assert all(lines(View.of(runtime), None))


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 B"), (2048, "2 KiB"), (3 << 20, "3 MiB"), (3 << 29, "1.5 GiB")]
)
def test_sizes(count, shown):
    assert size(count) == shown
