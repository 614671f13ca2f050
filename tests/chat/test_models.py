"""Models and adapters in a chat, on small real models: lists, pickers, switches, refusals."""

import io
import json
import time

import pytest
from ruvmlx.apps.chat import models
from ruvmlx.apps.chat.actions.models import AFTER_RATING
from ruvmlx.apps.chat.app import ChatApp
from ruvmlx.apps.chat.compare import Candidate, ReplyComparison
from ruvmlx.apps.chat.messages import Notice
from ruvmlx.apps.chat.options import ChatOptions
from ruvmlx.apps.chat.picker_screen import PickerScreen
from ruvmlx.apps.chat.plain import PlainChat
from ruvmlx.apps.chat.welcome import Welcome, plan_block

from ruvmlx.engine import Sampling
from ruvmlx.errors import Interrupted, UsageError
from ruvmlx.host.model_holder import ModelHolder, Opener
from ruvmlx.progress import Progress
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.sona.calibration import Measurement

from ..models.make_models import make_safetensors_model
from .helpers import SMALL, WIDE, ask, screen_text, until
from .test_branches import BOTH_SIZES, send, shown_texts

ONE, TWO, NO_PLACE, CUT = "first/one", "second/two", "third/no-place", "fourth/cut-short"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache with two usable models and two unusable ones; the machine has no other models."""
    hub = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("ruvmlx.models.find.local.starter_path", lambda: None)

    def lay(name, **shape):
        repo = hub / f"models--{name.replace('/', '--')}"
        (repo / "refs").mkdir(parents=True)
        (repo / "refs" / "main").write_text("abc123")
        return make_safetensors_model(repo / "snapshots" / "abc123", **shape)

    lay(ONE)
    lay(TWO, seed=1, hidden_size=32, bits=8, group_size=32)
    config = lay(NO_PLACE, seed=2) / "tokenizer_config.json"
    refuses = {"chat_template": "{{ raise_exception('no place for this role') }}"}
    config.write_text(json.dumps(json.loads(config.read_text()) | refuses))
    cut = lay(CUT) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])


def opener(first_run=False):
    def opens(model, adapter, watch):
        return Runtime.open(
            Settings(model=model, backend="native", adapter=adapter or "none", threads=1, kv_disk=None),
            watch=watch,
        )

    return Opener(opens, ONE, "default", first_run)


@pytest.fixture
def chatting(cache):
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def chat(size=SMALL, first_run=False, **options):
        known = dict(sampling=Sampling(1.5), max_new_tokens=5, learn_when_idle=False)
        app = ChatApp(opener(first_run), ChatOptions(**known | options))
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: app.phase == "idle" or app.failure)
            assert not app.failure
            yield app, pilot
            app.host.close_now()

    return chat


def listed_names(app):
    return [entry.name for entry in app.screen._shown] if isinstance(app.screen, PickerScreen) else None


def notices(app):
    return [str(notice.content) for notice in app.query(Notice)]


async def wait_for_model(app, pilot, to):
    await until(pilot, lambda: app.phase == "idle" and app.chat.model == to)


@BOTH_SIZES
async def test_another_model_continues_the_chat(chatting, size):
    """F3, a few letters, Enter; the chat is still there, and the new model answers in it."""
    async with chatting(size) as (app, pilot):
        await ask(app, pilot, "Hello there")
        first, session = app.chat.transcript.replies[0].text, app.chat.state.session
        await pilot.press("f3")
        await until(pilot, lambda: listed_names(app) is not None and len(listed_names(app)) == 5)
        await until(pilot, lambda: "● first/one" in screen_text(app))
        assert "safetensors · 16.0 bits · 164 k · 328 kB" in screen_text(app)
        await pilot.press(*"sctw")
        await until(pilot, lambda: listed_names(app) == [TWO])
        await pilot.press("enter")
        await wait_for_model(app, pilot, TWO)
        assert app.chat.state.session == session and shown_texts(app) == ["Hello there", first]
        await until(pilot, lambda: f"Model: {TWO}" in screen_text(app))
        assert "It reads this chat again." in " ".join(notices(app)) and app.chat.prompt.heading == TWO
        await ask(app, pilot, "And you?")
        assert len(app.chat.transcript.replies) == 2
        turns = await app.host.call(
            lambda r: [r.store.replies.get(t.reply_id).model for t in r.chats.turns(session)[1::2]]
        )
        assert turns == [ONE, TWO]


async def test_a_model_that_cannot_be_remembered_is_shown_all_the_same(chatting, monkeypatch):
    """The settings file cannot be written. The chat uses the new model."""

    def refuse(name):
        raise UsageError("the settings file cannot be written")

    monkeypatch.setattr(models, "remember", refuse)
    async with chatting() as (app, pilot):
        await ask(app, pilot, "Hello")
        await send(app, pilot, f"/model {TWO}")
        await wait_for_model(app, pilot, TWO)
        await until(pilot, lambda: "the settings file cannot be written" in notices(app)[-1])


@pytest.fixture
def measurement(monkeypatch):
    """The texts that the first measurement has read: it reads a text in a tenth of a second."""
    read, texts = Measurement._read, []

    def read_slowly(self, index, pause, stops_inside):
        for _ in range(10):
            time.sleep(0.01)
            if pause is not None and stops_inside:
                pause()
        texts.append(index)
        read(self, index, pause, stops_inside)

    monkeypatch.setattr(Measurement, "_read", read_slowly)
    return texts


async def test_the_first_measurement_does_not_hold_up_a_switch(chatting, measurement):
    """The command waited with an empty input, and only the line of the progress was on the screen."""
    async with chatting() as (app, pilot):
        await ask(app, pilot, "Hello")
        await until(pilot, lambda: "Getting to know the model" in screen_text(app))
        await send(app, pilot, f"/model {TWO}")
        await wait_for_model(app, pilot, TWO)
        assert len(measurement) < 4
        await send(app, pilot, "/model 99")
        await until(pilot, lambda: "give a number from 1 to 4" in notices(app)[-1])


async def test_a_number_of_no_model_does_not_end_the_first_measurement(chatting, measurement):
    """It goes on once the error is shown."""
    async with chatting() as (app, pilot):
        await ask(app, pilot, "Hello")
        await until(pilot, lambda: "Getting to know the model" in screen_text(app))
        await send(app, pilot, "/model 99")
        await until(pilot, lambda: "give a number from 1 to" in "".join(notices(app)))
        read = len(measurement)
        await until(pilot, lambda: len(measurement) > read + 2)


async def test_a_switch_waits_for_the_rating_in_progress(chatting, measurement):
    """The rating was lost, and a notice of the error was on the screen for a moment."""
    async with chatting() as (app, pilot):
        await ask(app, pilot, "Hello")
        await pilot.press("ctrl+y")
        await until(pilot, lambda: "Getting to know the model" in screen_text(app))
        await send(app, pilot, f"/model {TWO}")
        await until(pilot, lambda: AFTER_RATING in screen_text(app))
        await wait_for_model(app, pilot, TWO)
        reply, session = app.chat.transcript.replies[0], app.chat.state.session
        rated = await app.host.call(lambda r: r.store.ratings.of_chat(session))
        assert rated == {reply.reply_id: "up"} and reply.rating == "up"


async def test_a_reply_of_another_model_cannot_be_rated(chatting):
    """Rating another model's reply is refused by one line, and changes nothing; with that model it works."""
    async with chatting(WIDE) as (app, pilot):
        await ask(app, pilot, "Hello")
        await send(app, pilot, f"/model {TWO}")
        await wait_for_model(app, pilot, TWO)
        await pilot.press("ctrl+y")
        await until(pilot, lambda: any("wrote that reply" in said for said in notices(app)))
        (refusal,) = [said for said in notices(app) if "wrote that reply" in said]
        assert f"/model {ONE}" in refusal and "\n" not in refusal
        assert app.chat.transcript.replies[0].rating is None
        assert (await app.host.call(lambda r: r.status())).ratings == 0
        await send(app, pilot, f"/model {ONE}")
        await wait_for_model(app, pilot, ONE)
        await pilot.press("ctrl+y")
        await until(pilot, lambda: app.chat.transcript.replies[0].rating == "up")
        assert (await app.host.call(lambda r: r.status())).ratings == 1
        assert (await app.host.call(lambda r: r.store.integrity())) == "ok"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (NO_PLACE, "no place for this role"),
        (CUT, "sound safetensors file"),
        ("nobody/there", "HF_HUB_OFFLINE is set"),
        ("9", "give a number from 1 to 4"),
    ],
)
async def test_a_model_that_fails_to_open_leaves_the_chat_unchanged(chatting, name, why):
    async with chatting(WIDE) as (app, pilot):
        await ask(app, pilot, "Hello")
        await send(app, pilot, f"/model {name}")
        await until(pilot, lambda: any(why in said for said in notices(app)) and app.phase == "idle")
        assert "Traceback" not in screen_text(app) and app.chat.model == ONE
        await ask(app, pilot, "Still there?")
        assert len(app.chat.transcript.replies) == 2


