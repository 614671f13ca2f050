"""Shows a reply while it is written: chunks become a growing widget and live figures."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from textual.widget import Widget

from ruvmlx.engine.types import Chunk, GenerationResponse
from ruvmlx.text import Sanitizer

from .messages import ReplyMessage
from .status import Meter, StatusLine

FRAME = 1 / 30  # seconds between two frames of a growing reply
REST = 0.25  # longest sleep after a frame, in seconds


async def show_reply(
    reply: ReplyMessage, arriving: AsyncIterator[list[Chunk]], status: StatusLine
) -> GenerationResponse | None:
    """Show chunks as they come. Returns the response; None if the stream ended without one.

    After each frame it sleeps as long as the frame took, so that keys are handled on slow machines, too.
    """
    safe, asked_at, response = Sanitizer(), time.perf_counter(), None
    status.meter = replace(Meter(), max_context=status.meter.max_context)
    async for chunks in arriving:
        started, busy = time.perf_counter(), time.thread_time()
        reply.begun = True
        for chunk in chunks:
            status.meter = status.meter.after(chunk, asked_at)
        await _show(reply, chunks[-1], safe.feed("".join(chunk.text for chunk in chunks)))
        response = chunks[-1].response
        if not response:
            await drawn(status)
            took, rest = time.perf_counter() - started, time.thread_time() - busy
            await asyncio.sleep(max(FRAME - took, min(rest, REST)))
    return response


async def drawn(widget: Widget) -> None:
    """Wait until pending changes are on the screen and pending scrolling has begun."""
    done = asyncio.Event()
    widget.call_after_refresh(done.set)
    await done.wait()


async def _show(reply: ReplyMessage, newest: Chunk, text: str) -> None:
    """Show the text since the last frame. A token may have no text: half an emoji has none."""
    if text:
        await reply.grow(text)
    elif newest.replies > 1 and not reply.text:
        reply.progress = f"writing {newest.replies} replies, {newest.generated} tokens each"
    elif newest.generated:
        reply.progress = ""
    elif newest.prefilled:
        reply.progress = f"reading {newest.prefilled} of {newest.prompt_tokens} tokens"
