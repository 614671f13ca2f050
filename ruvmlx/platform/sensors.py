"""This module reads the temperature and the power of the machine without administrator rights.

On Linux the module reads the processor's sensors (hwmon, thermal zones), the RAPL energy counters if the user
has the right to read them, and a discharging battery. On macOS the module reads the thermal state
(NSProcessInfo) and the battery. On macOS a program needs administrator rights to read degrees, and watts on
mains power.
"""

import ctypes
import plistlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.parsers.expat import ExpatError

SYS = Path("/sys")
# the thermal states of macOS, in the order of NSProcessInfoThermalState
HEAT = ("nominal", "fair", "serious", "critical")
_PROCESSORS = re.compile("coretemp|k10temp|zenpower|cpu_?thermal|soc_?thermal")
_ZONES = re.compile("cpu|soc|pkg", re.IGNORECASE)
_MAX_SPAN_SECONDS, _MIN_SPAN_SECONDS = 60.0, 0.1  # the longest and shortest time over which power is averaged


@dataclass(frozen=True)
class SensorReading:
    """One reading of the sensors. celsius: the temperature of the processor's hottest sensor. heat: one of
    HEAT. watts: the power of the part that `drawn_by` names. None and "" mean that the machine does not
    report the value."""

    celsius: float | None = None
    heat: str = ""
    watts: float | None = None
    drawn_by: str = ""  # "processor" | "battery"


def ioreg() -> Any:
    """Return a list with the battery's properties on macOS; the list is empty without a battery."""
    command = ["/usr/sbin/ioreg", "-r", "-n", "AppleSmartBattery", "-a"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=5, check=False)
        return plistlib.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError, ExpatError):
        return []


class Sensors:
    """The machine's sensors. Do not call `read` in the thread that draws the screen, because `read` takes up
    to a tenth of a second."""

    def __init__(self, root: Path = SYS, platform: str = sys.platform, battery: Callable[[], Any] = ioreg):
        self._root, self._darwin, self._battery = root, platform == "darwin", battery
        self._counters = packages(root / "class/powercap")
        self._last = self._joules()

    def read(self) -> SensorReading:
        if self._darwin:
            watts = battery_watts(self._battery())
            return SensorReading(None, thermal_state(), watts, "battery" if watts else "")
        watts, drawn_by = self._processor_watts(), "processor"
        if watts is None:
            watts, drawn_by = self._battery_watts(), "battery"
        return SensorReading(self._celsius(), "", watts, drawn_by if watts else "")

    def is_on_battery(self) -> bool:
        """Return True if a battery of the machine discharges."""
        if self._darwin:
            return bool(battery_watts(self._battery()))
        return any(True for _ in self._discharging())

    def heat(self) -> tuple[float | None, str]:
        """Return (the temperature in degrees Celsius, the system's word for the thermal state). macOS has
        only the word, Linux only the temperature; the other value is None or ""."""
        return (None, thermal_state()) if self._darwin else (self._celsius(), "")

    # Linux --------------------------------------------------------------------------------------

    def _celsius(self) -> float | None:
        chips = self._root.glob("class/hwmon/hwmon*")
        inputs = [t for c in chips if _PROCESSORS.search(_text(c / "name")) for t in c.glob("temp*_input")]
        if not inputs:
            zones = self._root.glob("class/thermal/thermal_zone*")
            inputs = [zone / "temp" for zone in zones if _ZONES.search(_text(zone / "type"))]
        found = [t / 1000 for t in map(_number, inputs) if t is not None and 0 < t < 150_000]
        return max(found, default=None)

    def _joules(self) -> tuple[float, list[int | None]]:
        """Return (time.monotonic(), for each processor package the microjoules on its energy counter; None if
        the counter cannot be read)."""
        return time.monotonic(), [counter.read() for counter in self._counters]

    def _processor_watts(self) -> float | None:
        """Return the processor's mean power (watts) since the last reading of the counters. If the last
        reading is older than _MAX_SPAN_SECONDS or newer than _MIN_SPAN_SECONDS, wait _MIN_SPAN_SECONDS and
        return the mean power during the wait."""
        if not self._counters:
            return None
        if not _MIN_SPAN_SECONDS <= time.monotonic() - self._last[0] <= _MAX_SPAN_SECONDS:
            self._last = self._joules()
            time.sleep(_MIN_SPAN_SECONDS)
        (then, before), self._last = self._last, self._joules()
        spent = sum(c.since(b) for c, b in zip(self._counters, before, strict=True) if b is not None)
        return spent / (self._last[0] - then)

    def _discharging(self) -> Iterator[Path]:
        """Yield the discharging batteries of the machine, without the batteries of mice and keyboards."""
        for supply in sorted(self._root.glob("class/power_supply/*")):
            is_battery = _text(supply / "type") == "Battery" and _text(supply / "scope") != "Device"
            if is_battery and _text(supply / "status") == "Discharging":
                yield supply

    def _battery_watts(self) -> float | None:
        """Return the watts of the first discharging battery, from the files in uW, or in uA and uV."""
        for supply in self._discharging():
            power, current, voltage = (_number(supply / f"{x}_now") for x in ("power", "current", "voltage"))
            if power is None and current is not None and voltage is not None:
                power = current * voltage // 10**6
            return abs(power) / 1e6 if power else None
        return None


