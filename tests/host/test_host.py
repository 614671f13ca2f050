"""The host of the runtime: calls in one thread, and another model in the place of the one in use."""

import asyncio
import subprocess
import sys
import threading

import pytest

from ruvmlx.backends.select import Choice
from ruvmlx.errors import CorruptFile, Interrupted, ModelClosed, ModelNotFound, UsageError
from ruvmlx.host.host import Host
from ruvmlx.host.model_holder import ModelHolder, ModelUnchanged, Opener, StoppableWatch, _PlanWatch
from ruvmlx.memory.load_plan import MachineMemory, Need, Plan
from ruvmlx.models.config.header_facts import Facts
from ruvmlx.platform import memory
from ruvmlx.progress import QUIET, Progress, Watch

from ..chat.scripted import ScriptedRuntime

NATIVE = Choice("native", "cpu", "native avx2", "")
GB = 10**9


class Shop:
    """Opens scripted runtimes by name, and notes in which order things happen. Each needs `size` bytes."""

    def __init__(self, size=GB, room=100 * GB, **errors):
        self.size, self.room, self.errors = size, room, errors
        self.events: list[str] = []
        self.open: dict[str, ScriptedRuntime] = {}
        self.holder = ModelHolder(Opener(self.opens, "old"))
        self.holder.open()

    def opens(self, model, adapter, watch):
        memory = MachineMemory(
            100 * GB, self.room - self.size * len(self.open), self.room - self.size * len(self.open)
        )
        facts = Facts(model, None, "gguf", None, 1000, self.size)
        watch.note_plan(Plan(facts, NATIVE, Need(self.size, 0, 0), memory, model, None))
        watch.progress(Progress(f"Loading {model}", 1, 2))
        if model in self.errors and (model != "old" or "new" in self.events):
            raise self.errors[model]
        self.events.append(model)
        runtime = self.open[model] = ScriptedRuntime()
        runtime.adapter, close = adapter, runtime.close

        def closes():
            self.events.append(f"-{model}")
            del self.open[model]
            close()

        runtime.close = closes
        return runtime


def test_side_by_side():
    """The old one is closed once the new one is there; the adapter's name stays."""
    shop = Shop()
    shop.holder.opened_runtime.adapter = "work"
    shop.holder.switch("new", "s1")
    assert shop.events == ["old", "new", "-old"] and shop.holder.opened_runtime is shop.open["new"]
    assert shop.holder.opened_runtime.adapter == "work" and shop.holder.model == "new"
    shop.holder.opened_runtime.adapter = None
    shop.holder.switch("third", "s1")
    assert shop.holder.opened_runtime.adapter is None


def test_one_after_the_other_where_there_is_no_room_for_both():
    shop = Shop(size=6 * GB, room=10 * GB)
    shop.holder.switch("new", "s1")
    assert shop.events == ["old", "-old", "new"] and shop.holder.opened_runtime is shop.open["new"]


def test_both_never_take_more_than_three_quarters():
    """Though each fits into what is free."""
    shop = Shop(size=40 * GB, room=100 * GB)
    shop.holder.switch("new", "s1")
    assert shop.events == ["old", "-old", "new"]


@pytest.mark.parametrize(("size", "events"), [(GB, ["old"]), (60 * GB, ["old", "-old", "old"])])
@pytest.mark.parametrize("error", [CorruptFile("cut short."), MemoryError(), ModelNotFound("none.")])
def test_a_failure_leaves_the_old_one(size, events, error):
    """Open as it was, or opened again if it had made room; one line says why."""
    shop = Shop(size, new=error)
    with pytest.raises(ModelUnchanged) as caught:
        shop.holder.switch("new", "s1")
    assert (
        shop.events == events
        and shop.holder.opened_runtime is shop.open["old"]
        and shop.holder.model == "old"
    )
    assert "\n" not in str(caught.value) and str(caught.value).endswith("The model stays as it was.")
    assert caught.value.exit_code == getattr(error, "exit_code", 1)


def test_too_large_for_the_machine_keeps_the_old_one_open():
    """Closing it would not have helped, so it was never closed."""
    shop = Shop(size=60 * GB, new=CorruptFile("too large"))
    shop.room = 50 * GB
    shop.size = 200 * GB
    with pytest.raises(ModelUnchanged):
        shop.holder.switch("new", "s1")
    assert shop.events == ["old"]


