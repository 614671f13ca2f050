"""How many files a call passes on its way (relays.py). The bars are those of today; they only fall."""

import pytest
from ruvmlx.apps.chat.app import ChatApp
from ruvmlx.apps.chat.options import ChatOptions
from ruvmlx.apps.server.access import Access
from ruvmlx.apps.server.limits import ServerLimits

from ruvmlx.backends.select import open_backend
from ruvmlx.engine import GenerationRequest
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.store import Store

from .chat.helpers import WIDE, ask, until
from .relays import Relays
from .server.conftest import run_server

# The last file is the one that is reached. engine/side_change.py is one of GENERATE: it guards each step
# against a side of the hybrid backend that fails.
GENERATE, HTTP, RATING = 10, 10, 8


def test_generate_reaches_the_c_decoder(tiny, home):
    with Relays("ruvmlx/kernels/decoder.py") as way:
        settings = Settings(adapter="none", kv_disk=None)
        with Runtime(Store(home / "ruvmlx.db"), tiny, open_backend("native", tiny), settings) as runtime:
            way.begin()
            list(runtime.writer.generate(GenerationRequest(prompt="hello", max_new_tokens=2)))
    assert len(way.files) == GENERATE, "\n".join(way.files)


def test_an_http_request_reaches_the_engine(open_tiny):
    with Relays("ruvmlx/engine/scheduler.py", "add") as way:
        running = run_server(open_tiny, Access(()), ServerLimits())
        try:
            running.chat()
            way.begin()
            assert running.chat().status == 200
        finally:
            running.stop()
    assert len(way.files) == HTTP, "\n".join(way.files)


@pytest.mark.asyncio
async def test_a_rating_key_reaches_the_store(open_tiny):
    # The first row of a rating: what prepares the reply for it writes to the store, too.
    with Relays("ruvmlx/store/ratings.py", "add") as way:
        app = ChatApp(lambda: open_tiny(max_tokens=4), ChatOptions())
        async with app.run_test(size=WIDE) as pilot:
            await until(pilot, lambda: app.phase == "idle" or app.failure)
            assert not app.failure
            reply = await ask(app, pilot)
            await pilot.pause(0.5)  # what the end of the reply began is no part of the key's way
            way.begin()
            await pilot.press("ctrl+y")
            await until(pilot, lambda: reply.effect)
            app.host.close_now()
    assert len(way.files) == RATING, "\n".join(way.files)
