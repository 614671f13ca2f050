"""A tokenizer of unknown origin is tried in a process of its own before this process opens it.

The libraries that read tokenizer.json and tokenizer.model can panic, abort, search a regular expression for
hours or take all memory, and neither can be caught here. So a child with limits of time and memory opens the
folder's tokenizer, and encodes texts that are known to make such files run away. What passes is remembered in
the data folder by a hash of its content: the next start only computes the hash.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from .. import errors
from ..errors import CorruptFile, RuvmlxError
from ..platform.files import open_ordinary
from ..settings import home
from .json_files import MAX_BYTES
from .messages import one_line
from .model import Message
from .tokenizer_base import BaseTokenizer

READ = ("tokenizer.json", "tekken.json", "tokenizer.model")  # the first one there is the tokenizer
BESIDE = ("tokenizer_config.json", "added_tokens.json")
PASSED = "tried-tokenizers"  # folder of empty files, each named by a hash
VERSION = 1  # of the trial: a stricter one tries every file again
SECONDS, BYTES_PER_SECOND = 5.0, 4e6  # of processor time, and more for large files
WAIT = 12  # times as long by the clock: the machine may be busy
MEMORY, PER_BYTE = 200_000_000, 20  # bytes; a large vocabulary takes about 15 times its file
MOST_TOKENS, BESIDES = 8, 64  # tokens per byte of a text, and per text
POLL = 0.1  # s
LONG = 20_000  # characters


def try_tokenizer(folder: Path) -> None:
    """Raise CorruptFile or UnsupportedModel unless the folder's tokenizer opens and works within limits."""
    path = next((folder / name for name in READ if (folder / name).is_file()), None)
    if path is None:
        return
    if path.stat().st_size > MAX_BYTES:
        raise CorruptFile(f"{path.name} is {path.stat().st_size} bytes; at most {MAX_BYTES} were expected.")
    passed = home() / PASSED / _digest(folder, path)
    if passed.exists():
        return
    _tried(folder, path)
    with contextlib.suppress(OSError):  # a full or read-only disk: it is tried again next time
        passed.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(passed, os.O_CREAT | os.O_WRONLY, 0o600))


def _digest(folder: Path, path: Path) -> str:
    """Of all that decides what the libraries do."""
    libraries = "sentencepiece" if path.suffix == ".model" else "tokenizers"
    total = hashlib.sha256(f"{VERSION} {path.name} {version(libraries)}".encode())
    for file in (path, *(folder / name for name in BESIDE)):
        try:
            with open_ordinary(file) as opened:
                total.update(b"\0" + hashlib.sha256(opened.read(MAX_BYTES)).digest())
        except FileNotFoundError:
            total.update(b"\0")
        except OSError as error:
            raise CorruptFile(
                f"{file.name} cannot be read: {error.strerror}. Fetch the model again."
            ) from None
    return total.hexdigest()


def _tried(folder: Path, path: Path) -> None:
    size = path.stat().st_size
    seconds, memory = SECONDS + size / BYTES_PER_SECOND, MEMORY + PER_BYTE * size
    # Not the working folder's modules (-P), and one thread: each reserves memory.
    command = [sys.executable, "-P", "-m", __name__, str(folder.resolve()), str(seconds), str(memory)]
    one = dict.fromkeys(("RAYON_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
    environment = {**os.environ, **one, "TOKENIZERS_PARALLELISM": "false"}
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    with child:
        try:
            said = _finished(child, seconds * WAIT, memory)
        except BaseException:
            child.kill()
            raise
    if said is None or child.returncode:
        limits = f"{seconds:.0f} seconds of work and {memory >> 20} MB"
        raise CorruptFile(
            f"{path.name} breaks the library that reads it, or needs more than {limits}. "
            "Fetch the model again."
        )
    if said:
        raise getattr(errors, said["error"])(said["text"])


def _finished(child: subprocess.Popen, seconds: float, memory: int) -> dict[str, str] | None:
    """What the child said; None if it had to be stopped, or said nothing."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            out, _ = child.communicate(timeout=POLL)
            return json.loads(out) if out else None
        except subprocess.TimeoutExpired:
            if sys.platform == "darwin" and _resident(child.pid) > memory:  # which limits no address space
                break
    child.kill()
    return None


def _resident(pid: int) -> int:
    """Bytes that a process holds in memory."""
    found = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return int(found.stdout.strip() or 0) * 1024


# In the child -------------------------------------------------------------------------------------


def _limit(seconds: float, memory: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = time.process_time()
    resource.setrlimit(resource.RLIMIT_CPU, (int(used + seconds) + 1,) * 2)
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        total = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (total, total))


def _texts() -> Iterator[str]:
    """Ordinary ones, and those on which careless regular expressions and replacements run away."""
    yield from ("", " ", "a", "Hello, world! It's 2026: 12,345.67 €.\n\n\tdef f(x): return x\r\n")
    yield "é ü ﬁ 漢字 かな 한국어 🙂👩‍👩‍👧 \u200b\ufeff\x00\x7f\U0010ffff"
    for code in range(32, 127):
        yield chr(code) * 32 + "!"
        yield chr(code) * 32 + "\n"
    yield "aA" * 30 + "!"
    yield "a1 " * 30 + "\n"
    yield "a" * LONG
    yield "word, " * (LONG // 6)


def _try(tokenizer: BaseTokenizer, where: str) -> None:
    for text in _texts():
        ids = tokenizer.encode(text)
        most = MOST_TOKENS * len(text.encode()) + BESIDES
        if len(ids) > most:
            raise CorruptFile(f"{where}: {len(text)} characters become {len(ids)} tokens; at most {most} do.")
        if not all(0 <= i < tokenizer.vocab_size for i in ids):
            raise CorruptFile(f"{where}: it makes tokens beyond its {tokenizer.vocab_size}.")
        tokenizer.decode(ids)
    with contextlib.suppress(errors.UsageError, errors.UnsupportedModel):  # the template is checked elsewhere
        tokenizer.encode_chat([Message("user", "Hello")])


def _main() -> None:
    from .tokenizer_json import folder_tokenizer

    folder, seconds, memory = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    _limit(seconds, memory)
    where, said = next(name for name in READ if (folder / name).is_file()), {}
    try:
        _try(folder_tokenizer(folder), where)
    except RuvmlxError as error:
        said = {"error": type(error).__name__, "text": str(error)}
    except BaseException as error:  # noqa: BLE001 - a panic in Rust is no Exception
        text = f"{where} breaks the library that reads it: {one_line(error)}. Fetch the model again."
        said = {"error": "CorruptFile", "text": text}
    print(json.dumps(said), flush=True)
    os._exit(0)  # no destructor of a broken library runs


if __name__ == "__main__":
    _main()
