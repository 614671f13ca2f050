"""Words that were deleted are in no file of the data folder, and nobody else can read any file there."""

import gc
import json
import os
import stat
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from ruvmlx.apps.chat.state import ChatOptions, ChatState
from ruvmlx.apps.chat.steps import library

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.chats import soft_delete
from ruvmlx.chats.chat_file import import_once
from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.models.config.model import Message
from ruvmlx.models.text.token_cache import MIN_RUN_CHARACTERS
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.settings.settings_file import save
from ruvmlx.store import Store

SECRET = "Zqxjkv"  # its letter triples, which the search index holds, are in no other text
QUESTION = f"{SECRET} is what I ask about, in many words that fill more than a page of the cache. " * 2


@pytest.fixture
def open_again(tiny, tiny_neutral, tiny_whitening, home):
    backend = NativeBackend(tiny, threads=1)

    def open_it() -> Runtime:
        store = Store(home / "ruvmlx.db")
        if store.model_data.reference_text(tiny.fingerprint) is None:
            store.model_data.put_reference_text(tiny.fingerprint, tiny_neutral)
            store.model_data.put_whitening(tiny.fingerprint, tiny_whitening)
        return Runtime(store, tiny, backend, Settings(kv_disk=10))

    return open_it


def say(runtime, chat: str, text: str) -> str:
    for chunk in runtime.chats.say(
        chat, text, sampling=Sampling(0.0), max_new_tokens=6, cancel=threading.Event()
    ):
        response = chunk.response
    runtime.learning.settle()
    return response.request_id


def ask(runtime, text: str) -> str:
    """Outside of chats, as a program asks over HTTP; the cache goes to disk."""
    request = GenerationRequest(
        messages=[Message("user", text)], max_new_tokens=6, sampling=Sampling(0.0), resumable=True
    )
    list(runtime.writer.generate(request))
    runtime.learning.settle()
    return request.request_id


def forms(tiny) -> list[bytes]:
    """What may stand for the words in a file: text, lower case, its triples, and token ids as the store and
    the cache write them."""
    ids = tiny.tokenizer.encode(SECRET)[-len(SECRET) :]
    texts = [SECRET, SECRET.lower(), "zqx", "xjk", SECRET.encode("utf-16-le").decode("latin-1")]
    written = [text.encode("latin-1") for text in texts]
    return [*written, np.array(ids[1:], "<i4").tobytes(), ",".join(map(str, ids[1:])).encode()]


def traces(home: Path, tiny) -> list[str]:
    """The files that hold the words in any form; by name, as names are read, too."""
    found = []
    for path in sorted(home.rglob("*")):
        data = path.read_bytes() if path.is_file() else b""
        found += [f"{path.name}: {form!r}" for form in forms(tiny) if form in data + os.fsencode(path.name)]
    return found


def fill(runtime, home) -> dict[str, str]:
    """The words in every place that takes words; ids of what holds them."""
    chat = runtime.chats.new_chat(system=f"You know {SECRET}")
    replied = say(runtime, chat, QUESTION)
    runtime.rate(replied, "down", f"{SECRET} is spelled otherwise")
    again = say(runtime, chat, f"And {SECRET} again?")
    runtime.rate(again, "up")
    runtime.store.chats.set_title(chat, f"About {SECRET}")
    forked = runtime.store.chats.fork(chat)
    file = json.dumps([{"role": "user", "content": f"In a file: {QUESTION}"}]).encode()
    imported = import_once(runtime.store, file, "f").session_id
    outside = ask(runtime, QUESTION)
    runtime.rate(outside, "up", SECRET)
    ask(runtime, QUESTION + "More.")
    return {"chat": chat, "fork": forked, "import": imported}


def test_no_word_is_left_after_all_is_deleted(open_again, home, tiny):
    """By every verb that deletes: of a chat, of replies outside chats; and each alone leaves the others."""
    with open_again() as runtime:
        kept = fill(runtime, home)
    assert {line.partition(":")[0] for line in traces(home, tiny)} >= {"ruvmlx.db"}
    assert any(line.split(":")[0].endswith(".tail") for line in traces(home, tiny))
    store = Store(home / "ruvmlx.db")
    for session_id in kept.values():
        assert soft_delete.delete(store, session_id)
        assert traces(home, tiny)
    assert soft_delete.forget(store, store.replies.outside_chats())
    assert traces(home, tiny) == []
    store.close()
    assert traces(home, tiny) == [] and not list((home / "kv").glob("*.*"))


