"""The verbs that write, each with what a trial of it needs, and the verbs that only read, with the reasons.

test_crashes.py compares this table with the command line's own list: a new verb is in one of the two.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from .crash_promises import BEGAN_DELETING, CLIENT_FAILED, DELETED, RATED, STORED, tell

TWO = ("before", "after")


@dataclass(frozen=True)
class Verb:
    """A writing verb.

    words: its arguments; {out} and {home} are folders of the trial
    base: the folder that it starts from: "used", "empty" (nothing yet), or one of MAKERS below
    states: the states that a crash may leave, in their order; those between the first and the last are
        commits of a verb of several steps
    call: what runs in place of the command line, where a trial of the verb needs a server or a terminal
    then: what the next start does besides; it returns a line for each thing that is wrong
    stdin: what is typed
    errors: the fewest and the most lines of error after a fault; a chat has one for each typed line
    has_promises: threads decide the order of its commits, so that a state between the first and the last has
        no name; the state keeps what was told (crash_promises.py)
    has_threads: threads decide the order of its calls, so that a later kill may find an earlier state
    caches: how the names begin of files and tables that the program can make again. A verb can end well
        without these files and tables.
    late: exit codes that are right, besides the usual one, with a clock that has jumped
    has_report: what is wrong stands in the verb's report on standard output
    """

    name: str
    words: tuple[str, ...] = ()
    base: str = "used"
    states: tuple[str, ...] = TWO
    call: Callable[[Path], int] | None = None
    then: Callable[[Path], list[str]] | None = None
    stdin: str = ""
    errors: tuple[int, int] = (1, 1)
    late: tuple[int, ...] = ()
    has_promises: bool = False
    has_threads: bool = False
    caches: tuple[str, ...] = ()
    has_report: bool = False
    is_slow: bool = False

    def run(self, work: Path) -> int:
        """Run the verb in this process, as if the process were the verb's own. Return the exit code."""
        os.environ["RUVMLX_HOME"] = str(work / "home")
        if self.call is not None:
            return self.call(work)
        return command(work, self.words, self.stdin)


def command(work: Path, words: tuple[str, ...], stdin: str = "") -> int:
    """Run a command line in this process."""
    from ruvmlx.apps.cli import cli
    from ruvmlx.apps.cli.output import run_plainly

    if stdin:
        reading, writing = os.pipe()
        os.write(writing, stdin.encode())
        os.close(writing)
        os.dup2(reading, 0)
    sys.argv = ["ruvmlx", *(word.format(out=work / "out", home=work / "home") for word in words)]
    try:
        return run_plainly(cli)
    except SystemExit as ended:
        return int(ended.code or 0)


def verb(line: str, states: tuple[str, ...] = TWO, **facts: object) -> Verb:
    """A verb whose words have no spaces in them: `sessions rm {chat}`."""
    words = tuple(line.split())
    return Verb(facts.pop("name", None) or line, words, states=states, **facts)  # type: ignore[arg-type]


# -- verbs without a command line of their own -------------------------------------------------------


def connect_write(work: Path) -> int:
    """What `connect codex --write` does with the client's file, after the server has answered."""
    from ruvmlx.apps.cli.written_files import write_over

    return _plainly(
        lambda: write_over(
            work / "out" / "client.json", '{"base": 2}\n', work / "home" / "connected" / "c.json"
        )
    )


def connect_undo(work: Path) -> int:
    from ruvmlx.apps.cli.written_files import put_back

    return _plainly(lambda: put_back(work / "home" / "connected" / "c.json"))


def serve_install(work: Path) -> int:
    from ruvmlx.apps.cli import service

    found = service.Service(work / "out" / "ruvmlx.service", "[Unit]\n", "start", "stop")
    return _plainly(lambda: service._write(found))


def serve_key(work: Path) -> int:
    """The key that `serve --host` makes beyond this machine."""
    from ruvmlx.apps.server.keys import new_key

    return _plainly(new_key)


