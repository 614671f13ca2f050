"""Two models in memory for one and a half: asks a real `ruvmlx serve` for one and the other, by turns.

python -m tests.server.two_models FIRST.gguf SECOND.gguf [REQUESTS]     # 40 requests, some minutes

Prints how many requests were answered, how many models were opened, and the most memory that was planned and
taken, beside the limit. Exit code 1 if a request was refused, or if the plan was exceeded.
"""

import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from ruvmlx.apps.server.installed import InstalledModels

from ruvmlx.memory.load_plan import PROGRAM
from ruvmlx.models.find.local import survey
from ruvmlx.settings import Settings


def main(first: str, second: str, requests: str = "40") -> int:
    with tempfile.TemporaryDirectory() as folder:
        names = [_install(Path(folder), i, Path(file)) for i, file in enumerate((first, second))]
        limit = _limit([Path(first), Path(second)]) >> 20
        environment = {
            **os.environ,
            "LMSTUDIO_MODELS": folder,
            "RUVMLX_HOME": f"{folder}/data",
            "RUVMLX_SERVER_MEMORY": str(limit),
        }
        command = [sys.executable, "-m", "ruvmlx", "serve", "--port", "0", "--json", "--model", names[0]]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["base_url"]
            return _ask_by_turns(url, names, int(requests))
        finally:
            server.terminate()
            server.wait()


def _install(folder: Path, index: int, file: Path) -> str:
    """Put a link to the file where LM Studio would have it; returns the model's name."""
    place = folder / "models" / f"number-{index}"
    place.mkdir(parents=True)
    (place / file.name).symlink_to(file.resolve())
    return f"lmstudio:models/number-{index}"


def _limit(files: list[Path]) -> int:
    """Bytes for the larger model and half of the smaller one."""
    installed = InstalledModels(Settings())
    sizes = sorted(installed.need(survey(file.stem, file)).total - PROGRAM for file in files)
    return PROGRAM + sizes[1] + sizes[0] // 2


def _ask_by_turns(url: str, names: list[str], requests: int) -> int:
    statuses, taken, planned = list[int](), 0, 0
    for i in range(requests):
        body = {
            "model": names[i % 2],
            "max_tokens": 8,
            "messages": [{"role": "user", "content": "Name a river."}],
        }
        statuses.append(_status(f"{url}/chat/completions", body))
        found = json.load(urllib.request.urlopen(f"{url}/ps"))
        limit = found["limit_bytes"]
        taken, planned = max(taken, found["resident_bytes"]), max(planned, found["planned_bytes"])
    text = urllib.request.urlopen(f"{url.removesuffix('/v1')}/metrics").read().decode()
    opened = sum(
        int(line.split()[-1]) for line in text.splitlines() if line.startswith("ruvmlx_model_loads_")
    )
    print(f"{statuses.count(200)} of {requests} answered; models opened behind the first: {opened}")
    print(f"MB: planned at most {planned >> 20}, resident at most {taken >> 20}, limit {limit >> 20}")
    return int(set(statuses) != {200} or planned > limit)


def _status(url: str, body: Any) -> int:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        return int(urllib.request.urlopen(request, timeout=600).status)
    except urllib.error.HTTPError as error:
        return error.code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