class Counter:
    """The RAPL energy counter of one processor package. The counter begins again at 0 after the value in
    max_energy_range_uj."""

    def __init__(self, path: Path):
        self._path = path

    def read(self) -> int | None:
        """Return the counter in microjoules, or None if the user has no right to read the counter."""
        return _number(self._path / "energy_uj")

    def since(self, before: int) -> float:
        """Return the joules that the processor used since an earlier read of the counter. before: the
        counter's value at that read, in microjoules."""
        now, around = self.read(), _number(self._path / "max_energy_range_uj")
        if now is None:
            return 0.0
        return ((now - before) if now >= before else (now - before + (around or 0))) / 1e6


def packages(folder: Path) -> Sequence[Counter]:
    """Return the readable RAPL counters of processor packages, without the counters of parts of a package."""
    found = [Counter(path) for path in sorted(folder.glob("*:*")) if path.name.count(":") == 1]
    return [counter for counter in found if counter.read() is not None]


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


# macOS ----------------------------------------------------------------------------------------------


def thermal_state() -> str:
    """Return [[NSProcessInfo processInfo] thermalState] as one of HEAT, or "" if it is not available."""
    state = _process_info(b"thermalState", ctypes.c_long)
    return HEAT[state] if state is not None and 0 <= state < len(HEAT) else ""


def low_power_mode() -> bool | None:
    """Return [[NSProcessInfo processInfo] isLowPowerModeEnabled], or None if it is not available."""
    return _process_info(b"isLowPowerModeEnabled", ctypes.c_bool)


def _process_info(question: bytes, kind: type) -> Any:
    """Return the value of [[NSProcessInfo processInfo] question], or None if the value is not available.
    kind: the value's C type."""
    try:
        ctypes.CDLL("/System/Library/Frameworks/Foundation.framework/Foundation")
        objc = ctypes.CDLL("/usr/lib/libobjc.dylib")
        pointer = ctypes.c_void_p
        named = ctypes.CFUNCTYPE(pointer, ctypes.c_char_p)
        class_, selector = (named((name, objc)) for name in ("objc_getClass", "sel_registerName"))
        # ctypes needs one declaration of objc_msgSend for each signature.
        asked = ctypes.CFUNCTYPE(pointer, pointer, pointer)(("objc_msgSend", objc))
        answered = ctypes.CFUNCTYPE(kind, pointer, pointer)(("objc_msgSend", objc))
        return answered(asked(class_(b"NSProcessInfo"), selector(b"processInfo")), selector(question))
    except (OSError, AttributeError):
        return None


def battery_watts(found: Any) -> float | None:
    """Return the watts that the battery delivers, or None if the battery does not discharge. found: the
    result of `ioreg`."""
    try:
        battery = found[0]
        # Amperage: mA, negative while the battery discharges; Voltage: mV
        current, voltage = battery["Amperage"], battery["Voltage"]
        current -= (current >= 1 << 63) << 64
        return -current * voltage / 1e6 if current < 0 else None
    except (LookupError, TypeError):
        return None
