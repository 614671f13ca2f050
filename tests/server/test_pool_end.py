"""The models of a server at the server's end, and after a switch that failed."""

import asyncio
import threading

from .test_many_models import B, ask, home, serve_models  # noqa: F401 - fixtures


def in_loop(running, work):
    """The result of a coroutine of the server's event loop."""
    return asyncio.run_coroutine_threadsafe(work, running.loop).result(60)


def test_a_server_that_stops_opens_no_model(serve_models):  # noqa: F811
    """The request waited for its turn to open a model. The end of the server waited for this opening."""
    running, got = serve_models(), []
    turn = running.models._turn
    in_loop(running, turn.acquire())
    asking = threading.Thread(target=lambda: got.append(ask(running, B)))
    asking.start()
    running.wait_until(lambda: running.serving.calls and turn._waiters, 60)
    running.loop.call_soon_threadsafe(running.models.stop)
    running.loop.call_soon_threadsafe(turn.release)
    asking.join()
    assert (got[0].status, got[0].error["code"]) == (503, "stopping")
    assert '"opened"' not in running.log.getvalue()
