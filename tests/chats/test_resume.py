"""Chats that are opened again find their KV cache on disk, and lose it when they are deleted."""

import re
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.chats import soft_delete
from ruvmlx.engine import LLMInferenceEngine
from ruvmlx.engine.model_identity import identify
from ruvmlx.engine.session_disk import model_key
from ruvmlx.errors import StoreBusy
from ruvmlx.models.load import load_model
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.store import Store

from ..cli.verbs import process  # noqa: F401 - a fixture
from ..test_runtime import say


@pytest.fixture
def open_native(tiny, tiny_neutral, tiny_whitening, home):
    """As `open_tiny`, on the native backend, with caches on disk."""
    backend = NativeBackend(tiny, threads=1)

    def open_it(kv_disk=10, **settings) -> Runtime:
        store = Store(home / "ruvmlx.db")
        if store.model_data.reference_text(tiny.fingerprint) is None:
            store.model_data.put_reference_text(tiny.fingerprint, tiny_neutral)
            store.model_data.put_whitening(tiny.fingerprint, tiny_whitening)
        return Runtime(store, tiny, backend, Settings(kv_disk=kv_disk, **settings))

    return open_it


def chats_with_pages(home) -> set[str]:
    """The chats that use pages; without any there is no page."""
    chats = {file.stem for file in (home / "kv").glob("*.uses")}
    assert chats or not list((home / "kv").glob("*"))
    return chats


def test_a_chat_goes_on_without_reading_it_again(open_native, home):
    """The turn after a restart prefills what the turn of a runtime that stayed open would have."""
    with open_native() as runtime:
        chat = runtime.chats.new_chat()
        say(runtime, chat, "hello " * 12)
        stayed = say(runtime, chat, "and again")
    assert chats_with_pages(home) == {chat}
    with open_native() as runtime:
        other = runtime.chats.new_chat()
        say(runtime, other, "hello " * 12)
    with open_native() as runtime:
        came_back = say(runtime, other, "and again")
        assert came_back.cached_tokens >= stayed.cached_tokens > 64  # the first chat has read all of it
        assert came_back.token_ids == stayed.token_ids
    assert chats_with_pages(home) == {chat, other}


def test_ratings_of_the_head_leave_it_valid(open_native):
    """MicroLoRA comes after keys and values."""
    with open_native() as runtime:
        chat = runtime.chats.new_chat()
        say(runtime, chat, "hello " * 12)
        assert runtime.rate("last", "up").applied
    with open_native() as runtime:
        assert say(runtime, chat, "and again").cached_tokens > 64


def test_a_base_makes_it_stale(open_native):
    """What was read under a base is not used without it."""
    with open_native(learn_targets="v_proj") as runtime:
        chat = runtime.chats.new_chat()
        say(runtime, chat, "hello " * 12)
        assert runtime.rate("last", "up").applied
        say(runtime, chat, "and again")
        assert runtime.backend.lora.of_keys
    with open_native(learn_targets="v_proj") as runtime:
        assert say(runtime, chat, "once more").cached_tokens > 64
    with open_native(learn_targets="v_proj") as runtime:
        runtime.learning.use(None)
        assert say(runtime, chat, "and now").cached_tokens == 0


def test_a_deleted_chat_leaves_nothing(open_native, home):
    with open_native() as runtime:
        chats = [runtime.chats.new_chat() for _ in range(3)]
        for chat in chats:
            say(runtime, chat, "hello " * 12)
    assert chats_with_pages(home) == set(chats)
    with open_native() as runtime:
        say(runtime, chats[0], "go on")
        runtime.store.chats.soft_delete(chats[1])
        runtime.store.chats.restore(chats[1])
        runtime.erase_chat(chats[0])
    assert chats_with_pages(home) == set(chats[1:])
    store = Store(home / "ruvmlx.db")
    soft_delete.delete(store, chats[1])
    assert chats_with_pages(home) == {chats[2]}
    store.chats.delete(chats[2])  # a process that was killed after that
    with open_native():
        assert chats_with_pages(home) == set()


@pytest.mark.parametrize("capacity", [0, 64], ids=["evicted", "at the end"])
def test_a_chat_that_another_process_erased_leaves_nothing(open_native, home, capacity):
    """This process still has the chat's KV cache in memory."""
    with open_native() as runtime:
        chats = [runtime.chats.new_chat() for _ in range(2)]
        for chat in chats:
            say(runtime, chat, "hello " * 12)
        soft_delete.delete(Store(home / "ruvmlx.db"), chats[0])
        runtime.engine.sessions.capacity = capacity
        runtime.engine.sessions.make_room()
    assert chats_with_pages(home) == {chats[1]}


