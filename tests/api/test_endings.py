"""The end of a program that did not close its model, and the processes that it forks."""

import asyncio
import os
import signal
import subprocess
import sys
import threading

import pytest

import ruvmlx
from ruvmlx.api.aio import AsyncModel
from ruvmlx.api.replies import ReplyStream
from ruvmlx.engine.types import Chunk
from ruvmlx.errors import UsageError

OPEN = """
import sys, threading
import ruvmlx
from tests.api.test_endings import begin_endless
model = ruvmlx.open(sys.argv[1], backend="reference", temperature=0, max_tokens=6)
"""


def begin_endless(model: ruvmlx.LocalModel) -> ReplyStream:
    """Begin a reply that ends only when its stream is stopped."""

    def write(_, cancel):
        while not cancel.wait(0.01):
            yield Chunk("on and ")
        print("stopped", flush=True)

    return ReplyStream(model, write)


def run(program: str, folder: object) -> subprocess.CompletedProcess[str]:
    """Run a program that has opened the model in `folder`. Its end may take at most 60 seconds."""
    command = [sys.executable, "-c", OPEN + program, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_end_of_a_program_ends_its_replies(tiny_folder, home):
    done = run("stream = begin_endless(model); print(next(stream))", tiny_folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "on and \nstopped\n", "")


def test_an_error_of_the_program_ends_its_replies(tiny_folder, home):
    done = run("stream = begin_endless(model); next(stream); sys.exit('no more')", tiny_folder)
    assert (done.returncode, done.stdout, done.stderr) == (1, "stopped\n", "no more\n")


def test_a_thread_uses_the_model_after_the_end_of_the_main_thread(tiny_folder, home):
    done = run(
        """
def ask():
    threading.main_thread().join()
    print(len(model.reply("hello").token_ids) > 0)
threading.Thread(target=ask).start()
""",
        tiny_folder,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_ctrl_c_ends_the_reply_that_the_program_waits_for(tiny_folder, home):
    """Also if the shell keeps the stream: the model is free for the next call."""
    with ruvmlx.open(tiny_folder, backend="reference", temperature=0, max_tokens=6) as model:
        stream = begin_endless(model)
        next(stream)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            print(stream.reply)
        assert model.reply("hello").token_ids


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_model_is_closed_in_a_forked_process(tiny_folder, home):
    """The thread of the model runs only in the parent, whose model stays open."""
    with ruvmlx.open(tiny_folder, backend="reference", temperature=0, max_tokens=6) as model:
        if (child := os.fork()) == 0:
            try:
                model.reply("hello")
            except UsageError as error:
                model.close()
                os._exit(7 if "closed" in str(error) else 1)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert model.reply("hello").token_ids


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_model_for_asyncio_is_closed_in_a_forked_process(tiny_folder, home):
    """The threads of the model run only in the parent: in the child, a call must not wait for them."""
    with ruvmlx.open(tiny_folder, backend="reference", temperature=0, max_tokens=6) as model:
        same = AsyncModel(model)
        if (child := os.fork()) == 0:
            signal.alarm(20)
            try:
                asyncio.run(same.learned())
            except UsageError as error:
                os._exit(7 if "closed" in str(error) else 1)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert asyncio.run(same.learned()).ratings == 0
