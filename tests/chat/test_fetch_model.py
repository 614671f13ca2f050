"""One key fetches a better model while the chat goes on, from a stand-in for the hub; one more switches."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ruvmlx.apps.chat.actions import fetch
from ruvmlx.apps.chat.app import ChatApp
from ruvmlx.apps.chat.messages import Notice, UserMessage
from ruvmlx.apps.chat.options import ChatOptions

from ruvmlx import settings
from ruvmlx.engine import Sampling
from ruvmlx.host.model_holder import Opener
from ruvmlx.memory import proposals
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings

from ..models.make_models import make_safetensors_model
from ..models.test_fetching import served  # noqa: F401 - a fixture
from .helpers import SMALL, ask, until
from .test_models import notices

NAME = "owner/tiny"


@pytest.fixture
def starter(tmp_path, monkeypatch):
    """A small model in the starter's place."""
    path = make_safetensors_model(tmp_path / "starter")
    for place in ("apps.chat.actions.fetch", "models.find.local"):
        monkeypatch.setattr(f"ruvmlx.{place}.starter_path", lambda: path)
    return path


@pytest.fixture
def offered_row(monkeypatch):
    """The table has one row: the model of the stand-in."""
    row = replace(proposals.table()[-1].facts, name=NAME, bytes=3_000_000, to_fetch=3_000_000)
    monkeypatch.setattr(proposals, "table", lambda: [proposals.Proposed(row, "Apache-2.0")])
    monkeypatch.setattr(proposals, "memory_bandwidth", lambda: 1e11)
    return row


def chat(starter, model=None):
    def opens(model, adapter, watch):
        known = dict(backend="native", adapter="none", threads=1, kv_disk=None)
        return Runtime.open(Settings(model=model or str(starter), **known), watch=watch)

    options = ChatOptions(sampling=Sampling(1.5), max_new_tokens=5, learn_when_idle=False)
    return ChatApp(Opener(opens, model, None), options)


async def wait_until_open(app, pilot):
    await until(pilot, lambda: app.phase == "idle" or app.failure)
    assert not app.failure


async def test_one_key_fetches_and_one_more_switches(starter, served, offered_row):  # noqa: F811
    """The offer; F5; a message is answered meanwhile; the connection breaks and the fetch goes on; F5 again
    switches in the same chat, and the next start opens that model."""
    served.pace, served.drops = 0.01, [1_000_000]
    app = chat(starter)
    async with app.run_test(size=SMALL) as pilot:
        await wait_until_open(app, pilot)
        offer = f"F5 fetches a good one for this machine: {NAME}"
        await until(pilot, lambda: any(offer in said for said in notices(app)))
        assert served.ranges == []
        await pilot.press("f5")
        await until(pilot, lambda: NAME in app.chat.status.background)
        await ask(app, pilot, "Hello there")
        assert len(app.chat.transcript.replies) == 1 and app.chat.model != NAME
        await until(pilot, lambda: any(f"{NAME} is here. F5 switches" in n for n in notices(app)))
        assert len(served.ranges) == 2 and served.ranges[1] > 0
        session = app.chat.state.session
        await pilot.press("f5")
        await until(pilot, lambda: app.phase == "idle" and app.chat.model == NAME)
        assert app.chat.state.session == session
        app.host.close_now()
    assert settings.load().model == NAME


async def test_the_offer_does_not_part_a_question_from_its_place(starter, offered_row, monkeypatch):
    """The search for a better model ends after the first reply: its line stands above the question."""
    released, best = threading.Event(), proposals.best_proposal
    monkeypatch.setattr(proposals, "best_proposal", lambda facts: released.wait(60) and best(facts))
    app = chat(starter)
    async with app.run_test(size=SMALL) as pilot:
        await wait_until_open(app, pilot)
        await ask(app, pilot, "Hello there")
        released.set()
        await until(pilot, lambda: any("fetches a good one" in said for said in notices(app)))
        kinds = [type(child) for child in app.chat.transcript.children]
        assert kinds.index(Notice) < kinds.index(UserMessage)
        app.host.close_now()


async def test_nothing_is_offered_offline_or_beside_another_model(starter, served, offered_row, monkeypatch):  # noqa: F811
    """HF_HUB_OFFLINE, or any model but the starter: no line, no request; F5 shows the list of models."""
    for offline in ("1", "0"):
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
        other = None if offline == "1" else str(make_safetensors_model(starter.parent / "other", seed=4))
        app = chat(starter, other)
        async with app.run_test(size=SMALL) as pilot:
            await wait_until_open(app, pilot)
            await pilot.pause(0.1)
            assert not any("fetches a good one" in said for said in notices(app))
            app.host.close_now()
    assert served.ranges == []


async def test_a_failed_fetch_is_one_line_and_goes_on_by_the_same_key(starter, served, offered_row):  # noqa: F811
    """The line names the key; what was fetched is kept."""
    served.drops = [1_000_000, 0, 0, 0, 0, 0, 0]
    app = chat(starter)
    async with app.run_test(size=SMALL) as pilot:
        await wait_until_open(app, pilot)
        await until(pilot, lambda: notices(app))
        await pilot.press("f5")
        await until(pilot, lambda: any("F5 goes on with it" in said for said in notices(app)))
        served.drops = []
        await pilot.press("f5")
        await until(pilot, lambda: any(f"{NAME} is here" in said for said in notices(app)))
        assert served.ranges[-1] > 0
        app.host.close_now()


async def test_the_key_goes_on_with_the_model_that_was_picked(starter, served, offered_row):  # noqa: F811
    """Beside another model than the starter nothing is offered: the key's model is the one of the list."""
    served.drops = [1_000_000, 0, 0, 0, 0, 0, 0]
    app = chat(starter, str(make_safetensors_model(starter.parent / "other", seed=4)))
    async with app.run_test(size=SMALL) as pilot:
        await wait_until_open(app, pilot)
        app.actions.fetch.fetch(NAME)
        await until(pilot, lambda: any("F5 goes on with it" in said for said in notices(app)))
        served.drops = []
        await pilot.press("f5")
        await until(pilot, lambda: any(f"{NAME} is here" in said for said in notices(app)), seconds=20)
        app.host.close_now()


async def test_the_key_fetches_the_model_that_is_offered_after_another_model_came(monkeypatch):
    """The key's model is the one that failed last, then the one that the app offers."""
    fetched, failing = [], {"offered", "first"}

    def find(name, watch):
        fetched.append(name)
        if name in failing:
            raise OSError("the line is cut")

    monkeypatch.setattr(fetch, "find_model", find)
    actions = fetch.FetchActions(SimpleNamespace(phase="closing", status=SimpleNamespace()), None, None)
    actions._wanted = ["offered"]
    for name in ("first", "other"):
        await actions._fetch(name)
    assert actions._wanted == ["offered", "first"]
    failing.clear()
    for _ in range(2):
        await actions._fetch(actions._wanted[-1])
    assert not actions._wanted and fetched == ["first", "other", "first", "offered"]
