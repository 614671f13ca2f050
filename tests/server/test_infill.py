"""POST /infill: the text between two others."""

import json

import pytest
from ruvmlx.apps.server.access import Access
from ruvmlx.apps.server.limits import ServerLimits
from ruvmlx.apps.server.llama_cpp_bodies import InfillBody
from ruvmlx.apps.server.request_fields import UNUSED

from ruvmlx.backends.select import open_backend
from ruvmlx.models.load import load_model
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.store import Store
from tests.models.make_models import make_safetensors_model
from tests.models.vocabularies import TOKENS
from tests.server.conftest import run_server

from .test_request_fields import put, value_of

NAMES = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")
GAP = {"input_prefix": "def f(", "input_suffix": "): pass", "temperature": 0, "n_predict": 8}


@pytest.fixture(scope="module")
def coder(tmp_path_factory):
    """A server whose model has tokens for a gap."""
    folder = make_safetensors_model(tmp_path_factory.mktemp("coder") / "tiny-coder", max_context=512)
    file = folder / "tokenizer.json"
    facts = json.loads(file.read_text("utf-8"))
    first = facts["added_tokens"][0]
    facts["added_tokens"] += [
        {**first, "id": len(TOKENS) + i, "content": name} for i, name in enumerate(NAMES)
    ]
    file.write_text(json.dumps(facts), "utf-8")
    model = load_model(str(folder))
    backend, settings = open_backend("reference", model), Settings(adapter="none", kv_disk=None)
    running = run_server(
        lambda: Runtime(Store(folder / "ruvmlx.db"), model, backend, settings, learn=False),
        Access(),
        ServerLimits(),
    )
    yield running
    running.stop()


def test_ollamas_clients_see_that_the_model_fills_gaps(coder, shared):
    """Their editors offer it only for such a model."""
    able = [r.ask("POST", "/api/show", {"model": r.model}).json["capabilities"] for r in (coder, shared)]
    assert "insert" in able[0] and "insert" not in able[1]


def infill(running, **fields):
    return running.ask("POST", "/infill", {**GAP, **fields})


def ids(running, *parts):
    """Names of special tokens become these; all else is plain text."""
    tokenizer = running.serving.runtime.model.tokenizer
    found = [
        [tokenizer.special_tokens[part]] if part in NAMES else tokenizer.encode(part, add_bos=False)
        for part in parts
    ]
    return [token for each in found for token in each]


def continuation(running, prompt):
    answer = running.ask("POST", "/v1/completions", running.body(prompt=prompt, max_tokens=8))
    return answer.json["choices"][0]["text"]


def test_the_model_reads_both_sides(coder):
    """The ids are the model's own form of a gap; the content is what it writes behind them."""
    prompt = ids(coder, NAMES[0], "def f(", NAMES[1], "): pass", NAMES[2])
    answer = infill(coder)
    assert answer.status == 200, answer.json
    found = answer.json
    assert found["content"] == continuation(coder, prompt) and found["tokens_evaluated"] == len(prompt)
    assert found["stop"] is True and found["stop_type"] == "limit" and found["tokens_predicted"] == 8
    assert found["timings"]["predicted_n"] == 8 and found["truncated"] is False
    assert infill(coder, model=coder.model).json["content"] == found["content"]
    typed = infill(coder, input_prefix="def f(<|fim_middle|>").json
    assert typed["tokens_evaluated"] == len(prompt) + len("<|fim_middle|>")


def test_more_text_before_the_gap(coder):
    prompt = ids(
        coder, NAMES[3], "a.py\nx = 1\n", NAMES[3], "loose\n", NAMES[3],
        NAMES[0], "def f(x", NAMES[1], "): pass", NAMES[2],
    )  # fmt: skip
    extra = [{"filename": "a.py", "text": "x = 1"}, {"text": "loose"}]
    answer = infill(coder, prompt="x", input_extra=extra).json
    assert answer["tokens_evaluated"] == len(prompt) and answer["content"] == continuation(coder, prompt)


def test_a_stream_is_the_whole_text(coder):
    whole = infill(coder).json
    lines = infill(coder, stream=True).body.decode().strip().split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["tokens_predicted"] == 8


def test_a_stop_text(coder):
    letter = next(c for c in infill(coder).json["content"] if c.strip())
    found = infill(coder, stop=[letter]).json
    assert found["stop_type"] == "word" and found["stopping_word"] == letter
    assert letter not in found["content"]


def test_what_editors_send_besides(coder):
    """It changes nothing, and the header names it."""
    body = dict(GAP)
    for name, field in UNUSED[InfillBody].items():
        body = put(body, name, value_of(InfillBody, name, field))
    answer = coder.ask("POST", "/infill", body)
    assert answer.json["content"] == infill(coder).json["content"]
    assert answer.headers["x-ruvmlx-ignored"].split(", ") == [*UNUSED[InfillBody]]


def test_a_model_without_such_tokens(shared):
    """400, and the message says why and what to do."""
    refused = infill(shared)
    assert refused.status == 400 and refused.error["code"] == "no_fim_tokens"
    assert "FIM" in refused.error["message"] and refused.error["param"] == "model"


def test_too_much_text(coder):
    refused = infill(coder, input_extra=[{"text": "word " * 10_000}] * 20)
    assert refused.status == 400 and refused.error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_the_forms_of_openai_and_ollama(coder, stream):
    """`suffix` is what comes behind the gap."""
    want, texts = infill(coder).json["content"], {"prompt": "def f(", "suffix": "): pass", "stream": stream}
    asked = coder.body(max_tokens=8, temperature=0, **texts)
    answer = coder.ask("POST", "/v1/completions", asked)
    lines = [line.removeprefix(b"data: ") for line in answer.body.split(b"\n\n") if b"{" in line]
    choices = [json.loads(line) for line in lines]
    assert "".join(found["choices"][0]["text"] for found in choices) == want
    options = {"temperature": 0, "num_predict": 8}
    answer = coder.ask("POST", "/api/generate", {"model": coder.model, "options": options, **texts})
    assert "".join(json.loads(line)["response"] for line in answer.body.splitlines()) == want


def test_a_suffix_needs_a_model_with_gaps(shared):
    refused = shared.ask("POST", "/v1/completions", shared.body(prompt="a", suffix="b"))
    assert refused.status == 400 and refused.error["code"] == "no_fim_tokens"