def save_role(work: Path) -> int:
    """/as NAME save, in the chat."""
    from ruvmlx.apps.chat import roles

    return _plainly(lambda: roles.save("cook", "You are a cook."))


def page_store(work: Path) -> int:
    from .crash_pages import write_pages

    return _plainly(write_pages)


def read_page_store(work: Path) -> list[str]:
    from .crash_pages import read_pages

    return read_pages()


def measure_tiers(work: Path) -> int:
    """`learn kv --measure` of two policies whose pages of all tiers are in short replies."""
    from ruvmlx.kv.policy import TierPolicy
    from ruvmlx.kv.pool import PagePool
    from ruvmlx.kv_tuning import tier_choice

    tier_choice.CANDIDATES = tuple(TierPolicy("tiered", (64, warm)) for warm in (64, 128))
    tier_choice.TIE = 1e9  # measured times decide nothing
    PagePool.pressure = lambda self: 0.1  # type: ignore[method-assign]
    return command(work, ("learn", "kv", "--measure"))


def consolidate(work: Path) -> int:
    """`learn consolidate` with two steps and a result that is always used. The first step is saved."""
    from ruvmlx.sona import background, promotion

    from .crash_bases import open_runtime

    promotion.objection = lambda *a: ""  # type: ignore[assignment]
    background.SAVE_EVERY = 1  # type: ignore[attr-defined]
    settings = background.TrainingSettings(steps=2, lr=4e-3, warmup=1, rank=2, minimum=4)

    def train() -> None:
        with open_runtime() as runtime:
            runtime.learning.consolidate(settings=settings)

    return _plainly(train)


def consolidate_style(work: Path) -> int:
    """`learn consolidate` with `slow_loop style`: the basis of the model from few short replies, then a style
    that is always used."""
    from ruvmlx.sona import faults
    from ruvmlx.sona.optional import style_bank, style_choice, style_loop
    from ruvmlx.sona.taste import TasteModel

    from .crash_bases import open_runtime

    questions, prose = style_bank.texts("style_questions")[:2], style_bank.texts("style_prose")[:1]
    style_loop.texts = lambda name: questions if name == "style_questions" else prose  # type: ignore
    style_bank.REPLIES, style_bank.MAX_REPLY_TOKENS, faults.MAX_REPLY_TOKENS = 5, 5, 5
    faults.questions = lambda: ("Why?",)
    style_loop.SAVE_EVERY, style_loop.MINIMUM = 0.0, 4  # type: ignore[attr-defined]
    of = style_choice.StyleChoice.of
    style_choice.StyleChoice.of = lambda *a: replace(of(*a), confidence=1.0)  # type: ignore
    style_loop.agreement = lambda *a: 0.0
    TasteModel.predict_gain = lambda *a: (1.0, 0.0)  # type: ignore[method-assign]
    style_loop.StyleLoop._worse = lambda *a: ""  # type: ignore[method-assign]

    def choose() -> None:
        with open_runtime(slow_loop="style") as runtime:
            report = runtime.learning.consolidate()
            assert report["promoted"], report

    return _plainly(choose)


def record_changes(work: Path) -> int:
    """`learn consolidate --deep`."""
    from .crash_bases import open_runtime

    def run_deep_loop() -> None:
        with open_runtime() as runtime:
            runtime.learning.loops.deepen()

    return _plainly(run_deep_loop)


def pull(work: Path) -> int:
    """`pull` from a hub of the trial's own."""
    import huggingface_hub.constants as constants

    from ..models.fake_hub import FakeHub
    from .crash_trial import PULLED

    hub, cache = FakeHub(Path(os.environ["RUVMLX_SERVED"]), PULLED), str(work / "out" / "hub")
    constants.ENDPOINT, constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = hub.url, cache, False
    constants.HUGGINGFACE_CO_URL_TEMPLATE = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    os.environ.update(HF_HUB_CACHE=cache, HF_HUB_OFFLINE="0")
    try:
        return command(work, ("pull", PULLED))
    finally:
        hub.close()