async def test_escape_while_another_model_loads_keeps_the_old_one(chatting, monkeypatch):
    """While the new one is loaded; and what is sent meanwhile goes to the old one then."""
    async with chatting() as (app, pilot):
        await ask(app, pilot, "Hello")
        waits = app.host.holder.opener

        def load_slowly(model, adapter, watch):
            while True:
                watch.progress(Progress("Loading slowly", 1, 3, 1.0))
                time.sleep(0.02)

        app.host.holder.opener = Opener(load_slowly, ONE)
        await send(app, pilot, f"/model {TWO}")
        await until(pilot, lambda: "Loading slowly: 1 B of 3 B" in screen_text(app))
        assert "esc Stop" in screen_text(app) and app.phase == "opening"
        await pilot.press("ctrl+y")
        await send(app, pilot, "What now?")
        assert app.chat.prompt.text == "What now?"
        app.host.holder.opener = waits
        await pilot.press("escape")
        await until(pilot, lambda: len(app.chat.transcript.replies) == 2 and app.phase == "idle")
        assert any("stopped before the model was open" in said for said in notices(app))
        assert app.chat.model == ONE and app.chat.transcript.replies[0].rating is None


async def test_deleted_chats_survive_a_change_of_the_model(chatting):
    """/restore brings back what was deleted under the old model."""
    async with chatting() as (app, pilot):
        await ask(app, pilot, "Hello")
        first = app.chat.state.session
        await send(app, pilot, "/delete")
        await until(pilot, lambda: app.chat.state.session != first and app.phase == "idle")
        await send(app, pilot, f"/model {TWO}")
        await wait_for_model(app, pilot, TWO)
        await send(app, pilot, "/restore")
        await until(pilot, lambda: app.chat.state.session == first and shown_texts(app)[:1] == ["Hello"])