def test_a_template_that_refuses_the_chat():
    """The new one is closed again."""
    shop = Shop()
    refusal = UsageError("the model's chat template refuses this conversation: no system.")

    def opens(model, adapter, watch):
        runtime = shop.opens(model, adapter, watch)
        runtime.chats.check_chat = lambda session: (_ for _ in ()).throw(refusal)
        return runtime

    shop.holder.opener = Opener(opens, "old")
    with pytest.raises(ModelUnchanged, match="no system"):
        shop.holder.switch("new", "s1")
    assert shop.events == ["old", "new", "-new"] and shop.holder.opened_runtime is shop.open["old"]


def test_stopped():
    """From another thread, at any time; then nothing has changed."""
    shop, told = Shop(), []

    class Notes(Watch):
        def progress(self, progress):
            told.append(progress)

    watch = StoppableWatch(Notes())
    threading.Thread(target=watch.stopped.set).start()
    watch.stopped.wait(10)
    with pytest.raises(ModelUnchanged, match="stopped before the model was open"):
        shop.holder.switch("new", "s1", watch)
    assert shop.events == ["old"] and told == []
    with pytest.raises(Interrupted):
        shop.holder.open(watch)


@pytest.mark.parametrize("wrap", [StoppableWatch, _PlanWatch])
def test_the_choice_of_a_file_is_passed_on(wrap):
    """Whoever opens a model learns which file of a repository is fetched."""
    told = []

    class Notes(Watch):
        def note_choice(self, choice):
            told.append(choice)

    wrap(Notes()).note_choice("a file")
    assert told == ["a file"]


def test_a_plain_function_opens_the_only_runtime():
    """Such a chat cannot change its model, and says so."""
    runtime = ScriptedRuntime()
    opener = Opener.of(lambda: runtime)
    assert opener() is runtime and Opener.of(opener) is opener
    holder = ModelHolder.of_runtime(runtime)
    with pytest.raises(ModelUnchanged, match="one model only"):
        holder.switch("new", "s1", QUIET)
    assert holder.opened_runtime is runtime and not runtime.closed


# -- the host -----------------------------------------------------------------------------------------


@pytest.fixture
async def host():
    """A host whose replies wait for a test to release each piece, and its runtime."""
    runtime = ScriptedRuntime(["one ", "two "], gate=True, free=0)
    host = Host(lambda: runtime)
    await host.open(QUIET)
    yield host, runtime
    await host.close()
    assert runtime.closed and len(runtime.threads) == 1
    assert threading.get_ident() not in runtime.threads


def saying(session):
    return lambda runtime, cancel: runtime.chats.say(
        session, "Hi", sampling=None, max_new_tokens=9, cancel=cancel
    )


async def test_a_rating_does_not_wait_for_the_reply(host):
    """It is answered between two chunks, and so is any other call."""
    host, runtime = host
    session, said = await host.call(lambda r: r.new_chat()), []
    arriving = host.write(saying(session))

    async def read():
        async for chunks in arriving:
            said.extend(chunk.text for chunk in chunks if chunk.text)

    reading = asyncio.ensure_future(read())
    await asyncio.sleep(0)
    turns = asyncio.ensure_future(host.call(lambda r: r.turns(session)))
    between = asyncio.ensure_future(host.call_between(lambda r: r.status()))
    await asyncio.sleep(0)
    runtime.released.release()
    assert (await between).ratings == 0 and [turn.content for turn in await turns] == ["Hi"]
    runtime.released.release()
    await reading
    after = await host.call(lambda r: r.turns(session))
    assert said == ["one ", "two "] and [turn.content for turn in after] == ["Hi", "one two "]


async def test_a_failure_between_two_chunks_goes_to_its_caller_alone(host, monkeypatch):
    host, runtime = host
    session = await host.call(lambda r: r.new_chat())
    arriving = host.write(saying(session))

    async def read():
        return [chunk.text async for chunks in arriving for chunk in chunks if chunk.text]

    def fail():
        raise OSError("no memory")

    reading = asyncio.ensure_future(read())
    await asyncio.sleep(0)
    monkeypatch.setattr(host._serving, "rest", fail)
    between = asyncio.ensure_future(host.call_between(lambda r: r.status()))
    await asyncio.sleep(0)
    runtime.released.release()
    with pytest.raises(OSError, match="no memory"):
        await asyncio.wait_for(between, 10)
    runtime.released.release()
    assert await asyncio.wait_for(reading, 10) == ["one ", "two "]


