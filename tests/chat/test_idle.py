"""Idle time in the chat app: it learns, stops at the first key, continues later, and never ends the chat."""

import asyncio
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from ruvmlx.apps import chat
from ruvmlx.apps.chat import idle
from ruvmlx.apps.chat.app import ChatApp
from ruvmlx.apps.chat.options import ChatOptions
from ruvmlx.apps.cli.chat import chat as chat_verb
from textual import events

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.errors import StoreBusy
from ruvmlx.settings import settings_file
from ruvmlx.sona import promotion
from ruvmlx.sona.background import Background
from ruvmlx.sona.deep import Deep

from ..sona.training_runs import QUICK, answer
from ..store.deleted_words import leave_words
from .helpers import SMALL, ask, chatting, lines_of, screen_text, until
from .scripted import ScriptedRuntime

SOON = 0.05  # seconds of idle time before it learns
NEVER = 1e6
REPORT = {"promoted": True, "reason": "held-out loss 0.5000 -> 0.4000"}


@pytest.fixture(scope="session")
def tiny_backend(tiny):
    return NativeBackend(tiny, threads=1)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(idle, "IDLE_AFTER", SOON)


@pytest.fixture
def rated_opener(open_tiny):
    """`opening`, with enough ratings that the background loop is due."""
    with open_tiny() as runtime:
        for i in range(17):
            runtime.rate(answer(runtime, i), "up" if i % 2 else "down")

    return partial(opening, open_tiny)


def opening(open_tiny, settings=QUICK, hook=lambda done: None):
    """Opens a runtime that trains with these settings and calls hook(steps done) after each step."""

    def open_it():
        runtime = open_tiny()
        consolidate = runtime.learning.consolidate

        def consolidate_with_hook(progress, cancel):
            def step(done, total, loss):
                progress(done, total, loss)
                hook(done)

            return consolidate(step, cancel, settings)

        runtime.learning.consolidate = consolidate_with_hook
        return runtime

    return open_it


@asynccontextmanager
async def idling(open_it, size=SMALL, **options):
    """The app, with a runtime that its own thread opens, and its pilot; closed as by Ctrl+Q."""
    app = ChatApp(open_it, ChatOptions(**options))
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.phase == "idle")
        yield app, pilot
        await pilot.press("ctrl+q")
        await until(pilot, lambda: app.return_value == 0)


def read_runtime(open_tiny, what):
    with open_tiny() as runtime:
        return what(runtime)


def status_line(app):
    return lines_of(app.screen)[-2].strip()


# -- on the tiny model -------------------------------------------------------------------------------


@pytest.mark.parametrize("objection", ["", "a test says no"])
async def test_idle_training_reports_its_result_once(rated_opener, open_tiny, monkeypatch, objection):
    """Promoted or refused: one line that stays until a key is pressed, and it is not done twice."""
    monkeypatch.setattr(promotion, "objection", lambda *_: objection)
    wanted = objection or "learned in the background: held-out loss"
    async with idling(rated_opener()) as (app, pilot):
        await until(pilot, lambda: wanted in status_line(app), 60)
        assert app.focused is app.chat.prompt and app.phase == "idle"
        await until(pilot, lambda: app.chat.status.learned.consolidations == (not objection))
        monkeypatch.setattr(idle, "IDLE_AFTER", NEVER)
        await pilot.press("x")
        await until(pilot, lambda: wanted in app.chat.status.message and not app.chat.status.background)
        assert app.chat.prompt.text == "x"
    assert read_runtime(open_tiny, lambda runtime: len(runtime.learner.history.attempts())) == 1
    assert not read_runtime(open_tiny, lambda runtime: runtime.learning.is_due())


async def test_a_result_stays_when_later_idle_work_has_nothing_to_do(rated_opener, monkeypatch):
    """The status line shows the result until the user returns, also after a minute."""
    monkeypatch.setattr(promotion, "objection", lambda *_: "")
    found, look = [], idle.learn

    def note(*args):
        found.append(look(*args).said)
        return idle.Lesson(found[-1])

    monkeypatch.setattr(idle, "learn", note)
    async with idling(rated_opener()) as (app, pilot):
        await until(pilot, lambda: "" in found[1:])
        await until(pilot, lambda: len(found) > 4)
        assert any(found) and "learned in the background" in status_line(app)


