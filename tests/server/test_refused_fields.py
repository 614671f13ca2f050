"""Nothing is ignored in silence: what is not supported is a 400 that names the field."""

import json

import msgspec
import pytest
from ruvmlx.apps.server import completions
from ruvmlx.apps.server.anthropic_bodies import MessagesBody
from ruvmlx.apps.server.bodies import ChatBody, CompletionBody, RatingBody, repetition_of
from ruvmlx.apps.server.decoding import decode
from ruvmlx.apps.server.errors import ApiError
from ruvmlx.apps.server.ollama_bodies import OllamaChatBody
from ruvmlx.apps.server.request_fields import WOULD_CHANGE

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hello"}]

NOT_SUPPORTED = {
    "functions": [], "function_call": "auto", "modalities": ["audio"], "audio": {}, "nonsense": None,
    "web_search_options": {}, "best_of": 2, "suffix": "x",
}  # fmt: skip


def test_a_penalty_for_no_tokens_is_no_penalty_of_the_model_either():
    """With repeat_last_n 0, the reply has no penalty, also from a model that recommends one."""
    asked = {"model": "m", "messages": HI}
    for last, expected in ((0, (1.0, 0)), (-1, (1.5, 0)), (5, (1.5, 5))):
        body = msgspec.convert({"repeat_penalty": 1.5, "repeat_last_n": last, **asked}, ChatBody)
        assert repetition_of(body) == expected
    assert repetition_of(msgspec.convert(asked, ChatBody)) == (None, None)


@pytest.mark.parametrize(("field", "value"), NOT_SUPPORTED.items(), ids=NOT_SUPPORTED)
def test_fields_of_chat(shared, field, value):
    refused = shared.chat(**{field: value})
    assert refused.status == 400 and refused.error["param"] == field
    assert field in refused.error["message"] and refused.error["type"] == "invalid_request_error"


