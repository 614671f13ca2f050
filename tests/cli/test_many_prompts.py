"""`generate --prompts`: order, errors, batches, and going on after a kill."""
# ruff: noqa: F811 - fixtures of another file

import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
from ruvmlx.apps.cli import many_prompts, prompt_results
from ruvmlx.apps.cli.prompt_lines import PromptLine, prompt_lines
from ruvmlx.apps.cli.prompt_results import Tally, result_file

from ruvmlx.errors import Interrupted
from ruvmlx.settings import store_file
from ruvmlx.store import Store

from .test_adapters import tiny_cli  # noqa: F401 - a fixture

REPLY = ("--max-tokens", "6", "--ignore-eos", "--temp", "0")
PROMPTS = [{"id": f"p{i}", "prompt": f"question {i}"} for i in range(5)]
RESULT = {
    "id", "reply_id", "text", "token_ids", "prompt_tokens", "generation_tokens", "finish_reason", "repeats",
    "adapter",
}  # fmt: skip


def jsonl(rows) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def prompts(tmp_path):
    """prompts(rows) -> a file of these lines."""

    def write(rows, name="prompts.jsonl"):
        file = tmp_path / name
        file.write_text(jsonl(rows))
        return file

    return write


@pytest.fixture
def answer(tiny_cli, tmp_path):
    """answer(file, *flags) -> exit code, results, standard error."""

    def ask(file, *flags, out="results.jsonl"):
        code, _, err = tiny_cli("generate", "--prompts", str(file), "--out", str(tmp_path / out), *flags)
        return code, read(tmp_path / out), err

    return ask


def test_each_line_is_answered_as_alone_in_the_files_order(tiny_cli, prompts, answer):
    """Long and short ones end at different times; the result has the fields of `generate`, and is stored."""
    rows = [row | {"max_tokens": 20 - 4 * i} for i, row in enumerate(PROMPTS)]
    code, results, err = answer(prompts(rows), *REPLY)
    assert code == 0 and "5 prompts answered" in err
    assert [row["id"] for row in results] == ["p0", "p1", "p2", "p3", "p4"]
    assert [row["generation_tokens"] for row in results] == [20, 16, 12, 8, 4]
    for row, result in zip(rows, results, strict=True):
        assert result.keys() == RESULT
        alone = tiny_cli(
            "generate", row["prompt"], *REPLY[2:], "--max-tokens", str(row["max_tokens"]), "--json"
        )[1]
        assert result["token_ids"] == alone["token_ids"] and result["adapter"] == "default@0"
        assert Store(store_file()).replies.get(result["reply_id"]).text == result["text"]
    assert tiny_cli("rate", results[1]["reply_id"], "up")[0] == 0


def test_the_replies_of_a_batch_have_their_traces(tiny_cli, prompts, answer):
    """A rating of a reply in a batch uses the numbers from the time when the model wrote the reply. This is
    also true under another adapter."""
    rows = [row | {"adapter": name} for name in ("default", "work") for row in PROMPTS]
    tiny_cli("adapters", "use", "work", "--new")
    tiny_cli("adapters", "use", "default")
    code, results, err = answer(prompts(rows), *REPLY)
    assert code == 0, err
    stored = Store(store_file())
    for result in results:
        assert stored.traces.get(result["reply_id"]) is not None
    assert tiny_cli("generate", PROMPTS[0]["prompt"], *REPLY)[0] == 0
    alone = tiny_cli("rate", "last", "up", "--json")[1]
    tiny_cli("learn", "undo")
    batched = tiny_cli("rate", results[0]["reply_id"], "up", "--json")[1]
    assert batched["logprob_before"] == alone["logprob_before"]


