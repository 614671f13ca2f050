"""This module decides if background work must wait: on battery power, on a hot machine, or if other programs
keep all cores busy."""

import os
import time
from collections.abc import Callable

from .sensors import Sensors

HOT = 90.0  # degrees Celsius of the processor's hottest sensor from which background work must wait
HEAT = ("serious", "critical")  # the thermal states (sensors.HEAT) in which background work must wait
LOOK_EVERY = 10.0  # seconds between two readings of the sensors while the work runs
ON_BATTERY, IS_HOT = "the machine runs on its battery", "the machine is hot"
IS_BUSY = "other programs keep all cores busy"


class Courtesy:
    """The rules for background work. load: a function that returns the system's load averages; the first one
    is the average of the last minute."""

    def __init__(
        self,
        sensors: Sensors | None = None,
        load: Callable[[], tuple[float, ...]] = os.getloadavg,
        cores: int | None = None,
    ):
        self._sensors, self._load = sensors or Sensors(), load
        self._cores = cores or os.cpu_count() or 1
        self._looked_at = time.monotonic()

    def reason_to_wait(self) -> str:
        """Return the reason why background work must not begin now, or "" if the work can begin."""
        if reason := self._reason():
            return reason
        return IS_BUSY if self._load()[0] >= self._cores else ""

    def should_stop(self) -> bool:
        """Return True if background work that runs must stop. The method reads the sensors only once in
        LOOK_EVERY seconds, because one reading takes up to a tenth of a second. The method ignores the load,
        because the work itself keeps the cores busy."""
        if time.monotonic() - self._looked_at < LOOK_EVERY:
            return False
        self._looked_at = time.monotonic()
        return bool(self._reason())

    def _reason(self) -> str:
        if self._sensors.is_on_battery():
            return ON_BATTERY
        celsius, heat = self._sensors.heat()
        return IS_HOT if heat in HEAT or (celsius is not None and celsius >= HOT) else ""