async def test_broken_models_cannot_be_selected_and_new_names_can_be_fetched(chatting):
    """What is broken cannot be chosen; a new name can be fetched."""
    async with chatting() as (app, pilot):
        await send(app, pilot, "/models")
        await until(pilot, lambda: listed_names(app) and len(listed_names(app)) == 5)
        for _ in range(4):
            await pilot.press("down")
        at = app.screen._shown[app.screen.options.highlighted]
        assert not at.problem
        await pilot.press(*"zzz/new")
        await until(pilot, lambda: "Fetch zzz/new from Hugging Face" in screen_text(app))
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, PickerScreen))
        assert app.chat.model == ONE


async def test_only_adapters_of_this_model_can_be_selected(chatting):
    """F4: none, those of this model, and those of others, which cannot be chosen; a new name begins one."""
    async with chatting(WIDE) as (app, pilot):
        await ask(app, pilot, "Hello")
        await pilot.press("ctrl+y")
        await until(pilot, lambda: app.chat.transcript.replies[0].rating == "up")
        await send(app, pilot, f"/model {TWO}")
        await wait_for_model(app, pilot, TWO)
        await pilot.press("f4")
        await until(pilot, lambda: listed_names(app) == ["none", "default", "default"])
        assert f"belongs to {ONE}" in screen_text(app)
        await pilot.press(*"poems", "enter")
        await until(pilot, lambda: "Adapter: poems@0." in screen_text(app))
        await send(app, pilot, "/adapters")
        await until(pilot, lambda: listed_names(app) is not None)
        await pilot.press("up", "up", "enter")
        await until(pilot, lambda: "No adapter: this chat does not learn." in screen_text(app))


