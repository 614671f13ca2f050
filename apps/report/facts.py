"""This module collects facts about the machine, the versions of the software and the model. The facts name no
person, no host and no path."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ruvmlx
from ruvmlx import settings
from ruvmlx.models.config.model import Model
from ruvmlx.models.find.starter import starter_path
from ruvmlx.platform import sensors
from ruvmlx.platform.cpu import available_memory, physical_cores

from ..bench import machine

# The keys of MLX's mx.device_info() that the report has. Other keys are left out, because a new version of
# MLX can add a key that identifies a machine.
_GPU = ("device_name", "architecture", "memory_size", "max_recommended_working_set_size", "max_buffer_length")
_SYSCTL = {
    "performance_cores": "hw.perflevel0.physicalcpu",
    "efficiency_cores": "hw.perflevel1.physicalcpu",
    "model": "hw.model",
    "translated": "sysctl.proc_translated",  # 1 if this Python is for x86-64 and runs under Rosetta
}


def machine_facts() -> dict[str, Any]:
    from ruvmlx.platform.mx import BLAS, mx

    info = mx.device_info()
    return machine.hardware(physical_cores()) | {
        "memory_free": available_memory(),
        "system": _system_build(),
        "cpu_blas": BLAS.name,
        "gpu": {"metal": mx.metal.is_available(), "cuda": mx.cuda.is_available()}
        | {name: info[name] for name in _GPU if name in info and mx.default_device() == mx.Device(mx.gpu)},
        **_sysctl(),
        "commit": commit(Path(ruvmlx.__file__).parents[1]),
        "settings": _public_settings(),
        # the names of the environment variables RUVMLX_* that are set
        "environment": sorted(machine.environment()),
    }


def _public_settings() -> dict[str, Any]:
    found = {name: settings.setting_text(s.value) for name, s in settings.resolve().items()}
    return {name: value for name, value in found.items() if settings.SPECS[name].public and value}


def has_gpu() -> bool:
    from ruvmlx.backends.mlx.runner import default_device

    return default_device() != "cpu"


def _system_build() -> str:
    """Return the name and version of the operating system, such as "macOS 15.1 (24B83)" or "Linux 6.1". The
    host's name is left out."""
    if sys.platform == "darwin":
        # Ask the command sw_vers for the version. On macOS 26, platform.mac_ver() returns 16.0 if Python was
        # built for an older macOS.
        version, build = (
            machine.output("sw_vers", f"-{name}") for name in ("productVersion", "buildVersion")
        )
        return f"macOS {version} ({build})"
    return f"{platform.system()} {re.match(r'[0-9.]*', platform.release())[0]}"  # type: ignore[index]


def _sysctl() -> dict[str, str]:
    if sys.platform != "darwin":
        return {}
    said = {name: machine.output("sysctl", "-n", key) for name, key in _SYSCTL.items()}
    return {name: value for name, value in said.items() if value}


def commit(folder: Path) -> str | None:
    """Return the commit of the git checkout in a folder; None if the folder is no git checkout, or if the
    command git fails. A "+" follows the commit if files in the checkout were changed."""
    if not (folder / ".git").exists():
        return None
    try:
        head, changes = (
            subprocess.run(
                ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=5, check=True
            ).stdout.strip()
            for words in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "-uno"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head + "+" * bool(changes)


def model_facts(model: Model) -> dict[str, Any]:
    """Return facts about the model's size and shape. The model's name is left out, because the user can
    choose any name for a folder."""
    shape = {name: value for name, value in vars(model.shape).items() if isinstance(value, int | float)}
    return {
        "starter": model.path == starter_path(),
        "format": model.format,
        "type": model.shape.model_type,
        "parameters": model.parameters,
        "bytes": model.bytes,
        "bits": round(model.bits, 2),
        "shape": shape,
    }


def heat() -> dict[str, Any] | None:
    """Return the machine's thermal state and its low-power mode, because both can slow the machine down.
    Return None if the operating system reports neither."""
    told = {"thermal_state": sensors.thermal_state(), "low_power_mode": sensors.low_power_mode()}
    return {name: value for name, value in told.items() if value not in ("", None)} or None


def load_average() -> Mapping[str, float]:
    """Return the load average: the mean number of runnable processes over the last minute. If the load
    average is above the number of cores, the report's figures of speed are not reliable."""
    return {"load": round(os.getloadavg()[0], 1)}
