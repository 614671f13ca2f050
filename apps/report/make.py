"""This module makes the parts of a report. Each measurement has a share of the time that is left. If a part
fails, the report has a line with the error."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ruvmlx.models.config.model import Model
from ruvmlx.platform.cpu import physical_cores

from .. import privacy
from ..bench.machine import Thermometer
from . import facts, kernels, speed

Log = Callable[[str], None]
FORMAT = 1  # the version of the JSON format
# These are the checks whose details the report shows, because the details have only the program's own words.
# The details of other checks name files, chats or adapters.
PUBLIC_CHECKS = frozenset({"installation", "native library", "backend"})


def make(checks: Sequence[dict[str, Any]], open_model: Callable[[], Model], seconds: float, log: Log) -> dict:
    """Return the report as JSON data.

    The part "clock" times the same arithmetic before and after the measurements, because a machine that
    becomes hot is slower.

    checks: the results of the command doctor's checks; a failed check has the key "error"
    open_model: a function that returns the model to measure
    seconds: the time limit of the whole report
    """
    started, deadline, thermometer = time.monotonic(), speed.Deadline(seconds), Thermometer()
    report: dict[str, Any] = {"format": FORMAT, "made": time.strftime("%Y-%m-%d", time.gmtime())}
    failed: dict[str, str] = {}

    def part(name: str, make_it: Callable[[], Any]) -> Any:
        log(f"{name} ...")
        try:
            if (made := make_it()) is not None:
                report[name] = made
        except Exception as e:  # noqa: BLE001 - any exception is the result of its part
            failed[name] = getattr(e, "public", None) or privacy.public_error(e)
            log(f"{name}: failed: {failed[name]}")
        return report.get(name)

    gpu = part("gpu", facts.has_gpu)
    report["checks"] = [_public(check) for check in checks]
    part("machine", facts.machine_facts)
    part("load_before", facts.load_average)
    part("heat_before", facts.heat)
    part("kernels", lambda: kernels.of_the_starter(deadline.share(0.2)) if gpu else None)
    part("kernel_shapes", lambda: kernels.of_all(kernels.shapes(), deadline.share(0.35)) if gpu else None)
    part("clock", thermometer.read)
    opened: list[Model] = []

    def model_part() -> dict[str, Any]:
        opened.append(open_model())
        return facts.model_facts(opened[0])

    part("model", model_part)
    # If the machine has a GPU, mlx-lm runs on the GPU. So ruvmlx's speed on the CPU is not compared with
    # mlx-lm.
    runs = [("speed", ["mlx"], True, 0.8), ("speed_cpu", ["native"], False, 0.9)]
    for name, backends, peer, share in runs if gpu else [("speed", ["native", "mlx"], True, 0.97)]:
        if opened:
            part(name, partial(_speed, opened[0], backends, peer, deadline.share(share), log))
    part("clock", thermometer.read)
    part("heat_after", facts.heat)
    report["slower_at_the_end"] = round(thermometer.drift, 3)
    report["seconds"] = round(time.monotonic() - started, 1)
    return privacy.clean_json(report | {"failed": failed}, privacy.known_names())


def _speed(
    model: Model, backends: Sequence[str], peer: bool, deadline: speed.Deadline, log: Log
) -> dict[str, Any]:
    return speed.measure(model, backends, peer, physical_cores(), deadline, log)


def _public(check: dict[str, Any]) -> dict[str, Any]:
    told = {"name": check["name"], "ok": check["ok"]}
    if not check["ok"]:
        return told | {"error": privacy.public_error(check["error"])}
    return told | ({"detail": check["detail"]} if check["name"] in PUBLIC_CHECKS else {})