def test_a_line_may_say_how_it_is_answered(tiny_cli, prompts, answer):
    """Messages, an adapter, sampling; a prompt gets the system prompt, messages bring their own."""
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "question 0"}]
    tiny_cli("adapters", "use", "work", "--new")
    tiny_cli("generate", "hi", *REPLY)
    tiny_cli("rate", "last", "up")
    tiny_cli("adapters", "use", "default")
    rows = [
        {"id": 1, "messages": turns},
        {"id": 2, "prompt": "question 0"},
        {"id": 3, "prompt": "question 0", "adapter": "work"},
        {"id": 4, "prompt": "question 0", "adapter": "none"},
        {"id": 5, "prompt": "question 0", "temperature": 2.0, "seed": 3, "max_tokens": 9},
    ]
    code, results, err = answer(prompts(rows), *REPLY, "--system", "be brief")
    assert code == 0, err
    assert results[0]["token_ids"] == results[1]["token_ids"] == results[3]["token_ids"]
    assert [row["adapter"] for row in results] == ["default@0", "default@0", "work@1", None, "default@0"]
    assert results[4]["generation_tokens"] == 9 and results[4]["token_ids"][:6] != results[0]["token_ids"]


def test_a_wrong_line_is_one_line_of_the_results(prompts, answer):
    """The others are answered; the exit code says that some were not."""
    wrong = {
        "[1]": "no JSON object",
        '{"id": 1': "no JSON object",
        '{"prompt": "a", "messages": []}': "either prompt or messages",
        '{"id": 5}': "either prompt or messages",
        '{"prompt": 3}': "prompt must be a text",
        '{"messages": [{"role": "user"}]}': "messages must be",
        '{"prompt": "a", "tempreature": 1}': "no field 'tempreature'",
        '{"prompt": "a", "temperature": "hot"}': "temperature is 'hot'",
        '{"prompt": "a", "top_p": 7}': "top-p is 7",
        '{"prompt": "a", "temperature": NaN}': "temperature is nan",
        '{"prompt": "a", "max_tokens": 2.5}': "max_tokens is 2.5; it must be a whole number",
        '{"prompt": "a", "seed": true}': "seed is True",
        '{"prompt": "a", "seed": -1}': "seed is -1",
        '{"prompt": "a", "max_tokens": 0}': "max-tokens is 0",
        '{"prompt": "a", "adapter": "wrok"}': "no adapter 'wrok'",
        '{"prompt": ""}': "empty",
        '{"prompt": "\\ud800"}': "half of a character",
        '{"messages": [{"role": "user", "content": "a \\udc00"}]}': "half of a character",
        '{"id": "\\ud83d", "prompt": "a"}': "half of a character",
        '{"id": [2], "prompt": "a"}': "id is [2]",
        json.dumps({"prompt": "word " * 500}): "the prompt is",
    }
    rows = [PROMPTS[0], *wrong, "", PROMPTS[1]]
    code, results, err = answer(prompts(rows), *REPLY)
    assert code == 1 and f"{len(wrong)} failed" in err and "2 prompts answered" in err
    assert results[0]["id"] == "p0" and results[-1]["id"] == "p1" and len(results) == len(wrong) + 2
    for number, (said, result) in enumerate(zip(wrong.values(), results[1:-1], strict=True), 2):
        assert result.keys() == {"id", "line", "error"} and result["line"] == number
        assert said in result["error"] and "\n" not in result["error"], result


def test_results_that_were_cut_anywhere_are_completed(prompts, answer, tmp_path):
    """Whole lines stay, the rest of a line that was cut goes; what is complete opens no model."""
    rows = [PROMPTS[0], "[1]", PROMPTS[1]]
    file, results = prompts(rows), tmp_path / "results.jsonl"
    _, whole, _ = answer(file, *REPLY)
    data = results.read_bytes()
    first, second = (data.index(b"\n") + 1, data.index(b"\n", data.index(b"\n") + 1) + 1)
    for cut in (0, 3, first - 1, first, first + 1, second, len(data) - 1):
        results.write_bytes(data[:cut])
        code, again, err = answer(file, *REPLY)
        kept = data[:cut].count(b"\n")
        assert code == 1 and again[:kept] == whole[:kept]
        assert [row.get("token_ids") for row in again] == [row.get("token_ids") for row in whole]
        assert ("were done before" in err) == (kept > 0)
    results.write_bytes(data[:first] + b'{"id": 2, "text": "' + b"x" * 2000)
    assert len(answer(file, *REPLY)[1]) == 3
    before = results.read_bytes()
    assert answer(file, *REPLY, "--model", "nowhere/at-all")[0] == 1 and results.read_bytes() == before


