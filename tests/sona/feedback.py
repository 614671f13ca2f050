"""Replies and chats that tests of feedback rate, compare and edit."""

import threading

from ruvmlx.engine import GenerationRequest, Sampling

from ..test_runtime import say


def reply(runtime, text="hello there", seed=1, settle=True) -> str:
    request = GenerationRequest(prompt=text, max_new_tokens=17, sampling=Sampling(seed=seed), ignore_eos=True)
    for _ in runtime.writer.generate(request):
        pass
    if settle:
        runtime.learning.settle()
    return request.request_id


def weights(runtime) -> bytes:
    runtime.learner.sync()
    return runtime.learner.micro.to_bytes()


def chat_with_reply(runtime, text="hello", n=12) -> tuple[str, int]:
    """A chat with one reply in it: (chat, message)."""
    chat = runtime.chats.new_chat()
    say(runtime, chat, text, n=n)
    message = runtime.chats.turns(chat)[-1].id
    assert message is not None
    return chat, message


def again(runtime, chat, seed=7, n=12, untouched=False) -> None:
    options = {"sampling": Sampling(seed=seed), "max_new_tokens": n, "untouched": untouched}
    for _ in runtime.chats.again(chat, cancel=threading.Event(), **options):
        pass