def serve_a_client(work: Path) -> int:
    """`serve` itself, with three requests of a client and SIGTERM."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["RUVMLX_KV_DISK"] = "8"
    thread = threading.Thread(target=_client, args=(port, work / "home" / "api_keys"), daemon=True)
    thread.start()
    return command(work, ("serve", "--json", "--port", str(port), "--max-tokens", "5"))


def _client(port: int, keys: Path) -> None:
    """Ask for a response and its continuation, rate the continuation, delete the first response, and send
    SIGTERM."""
    try:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.1):
                break
            time.sleep(0.01)
        key, asked = keys.read_text().split()[0], {"model": "tiny"}
        first, one = _respond(port, key, asked | {"input": "a question " * 30})
        more = asked | {"input": "and more", "previous_response_id": first}
        _, two = _respond(port, key, more)
        _ask(port, key, "/v1/ratings", {"id": two, "rating": "up"})
        tell(RATED, two)
        tell(BEGAN_DELETING, one)
        _ask(port, key, f"/v1/responses/{first}", None)
        tell(DELETED, one)
    except OSError as error:
        print(f"{CLIENT_FAILED}{error}", file=sys.stderr)
        if not isinstance(error, urllib.error.HTTPError):
            return  # the server ends without the client
    os.kill(os.getpid(), signal.SIGTERM)


def _respond(port: int, key: str, body: dict) -> tuple[str, str]:
    """Ask for a response. Return (its id, the id of its reply). `tell` that it is stored if the answer says
    so."""
    answer = _ask(port, key, "/v1/responses", body)
    reply = answer["id"].removeprefix("resp_")
    if answer["store"]:
        tell(STORED, reply)
    return answer["id"], reply


def _ask(port: int, key: str, path: str, body: dict | None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data,
        {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
        method="DELETE" if body is None else "POST",
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


def _plainly(act: Callable[[], object]) -> int:
    """Run it with the errors of the command line."""
    import click
    from ruvmlx.apps.cli.output import run_plainly

    sys.argv = ["ruvmlx"]
    return run_plainly(click.Command("act", callback=lambda: act() and None))


# -- the table ---------------------------------------------------------------------------------------

# A chat is hidden until it is whole; a start an hour after a kill erases it.
IMPORTED = (
    "before",
    "one hidden",
    "one hidden and filled",
    "one",
    "two hidden",
    "two hidden and filled",
    "after",
)
# A reply is in the store before its line is in the file of results, which a later run fills up.
BATCH = (
    "before", "a file", "reply 1", "line 1", "its figures", "reply 2", "line 2", "an error's line",
    "a reply without its line", "two without a line", "a line lost",
    *(f"traces, with or without replies and lines {i}" for i in range(1, 10)), "after",
)  # fmt: skip
# The faults of the original model's replies are kept for later trainings.
TRAINED = ("before", "a step", "the model's faults", "after")
# The bank of replies is saved before each of its 13 parts and after the last one.
STYLED = (
    "before",
    *(f"bank {i}" for i in range(1, 15)),
    "basis beside the bank",
    "basis",
    "measured",
    "after",
)
WRITES = [
    verb("adapters save work2"),
    verb("adapters use work", ("before", "setting", "after")),
    verb("adapters rm work"),
    verb("adapters export {out}/adapter", name="adapters export"),
    verb("adapters import {out}/adapter new", base="exported", name="adapters import"),
    verb("adapters fuse {out}/fused", name="adapters fuse"),
    verb("backup {out}/copy.db", name="backup"),
    verb("backup {out}/copy.db --replace", base="backed-up", name="backup --replace"),
    verb("restore {out}/copy.db", ("before", "the old store has two names", "after"), base="backed-up",
         name="restore"),
    verb("restore {out}/copy.db", base="lost", name="restore without a store"),
    verb("completion install --shell zsh", base="empty", name="completion install"),
    verb("completion remove --shell zsh", base="completed", name="completion remove"),
    verb("config set max_tokens 300", name="config set"),
    verb("config unset temperature", name="config unset"),
    Verb("connect --write", call=connect_write, base="empty", states=("before", "record", "after")),
    Verb("connect --undo", call=connect_undo, base="connected", states=("before", "file put back", "after")),
    Verb("serve --install", call=serve_install, base="empty"),
    Verb("serve, a new key", call=serve_key, base="empty"),
    Verb("chat, /as save", call=save_role, base="empty"),
    verb("learn undo"),
    verb("learn rollback 1"),
    verb("learn reset"),
    verb("learn chart --svg {out}/chart.svg", name="learn chart"),
    verb("log export -o {out}/log.jsonl", name="log export"),
    verb("sessions import {out}/chats", base="chats", states=IMPORTED,
         name="sessions import"),
    verb("sessions export last -o {out}/chat.json", name="sessions export"),
    verb("sessions folder last Work"),
    verb("sessions fork last"),
    verb("sessions pin last"),
    verb("sessions rename last Travel"),
    verb("sessions rm last"),
    # A year later the chat is erased: it could come back for a day.
    verb("sessions restore last", base="deleted", late=(1,)),
    verb("sessions forget --all"),
    verb("sessions forget last"),
    verb("rate last up"),
    verb("rate last down --why long", name="rate --why"),
    Verb("generate", ("generate", "a question", "--max-tokens", "5"),
         states=("before", "reply", "trace", "after")),
    verb("generate --prompts {out}/prompts.jsonl -o {out}/replies.jsonl", base="prompts", errors=(0, 1),
         states=BATCH, name="generate --prompts", has_threads=True),
    Verb("chat --plain", ("chat", "--plain", "--max-tokens", "5"), stdin="a question\n/rate up\n/exit\n",
         errors=(1, 3), states=("before", "chat", "question", "reply", "trace", "rated", "after")),
    verb("embed -o {out}/vectors.npy words", name="embed"),
    Verb("learn consolidate", call=consolidate, states=TRAINED, is_slow=True),
    Verb("learn consolidate, slow_loop style", call=consolidate_style, states=STYLED,
         caches=("home/style/",), is_slow=True),
    Verb("learn consolidate --deep", call=record_changes, is_slow=True),
    Verb("learn kv --measure", call=measure_tiers, base="long",
         states=("before", "a policy", "both", "after"), is_slow=True),
    verb("learn router --train", base="routed", is_slow=True),
    Verb("serve", call=serve_a_client, is_slow=True, has_promises=True),
    # The program stores a reply first, and its trace second. If the disk has no room for the trace, a later
    # rating computes the trace again.
    Verb("page store", call=page_store, then=read_page_store, has_threads=True, caches=("table traces",),
         states=("before", "a reply", "its trace", "two replies", "and a trace", "after")),
    Verb("pull", call=pull, base="empty", has_threads=True),  # huggingface-hub fetches files in threads
    verb("doctor", ("the same",), errors=(0, 1), has_report=True),
    verb("sessions pin last", base="old", name="a store of an older format"),
    verb("config set max_tokens 300", base="empty", name="config set, first of all"),
    verb("sessions import {out}/chats", base="first", name="sessions import, first of all",
         states=IMPORTED),
]  # fmt: skip

READS = {
    "adapters ls": "reads",
    "bench": "writes into a scratch folder; its report is text that can be made again",
    "config path": "reads",
    "config show": "reads",
    "launch": "runs another verb, which has a row; the ranks above 0 write nothing",
    "learn check": "reads; nothing is stored",
    "learn export": "prints",
    "learn status": "reads",
    "log show": "reads",
    "log verify": "reads",
    "ls": "reads",
    "mcp": "asks the server",
    "models": "keeps one measurement, as `config set` keeps a setting",
    "perplexity": "reads",
    "prove": "works on a store of its own",
    "ps": "asks the server",
    "rm": "deletes from the hub's folder: tests/models/test_fetching.py",
    "sessions ls": "reads",
    "sessions search": "reads",
    "sessions show": "reads",
    "show": "reads",
    "stop": "asks the server",
}
