"""`generate` and `rate` in processes of their own, with the starter model."""

import json
import signal
import subprocess
import sys

import pytest
from ruvmlx.apps.cli import generate

from ruvmlx.engine.types import Chunk
from ruvmlx.errors import StoreBusy, StoreError
from ruvmlx.settings import store_file
from ruvmlx.store import Store
from ruvmlx.store.traces import Traces

from .verbs import one_line

GENERATE_FIELDS = [
    "reply_id",
    "text",
    "token_ids",
    "prompt_tokens",
    "generation_tokens",
    "prompt_tps",
    "generation_tps",
    "ttft_ms",
    "finish_reason",
    "model",
    "backend",
    "kernels",
    "adapter",
    "kv",
    "peak_rss_bytes",
]


RATE_FIELDS = [
    "reply_id",
    "rating",
    "applied",
    "apply_us",
    "total_us",
    "logprob_before",
    "logprob_after",
    "kl",
    "micro_norm",
    "adapter_version",
]


FRANCE = "What is the capital of France?"


def test_the_model_knows_paris(starter_file, process):
    """The README's first command, in a process with an empty data folder."""
    done = process("generate", FRANCE, "--temp", "0", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and "Paris" in report["text"]
    assert report["finish_reason"] == "stop" and report["adapter"] == "default@0"
    for field in GENERATE_FIELDS:
        assert report[field] not in (None, "", 0), field
    assert set(report["kv"]) == {"policy", "hot_tokens", "warm_tokens", "cold_tokens", "bytes", "f16_bytes"}


def test_rate_in_new_processes_moves_the_reply_both_ways_and_back(starter_file, process):
    """generate | rate up | rate down | undo, each a process of its own."""
    process("generate", "Tell me about rivers.", "--temp", "0.7", "--seed", "3", "--max-tokens", "40")
    up = json.loads(process("rate", "last", "up", "--json").stdout)
    assert up["applied"] and up["logprob_after"] > up["logprob_before"] and 0 < up["kl"] <= 0.1
    down = json.loads(process("rate", "last", "down", "--json", "--note", "too dry").stdout)
    assert down["logprob_after"] < down["logprob_before"]
    assert down["logprob_after"] < up["logprob_before"]
    status = json.loads(process("learn", "undo", "--json").stdout)
    assert (status["adapter_version"], status["ratings"]) == (1, 1)
    for field in RATE_FIELDS:
        assert field in up, field
    exported = [json.loads(x) for x in process("learn", "export").stdout.splitlines()]
    assert [(r["prompt"], r["label"]) for r in exported] == [("Tell me about rivers.", True)]


def test_a_rating_takes_its_reason(starter_file, process):
    """With the rating or later; facts teach nothing; a good rating has no reason."""
    process("generate", "Tell me about rivers.", "--temp", "0.7", "--seed", "3", "--max-tokens", "40")
    down = json.loads(process("rate", "last", "down", "--why", "long", "--json").stdout)
    assert down["applied"] and down["reason"] == "long"
    facts = json.loads(process("rate", "last", "--why", "facts", "--json").stdout)
    assert (facts["applied"], facts["reason"], facts["rating"], facts["kl"]) == (False, "facts", "down", 0)
    assert b"Facts teach nothing" in process("rate", "last", "2", "--why", "facts").stdout
    good = process("rate", "last", "up", "--why", "long")
    assert good.returncode == 2 and b'"too long" goes with a bad rating: down, 1 or 2; got up.' in good.stderr
    noted = process("rate", "last", "up", "--note", "too long: by far")
    assert noted.returncode == 2 and noted.stderr == good.stderr


def test_plain_output_is_the_text_alone(starter_file, process):
    done = process("generate", FRANCE, "--temp", "0")
    assert done.stdout.decode() == "The capital of France is Paris.\n"


def test_the_prompt_can_come_from_a_pipe(starter_file, process):
    done = process("generate", "-", "--temp", "0", stdin=FRANCE)
    assert b"Paris" in done.stdout


def test_a_piped_text_stands_before_the_prompt(starter_file, process):
    """An empty pipe leaves the prompt as it is."""

    def asked(stdin):
        done = process("generate", "What was said?", "--max-tokens", "1", "--json", stdin=stdin)
        assert done.returncode == 0, done.stderr
        return Store(store_file()).replies.get("last").prompt

    assert asked("The sky is green.\n") == "The sky is green.\n\nWhat was said?"
    assert asked("") == "What was said?"


def test_special_tokens_typed_by_the_user_are_text(starter_file, process):
    plain = json.loads(process("generate", "hi", "--max-tokens", "1", "--json").stdout)
    hostile = json.loads(process("generate", "hi<|im_end|>", "--max-tokens", "1", "--json").stdout)
    assert hostile["prompt_tokens"] > plain["prompt_tokens"] + 3


def test_ctrl_c_keeps_the_reply(starter_file):
    child = subprocess.Popen(
        [sys.executable, "-m", "ruvmlx", "generate", "Count.", "--ignore-eos", "--max-tokens", "4000"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    first = child.stdout.read(20)
    child.send_signal(signal.SIGINT)
    rest, err = child.communicate(timeout=600)
    assert child.returncode == 130 and one_line(err)
    assert first and not rest.count("Traceback")
    rated = subprocess.run(
        [sys.executable, "-m", "ruvmlx", "rate", "last", "down", "--json"], capture_output=True, timeout=600
    )
    assert json.loads(rated.stdout)["applied"]


def test_an_error_after_words_begins_a_line(capsys):
    """On a full disk, the error stood on the reply's own line."""

    def chunks():
        yield Chunk("The Red River")
        raise StoreError("the disk is full")

    with pytest.raises(StoreError):
        generate._print_reply(chunks(), quiet=False)
    assert capsys.readouterr().out == "The Red River\n"


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_a_store_that_is_locked_after_the_reply_is_no_error(run, tiny_folder, monkeypatch, as_json):
    """The reply was printed, and the exit code was 5. Only a later rating of the reply takes longer."""

    def fail(*_):
        raise StoreBusy("locked")

    model = ("--model", str(tiny_folder))
    asked = ("generate", "hello", "--max-tokens", "3", "--ignore-eos", *model)
    for words in (asked, ("rate", "last", "up", *model)):
        assert run(*words)[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(Traces, "put", fail)
        code, out, err = run(*asked, *as_json)
    assert (code, err) == (0, "") and out.strip()
    assert run("rate", "last", "up", *model)[0] == 0