async def test_the_open_chat_is_read_again_after_training(rated_opener, monkeypatch):
    """A chat that was not read again would delay the next reply."""
    monkeypatch.setattr(promotion, "objection", lambda *_: "")
    monkeypatch.setattr(idle, "IDLE_AFTER", NEVER)

    def read_with(runtime):
        return runtime.engine.sessions.get(app.chat.state.session).base, runtime.backend.lora

    async with idling(rated_opener(), max_new_tokens=4) as (app, pilot):
        await ask(app, pilot)
        assert await app.host.call(read_with) == (None, None)
        monkeypatch.setattr(idle, "IDLE_AFTER", SOON)
        await pilot.press("x")
        await until(pilot, lambda: "learned in the background" in status_line(app), 60)
        read, now = await app.host.call(read_with)
        assert read is now is not None


async def test_a_key_pauses_idle_training_and_the_next_idle_time_resumes_it(
    rated_opener, open_tiny, monkeypatch
):
    """The steps that were done are not done again; meanwhile the chat answers."""
    steps, seen = [], []

    def hook(done):
        steps.append(done)
        while done == 2 and len(seen) == 0:  # until the key was pressed
            time.sleep(0.001)

    async with idling(rated_opener(hook=hook), max_new_tokens=4) as (app, pilot):
        await until(pilot, lambda: status_line(app).startswith("learning in the background, step 2 of 4"), 60)
        monkeypatch.setattr(idle, "IDLE_AFTER", NEVER)
        await pilot.press("h")
        assert app.chat.prompt.text == "h" and app.chat.status.background == ""
        seen.append(1)
        reply = await ask(app, pilot)
        assert reply.reply_id and steps == [0, 1, 2]
        monkeypatch.setattr(idle, "IDLE_AFTER", SOON)
        await pilot.press("backspace")
        await until(pilot, lambda: "in the background: " in status_line(app), 60)
        assert steps == [0, 1, 2, 2, 3, 4]  # each run begins by saying how many are done
    assert read_runtime(open_tiny, lambda runtime: len(runtime.learner.history.attempts())) == 1


async def test_idle_training_resumes_after_a_restart(rated_opener, open_tiny):
    """Ctrl+Q while it trains: the store opens, holds the run, and the next app finishes it."""
    steps, settings = [], replace(QUICK, steps=24)
    async with idling(rated_opener(settings, steps.append)) as (app, pilot):
        await until(pilot, lambda: steps and steps[-1] > 0, 60)
    done = steps[-1]
    assert 0 < done < 24 and not app.host.is_open
    assert read_runtime(open_tiny, lambda runtime: runtime.learner.history.training() is not None)
    assert (
        read_runtime(open_tiny, lambda runtime: runtime.learning.is_due() and runtime.store.integrity())
        == "ok"
    )
    async with idling(rated_opener(settings, steps.append)) as (app, pilot):
        await until(pilot, lambda: "in the background: " in status_line(app), 60)
    assert steps == [*range(done + 1), *range(done, 25)]  # each run begins by saying how many are done


async def test_with_learn_when_idle_off_nothing_is_trained(rated_opener, open_tiny):
    async with idling(rated_opener(), learn_when_idle=False) as (app, pilot):
        for _ in range(10):
            await pilot.pause(SOON)
        assert app.chat.status.background == ""
    assert read_runtime(open_tiny, lambda runtime: runtime.learner.history.attempts()) == []
    assert read_runtime(open_tiny, lambda runtime: runtime.learning.is_due())


async def test_with_learn_when_idle_off_deleted_words_still_leave_the_index(rated_opener, open_tiny):
    async with idling(rated_opener(), learn_when_idle=False) as (app, pilot):
        await app.host.call(lambda runtime: leave_words(runtime.store))
        deleted = time.monotonic()
        while not await app.host.call(lambda runtime: runtime.store.search_index.is_clean()):
            assert time.monotonic() - deleted < 20
            await pilot.pause(SOON)


async def test_a_key_pressed_during_idle_training_is_taken(rated_opener, monkeypatch):
    """Figures for the log (-s): the key in the input, and the runtime's thread free for a call. No limit."""
    shown, free = [], []
    async with idling(rated_opener(replace(QUICK, steps=100_000))) as (app, pilot):
        for n in range(1, 21):
            await until(pilot, lambda: ", step" in status_line(app), 60)
            await pilot.pause(0.01 * (n % 4))
            start = time.perf_counter()
            app.post_message(events.Key("x", "x"))
            while app.chat.prompt.text != "x" * n:
                await asyncio.sleep(0)
            shown.append(1000 * (time.perf_counter() - start))
            await app.host.call(lambda runtime: None)
            free.append(1000 * (time.perf_counter() - start))
    print(f"\nkey in the input: {figures(shown)}\nruntime free: {figures(free)}")