async def test_stop_keeps_the_words(host):
    host, runtime = host
    session, runtime.free = await host.call(lambda r: r.new_chat()), 1
    async for chunks in host.write(saying(session)):
        last = chunks[-1]
        if any(chunk.text for chunk in chunks):
            host.stop()
    assert last.response.text == "one " and last.response.finish_reason == "cancelled"


async def test_any_call_ends_idle_work(host):
    host, _ = host
    idle = asyncio.ensure_future(host.run_idle(lambda runtime, cancel: cancel.wait(60)))
    await asyncio.sleep(0)
    assert await host.call(lambda runtime: runtime.chats.last_chat()) is None
    assert await idle


async def test_a_rating_does_not_wait_for_unseen_replies(host, monkeypatch):
    """`settle` prepares the newest reply to its end; what takes minutes ends at once. Without the event of
    its own, the rating waited for all of it."""
    host, runtime = host
    begun, prepared = threading.Event(), []

    def settle(cancel, watch, unseen):
        begun.set()
        unseen.wait(60)
        prepared.append(not cancel.is_set())

    monkeypatch.setattr(runtime.learning, "settle", settle)
    settling = asyncio.ensure_future(host.settle())
    await asyncio.to_thread(begun.wait, 10)
    await asyncio.wait_for(host.call_between(lambda r: r.status()), 20)
    assert not await settling and prepared == [True]


async def test_freed_memory_goes_back_after_the_work_between_replies(host, monkeypatch):
    """This work takes some milliseconds. If a user waits, the work is left out."""
    host, runtime = host
    done = []
    monkeypatch.setattr(runtime.learning, "settle", lambda *_: done.append("settled"))
    monkeypatch.setattr(memory, "give_back", lambda: done.append("gave back"))
    await host.settle()
    assert done == ["settled", "gave back"]
    monkeypatch.setattr(runtime.learning, "settle", lambda cancel, *_: (done.append("settled"), cancel.set()))
    await host.settle()
    assert done == ["settled", "gave back", "settled"]


async def test_work_in_slices_ends_with_its_model():
    """If another model takes the place of the model between two slices, no later slice runs."""
    host, runs = Host(Opener(lambda model, adapter, watch: ScriptedRuntime(), "old")), []
    await host.open(QUIET)

    def begin(runtime):
        while len(runs) < 500:
            runs.append(runtime.closed)
            yield

    async def switch():
        while not runs:
            await asyncio.sleep(0)
        await host.switch("new", "s1", QUIET)

    switching = asyncio.ensure_future(switch())
    try:
        with pytest.raises(ModelClosed, match="another model is open now; ask again"):
            await host.call_in_slices(begin)
        assert runs and not any(runs)
    finally:
        await switching
        await host.close()


async def test_a_look_does_not_postpone_idle_work(host):
    host, _ = host
    before = host.used_at
    await host.call_between(lambda r: r.status(), is_use=False)
    assert host.used_at == before
    await host.call_between(lambda r: r.status())
    assert host.used_at > before


async def test_a_call_ends_every_idle_work(host):
    """Of two in the queue the first one, which runs, was no longer ended by a call."""
    host, _ = host
    idle = [asyncio.ensure_future(host.run_idle(lambda runtime, cancel: cancel.wait(20))) for _ in range(2)]
    await asyncio.sleep(0.05)
    assert await host.call(lambda runtime: runtime.chats.last_chat()) is None
    assert await asyncio.gather(*idle) == [True, True]


async def test_an_error_goes_to_the_caller(host):
    host, _ = host

    def fail(runtime):
        raise UsageError("not this")

    for call in (host.call, host.call_between):
        with pytest.raises(UsageError, match="not this"):
            await call(fail)


def test_it_needs_no_terminal():
    """A server can use it: Textual is not imported."""
    code = "import sys, ruvmlx.host.host; sys.exit('textual' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
