"""Temperature and power of the machine, where they can be read without special rights.

Linux: the processor's sensors (hwmon, thermal zones), RAPL counters where this user may read them, a
discharging battery. macOS: the thermal state (NSProcessInfo) and the battery; degrees, and watts on mains
power, need administrator rights.
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
HEAT = ("nominal", "fair", "serious", "critical")  # NSProcessInfoThermalState
_PROCESSORS = re.compile("coretemp|k10temp|zenpower|cpu_?thermal|soc_?thermal")
_ZONES = re.compile("cpu|soc|pkg", re.IGNORECASE)
_MAX_SPAN_SECONDS, _MIN_SPAN_SECONDS = 60.0, 0.1  # seconds: longest and shortest span for a mean


@dataclass(frozen=True)
class SensorReading:
    """celsius: the processor's hottest sensor; heat: one of HEAT; watts: power of the part that `drawn_by`
    names. None and "": not available on this platform."""

    celsius: float | None = None
    heat: str = ""
    watts: float | None = None
    drawn_by: str = ""  # "processor" | "battery"


def ioreg() -> Any:
    """A list with the battery's properties as plist; empty without a battery."""
    command = ["/usr/sbin/ioreg", "-r", "-n", "AppleSmartBattery", "-a"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=5, check=False)
        return plistlib.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError, ExpatError):
        return []


class Sensors:
    """The machine's sensors. `read` takes up to a tenth of a second: do not call it in the thread that draws
    the screen."""

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
        """Does a battery discharge?"""
        if self._darwin:
            return bool(battery_watts(self._battery()))
        return any(True for _ in self._discharging())

    def heat(self) -> tuple[float | None, str]:
        """(degrees of the processor, one of HEAT), as in SensorReading."""
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
        """(time.monotonic(), microjoules of each package or None)"""
        return time.monotonic(), [counter.read() for counter in self._counters]

    def _processor_watts(self) -> float | None:
        """Mean power since the last reading, or over _BRIEF seconds if that is long ago."""
        if not self._counters:
            return None
        if not _MIN_SPAN_SECONDS <= time.monotonic() - self._last[0] <= _MAX_SPAN_SECONDS:
            self._last = self._joules()
            time.sleep(_MIN_SPAN_SECONDS)
        (then, before), self._last = self._last, self._joules()
        spent = sum(c.since(b) for c, b in zip(self._counters, before, strict=True) if b is not None)
        return spent / (self._last[0] - then)

    def _discharging(self) -> Iterator[Path]:
        """The batteries of the machine that discharge. One of a mouse or a keyboard does not count."""
        for supply in sorted(self._root.glob("class/power_supply/*")):
            is_battery = _text(supply / "type") == "Battery" and _text(supply / "scope") != "Device"
            if is_battery and _text(supply / "status") == "Discharging":
                yield supply

    def _battery_watts(self) -> float | None:
        """Power of a discharging battery, from uW, or from uA and uV."""
        for supply in self._discharging():
            power, current, voltage = (_number(supply / f"{x}_now") for x in ("power", "current", "voltage"))
            if power is None and current is not None and voltage is not None:
                power = current * voltage // 10**6
            return abs(power) / 1e6 if power else None
        return None


class Counter:
    """RAPL's energy_uj of one package; it wraps to 0 after max_energy_range_uj."""

    def __init__(self, path: Path):
        self._path = path

    def read(self) -> int | None:
        """Microjoules; None if this user may not read the counter."""
        return _number(self._path / "energy_uj")

    def since(self, before: int) -> float:
        """Joules since the count `before`, in microjoules."""
        now, around = self.read(), _number(self._path / "max_energy_range_uj")
        if now is None:
            return 0.0
        return ((now - before) if now >= before else (now - before + (around or 0))) / 1e6


def packages(folder: Path) -> Sequence[Counter]:
    """The RAPL counters that this user may read, one for each package; counters of parts of a package are
    left out."""
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
    """[[NSProcessInfo processInfo] thermalState] as one of HEAT; "" if it is not available."""
    state = _process_info(b"thermalState", ctypes.c_long)
    return HEAT[state] if state is not None and 0 <= state < len(HEAT) else ""


def low_power_mode() -> bool | None:
    """[[NSProcessInfo processInfo] isLowPowerModeEnabled]; None if it is not available."""
    return _process_info(b"isLowPowerModeEnabled", ctypes.c_bool)


def _process_info(question: bytes, kind: type) -> Any:
    """[[NSProcessInfo processInfo] QUESTION], whose C type is `kind`; None if it is not available."""
    try:
        ctypes.CDLL("/System/Library/Frameworks/Foundation.framework/Foundation")
        objc = ctypes.CDLL("/usr/lib/libobjc.dylib")
        pointer = ctypes.c_void_p
        named = ctypes.CFUNCTYPE(pointer, ctypes.c_char_p)
        class_, selector = (named((name, objc)) for name in ("objc_getClass", "sel_registerName"))
        # objc_msgSend is declared once for each signature that it is called with.
        asked = ctypes.CFUNCTYPE(pointer, pointer, pointer)(("objc_msgSend", objc))
        answered = ctypes.CFUNCTYPE(kind, pointer, pointer)(("objc_msgSend", objc))
        return answered(asked(class_(b"NSProcessInfo"), selector(b"processInfo")), selector(question))
    except (OSError, AttributeError):
        return None


def battery_watts(found: Any) -> float | None:
    """Watts from the battery, by ioreg's data; None while it does not discharge."""
    try:
        battery = found[0]
        current, voltage = battery["Amperage"], battery["Voltage"]  # mA, negative while discharging; mV
        current -= (current >= 1 << 63) << 64
        return -current * voltage / 1e6 if current < 0 else None
    except (LookupError, TypeError):
        return None
