"""The folders that trials of crash_verbs.py start from, each made by the program itself."""

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..models.make_gguf import make_gguf_model
from ..models.make_models import make_safetensors_model
from .crash_trial import Bench
from .crash_verbs import command, connect_write

SETTINGS = {"RUVMLX_BACKEND": "native", "RUVMLX_THREADS": "1", "RUVMLX_KV_DISK": "0"}
CHAT = [{"role": "user", "content": "a trip to Paris"}, {"role": "assistant", "content": "By train."}]


def prepare(bench: Bench, wanted: Collection[str]) -> None:
    """Make the model and these bases, with those that they start from; set the environment of all trials."""
    model = make_gguf_model(bench.folder / "tiny.gguf", max_context=512)
    os.environ.update(SETTINGS)
    os.environ["RUVMLX_MODEL"] = str(model)
    os.environ["RUVMLX_SERVED"] = str(make_safetensors_model(bench.folder / "served"))
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        os.environ[name] = str(bench.work / "out")
    os.environ["TMPDIR"] = str(bench.work / "tmp")
    os.environ.pop("RUVMLX_ADAPTER", None)
    starts = {base: start for base, start, _ in MAKERS}
    needed = {"empty"}
    for base in wanted:
        while base not in needed:
            needed.add(base)
            base = starts[base]
    _make(bench, "empty", None, make_empty)
    for base, start, make in MAKERS:
        if base in needed:
            _make(bench, base, start, make)


def _make(bench: Bench, name: str, start: str | None, make: Any) -> None:
    if start is None:
        bench.work.mkdir(parents=True, exist_ok=True)
    else:
        bench.reset(start)

    def call() -> int:
        os.environ["RUVMLX_HOME"] = str(bench.work / "home")
        return int(make(bench.work))

    ended = bench.run(call, after=sum(name.encode()) % 40)
    assert ended.code == 0, f"base {name}: {ended.code} {ended.out} {ended.err}"
    bench.keep(name)


def speed_up_tiny_model() -> None:
    """Measure the tiny model on few texts, train it for few steps, and let idle work wait for nothing."""
    from ruvmlx.platform import courtesy
    from ruvmlx.sona import measure_directions, reference_text

    texts, questions = reference_text.texts(), reference_text.questions()[:2]
    short = [*texts[:3], *[pair for pair in texts if not pair[0]][:3]]
    reference_text.texts, reference_text.questions = lambda: short, lambda: questions
    measure_directions.REPLIES, measure_directions.MAX_REPLY_TOKENS = 3, 9
    courtesy.Courtesy.reason_to_wait = lambda self: ""  # type: ignore[method-assign]
    courtesy.Courtesy.should_stop = lambda self: False  # type: ignore[method-assign]


def open_runtime(**settings: Any) -> Any:
    from ruvmlx import settings as config
    from ruvmlx.runtime import Runtime

    return Runtime.open(config.load(settings))


def reply(runtime: Any, seed: int, chat: str | None = None, prompt: str = "question") -> str:
    """Let the model write a few tokens; the reply's id."""
    from ruvmlx.engine import GenerationRequest, Sampling

    request = GenerationRequest(
        prompt=prompt, max_new_tokens=5, sampling=Sampling(seed=seed), ignore_eos=True
    )
    list(runtime.writer.generate(request, chat))
    return str(request.request_id)


def make_empty(work: Path) -> int:
    for name in ("out", "tmp"):
        (work / name).mkdir(parents=True)
    return 0


def use(work: Path) -> int:
    """Ratings inside and outside chats, a second adapter, a deleted chat, settings."""
    with open_runtime() as runtime:
        for i in range(2):
            chat = runtime.store.chats.new("tiny", title=f"chat {i}")
            runtime.store.messages.add_user(chat, f"question {i}")
            reply_id = reply(runtime, i, chat)
            runtime.learning.settle()
            runtime.rate(reply_id, "up")
        for i in range(4):
            reply_id = reply(runtime, 10 + i)
            runtime.learning.settle()
            if i < 3:
                runtime.rate(reply_id, "down" if i % 2 else "up")
        runtime.store.adapters.copy(runtime.model.fingerprint, "default", "work")
    (work / "home" / "config.toml").write_text("# mine\ntemperature = 0.5\n")
    return 0


def write_long_replies(work: Path) -> int:
    """Three replies on which all KV policies of `measure_tiers` can be measured, two of them measured."""
    from .crash_verbs import measure_tiers

    with open_runtime() as runtime:
        for i in range(3):
            reply(runtime, i, prompt=f"a long question {i} " * 22)
    return measure_tiers(work)


def route(work: Path) -> int:
    """As many rated choices of the router as its training needs."""
    from ruvmlx.sona.optional.router import MINIMUM

    with open_runtime(router=True) as runtime:
        for i in range(MINIMUM + 1):  # nothing is chosen before the first rating
            reply_id = reply(runtime, i, prompt=f"question {i % 5}")
            runtime.learning.settle()
            runtime.rate(reply_id, "down" if i % 3 else "up")
    return 0


def write_chats(work: Path) -> int:
    folder = work / "out" / "chats"
    folder.mkdir()
    for i in range(2):
        words = [{"role": turn["role"], "content": f"{turn['content']} {i}"} for turn in CHAT]
        (folder / f"{i}.json").write_text(json.dumps(words))
    return 0


def write_prompts(work: Path) -> int:
    lines = [json.dumps({"prompt": f"question {i}", "max_tokens": 4}) for i in range(2)]
    (work / "out" / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return 0


def lose_store(work: Path) -> int:
    (work / "home" / "ruvmlx.db").unlink()
    return 0


def make_older(work: Path) -> int:
    """A store of format 16, with a chat."""
    import sqlite3

    from ruvmlx.store.schema import statements

    (work / "home").mkdir(mode=0o700)
    db = sqlite3.connect(work / "home" / "ruvmlx.db", isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    for statement in statements(16):
        db.execute(statement)
    db.execute("PRAGMA user_version = 16")
    db.execute(
        "INSERT INTO sessions (id, title, model, created, updated)"
        " VALUES ('abcdefabcdef', 'old', 'tiny', 1, 1)"
    )
    db.execute(
        "INSERT INTO messages (session_id, role, content, created)"
        " VALUES ('abcdefabcdef', 'user', 'hello', 1)"
    )
    db.execute("UPDATE sessions SET head = 1")
    db.close()
    os.chmod(work / "home" / "ruvmlx.db", 0o600)
    return 0


MAKERS = [
    ("used", "empty", use),
    ("exported", "used", lambda work: command(work, ("adapters", "export", "{out}/adapter"))),
    (
        "backed-up",
        "used",
        lambda work: command(work, ("backup", "{out}/copy.db")) or command(work, ("learn", "undo")),
    ),
    ("lost", "backed-up", lose_store),
    ("completed", "empty", lambda work: command(work, ("completion", "install", "--shell", "zsh"))),
    ("connected", "empty", connect_write),
    ("long", "empty", write_long_replies),
    ("routed", "empty", route),
    ("chats", "used", write_chats),
    ("first", "empty", write_chats),
    ("deleted", "used", lambda work: command(work, ("sessions", "rm", "last"))),
    ("prompts", "used", write_prompts),
    ("old", "empty", make_older),
]
