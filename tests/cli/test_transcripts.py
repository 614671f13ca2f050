"""What verbs print, at 80 and 120 columns: tests/cli/transcripts/ has it, for people to read.

`pytest tests/cli/test_transcripts.py --write-screens` writes the files again; read the difference. Ids,
paths, times and speeds are replaced by what they are, because they differ from run to run.
"""

import re
import shutil
import tempfile
from pathlib import Path

import pytest

from .test_cli import run  # noqa: F401 - a fixture

FOLDER = Path(__file__).with_name("transcripts")
WIDTHS = (80, 120)
REPLY = ("--max-tokens", "4", "--temp", "0", "--ignore-eos")

# In this order: a verb finds what the verbs before it have made. MODEL stands for the tiny model's flag.
VERBS = (
    "sessions ls",
    "adapters ls",
    "learn status MODEL",
    "sessions import chat.json",
    "sessions ls",
    "sessions show last",
    "sessions search paris",
    "sessions fork last",
    "sessions rm last",
    "sessions restore",
    "generate hello MODEL REPLY",
    "rate last up MODEL",
    "rate last 2 MODEL",
    "learn status MODEL",
    "learn status --details MODEL",
    "learn chart MODEL",
    "learn kv MODEL",
    "learn router MODEL",
    "learn undo MODEL",
    "learn rollback 99 MODEL",
    "adapters save work MODEL",
    "adapters ls",
    "adapters use wrok MODEL",
    "adapters use work MODEL",
    "config set max_tokens 200",
    "config show",
    "config show --origin",
    "config unset max_tokens",
    "config path",
    "backup copy.db",
    "completion install --shell bash",
    "completion remove --shell bash",
    "pull qwen",
    "show MODEL_NAME",
    "perplexity text.txt MODEL",
)
UNSTEADY = (
    (r"/\S*pytest\S*", "PATH"),
    (r"\b[0-9a-f]{12}\b", "ID          "),
    (r"\bjust now\b|\b\d+ (seconds?|minutes?) ago\b", "just now"),
    (r"\d[\d.,]* (MB|GB|kB|B)\b", "SIZE"),
    (r"\d+\.\d+ (ms|s|of f16's time)", r"N \1"),
    (r"(native|reference|mlx), \w+( \w+, \d+ threads?)?", "BACKEND"),
    (r" +$", ""),
)


@pytest.fixture
def short_folder():
    """A folder whose path has the same length in every run: where a line breaks depends on its paths."""
    with tempfile.TemporaryDirectory(prefix="pytest-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def model_folder(short_folder, tiny_folder):
    return shutil.copytree(tiny_folder, short_folder / "tiny-llama")


@pytest.fixture(params=WIDTHS)
def width(request, monkeypatch, short_folder, home):
    monkeypatch.setenv("RUVMLX_HOME", str(short_folder / "home"))
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("HOME", str(short_folder))
    monkeypatch.chdir(short_folder)
    (short_folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 3)
    (short_folder / "chat.json").write_text(
        '[{"role": "user", "content": "Where is Paris?"}, {"role": "assistant", "content": "In France."}]'
    )
    return request.param


def steady(text: str) -> str:
    """The text without what differs from run to run; of a table, the widths of columns stay comparable."""
    for pattern, instead in UNSTEADY:
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return re.sub(r" {2,}", "  ", text)


def words_of(verb: str, model_folder: Path) -> list[str]:
    """The command line of a row of VERBS."""
    model = {"MODEL": ["--model", str(model_folder)], "MODEL_NAME": [str(model_folder)], "REPLY": REPLY}
    return [part for word in verb.split() for part in model.get(word, [word])]


def test_what_verbs_print(width, run, model_folder, request):  # noqa: F811
    """Each line fits the terminal; the structure is that of the committed file."""
    told, wide = [], []
    for verb in VERBS:
        _, out, err = run(*words_of(verb, model_folder))
        told.append(f"$ ruvmlx {verb}\n{steady(out)}{steady(err)}")
        wide += [line for line in out.splitlines() if len(line) > width and "pytest" not in line]
    assert not wide
    assert not re.search(r"\b1 (ratings|replies|chats|tokens|seeds|checks|messages)\b", "\n".join(told))
    text, file = "\n".join(told), FOLDER / f"{width}.txt"
    if request.config.getoption("--write-screens"):
        FOLDER.mkdir(exist_ok=True)
        file.write_text(text, "utf-8")
    assert text == file.read_text("utf-8")