def figures(ms):
    ordered = sorted(ms)
    return f"median {ordered[len(ordered) // 2]:.1f} ms, longest {ordered[-1]:.1f} ms of {len(ordered)}"


def test_a_stopped_deep_run_builds_no_training_graph(open_tiny, rated_opener, monkeypatch):
    """Stopped while it anchors: the run ends there. With few ratings nothing of the sort is loaded."""
    cancel = threading.Event()
    cancel.set()
    monkeypatch.setattr(Deep, "why_due", lambda *_: "a test wants it")
    monkeypatch.setattr(Background, "run", lambda *_: pytest.fail("it went on"))
    with open_tiny() as runtime:
        report = runtime.learning.consolidate(None, cancel)
        assert not report["promoted"] and report["reason"] == report["deep"]["reason"]
    with open_tiny("other") as runtime:
        assert not runtime.learning.is_due() and runtime.learning.loops._deep is None


# -- the setting -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "environment", "file", "learns"),
    [
        ([], "", "", True),
        ([], "", "off", False),
        ([], "on", "off", True),
        ([], "off", "on", False),
        (["--learn-when-idle", "on"], "off", "off", True),
        (["--learn-when-idle", "off"], "on", "on", False),
    ],
)
def test_learn_when_idle_comes_from_flag_then_environment_then_file(
    monkeypatch, home, flags, environment, file, learns
):
    """Flag before environment before file; on where nothing is said."""
    given = {}
    monkeypatch.setattr(chat, "run_chat", lambda open_runtime, **options: given.update(options) or 0)
    monkeypatch.setenv("RUVMLX_LEARN_WHEN_IDLE", environment)
    if file:
        settings_file.save("learn_when_idle", file)
    assert CliRunner().invoke(chat_verb, flags).exit_code == 0
    assert given["learn_when_idle"] is learns


# -- on a scripted runtime ---------------------------------------------------------------------------


class Restful(ScriptedRuntime):
    """Plays `lessons`, one in each idle time: a report, an exception, or "wait" until it is cancelled."""

    def __init__(self, *lessons, kv=(), replies=()):
        super().__init__(*replies)
        self.lessons, self.kv = list(lessons), list(kv)
        self.is_paused = False
        self.begun: list[float] = []  # time.monotonic() of each

    def is_due(self):
        self._note_call()
        return bool(self.lessons)

    @property
    def tiers(self):
        return SimpleNamespace(due_when_idle=lambda: bool(self.kv), review=self._review)

    def consolidate(self, progress, cancel):
        self._note_call()
        self.begun.append(time.monotonic())
        if self.lessons[0] == "wait":
            progress(1, 12, 0.5)
            assert cancel.wait(10)
            self.is_paused = True
            return {"promoted": False, "reason": "stopped after 1 of 12 steps; the next run continues it"}
        lesson = self.lessons.pop(0)
        if isinstance(lesson, Exception):
            raise lesson
        return lesson

    def _review(self, cancel):
        self._note_call()
        return self.kv.pop(0) if len(self.kv) > 1 else self.kv[0]


@pytest.mark.parametrize(
    "disturb",
    [
        lambda app, pilot: pilot.press("x"),
        lambda app, pilot: pilot.click("Transcript"),
        lambda app, pilot: app.on_event(events.Paste("y")),
        lambda app, pilot: app.host.call(lambda runtime: None),
        lambda app, pilot: app.host.call_between(lambda runtime: None),
        lambda app, pilot: ask(app, pilot),
        lambda app, pilot: pilot.press(*"/status", "enter"),
    ],
    ids=["key", "click", "paste", "call", "rating", "message", "command"],
)
async def test_any_request_stops_idle_training(disturb):
    """Nothing waits for the lesson to end by itself, and nothing is said of a pause."""
    runtime = Restful("wait", {**REPORT}, replies=[["Hi."]])
    async with chatting(runtime) as (app, pilot):
        await until(pilot, lambda: status_line(app) == "learning in the background, step 1 of 12")
        runtime.lessons = []
        await disturb(app, pilot)
        await until(pilot, lambda: runtime.is_paused and app.chat.status.background == "")
        assert "stopped after" not in screen_text(app) and app.is_running
    assert len(runtime.threads) == 1


