"""The side panel: learning and the machine."""

import re
import threading

import pytest
from ruvmlx.apps.chat import overview
from ruvmlx.apps.chat.actions import panel as panel_actions
from ruvmlx.apps.chat.overview import Overview, spoken_lines

from ruvmlx.kv.cache import KVStats
from ruvmlx.platform.memory import MemoryUse
from ruvmlx.platform.sensors import SensorReading, Sensors
from ruvmlx.runtime import LearningState, LearnStatus, MemoryStatus

from .helpers import SMALL, ask, screen_text, until
from .test_branches import BOTH_SIZES, chatting, run_plain, send  # noqa: F401


@BOTH_SIZES
async def test_ratings_undo_and_rollback_update_the_panel(chatting, size):  # noqa: F811
    """F2 shows it; a rating, undo and rollback change it; F2 hides it."""
    async with chatting(size) as (app, pilot):
        await ask(app, pilot, "What is blue?")
        await pilot.press("f2")
        await until(pilot, lambda: "default, version 0" in screen_text(app))
        assert "after 16 more" in screen_text(app)
        assert re.search(r"memory +[▰▱]{5} [\d.]+ [MG]B", screen_text(app))
        assert re.search(r"budget +[\d.]+ [MG]B, peak [\d.]+ [MG]B", screen_text(app))
        await send(app, pilot, "/rate up very\x1b[2J clear")
        await until(pilot, lambda: "default, version 1" in screen_text(app))
        await until(pilot, lambda: "after 15 more" in screen_text(app))
        assert "very clear" in screen_text(app) and "versions 0, 1" in screen_text(app)
        assert bool(re.search(r"learned +\d", screen_text(app))) == (
            size != SMALL
        )  # details where there is room
        await send(app, pilot, "/rollback 0")
        await until(pilot, lambda: "default, version 0" in screen_text(app))
        await send(app, pilot, "/rollback x")
        await until(pilot, lambda: "/rollback needs the number of a version" in screen_text(app))
        await pilot.press("f2")
        await until(pilot, lambda: "default, version" not in screen_text(app))


async def test_in_a_narrow_terminal_the_panel_covers_the_conversation(chatting):  # noqa: F811
    """The user reads all rows of the panel with Page Down. The panel hides no line of the input. A new reply
    closes the panel."""
    async with chatting((40, 12)) as (app, pilot):
        await ask(app, pilot, "What is blue?")
        await pilot.press("f2")
        await until(pilot, lambda: "adapter   default, version 0" in screen_text(app))
        await pilot.press(*"two", "ctrl+j", *"lines")
        await until(pilot, lambda: app.chat.panel.outer_size.height == 12 - app._dock.outer_size.height)
        assert "│ lines    " in screen_text(app) and "What is blue?" not in screen_text(app)
        seen = screen_text(app)
        while not app.chat.panel.is_vertical_scroll_end:
            before = app.chat.panel.scroll_y
            await pilot.press("pagedown")
            await until(pilot, lambda before=before: app.chat.panel.scroll_y > before)
            await pilot.pause(0.1)
            seen += screen_text(app)
        rows = [word for _, rows in overview.sections(app.chat.panel.view, None) for word, _ in rows]
        assert all(f" {word} " in seen for word in rows if word not in overview.DETAILS)
        assert "^r take back" in seen
        await pilot.resize_terminal(100, 30)
        await until(pilot, lambda: "What is blue?" in screen_text(app) and "adapter" in screen_text(app))
        await pilot.resize_terminal(40, 12)
        await until(pilot, lambda: "What is blue?" not in screen_text(app))
        await ask(app, pilot, "And green?")
        assert "And green?" in screen_text(app) and not app.chat.panel.display


async def test_the_panel_can_be_shown_without_an_adapter(open_tiny, chatting):  # noqa: F811
    async with chatting() as (app, pilot):
        await send(app, pilot, "/adapter none")
        await until(pilot, lambda: "does not learn" in screen_text(app))
        await pilot.press("f2")
        await until(pilot, lambda: "Learning" in screen_text(app) and "Machine" in screen_text(app))


def test_the_learning_command_prints_what_the_panel_shows(open_tiny):
    with open_tiny() as runtime:
        _, said = run_plain(runtime, "Hi", "/down too short", "/learning", "/rollback 0")
    assert "Learning: adapter default, version 1" in said
    assert "Recent ratings: ▼ bad too short" in said
    assert re.search(r"Machine: memory [\d.]+ [MG]B\nMachine: budget [\d.]+ [MG]B, peak [\d.]+ [MG]B", said)
    assert re.search(r"Machine: recent \d+.* [kM]?B, \d+ tokens\n", said) and "▰" not in said
    assert "Version 0 is in use; it learned from 0 ratings." in said


