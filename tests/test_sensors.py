"""Heat and power, from files as Linux has them and from what macOS says."""

import plistlib
import sys
import time

import pytest

from ruvmlx.platform import sensors
from ruvmlx.platform.sensors import HEAT, SensorReading, Sensors, battery_watts


def put(root, **files):
    """files: path with __ for /, text."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def linux(root) -> SensorReading:
    return Sensors(root, "linux").read()


def test_a_machine_that_tells_nothing(tmp_path):
    assert linux(tmp_path) == SensorReading()


def test_the_hottest_of_the_processors_sensors(tmp_path):
    """A disk's sensor does not count, nor one that is not connected."""
    put(tmp_path, class__hwmon__hwmon0__name="nvme", class__hwmon__hwmon0__temp1_input=90000)
    put(tmp_path, class__hwmon__hwmon1__name="coretemp", class__hwmon__hwmon1__temp1_input=51000,
        class__hwmon__hwmon1__temp2_input=54500, class__hwmon__hwmon1__temp3_input=-128000)  # fmt: skip
    assert linux(tmp_path).celsius == 54.5


def test_zones_where_there_are_no_chips(tmp_path):
    put(tmp_path, class__thermal__thermal_zone0__type="acpitz", class__thermal__thermal_zone0__temp=20000)
    put(tmp_path, class__thermal__thermal_zone1__type="x86_pkg_temp",
        class__thermal__thermal_zone1__temp=47000)  # fmt: skip
    assert linux(tmp_path).celsius == 47
    (tmp_path / "class/thermal/thermal_zone1/temp").write_text("unknown")
    assert linux(tmp_path).celsius is None


def test_power_of_the_packages(tmp_path, monkeypatch):
    """Joules over seconds between two readings, across the counter's end, no part counted twice."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda s: now.__setitem__(0, now[0] + s))

    def spend(joules):
        for name in ("intel-rapl:0", "intel-rapl:0:0"):
            put(tmp_path, **{f"class__powercap__{name}__energy_uj": joules * 10**6,
                             f"class__powercap__{name}__max_energy_range_uj": 10**9})  # fmt: skip

    spend(990)
    read = Sensors(tmp_path, "linux")
    now[0] += 5
    spend(15)
    assert read.read() == SensorReading(None, "", pytest.approx(5.0), "processor")
    now[0] += 1000  # too long ago to say what is drawn now
    spend(500)
    assert read.read().watts == 0


@pytest.mark.parametrize(
    ("status", "files", "watts"),
    [
        ("Discharging", {"power": 12_340_000}, 12.34),
        ("Discharging", {"current": -2_000_000, "voltage": 11_500_000}, 23.0),
        ("Charging", {"power": 12_340_000}, None),
        ("Discharging", {}, None),
    ],
)
def test_a_battery_that_is_emptied(tmp_path, status, files, watts):
    battery = "class__power_supply__BAT0__"
    put(tmp_path, **{battery + "type": "Battery", battery + "status": status},
        **{f"{battery}{name}_now": value for name, value in files.items()})  # fmt: skip
    put(tmp_path, class__power_supply__AC__type="Mains")
    assert linux(tmp_path) == SensorReading(None, "", watts, "battery" if watts else "")


@pytest.mark.parametrize(("amperage", "watts"), [(-1500, 18.0), (2**64 - 1500, 18.0), (900, None), (0, None)])
def test_a_battery_as_ioreg_tells_it(amperage, watts):
    """The current is negative, or its two's complement, while the battery is emptied."""
    battery = plistlib.loads(plistlib.dumps([{"Amperage": amperage, "Voltage": 12000, "IsCharging": False}]))
    assert battery_watts(battery) == watts


@pytest.mark.parametrize("found", [[], None, [{}], [{"Amperage": "x", "Voltage": 1}], {}])
def test_a_mac_without_a_battery(found):
    assert battery_watts(found) is None


def test_on_macos_the_heat_is_a_word(monkeypatch):
    monkeypatch.setattr(sensors, "thermal_state", lambda: "fair")
    battery = [{"Amperage": -1000, "Voltage": 11000}]
    found = Sensors(platform="darwin", battery=lambda: battery).read()
    assert found == SensorReading(None, "fair", 11.0, "battery")


def test_this_machine_can_be_asked():
    """Whatever it tells: no error, and nothing that cannot be."""
    found = Sensors().read()
    assert found.celsius is None or 0 < found.celsius < 150
    assert found.watts is None or found.watts >= 0
    assert found.heat in (HEAT if sys.platform == "darwin" else ("",))
