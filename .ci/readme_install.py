#!/usr/bin/env python3
"""Runs the commands of the README's section "Install" as they stand there, in a fresh clone.

    .ci/readme_install.py here WAY          on this machine: what the hosted workflows do
    .ci/readme_install.py debian FOLDER     in a new Debian 12 below FOLDER (needs root and debootstrap)
    .ci/readme_install.py new-python FOLDER     the same in Debian's unstable version; its Python is newer
    .ci/readme_install.py old-python FOLDER --python39 PREFIX     in a Debian 12 with only PREFIX's Python 3.9

WAY is the first word of the line that installs uv: brew, pipx or python3. The tests run with `-m unit`, or
all of them with --all-tests. Each run has an empty home folder, so uv downloads about 500 MB.
Where Python cannot be downloaded, --python-archive names a `.tar.gz` of one that uv gets in its place.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUESTION = "What is the capital of France?"
USER, UID = "someone", 1000
DEBIAN, UNSTABLE = "bookworm", "sid"
# What the README asks for beside uv, and git for the clone.
COMPILER = "build-essential,git,ca-certificates"
# What a Python in the place of uv's may link to; uv's own needs none of it.
LIBRARIES = "libsqlite3-0 libffi8 libssl3 liblzma5 libbz2-1.0 libreadline8"


def install_lines(readme: str) -> tuple[dict[str, str], list[str]]:
    """The lines that install uv, by their first word; then the commands that follow."""
    section = readme.split("\n## Install\n", 1)[1].split("\n## ", 1)[0]
    ways, commands = (
        [line.strip() for line in block.splitlines()] for block in re.findall(r"(?m)(?:^ {4}.*\n)+", section)
    )
    return {line.split()[0]: line for line in ways}, commands


def script(way: str, *, all_tests: bool) -> str:
    """A stranger's shell: the clone lies in ~/ruvmlx. A question and /quit stand for the keys."""
    ways, (chat, tests) = install_lines((ROOT / "README.md").read_text("utf-8"))
    chosen = "" if all_tests else "export PYTEST_ADDOPTS='-m unit'\n"
    return f"""set -euxo pipefail
cd ~/ruvmlx
{ways[way]}
uv --version
printf '%s\\n' {shlex.quote(QUESTION)} /quit > ~/keys
{{ {chat}
}} < ~/keys | tee ~/said
grep -q '^Assistant: [A-Z].' ~/said
{chosen}{tests}
"""


def clone(home: Path) -> None:
    home.mkdir(parents=True, exist_ok=True)
    run("git", "clone", "--quiet", "--depth", "1", ROOT.as_uri(), home / "ruvmlx")


def run(*words: object, **more: object) -> None:
    subprocess.run([str(word) for word in words], check=True, **more)  # type: ignore[call-overload]


def here(way: str, text: str) -> None:
    """A home folder of its own: no cache and no settings of this user are seen."""
    with tempfile.TemporaryDirectory() as folder:
        clone(Path(folder))
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "RUVMLX_GPU") if name in os.environ}
        print(f"-- {way}", flush=True)
        run("bash", "-c", text, env=kept | {"HOME": folder})


def make_debian(root: Path, version: str) -> None:
    """Install a Debian with a compiler and without Python in a folder, unless the folder has a Debian."""
    if not (root / "bin/bash").exists():
        run("debootstrap", "--variant=minbase", f"--include={COMPILER}", version, root)
        shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")


def in_debian(root: Path, text: str, environment: dict[str, str], user: str = USER) -> None:
    """bash in the chroot, with /proc and /dev and this machine's network."""
    settings = {"LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"} | environment
    settings["HOME"] = "/root" if user == "root" else f"/home/{user}"
    mounts = "".join(
        f"mount --rbind /{name} {shlex.quote(str(root))}/{name}; " for name in ("proc", "sys", "dev")
    )
    command = shlex.join(["chroot", f"--userspec={user}", str(root), "bash", "-c", text])
    run("unshare", "--mount", "bash", "-c", f"set -e; {mounts}exec {command}", env=settings)


def with_ca(root: Path) -> dict[str, str]:
    """The certificates that this machine trusts, where it was given its own."""
    shutil.copy("/etc/ssl/certs/ca-certificates.crt", root / "etc/ssl/certs/ca-certificates.crt")
    bundle = "/etc/ssl/certs/ca-certificates.crt"
    return {"SSL_CERT_FILE": bundle, "PIP_CERT": bundle, "DEBIAN_FRONTEND": "noninteractive"}