WRONG = [
    ("model", 3, "model"),
    ("model", None, "model"),
    ("messages", "hello", "messages"),
    ("messages", [], "messages"),
    ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [{"content": "x"}], "messages[0].role"),
    ("messages", [{"role": "tool", "content": "x", "tool_call_id": "1"}], "messages[0].tool_call_id"),
    ("messages", [{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
    ("messages", [{"role": "user", "content": None}], "messages[0].content"),
    ("messages", [{"role": "user", "content": []}], "messages[0].content"),
    ("messages", [{"role": "user", "content": [IMAGE]}], "messages[0].content[0].type"),
    ("messages", [{"role": "assistant", "content": "x", "tool_calls": []}], "messages[0].tool_calls"),
    ("stream", "yes", "stream"),
    ("stream_options", {"include_usage": True}, "stream_options"),
    ("stream_options", {"nonsense": True}, "stream_options.nonsense"),
    ("n", 0, "n"),
    ("n", 17, "n"),
    ("n", 1.5, "n"),
    ("n", True, "n"),
    ("stop", 5, "stop"),
    ("stop", "", "stop"),
    ("stop", [""], "stop[0]"),
    ("stop", ["a"] * 17, "stop"),
    ("seed", -(2**63) - 1, "seed"),
    ("seed", 2**63, "seed"),
    ("temperature", -0.1, "temperature"),
    ("temperature", "hot", "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 1.1, "top_p"),
    ("top_k", -1, "top_k"),
    ("min_p", 1, "min_p"),
    ("max_tokens", 0, "max_tokens"),
    ("max_completion_tokens", 5, "max_tokens"),
    ("logprobs", 3, "logprobs"),
    ("top_logprobs", 3, "top_logprobs"),
    ("top_logprobs", 21, "top_logprobs"),
    ("adapter", 5, "adapter"),
    ("user", 5, "user"),
]


@pytest.mark.parametrize(
    ("field", "value", "param"), WRONG, ids=[f"{f}-{i}" for i, (f, _, _) in enumerate(WRONG)]
)
def test_wrong_values(shared, field, value, param):
    refused = shared.chat(**{field: value})
    assert refused.status == 400 and refused.error["param"] == param, refused.error
    assert param in refused.error["message"]


def test_whole_numbers_may_have_a_point(shared):
    """JSON knows one kind of number."""
    assert shared.chat(max_tokens=2.0, n=1.0, seed=3e0).status == 200
    assert shared.chat(max_tokens=2.0, n=1.0, seed=3.5).error["param"] == "seed"


def test_a_number_without_a_fraction_stays_a_float_where_no_field_wants_an_integer():
    """The server keeps the type of each value in the schemas and the inputs of tools."""
    schema = {"type": "object", "properties": {"x": {"minimum": 1.0, "enum": [2.0, 3]}}}
    call = {"type": "tool_use", "id": "a", "name": "w", "input": {"max_tokens": 2.0, "n": [1.0, 2]}}
    asked = {"model": "m", "max_tokens": 5.0, "top_k": 1.0, "temperature": 1.0}
    asked["tools"] = [{"name": "w", "input_schema": schema}]
    asked["messages"] = [{"role": "assistant", "content": [call]}, {"role": "user", "content": "so?"}]
    body = decode(json.dumps(asked).encode(), MessagesBody).body
    assert repr((body.max_tokens, body.top_k)) == "(5, 1)"
    assert repr(body.tools[0].input_schema) == repr(schema)
    assert repr(body.messages[0].content[0].input) == repr(call["input"])


def test_fields_that_change_nothing_may_have_whole_numbers_with_a_point():
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    for options in ({"num_ctx": 2048.0}, {"mirostat": 0.0, "mirostat_tau": 5.0}):
        decoded = decode(json.dumps({**asked, "options": options}).encode(), OllamaChatBody)
        assert decoded.ignored == [f"options.{name}" for name in options]
    with pytest.raises(ApiError) as refused:
        decode(json.dumps({**asked, "options": {"num_ctx": 2048.5}}).encode(), OllamaChatBody)
    assert refused.value.param == "options.num_ctx"


def test_a_list_of_ids_may_have_floats_without_a_fraction():
    asked = {"model": "m", "prompt": [1.0, 2, [3.0, 4]], "max_tokens": 1.0, "logit_bias": {"5": 2.0}}
    body = decode(json.dumps(asked).encode(), CompletionBody).body
    assert repr((body.prompt, body.max_tokens)) == "([1, 2, [3, 4]], 1)"
    with pytest.raises(ApiError) as refused:
        decode(json.dumps({**asked, "prompt": [1.0, 2.5]}).encode(), CompletionBody)
    assert refused.value.param == "prompt[1]"
    assert repr(decode(b'{"id": "a", "rating": 4.0}', RatingBody).body.rating) == "4"


@pytest.mark.parametrize(
    "field",
    ["stream", "stop", "seed", "temperature", "top_p", "n", "logprobs", "adapter", "user", "store",
     *WOULD_CHANGE[ChatBody]],
)  # fmt: skip
def test_null_is_not_given(shared, field):
    assert shared.chat(**{field: None, "max_tokens": 2}).status == 200


def test_a_seed_may_be_negative(shared):
    """OpenAI's range is that of 64 bits with a sign."""
    for seed in (-1, -(2**63), 2**63 - 1):
        first, again = (shared.chat(seed=seed, n=2, max_tokens=4).json["choices"] for _ in range(2))
        assert [c["message"]["content"] for c in first] == [c["message"]["content"] for c in again]


@pytest.mark.parametrize("part", [IMAGE, dict(reversed(IMAGE.items()))], ids=["type first", "type last"])
def test_only_text_is_read(shared, part):
    """Pydantic AI sends the type of a part behind its other field."""
    refused = shared.chat(messages=[{"role": "user", "content": [part]}])
    assert refused.error["param"] == "messages[0].content[0].type"
    assert "the server reads text alone: no images, sound or files" in refused.error["message"]
    refused = shared.ask(
        "POST",
        "/v1/responses",
        {"model": shared.model, "input": [{"role": "user", "content": [{"type": "input_image"}]}]},
    )
    assert "no images" in refused.error["message"]


def test_a_model_may_be_asked_for_its_own_dimensions(shared):
    def ask(path, **more):
        return shared.ask("POST", path, {"model": shared.model, "input": "a", **more})

    width = len(ask("/v1/embeddings").json["data"][0]["embedding"])
    for path in ("/v1/embeddings", "/api/embed"):
        assert ask(path, dimensions=width).status == ask(path, dimensions=None).status == 200
        assert ask(path, dimensions=width + 1).status == 400


@pytest.mark.parametrize("half", [rb"\ud83d", rb"\ude00", rb"\ud83dA"])
def test_half_of_a_character_is_named(shared, half):
    body = b'{"model": "x", "messages": [{"role": "user", "content": "a%s"}]}' % half
    assert "half of a character" in shared.ask("POST", CHAT, body).error["message"]
    pair = b'{"model": "x", "messages": [{"role": "user", "content": "\\ud83d\\ude00"}]'
    assert "half of a character" not in shared.ask("POST", CHAT, pair).error["message"]


def test_a_compressed_body_is_named(shared):
    refused = shared.ask("POST", CHAT, b"{}", content_encoding="gzip")
    assert refused.status == 415 and "compressed" in refused.error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "echo": True}, "echo"),
        ("/v1/completions", {"prompt": ["a", "c"], "suffix": "b"}, "suffix"),
        ("/v1/completions", {"prompt": "a", "best_of": 2}, "best_of"),
        ("/v1/completions", {"prompt": "a", "logprobs": True}, "logprobs"),
        ("/v1/completions", {"prompt": {"a": 1}}, "prompt"),
        ("/v1/completions", {"prompt": ["a", 1]}, "prompt"),
        ("/v1/completions", {}, "prompt"),
        ("/v1/embeddings", {"input": "a", "dimensions": 5}, "dimensions"),
        ("/v1/embeddings", {"input": [1, 2]}, "input[0]"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": " "}, "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1]"),
        ("/v1/ratings", {"id": "x", "rating": "great"}, "rating"),
        ("/v1/ratings", {"id": "x", "rating": 6}, "rating"),
        ("/v1/ratings", {"id": "x"}, "rating"),
        ("/v1/ratings", {"id": "x", "rating": "up", "preferred": "b"}, "rating"),
        ("/v1/ratings", {"id": "x", "preferred": "b", "note": "c"}, "note"),
        ("/v1/ratings", {"rating": "up"}, "id"),
        ("/v1/ratings", {"id": "x", "rating": "up", "stars": 5}, "stars"),
    ],
)
def test_other_endpoints(shared, path, body, param):
    model = {} if path == "/v1/ratings" else {"model": shared.model}
    refused = shared.ask("POST", path, {**model, **body})
    assert refused.status == 400 and refused.error["param"] == param, refused.error