def test_a_rating_counts_down_to_the_training(open_tiny):
    """As many ratings are missing as the loop then waits for; `due` is when none is."""
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        from ..test_runtime import say

        for left in range(16, 0, -1):
            assert runtime.learning.state().missing == left and not runtime.learning.is_due()
            say(runtime, chat, "hello", n=2)
            runtime.rate("last", "up" if left % 2 else "down")
        state = runtime.learning.state(recent=3)
        assert state.missing == 0 and runtime.learning.is_due()
        assert [r.rating for r in state.recent] == ["up", "down", "up"]
        assert all(spoken_lines(Overview.of(runtime), None))


async def test_the_panel_reads_the_sensors_without_the_runtime(chatting, monkeypatch):  # noqa: F811
    """Heat, power and memory are looked at again and again, in a thread, and no idle work is disturbed."""
    now, threads = [SensorReading(41.0)], set()

    def read(_):
        threads.add(threading.get_ident())
        return now[0]

    monkeypatch.setattr(Sensors, "read", read)
    monkeypatch.setattr(panel_actions, "SENSE_EVERY", 0.2)
    async with chatting() as (app, pilot):
        await pilot.press("f2")
        await until(pilot, lambda: "heat     41 °C" in screen_text(app))
        disturbed = []
        monkeypatch.setattr(app.host, "cancel_idle", lambda: disturbed.append(1))
        now[0] = SensorReading(None, "serious", 12.34, "battery")
        await until(pilot, lambda: "heat     serious" in screen_text(app))
        assert "power    12.3 W, battery" in screen_text(app)
        now[0] = SensorReading()
        await until(pilot, lambda: "heat" not in screen_text(app))
        assert "power" not in screen_text(app)
        assert not disturbed and threading.get_ident() not in threads


KV = KVStats("tiered", (2048, 1792, 319), 50 << 20, 94 << 20, (22 << 20, 21 << 20, 7 << 20))
HELD = MemoryUse(100 << 20, 50 << 20, 5 << 20, 400 << 20, 500 << 20, 8 << 30, 64 << 20)


def test_every_tier_with_its_bytes_and_every_part_with_its_name():
    assert overview.cache_rows(KV) == [
        ("recent", "▰▱▱▱ 7.3 MB, 319 tok"),
        ("older", "▰▰▱▱ 22 MB, 1,792 tok"),
        ("oldest", "▰▰▱▱ 23 MB, 2,048 tok"),
        ("cache", "52 MB (full: 99 MB)"),
    ]
    assert overview.memory_rows(HELD) == [
        ("memory", "▰▱▱▱▱ 419 MB"),
        ("budget", "8.6 GB, peak 524 MB"),
        ("model", "105 MB"),
        ("caches", "52 MB of 67 MB"),
        ("learned", "5.2 MB"),
        ("rest", "257 MB"),
    ]


@pytest.mark.parametrize("height", range(12, 40))
def test_in_a_low_panel_details_go_first(height):
    """Details go first, then the older of the recent ratings; tiers, memory and heat stay."""
    recent = [(f"▲ {i}", "q") for i in range(8)]
    machine = [*overview.cache_rows(KV), *overview.memory_rows(HELD), ("heat", "50 °C")]
    shown = overview.fit_sections([("Recent ratings", recent), ("Machine", machine)], height)
    words = [word for _, rows in shown for word, _ in rows]
    assert {"▲ 0", "recent", "older", "oldest", "memory", "budget", "heat"} <= set(words)
    assert len(words) + len(shown) <= max(height, 10)
    assert ("rest" in words) == (height >= len(recent) + len(machine) + 4)


@pytest.mark.parametrize("hits, shown", [(0, "2"), (1, "2, seen 1 time")])
def test_a_topic_that_was_never_seen_is_not_said_to_be_seen(hits, shown):
    state = LearningState(
        "default", LearnStatus(9, 9, 9, 0.01, 0.1, 0.0, [0]), MemoryStatus(1, 2, 0, hits, 0, 0), 3, []
    )
    assert dict(overview.learning_rows(state))["topics"] == shown


def test_what_the_user_likes_is_shown_once_ratings_support_it():
    def rows(*likes: str):
        status = LearnStatus(9, 9, 9, 0.01, 0.1, 0.0, [0])
        state = LearningState("default", status, MemoryStatus(1, 1, 0, 1, 0, 0), 3, [], likes)
        return overview.learning_rows(state)

    assert "likes" not in dict(rows())
    assert rows("lists", "shorter replies", "code")[-2:] == [("likes", "lists"), ("likes", "shorter replies")]
