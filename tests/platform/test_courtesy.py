"""Work that nobody waits for waits: on the battery, in heat, beside busy programs."""

import threading
import time
from types import SimpleNamespace

import pytest
from ruvmlx.apps.chat import idle
from ruvmlx.apps.server import idle as server_idle

from ruvmlx.platform import courtesy
from ruvmlx.platform.courtesy import IS_BUSY, IS_HOT, ON_BATTERY, Courtesy
from ruvmlx.platform.sensors import Sensors

from ..test_sensors import put

REAL = Courtesy.reason_to_wait, Courtesy.should_stop


@pytest.fixture(autouse=True)
def real_courtesy(monkeypatch):
    """conftest.py turns courtesy off."""
    monkeypatch.setattr(Courtesy, "reason_to_wait", REAL[0])
    monkeypatch.setattr(Courtesy, "should_stop", REAL[1])


def make_courtesy(root, load=0.1):
    return Courtesy(Sensors(root, "linux"), lambda: (load, 0.0, 0.0), cores=4)


def test_it_waits_on_the_battery(tmp_path):
    put(tmp_path, class__power_supply__BAT0__type="Battery", class__power_supply__BAT0__status="Charging")
    assert make_courtesy(tmp_path).reason_to_wait() == ""
    put(tmp_path, class__power_supply__BAT0__status="Discharging")
    assert make_courtesy(tmp_path).reason_to_wait() == ON_BATTERY
    put(tmp_path, class__power_supply__BAT0__scope="Device")  # of a mouse
    assert make_courtesy(tmp_path).reason_to_wait() == ""


def test_it_waits_in_heat(tmp_path):
    put(tmp_path, class__hwmon__hwmon0__name="coretemp", class__hwmon__hwmon0__temp1_input=89000)
    assert make_courtesy(tmp_path).reason_to_wait() == ""
    put(tmp_path, class__hwmon__hwmon0__temp1_input=90000)
    assert make_courtesy(tmp_path).reason_to_wait() == IS_HOT


@pytest.mark.parametrize(
    "heat,reason", [("nominal", ""), ("fair", ""), ("serious", IS_HOT), ("critical", IS_HOT)]
)
def test_macos_says_how_hot_it_is(heat, reason):
    sensors = SimpleNamespace(is_on_battery=lambda: False, heat=lambda: (None, heat))
    assert Courtesy(sensors, lambda: (0.0,), 4).reason_to_wait() == reason


def test_it_waits_while_others_keep_all_cores_busy(tmp_path):
    assert make_courtesy(tmp_path, load=3.9).reason_to_wait() == ""
    assert make_courtesy(tmp_path, load=4.0).reason_to_wait() == IS_BUSY


def test_work_that_goes_on_stops_on_the_battery_but_not_for_its_own_load(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    busy = make_courtesy(tmp_path, load=9.0)
    now[0] += courtesy.LOOK_EVERY
    assert not busy.should_stop()
    put(tmp_path, class__power_supply__BAT0__type="Battery", class__power_supply__BAT0__status="Discharging")
    assert not busy.should_stop()  # it has just looked
    now[0] += courtesy.LOOK_EVERY
    assert busy.should_stop()


class Polite:
    """Counts looks. waits: why it may not begin. stops: after the first step."""

    def __init__(self, waits="", stops=False):
        self.waits, self.stops, self.looks = waits, stops, 0

    def reason_to_wait(self):
        self.looks += 1
        return self.waits

    def should_stop(self):
        return self.stops


def runtime(is_due=True):
    """Three steps of training, or those before it is stopped."""

    def consolidate(step, cancel):
        for n in range(1, 4):
            steps.append(n)
            step(n, 3, 0.5)
            if cancel.is_set():
                return {"promoted": False, "reason": "stopped"}
        return {"promoted": True, "reason": "better"}

    steps = []
    tiers = SimpleNamespace(due_when_idle=lambda: False)
    learning = SimpleNamespace(is_due=lambda: is_due and not steps, consolidate=consolidate)
    store = SimpleNamespace(search_index=SimpleNamespace(is_clean=lambda: True))
    optimizer = SimpleNamespace(due_when_idle=lambda: False)
    engine = SimpleNamespace(sessions=SimpleNamespace(read_again=lambda session, pause: 0))
    return SimpleNamespace(
        learning=learning, tiers=tiers, optimizer=optimizer, store=store, engine=engine, steps=steps
    )


def test_the_chat_says_why_it_waits_and_how_long_it_takes():
    shown, cancel = [], threading.Event()
    lesson = idle.learn(runtime(), cancel, shown.append, Polite(IS_HOT))
    assert (lesson.said, lesson.waits, shown) == ("learning waits: the machine is hot", True, [])
    lesson = idle.learn(runtime(), cancel, shown.append, Polite())
    assert not lesson.waits and shown[1] == "learning in the background, step 1 of 3"
    assert shown[2] == "learning in the background, step 2 of 3, about 0 s left"


def test_nothing_is_looked_at_while_nothing_is_due():
    polite = Polite(IS_HOT)
    assert idle.learn(runtime(False), threading.Event(), print, polite).said == "" and polite.looks == 0
    assert server_idle.learn(runtime(False), threading.Event(), print, polite) == ({}, False)
    assert polite.looks == 0


def test_training_stops_where_the_machine_needs_rest():
    for learn in (idle.learn, server_idle.learn):
        trained, cancel = runtime(), threading.Event()
        learn(trained, cancel, lambda line: None, Polite(stops=True))
        assert trained.steps == [1] and cancel.is_set()


def test_the_server_waits_too():
    waiting = runtime()
    assert server_idle.learn(waiting, threading.Event(), print, Polite(ON_BATTERY)) == ({}, False)
    assert waiting.steps == []
