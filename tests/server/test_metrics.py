"""What /metrics counts: first tokens, the queue, and the tokens of replies whose clients left."""

import asyncio
import re
import threading

from ruvmlx.apps.server.metrics import BOUNDS, Metrics

from .conftest import CHAT_KEY
from .test_budget import model, slow_steps, start_small  # noqa: F401 - fixtures


def value(running, name):
    return float(re.search(rf"^{name} (\S+)$", running.ask("GET", "/metrics").body.decode(), re.M)[1])


def test_first_tokens(running):
    """One for each reply, also of a stream."""
    running.chat(n=2, max_tokens=2)
    running.chat(stream=True, max_tokens=2)
    text = running.ask("GET", "/metrics").body.decode()
    assert "ruvmlx_first_token_seconds_count 3" in text
    assert 'ruvmlx_first_token_seconds_bucket{le="+Inf"} 3' in text
    assert value(running, "ruvmlx_first_token_seconds_sum") > 0


def test_tokens_of_cancelled_replies_count(running, endless):
    """The client leaves behind the first pieces; what was written is counted when the reply has ended."""
    running.slow_down(0.05)
    connection = running.send_chat(stream=True, max_tokens=300)
    connection.recv(2000)
    connection.close()
    running.wait_until(lambda: running.serving.waiting == 0)
    assert 1 <= value(running, "ruvmlx_generated_tokens_total") < 300
    assert value(running, "ruvmlx_prompt_tokens_total") > 0
    assert value(running, "ruvmlx_cancelled_total") == 1


def test_a_lost_client_of_a_look_is_no_cancelled_reply(running):
    """Its client left, but the server wrote no reply for it."""
    begun, free = threading.Event(), threading.Event()

    def keep_busy(_):
        begun.set()
        assert free.wait(60)

    busy = asyncio.run_coroutine_threadsafe(running.serving.host.call(keep_busy), running.loop)
    assert begun.wait(30)
    with running.connect() as connection:
        head = f"GET /v1/chats HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {CHAT_KEY}\r\n\r\n"
        connection.sendall(head.encode())
        running.wait_until(lambda: running.serving.calls)
    running.wait_until(lambda: '"gone"' in running.log.getvalue())
    free.set()
    busy.result(30)
    assert value(running, "ruvmlx_cancelled_total") == 0


def test_the_queue(start_small, endless):  # noqa: F811
    """One reply takes all memory: the next one waits, and is counted."""
    running = start_small(4)
    slow_steps(running)
    first, second = (running.send_chat(max_tokens=180) for _ in range(2))
    running.wait_until(lambda: value(running, "ruvmlx_queue_length") == 1)
    for connection in (first, second):
        connection.close()
    running.wait_until(lambda: value(running, "ruvmlx_queue_length") == 0)


def test_a_histogram():
    """Each bound counts all that is not longer."""
    metrics = Metrics()
    for seconds in (0.01, 0.3, 500.0):
        metrics.observe("ruvmlx_first_token_seconds", seconds)
    lines = metrics.text({}).splitlines()
    counts = [int(line.split()[-1]) for line in lines if line.startswith("ruvmlx_first_token_seconds_bucket")]
    assert counts == [1, 1, 1, *[2] * 7, 3] and len(counts) == len(BOUNDS["ruvmlx_first_token_seconds"]) + 1
    assert (
        "ruvmlx_first_token_seconds_sum 500.31" in lines
        and "# TYPE ruvmlx_first_token_seconds histogram" in lines
    )


def test_a_path_is_no_name(serve, tiny_folder):
    """The list of models shows no folder of this machine; clients that were given the path can use it."""
    running = serve(alias=str(tiny_folder))
    assert str(tiny_folder) not in running.ask("GET", "/v1/models").body.decode()
    assert running.chat(model=str(tiny_folder), max_tokens=1).status == 200
