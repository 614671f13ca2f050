"""`prediction` of a chat completion: a text that the client expects in the reply."""

import pytest

from apps.server.access import Access
from apps.server.limits import ServerLimits
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.models.load import load_model
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.store import Store
from tests.models.make_models import make_safetensors_model

from .conftest import run_server
from .test_metrics import value


@pytest.fixture(scope="module")
def drafting(tmp_path_factory):
    """A server that drafts up to 7 tokens wherever it can guess."""
    folder = tmp_path_factory.mktemp("drafting")
    model = load_model(str(make_safetensors_model(folder / "m", max_context=512, bits=4, group_size=32)))
    settings = Settings(adapter="none", kv_disk=None, speculate="7")

    def open_runtime():
        store = Store(folder / "ruvmlx.db")
        return Runtime(store, model, NativeBackend(model, threads=1), settings, learn=False)

    running = run_server(open_runtime, Access(), ServerLimits())
    running.letters = dict.fromkeys(map(str, model.tokenizer.encode("abcdefgh", add_bos=False)), 50)
    yield running
    running.stop()


def reply(drafting, **fields):
    """A reply of random letters."""
    return drafting.chat(temperature=1.3, seed=5, max_tokens=40, logit_bias=drafting.letters, **fields).json


def prediction_field(content):
    return {"prediction": {"type": "content", "content": content}}


@pytest.mark.parametrize("as_parts", [False, True])
def test_a_right_prediction_is_accepted_and_changes_nothing(drafting, as_parts):
    plain = reply(drafting)
    text = plain["choices"][0]["message"]["content"]
    answer = reply(drafting, **prediction_field([{"type": "text", "text": text}] if as_parts else text))
    assert answer["choices"][0]["message"] == plain["choices"][0]["message"]
    assert "completion_tokens_details" not in plain["usage"]
    counts = answer["usage"].pop("completion_tokens_details")
    assert counts["accepted_prediction_tokens"] > 15
    del answer["usage"]["prompt_tokens_details"], plain["usage"]["prompt_tokens_details"]
    assert answer["usage"] == plain["usage"]


def test_guessed_tokens_are_counted(drafting):
    """The metrics add up what the answers say."""
    names = ("ruvmlx_drafted_tokens_total", "ruvmlx_accepted_tokens_total")
    before = [value(drafting, name) for name in names]
    details = reply(drafting, **prediction_field("hello"))["usage"]["completion_tokens_details"]
    accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    more = [value(drafting, name) - count for name, count in zip(names, before, strict=True)]
    assert more == [accepted + rejected, accepted]


def test_a_wrong_prediction_changes_nothing_either(drafting):
    plain = reply(drafting)["choices"][0]["message"]["content"]
    answer = reply(drafting, **prediction_field(plain[::-1] + "hello" * 40))
    assert answer["choices"][0]["message"]["content"] == plain
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] < 15


@pytest.mark.parametrize(
    "wrong", [{"type": "file", "content": "x"}, {"type": "content"}, {"type": "content", "content": 3}, "x"]
)
def test_a_malformed_prediction_is_refused_by_name(drafting, wrong):
    answer = drafting.chat(prediction=wrong)
    assert answer.status == 400 and "prediction" in answer.json["error"]["message"]
