"""This module shows a reply while the model writes it. Each frame adds the new chunks to the reply's widget
and updates the figures of the status line."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from textual.widget import Widget

from ruvmlx.engine.types import Chunk, GenerationResponse
from ruvmlx.text import Sanitizer, count, sanitize

from .messages import ReplyMessage
from .status import Meter, StatusLine

FRAME = 1 / 30  # seconds between two frames of a growing reply
REST = 0.25  # the longest time in seconds that the app sleeps after a frame


async def show_reply(
    reply: ReplyMessage, arriving: AsyncIterator[list[Chunk]], status: StatusLine
) -> GenerationResponse | None:
    """Show the chunks of a reply as they arrive. Return the response (the whole reply with its figures), or
    None if the stream ended without a response.

    After each frame, the function sleeps at least as long as the frame's computation took (but at most REST
    seconds for this reason), so that the app also handles keys on slow machines.
    """
    safe, asked_at, response, notes = Sanitizer(), time.perf_counter(), None, list[str]()
    status.meter = replace(Meter(), max_context=status.meter.max_context)
    async for chunks in arriving:
        started, busy = time.perf_counter(), time.thread_time()
        reply.begin()
        for chunk in chunks:
            if chunk.note:
                # a line that ends with "..." is about work in progress: the next line takes its place
                notes = [note for note in notes if not note.endswith("...")] + [sanitize(chunk.note)]
                reply.chosen = "\n".join(notes)
            status.meter = status.meter.after(chunk, asked_at)
        await _show(reply, chunks[-1], safe.feed("".join(chunk.text for chunk in chunks)))
        response = chunks[-1].response
        if not response:
            await wait_until_drawn(status)
            took, rest = time.perf_counter() - started, time.thread_time() - busy
            await asyncio.sleep(max(FRAME - took, min(rest, REST)))
    return response


async def wait_until_drawn(widget: Widget) -> None:
    """Wait until the widget's pending changes are on the screen and its pending scrolling has begun."""
    done = asyncio.Event()
    widget.call_after_refresh(done.set)
    await done.wait()


async def _show(reply: ReplyMessage, newest: Chunk, text: str) -> None:
    """Show the text that has arrived since the last frame. Before the first text, show the progress of the
    reply. A token can have no text, because an emoji can be several tokens."""
    if text:
        await reply.grow(text)
    elif newest.replies > 1 and not reply.text:
        reply.progress = f"writing {newest.replies} replies, {count(newest.generated, 'token')} each"
    elif newest.generated:
        reply.progress = ""
    elif newest.prefilled:
        reply.progress = f"reading {newest.prefilled:,} of {count(newest.prompt_tokens, 'token')}"