async def test_a_change_of_the_model_ends_a_comparison(chatting):
    async with chatting(WIDE) as (app, pilot):
        await ask(app, pilot, "Hello")
        app.chat.state.comparison = ReplyComparison([Candidate(1, True, "a"), Candidate(2, False, "b")], 2)
        await send(app, pilot, f"/model {TWO}")
        await wait_for_model(app, pilot, TWO)
        assert app.chat.state.comparison == ReplyComparison()


@BOTH_SIZES
async def test_the_first_run_shows_model_backend_memory_and_folders(chatting, size, home):
    """Model, size, backend, memory, where data lie; they stay until the first message."""
    async with chatting(size, first_run=True) as (app, pilot):
        await until(pilot, lambda: "your data" in screen_text(app))
        text = screen_text(app)
        for words in ("first/one", "164 k parameters of 16.0 bits", "native", "are free", "Ctrl+Y"):
            assert words in text
        await ask(app, pilot, "Hello")
        assert "your data" not in screen_text(app)
    async with chatting(size) as (app, _):
        assert app.query_one(Welcome).plan is None


async def test_escape_while_the_first_model_opens_exits_as_interrupted(cache):
    """One line and the exit code of an interruption; Ctrl+C does the same."""
    for key in ("escape", "ctrl+c"):

        def fetch_slowly(model, adapter, watch):
            while True:
                watch.progress(Progress("Fetching x", 1, 3, 1.0))
                time.sleep(0.02)

        app = ChatApp(Opener(fetch_slowly, ONE))
        async with app.run_test() as pilot:
            await until(pilot, lambda app=app: "Fetching x" in screen_text(app))
            await pilot.press(key)
            await until(pilot, lambda app=app: app.failure is not None)
        assert isinstance(app.failure, Interrupted) and app.return_value == 130


def test_the_lines_of_the_plan_are_equally_long(monkeypatch, tiny):
    """At any width; every line is as long as the others, so they stand below each other when centred."""
    from ruvmlx.backends.select import Choice
    from ruvmlx.memory.load_plan import Plan
    from ruvmlx.models.config.header_facts import Facts

    backend = Choice("native", "cpu", "native avx512vnni, 2 threads", "MLX finds no GPU; the C decoder runs")
    plan = Plan.of(Facts.of(tiny), backend, None)
    for width in (40, 60, 100):
        lines = plan_block(plan, width).split("\n")
        assert len({len(line) for line in lines}) == 1 and len(lines[0]) <= width


# Plain mode ---------------------------------------------------------------------------------------


def run_plain(*lines):
    holder, sink = ModelHolder(opener()), io.StringIO()
    holder.open()
    try:
        options = ChatOptions(sampling=Sampling(1.5), max_new_tokens=3, learn_when_idle=False)
        code = PlainChat(holder, options, io.StringIO("\n".join(lines) + "\n"), sink).run()
    finally:
        holder.close()
    return code, sink.getvalue()


def test_plain_mode_lists_and_switches_models(cache, capsys):
    """The same by commands: the list is numbered, the chat goes on, what is refused is one line."""
    code, said = run_plain(
        "/models", "Hi", "/model", f"/model {TWO}", "/up", "More", "/up", f"/model {NO_PLACE}", "/model 9",
        "/adapters", "/model 1", "/adapters",
    )  # fmt: skip
    lines = said.splitlines()
    assert lines[0] == "1. first/one, in use, safetensors, 16.0 bits, 164 k parameters, 328 kB"
    assert lines[1].startswith("2. fourth/cut-short, safetensors, 331 kB") and "sound safetensors" in lines[1]
    assert f"Model: {ONE} (safetensors, 16.0 bits" in said and "/models lists others." in said
    assert f"Model: {TWO} (safetensors" in said and said.count("It reads this chat again.") == 2
    assert said.count("Assistant: ") == 2 and said.count("Rated good") == 1
    assert "default, version 1, belongs to second/two." in said and "default, in use, version 0." in said
    errors = capsys.readouterr().err
    assert (
        errors.count("ruvmlx: ") == 3 and "wrote that reply" in errors and "no place for this role" in errors
    )
    assert "give a number from 1 to 5" in errors and code == 1


def test_a_model_outside_the_cache_is_listed_as_in_use(cache, tiny):
    first, *others = models.models(tiny)
    assert first.in_use and first.name == str(tiny.path) and len(others) == 4
    assert models.find_model("2", tiny) == ONE and models.find_model("owner/x", tiny) == "owner/x"