def test_a_seed_gives_the_same_results_in_one_run_and_in_two(prompts, answer, tmp_path):
    """Each prompt has a seed of its own."""
    flags = ("--max-tokens", "8", "--ignore-eos", "--temp", "1.5", "--seed", "7")
    file = prompts([{"prompt": "same"}] * 4)
    whole = [row["token_ids"] for row in answer(file, *flags)[1]]
    assert len({tuple(ids) for ids in whole}) == 4
    results = tmp_path / "results.jsonl"
    results.write_text("".join(results.read_text().splitlines(keepends=True)[:2]))
    assert [row["token_ids"] for row in answer(file, *flags)[1]] == whole


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ("dear diary\n", "no result"),
        ("dear diary", "no file of results"),
        ('{"id": "p0", "prompt": "hi"}\n', "no result"),
        ('{"id": "other", "text": ""}\n', "results of other prompts"),
        ('{"id": "p0", "text": ""}\n{"id": "p1", "text": ""}\n{"id": "p2", "text": ""}\n', "no more prompts"),
    ],
)
def test_a_file_of_something_else_stays_as_it_is(tiny_cli, prompts, tmp_path, there, said):
    out = tmp_path / "out.jsonl"
    out.write_text(there)
    code, _, err = tiny_cli("generate", "--prompts", str(prompts(PROMPTS[:2])), "--out", str(out))
    assert code == 2 and said in err and err.count("\n") == 1 and out.read_text() == there


def test_results_on_a_disk_whose_files_cannot_be_locked(tiny_cli, prompts, tmp_path, monkeypatch):
    """The error "No locks available" did not say what to do."""

    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(prompt_results.fcntl, "flock", refuse)
    out = str(tmp_path / "out.jsonl")
    code, _, err = tiny_cli("generate", "--prompts", str(prompts(PROMPTS)), "--out", out)
    assert code == 2 and "has no locks; give a file on another disk." in err and err.count("\n") == 1