def test_switched_off_it_keeps_nothing(open_native, home):
    with open_native() as runtime:
        say(runtime, runtime.chats.new_chat(), "hello " * 12)
    assert chats_with_pages(home)
    with open_native(kv_disk=0) as runtime:
        assert not chats_with_pages(home)
        say(runtime, runtime.chats.new_chat(), "hello " * 12)
    assert not chats_with_pages(home)


def test_what_another_process_brought_back_stays(open_native, home):
    """`sessions restore` while the chat that deleted it is still open; and who writes in it wants it back."""
    with open_native() as runtime:
        one, two = runtime.chats.new_chat(), runtime.chats.new_chat()
        for chat in (one, two):
            say(runtime, chat, "hello")
            runtime.store.chats.soft_delete(chat)
        Store(home / "ruvmlx.db").chats.restore(one)
        say(runtime, two, "still here")
    store = Store(home / "ruvmlx.db")
    assert {s.id for s in store.chats.all()} == {one, two}


def test_the_command_line_keeps_them(starter_file, home, process):  # noqa: F811
    """`chat` writes the cache down, `chat -c` goes on with it, `doctor` tells of it, a setting empties it."""
    story = "Here is a list of words: " + "river, mountain, house, " * 20 + "Which was the first?"
    sizes = []
    for words, more in ((story, []), ("And the second?", ["-c"])):
        done = process("chat", "--max-tokens", "4", *more, stdin=f"{words}\n")
        assert done.returncode == 0, done.stderr
        files = list((home / "kv").iterdir())
        sizes.append(sum(file.stat().st_size for file in files))
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600} and sizes[0] < sizes[1]
    told = re.sub(r"\n {8,}", "", process("doctor").stdout.decode())  # a long path is cut anywhere
    assert re.search(r"KV caches +\S+/kv: caches of 1 chat, ?[\d.]+ MB of 1.1 GB", told)
    assert process("config", "set", "kv_disk", "0").returncode == 0
    process("chat", stdin="/status\n")
    assert chats_with_pages(home) == set()


def other_layers(folder, tmp_path) -> Path:
    """A model that differs from that of `folder` only in a matrix that the fingerprint leaves out."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (file,) = other.glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(tensors | {name: -tensors[name]}, file, {"format": "pt"})
    return other


def test_a_model_with_other_layers_does_not_read_the_caches(tiny_folder, home, tmp_path):
    """Two models whose fingerprints are equal, because only a matrix differs that the fingerprint leaves
    out."""
    other, keys = other_layers(tiny_folder, tmp_path), []
    for folder in (tiny_folder, other):
        model = load_model(str(folder))
        keys.append((model.fingerprint, model_key(model)))
    assert keys[0][0] == keys[1][0] and keys[0][1] != keys[1][1]
    (other / ".DS_Store").write_bytes(b"Bud1")  # macOS writes it when its user looks at the folder
    assert model_key(model) == keys[1][1]
    assert (
        LLMInferenceEngine(model, NativeBackend(model, threads=1)).sessions.keys.key(None)["model"]
        == keys[1][1]
    )


def test_a_model_with_other_layers_has_its_own_adapters(tiny_folder, home, tmp_path):
    """The first of the two that opens keeps the fingerprint, so adapters of earlier versions still fit it."""
    models = [str(tiny_folder), str(other_layers(tiny_folder, tmp_path))]
    known, reply_ids = [], []
    for name in (*models, *models):
        with Runtime.open(Settings(model=name, backend="native", system="", kv_disk=None)) as runtime:
            known.append((runtime.model.fingerprint, [row.version for row in runtime.adapters()]))
            if not reply_ids:
                reply_ids.append(say(runtime, runtime.chats.new_chat(), "hello").request_id)
                runtime.rate(reply_ids[0], "up")
    assert known[0][0] == known[2][0] == load_model(models[0]).fingerprint != known[1][0] == known[3][0]
    assert [max(versions, default=0) for _, versions in known] == [0, 0, 1, 0]


def test_a_locked_store_does_not_stop_a_new_model(tiny, home, monkeypatch):
    store = Store(home / "ruvmlx.db")

    def refuse():
        raise StoreBusy("locked")

    monkeypatch.setattr(store.db, "transaction", refuse)
    assert identify(store, tiny).fingerprint == tiny.fingerprint
