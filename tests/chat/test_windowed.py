"""Only widgets near the window are placed, and the screen looks the same."""

import gc

import pytest
from ruvmlx.apps.chat import windowed
from ruvmlx.apps.chat.gc_policy import Garbage
from ruvmlx.apps.chat.messages import ReplyMessage, UserMessage

from ruvmlx.runtime import Turn

from .documents import document
from .helpers import SMALL, WIDE, chatting, lines_of, until
from .scripted import ScriptedRuntime


def long_chat(seed):
    runtime = ScriptedRuntime(["New."])
    turns = runtime.spoken["s0"] = []
    for n in range(8):
        text = "\n\n".join(document(100 * seed + 10 * n + k) for k in range(6))
        turns += [Turn("user", f"question {n}"), Turn("assistant", text, f"a{n}")]
    return runtime


async def screens(runtime, size, steps):
    """The conversation's height, and the screen at each scroll position."""
    async with chatting(runtime, size, session="continue", motion=False) as (app, pilot):
        found, transcript = [], app.chat.transcript
        await until(pilot, lambda: not transcript._lacks_earlier)
        await wait_for_layout(pilot, transcript)
        for share in steps:
            transcript.scroll_to(y=share * transcript.max_scroll_y, animate=False, immediate=True)
            await wait_for_layout(pilot, transcript)
            found.append((transcript.scroll_y, lines_of(app.screen)))
        return transcript.virtual_size, found


async def wait_for_layout(pilot, transcript, times=5):
    """Wait until the height and the position have stayed the same: on a busy machine, a layout comes late."""
    seen = []
    while len(seen) < times or len(set(seen[-times:])) > 1:
        await pilot.pause()
        seen.append((transcript.virtual_size, transcript.scroll_y, tuple(lines_of(transcript))))


@pytest.mark.parametrize("seed,size", [(1, SMALL), (2, WIDE)], ids=["80x24", "160x50"])
async def test_a_windowed_reply_looks_as_if_all_widgets_were_placed(monkeypatch, size, seed):
    steps = [0.5, 0.52, 0.1, 0.9, 0.0, 1.0, 0.31]
    near = await screens(long_chat(seed), size, steps)
    assert near[0].height > 10 * size[1]
    monkeypatch.setattr(windowed, "visible_part", lambda arranged, _: arranged)
    assert near == await screens(long_chat(seed), size, steps)


async def test_widgets_out_of_sight_are_not_in_the_compositor():
    """The compositor has few of a long reply's widgets, the same number while it grows."""
    async with chatting(ScriptedRuntime(["x"]), SMALL) as (app, pilot):
        reply, placed = ReplyMessage(), []
        await app.chat.transcript.add(UserMessage("Go on."), reply)
        for _ in range(6):
            await reply.grow("- one\n- two\n\nand a paragraph\n\n" * 20)
            await pilot.pause()
            await pilot.pause()
            assert app.chat.transcript.is_vertical_scroll_end
            placed.append(len(app.screen._compositor.full_map))
        assert len(reply.query("*")) > 700
        assert max(placed) < 400 and placed[-1] < placed[1] + 20


def test_a_full_collection_finds_garbage_and_leaving_restores_pythons_own():
    class Cycle:
        def __init__(self):
            self.me = self

    def cycle_count():
        return sum(isinstance(thing, Cycle) for thing in gc.get_objects())

    garbage, before = Garbage(), cycle_count()
    garbage.set_aside()
    assert garbage.is_more_than(1.6)  # nothing was searched yet
    garbage.search()
    assert not garbage.is_more_than(1.02)
    kept = [Cycle() for _ in range(100_000)]
    garbage.set_aside()
    assert garbage.is_more_than(1.02)
    del kept
    gc.collect()
    garbage.set_aside()
    assert garbage.is_more_than(1.02)  # set aside: not found by the usual search
    garbage.search()
    assert not garbage.is_more_than(1.02)
    garbage.leave()
    assert gc.get_freeze_count() == 0 and cycle_count() == before