def test_two_processes_do_not_write_one_file(tiny_cli, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    with result_file(out):
        code, _, err = tiny_cli("generate", "--prompts", str(prompts(PROMPTS)), "--out", str(out))
    assert code == 2 and "another process writes" in err


def test_wrong_flags_are_one_line(tiny_cli, prompts):
    file = str(prompts(PROMPTS))
    for flags, said in (
        ([], "either a prompt (- reads it from a pipe) or --prompts"),
        (["hi", "--prompts", file], "either a prompt (- reads it from a pipe) or --prompts"),
        (["hi", "--out", "x"], "goes with --prompts"),
        (["--prompts", file, "--json"], "needs --out"),
        (["--prompts", file, "--out", file], "is the file of prompts"),
        (["--prompts", "nowhere.jsonl"], "cannot read nowhere.jsonl"),
        (["--prompts", file, "--out", "no/such/folder"], "cannot write"),
    ):
        code, out, err = tiny_cli("generate", *flags)
        assert (code, out) == (2, "") and said in err and err.count("\n") == 1


def test_without_a_file_the_results_are_lines_of_standard_output(tiny_cli, monkeypatch):
    """And prompts may come from standard input."""
    data = types.SimpleNamespace(buffer=io.BytesIO(jsonl(PROMPTS).encode()))
    monkeypatch.setattr(sys, "stdin", data)
    code, out, _ = tiny_cli("generate", "--prompts", "-", *REPLY)
    assert code == 0 and [json.loads(line)["id"] for line in out.splitlines()] == [r["id"] for r in PROMPTS]


def test_json_is_the_sum(tiny_cli, prompts, tmp_path):
    flags = ("--prompts", str(prompts([*PROMPTS, "[1]"])), "--out", str(tmp_path / "out"), *REPLY, "--json")
    code, facts, _ = tiny_cli("generate", *flags)
    assert code == 1 and facts["answered"] == 5 and (facts["kept"], facts["failed"]) == (0, 1)
    assert facts["generation_tokens"] == 30 and facts["seconds"] > 0


def test_ctrl_c_keeps_whole_lines_and_the_next_run_goes_on(prompts, answer, tmp_path, monkeypatch):
    real = many_prompts.write_line

    def interrupted(file, facts):
        real(file, facts)
        if facts["id"] == "p1":
            os.kill(os.getpid(), signal.SIGINT)

    rows = [row | {"max_tokens": 40 if i > 1 else 4} for i, row in enumerate(PROMPTS)]
    monkeypatch.setattr(many_prompts, "write_line", interrupted)
    code, results, err = answer(prompts(rows), *REPLY)
    assert (
        code == 130 and "goes on where the results end" in err and [r["id"] for r in results] == ["p0", "p1"]
    )
    monkeypatch.setattr(many_prompts, "write_line", real)
    code, results, err = answer(prompts(rows), *REPLY)
    assert code == 0 and len(results) == 5 and "2 were done before" in err


def test_a_killed_run_goes_on(prompts, tiny_folder, tmp_path, home, answer):
    """SIGKILL in the middle: every line that is there is whole, and the rest follows."""
    rows, results = (
        [{"prompt": f"question {i}", "max_tokens": 30} for i in range(60)],
        tmp_path / "results.jsonl",
    )
    file = prompts(rows)
    command = [sys.executable, "-m", "ruvmlx", "generate", "--prompts", str(file), "--out", str(results)]
    flags = [*REPLY, "--model", str(tiny_folder), "--backend", "reference"]
    with subprocess.Popen([*command, *flags], stderr=subprocess.PIPE) as child:
        deadline = time.monotonic() + 60
        while not results.exists() or results.read_bytes().count(b"\n") < 3:
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        child.kill()
    kept = results.read_bytes().count(b"\n")
    assert 3 <= kept < 60
    code, found, err = answer(file, *REPLY)
    assert code == 0 and f"{kept} were done before" in err and [row["id"] for row in found] == [*range(1, 61)]


def test_few_prompts_are_read_ahead(open_tiny, tiny_backend, monkeypatch):
    """A file of any length is never in memory as a whole."""
    monkeypatch.setattr(many_prompts, "AHEAD", 3)
    read_lines, written = [], []

    def lines():
        for i in range(20):
            read_lines.append(i)
            assert len(read_lines) - len(written) <= 3
            yield PromptLine(i, i, {"prompt": "hi", "max_tokens": 2 + i % 5})

    with open_tiny() as runtime:
        make = many_prompts.request_maker(runtime, None, None, max_tokens=4, ignore_eos=True)
        done = threading.Event()
        many_prompts.answer_all(runtime, lines(), make, written.append, Tally(), done, lambda _: None)
        assert [row["id"] for row in written] == [*range(20)]
        done.set()
        with pytest.raises(Interrupted):
            many_prompts.answer_all(runtime, lines(), make, written.append, Tally(), done, lambda _: None)
        assert not len(runtime.writer.scheduler)


def test_a_line_that_is_too_long_is_skipped_whole(monkeypatch):
    monkeypatch.setattr("ruvmlx.apps.cli.prompt_lines.MAX_LINE_BYTES", 64)
    data = b'{"prompt": "a"}\n' + b"x" * 1000 + b'\n{"prompt": "b"}'
    first, long, last = prompt_lines(io.BytesIO(data))
    assert (first.number, long.number, last.number) == (1, 2, 3)
    assert "over" in long.error and last.fields == {"prompt": "b"} and last.error == ""