@pytest.mark.parametrize("prompt", ["a", [1, 2]])
def test_at_most_32_prompts_come_at_once(prompt):
    assert len(completions._prompts([prompt] * 32)) == 32
    with pytest.raises(ApiError, match="at most 32") as refused:
        completions._prompts([prompt] * 33)
    assert (refused.value.status, refused.value.param) == (400, "prompt")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"5", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_bodies_that_are_no_objects(shared, body):
    refused = shared.ask("POST", CHAT, body)
    assert refused.status == 400 and refused.error["param"] is None


def test_media_types(shared):
    body = b'{"model": "x", "messages": []}'
    assert shared.ask("POST", CHAT, body, content_type="text/plain").status == 415
    assert shared.ask("POST", CHAT, body, content_type="application/json; charset=utf-8").status == 400


def test_curl_without_a_media_type(shared):
    """`curl -d` says that it sends a form. A web page's form is refused, also one of this machine."""
    body, form = json.dumps(shared.body(messages=HI)).encode(), "application/x-www-form-urlencoded"
    assert shared.ask("POST", CHAT, body, content_type=form).status == 200
    for name, value in (("origin", "http://localhost:3000"), ("sec_fetch_site", "same-site")):
        assert shared.ask("POST", CHAT, body, content_type=form, **{name: value}).status == 415


def test_paths_and_methods(shared):
    assert shared.ask("GET", "/v1/nothing").error["type"] == "not_found_error"
    wrong = shared.ask("GET", CHAT)
    assert wrong.status == 405 and "POST" in wrong.headers["allow"] and wrong.error
    assert shared.ask("POST", "/health", b"").status == 405
    allowed = shared.ask("PUT", "/v1/responses/none", b"").headers["allow"]
    assert allowed == "DELETE, GET, HEAD"  # all of the path, not those of its first endpoint alone
    assert shared.ask("HEAD", "/health").status == 200
    assert shared.ask("GET", "/v1/models/").status == 404


def test_names_in_a_body_cannot_break_the_message(shared):
    """Controls, line ends and length: the message stays one short line."""
    refused = shared.chat(**{"a\n\u0007" + "b" * 5000: 1})
    assert refused.status == 400 and len(refused.error["message"]) < 400
    assert refused.error["message"].isprintable()


@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ({"model": "other"}, "model", 404),
        ({"model": ""}, "model", 404),
        ({"model": "@default"}, "model", 404),
        ({"model": "{}@nobody"}, "model", 404),
        ({"adapter": "nobody"}, "adapter", 404),
        ({"model": "{}@none", "adapter": "default"}, "adapter", 400),
    ],
)
def test_names_of_models_and_adapters(shared, fields, param, status):
    given = {name: text.format(shared.model) for name, text in fields.items()}
    refused = shared.chat(**given)
    assert refused.status == status and refused.error["param"] == param
    assert "nobody" not in str(fields) or "has no adapter 'nobody'" in refused.error["message"]


def test_an_empty_question(shared):
    refused = shared.chat("  ")
    assert refused.status == 400 and refused.error["message"].startswith("the prompt is empty")
