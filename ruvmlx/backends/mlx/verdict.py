"""This module stores the verdicts of the GPU kernels' self-check, so that the check mostly runs once for each
machine and each model's shapes.

A verdict belongs to a key: the GPU, the build of its compiler, the versions of MLX and mlx-lm, the sources of
ruvmlx's kernels, and the model's shapes. The file is optional: if it is damaged, missing or not writable, the
check runs again. This is the format of DATA/gpu_check.json, with the newest verdict last:

    {"format": 1, "verdicts": [
        {"key": {"gpu": "Apple M3", ...}, "seconds": 2.1, "made": "2026-01-31T12:00:00Z",
         "results": [{"name": "append", "ok": true, "why": "", "ratio": 0.4}, ...]}]}
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ... import settings
from ...platform import files
from ...platform.gpu import gpu
from .check_results import CheckResult, KernelVerdict, Shapes
from .kernels import source

# FORMAT: the version of the file's format. MAX_VERDICTS: the maximum number of stored verdicts; the oldest
# verdicts are dropped.
FORMAT, MAX_VERDICTS = 1, 16


# The key --------------------------------------------------------------------------------------------


def key(shapes: Shapes) -> dict[str, Any]:
    """Return the key of a verdict: the values on which the result of the check probably depends."""
    return {
        "device": gpu.kind,
        "gpu": gpu.name,
        "system": gpu.system,
        "mlx": _version("mlx"),
        "mlx_lm": _version("mlx-lm"),
        "kernels": sources_hash(),
        **asdict(shapes),
    }


def _version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return ""


def sources_hash() -> str:
    """Return a hash of the GPU kernels' Metal sources and headers, and of the Python files in the folder of
    the code that launches them."""
    found = hashlib.sha256()
    for folder, kinds in ((source.folder(), (".metal", ".h")), (Path(source.__file__).parent, (".py",))):
        for file in sorted(f for f in folder.iterdir() if f.suffix in kinds):
            data = file.read_bytes()
            found.update(f"{file.name} {len(data)}\n".encode() + data)
    return found.hexdigest()[:32]


# The file -----------------------------------------------------------------------------------------


def path() -> Path:
    return settings.home() / "gpu_check.json"


def stored_verdict(wanted: dict[str, Any]) -> KernelVerdict | None:
    """Return the stored verdict for this key, or None."""
    for entry in reversed(_entries()):
        with suppress(KeyError, TypeError, ValueError):
            if entry["key"] == wanted:
                return _read_entry(entry)
    return None


def keep(wanted: dict[str, Any], verdict: KernelVerdict) -> None:
    """Store the verdict. If the file cannot be written, the next start of the program checks the kernels
    again."""
    entry = {
        "key": wanted,
        "seconds": round(verdict.seconds, 2),
        "made": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "results": [asdict(result) for result in verdict.results],
    }
    others = [e for e in _entries() if not (isinstance(e, dict) and e.get("key") == wanted)]
    with suppress(OSError):
        _write({"format": FORMAT, "verdicts": [*others[-(MAX_VERDICTS - 1) :], entry]})


def _entries() -> list[Any]:
    try:
        whole = json.loads(path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    right = isinstance(whole, dict) and whole.get("format") == FORMAT
    found = whole.get("verdicts") if right else None
    return found if isinstance(found, list) else []


def _read_entry(entry: dict[str, Any]) -> KernelVerdict:
    """Return the verdict of an entry of the file. Raises ValueError, TypeError or KeyError if the entry is
    damaged."""
    results: Sequence[dict[str, Any]] = entry["results"]
    made = tuple(CheckResult(**result) for result in results)
    if not made or not all(isinstance(r.ok, bool) and isinstance(r.name, str) for r in made):
        raise ValueError("no verdict")
    return KernelVerdict(made, float(entry["seconds"]))


def _write(whole: dict[str, Any]) -> None:
    """Replace gpu_check.json by a file with these results. A program that reads the file meanwhile gets the
    old results or the new results."""
    files.make_folder(path().parent)
    with files.replacing(path()) as file:
        file.write(json.dumps(whole, indent=1).encode())