def new_system(folder: Path, name: str, version: str = DEBIAN) -> tuple[Path, dict[str, str]]:
    """A fresh copy of FOLDER's Debian with a user and a clone."""
    base, root = folder / f"base-{version}", folder / name
    make_debian(base, version)
    shutil.rmtree(root, ignore_errors=True)
    run("cp", "-a", base, root)
    environment = with_ca(root)
    in_debian(root, f"useradd --create-home --uid {UID} {USER}", environment, "root")
    clone(root / f"home/{USER}")
    run("chown", "-R", f"{UID}:{UID}", root / f"home/{USER}")
    return root, environment


def debian(folder: Path, text: str, name: str, version: str) -> None:
    """Debian's own Python, externally managed like Homebrew's: pip refuses, pipx works."""
    root, environment = new_system(folder, name, version)
    # a mirror of the unstable version can be older than its own file of releases allows
    update = "apt-get update -qq -o Acquire::Check-Valid-Until=false"
    install = "apt-get install -y -qq pipx python3-pip > /dev/null"
    in_debian(root, f"{update} && {install}", environment, "root")
    refused = "! pip install uv > ~/refusal 2>&1 && grep externally-managed-environment ~/refusal"
    in_debian(root, refused, environment)
    in_debian(root, text, environment)


def old_python(folder: Path, text: str, prefix: Path, archive: Path | None) -> None:
    """Python 3.9 and no other, as Apple's command line tools have it: uv brings the one that runs ruvmlx."""
    root, environment = new_system(folder, "old-python")
    run("cp", "-a", prefix, root / "opt/python3.9")
    (root / "usr/bin/python3").symlink_to("/opt/python3.9/bin/python3.9")
    if archive:
        in_debian(root, f"apt-get update -qq && apt-get install -y -qq {LIBRARIES}", environment, "root")
        environment |= offered_python(root, archive)
    in_debian(root, "python3 -c 'import sys; assert sys.version_info[:2] == (3, 9)'", environment)
    in_debian(root, text, environment)


def offered_python(root: Path, archive: Path) -> dict[str, str]:
    """uv's list of downloads, with `archive` alone: python/bin/python3 is in it."""
    name = re.search(r"(3)\.(\d+)\.(\d+)", archive.name)
    if not name:
        sys.exit(f"{archive.name} does not say which Python it holds, expected e.g. python-3.12.1.tar.gz")
    major, minor, patch = map(int, name.groups())
    shutil.copy(archive, root / "opt" / archive.name)
    row = {
        "name": "cpython", "arch": {"family": platform.machine(), "variant": None},
        "os": "linux", "libc": "gnu",
        "major": major, "minor": minor, "patch": patch, "prerelease": "", "variant": None, "build": "1",
        "url": f"file:///opt/{archive.name}", "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
    }  # fmt: skip
    key = f"cpython-{major}.{minor}.{patch}-linux-{platform.machine()}-gnu"
    (root / "opt/pythons.json").write_text(json.dumps({key: row}))
    return {"UV_PYTHON_DOWNLOADS_JSON_URL": "/opt/pythons.json"}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--all-tests", action="store_true")
    where = ask.add_subparsers(dest="where", required=True)
    where.add_parser("here").add_argument("way", choices=("brew", "pipx", "python3"))
    where.add_parser("debian").add_argument("folder", type=Path)
    where.add_parser("new-python").add_argument("folder", type=Path)
    old = where.add_parser("old-python")
    old.add_argument("folder", type=Path)
    old.add_argument("--python39", type=Path, required=True)
    old.add_argument("--python-archive", type=Path)
    asked = ask.parse_args()
    way = {"debian": "pipx", "new-python": "pipx", "old-python": "python3"}.get(asked.where) or asked.way
    text = script(way, all_tests=asked.all_tests)
    if asked.where == "here":
        here(way, text)
    elif asked.where in ("debian", "new-python"):
        version = DEBIAN if asked.where == "debian" else UNSTABLE
        debian(asked.folder.resolve(), text, asked.where, version)
    else:
        old_python(asked.folder.resolve(), text, asked.python39, asked.python_archive)
    print(f"The README's lines work: {asked.where}, {way}.")


if __name__ == "__main__":
    main()