def test_no_word_is_left_when_the_chat_says_that_it_deleted_for_good(open_again, home, tiny):
    """While the store is still open, as a kill can end the process the moment after. Another reader of the
    store keeps words in the log; then the chat says so."""
    options = ChatOptions()
    with open_again() as runtime:
        chat = runtime.chats.new_chat()
        say(runtime, chat, QUESTION)
        assert traces(home, tiny)
        said = library.delete(runtime, ChatState(options, session=chat), "now").words
        assert (
            said
            == ("The chat is deleted for good; what its ratings taught stays learned. This is a new chat.")
            and traces(home, tiny) == []
        )
        chat = runtime.chats.new_chat()
        say(runtime, chat, QUESTION)
        reader = Store(home / "ruvmlx.db")
        with reader.snapshot():
            assert reader.chats.all()
            said = library.delete(runtime, ChatState(options, session=chat), "now").words
            assert "Another ruvmlx reads the store" in said
        reader.close()


def kept_in_memory() -> list[str]:
    """The long texts in this process that have the word."""
    gc.collect()
    seen, rest = {}, gc.get_objects()
    while rest:  # Python does not list a container of texts and numbers alone, but what refers to it
        inner = [
            one for one in gc.get_referents(rest.pop()) if not gc.is_tracked(one) and id(one) not in seen
        ]
        seen |= {id(one): one for one in inner}
        rest += inner
    texts = [text for text in seen.values() if type(text) is str]
    return [text for text in texts if "Pfwyq" in text and len(text) > MIN_RUN_CHARACTERS]


def test_no_word_is_left_in_memory_after_an_erased_chat(open_again):
    """The tokenizer kept the text, and the memory of rated questions did, until the program ended. Then the
    learned taste changed, too, because the store no longer had the features of the reply."""
    with open_again() as runtime:
        chat, other = runtime.chats.new_chat(), runtime.chats.new_chat()
        erased, kept = say(runtime, chat, "Pfwyq" + " hello" * 90), say(runtime, other, "Hello")
        for reply in (erased, kept):
            runtime.rate(reply, "up")
        assert runtime.learner.taste.model.ratings == 2 and kept_in_memory()
        runtime.erase_chat(chat)
        assert kept_in_memory() == []
        assert runtime.learner.taste.model.ratings == 1 and erased not in runtime.learner.traces.held
        runtime.rate(kept, "down")
    with open_again() as runtime:
        assert runtime.learner.taste.model.ratings == 1


def test_no_word_is_left_a_day_after(open_again, home, tiny, monkeypatch):
    """Chats that were hidden are erased at a later start."""
    with open_again() as runtime:
        for session_id in fill(runtime, home).values():
            runtime.store.chats.soft_delete(session_id)
        soft_delete.forget(runtime.store, runtime.store.replies.outside_chats())
    assert traces(home, tiny)
    now = time.time() + 1.5 * 86400
    monkeypatch.setattr(time, "time", lambda: now)
    open_again().close()
    assert traces(home, tiny) == []


def modes(home: Path) -> dict[Path, int]:
    return {path: path.lstat().st_mode for path in (home, *home.rglob("*"))}


def test_what_is_written_is_for_its_owner_alone(open_again, home):
    """Whatever the umask says."""
    before = os.umask(0)
    try:
        with open_again() as runtime:
            fill(runtime, home)
            save("max_tokens", "7")
            open_mode = modes(home)
        mode = open_mode | modes(home)
    finally:
        os.umask(before)
    assert {"kv", "ruvmlx.db-wal", "config.toml"} <= {path.name for path in mode} and len(mode) > 10
    private = (stat.S_IFDIR | 0o700, stat.S_IFREG | 0o600)
    assert {path.name: oct(found) for path, found in mode.items() if found not in private} == {}