async def test_idle_training_does_not_begin_during_a_reply():
    runtime = Restful(replies=[["One ", "two ", "three."]])
    runtime.gate = True
    async with chatting(runtime) as (app, pilot):
        app.chat.prompt.text = "Go"
        await pilot.press("enter")
        await until(pilot, lambda: "One two" in screen_text(app))
        runtime.lessons = [REPORT]
        for _ in range(5):
            await pilot.pause(SOON)
        assert not runtime.begun and app.phase == "replying"
        runtime.released.release()
        await until(pilot, lambda: "learned in the background" in status_line(app))
        assert app.chat.transcript.replies[-1].text == "One two three."


async def test_errors_of_idle_training_are_one_line_and_delay_the_next_try(monkeypatch):
    """The chat goes on; every failure in a row doubles the time to the next try, a success ends that."""
    monkeypatch.setattr(idle, "LOOK_EVERY", 0.01)
    runtime, said = Restful(), []
    async with chatting(runtime) as (app, pilot):
        app.watch(app.chat.status, "background", lambda line: said.append(line))
        runtime.lessons = [StoreBusy("another process holds it"), ValueError("boom\nline two"), REPORT]
        await until(pilot, lambda: "learned in the background: held-out" in status_line(app))
        assert "nothing learned in the background: another process holds it" in said
        assert "nothing learned in the background: unexpected ValueError: boom line two" in said
        first, second, third = runtime.begun
        assert second - first >= 2 * SOON and third - second >= 4 * SOON and app.idle_learner.stuck == 0
        runtime.replies = [["Fine."]]
        assert (await ask(app, pilot)).text == "Fine."


async def test_idle_time_reviews_the_kv_tiers():
    """Only a change is worth a line; a review that gets nowhere is not tried again and again."""
    same = {"measured": 4, "changed": False, "reason": "the fastest"}
    runtime = Restful(kv=[same, same | {"measured": 0}])
    async with chatting(runtime) as (app, pilot):
        await until(pilot, lambda: app.idle_learner.stuck == 2)
        assert app.chat.status.background in ("", "measuring the KV cache in the background")
        runtime.kv = [same | {"changed": True}]
        await until(pilot, lambda: "other cache precisions: the fastest" in status_line(app))
        assert app.idle_learner.stuck == 0


async def test_quitting_does_not_wait_for_idle_training():
    runtime = Restful("wait")
    async with chatting(runtime) as (app, pilot):
        await until(pilot, lambda: "step 1 of 12" in status_line(app))
        await pilot.press("ctrl+q")
        await until(pilot, lambda: runtime.closed)
    assert app.return_value == 0


# -- what is done with replies -----------------------------------------------------------------------


async def test_copying_text_of_a_reply_is_an_implicit_signal():
    """The reply's text selected and copied; what was copied of the input is nobody's."""
    runtime = ScriptedRuntime(["Some words."], ["Others."])
    async with chatting(runtime) as (app, pilot):
        first, _ = await ask(app, pilot), await ask(app, pilot)
        app.chat.prompt.text = "mine"
        app.chat.prompt.select_all()
        await pilot.press("ctrl+c")
        app.chat.prompt.text = ""
        first.body.query("*").first().text_select_all()
        assert app.screen.get_selected_text() == "Some words."
        await pilot.press("ctrl+c")
        await until(pilot, lambda: runtime.noticed == [(first.reply_id, "copied")])
        assert app.clipboard == "Some words."


@pytest.mark.parametrize("implicit", [False, True])
async def test_implicit_signals_are_recorded_only_with_implicit_feedback_on(open_tiny, implicit):
    """A reply that is copied and then talked on about: recorded where `implicit_feedback` is on."""
    async with idling(
        lambda: open_tiny(implicit_feedback=implicit), max_new_tokens=4, learn_when_idle=False
    ) as (
        app,
        pilot,
    ):
        reply = await ask(app, pilot)
        app.actions.rate.notice({reply.reply_id, None}, "copied")
        await ask(app, pilot)
        signals = await app.host.call(lambda r: [s.label for s in r.store.signals.all(r.model.fingerprint)])
    assert signals == (["copied", "continued"] if implicit else [])
