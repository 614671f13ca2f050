"""Is the installed wheel whole? Run by a Python that has it and the starter model, from any folder.

It must not be the checkout that answers: a library or kernel that the wheel lacks would be found there.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path


def main() -> None:
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]
    import ruvmlx
    from ruvmlx.kernels.library import find, implementations

    installed = Path(sysconfig.get_path("platlib")).resolve()
    for part in (Path(ruvmlx.__file__), find("rvm")):
        if not part.resolve().is_relative_to(installed):
            sys.exit(f"{part} is not in {installed}: this is not the wheel")
    if len(kernels := list((Path(ruvmlx.__file__).parent / "metal_kernels").glob("*.metal"))) < 9:
        sys.exit(f"{len(kernels)} Metal kernels are installed, expected 9 or more")
    checks = verb("doctor", "--json")["checks"]
    reply = verb("generate", "What is the capital of France?", "--temp", "0", "--max-tokens", "16", "--json")
    if "Paris" not in reply["text"]:
        sys.exit(f"the starter model says {reply['text']!r}, expected a sentence with Paris")
    print(f"{len(checks)} checks, library {implementations()[0]}, {reply['kernels']}: {reply['text']}")


def verb(*words: str) -> dict:
    """A verb of the installed command, in an empty folder and with an empty store."""
    command = Path(sysconfig.get_path("scripts")) / "ruvmlx"
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [command, *words],
            capture_output=True,
            text=True,
            cwd=home,
            env=os.environ | {"RUVMLX_HOME": home},
        )
    if done.returncode:
        sys.exit(f"ruvmlx {words[0]} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
