"""Replies that must be JSON, and options that change logits, in OpenAI's form."""

import json

import jsonschema
import pytest

openai = pytest.importorskip("openai", reason="the dependency group `clients` is not installed")

HI = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6, "pattern": "^[a-z]+$"},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["city", "days", "tags"],
    "additionalProperties": False,
}
WHERE = "response_format.json_schema.schema"


@pytest.fixture
def client(shared):
    with openai.OpenAI(base_url=shared.url, api_key="x", max_retries=0, timeout=600) as found:
        yield found


def schema_format(schema=SCHEMA, **more):
    return {"type": "json_schema", "json_schema": {"name": "place", "schema": schema, **more}}


@pytest.mark.parametrize("strict", [True, False, None])
@pytest.mark.parametrize("seed", range(2))
def test_replies_fit_the_schema(client, shared, strict, seed):
    """A model with random weights, at temperature 1; the stream has the same text."""
    want = {"model": shared.model, "messages": HI, "max_tokens": 200, "temperature": 1.0, "seed": seed}
    want["response_format"] = schema_format(strict=strict)
    done = client.chat.completions.create(**want).choices[0]
    assert done.finish_reason == "stop"
    jsonschema.validate(json.loads(done.message.content), SCHEMA)
    chunks = client.chat.completions.create(**want, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == done.message.content


def test_json_object_begins_an_object_and_text_is_free(client, shared):
    want = {"model": shared.model, "messages": HI, "max_tokens": 12, "temperature": 0}

    def text(**more):
        return client.chat.completions.create(**want, **more).choices[0].message.content

    free = text()
    assert text(response_format={"type": "text"}) == free and not free.lstrip().startswith("{")
    assert text(response_format={"type": "json_object"}).lstrip().startswith("{")


def test_unknown_keywords_are_an_error_where_it_is_strict(shared):
    tags = {**SCHEMA["properties"]["tags"], "uniqueItems": True}
    odd = {**SCHEMA, "properties": {**SCHEMA["properties"], "tags": tags}}
    refused = shared.chat(response_format=schema_format(odd, strict=True))
    assert refused.status == 400 and refused.error["param"] == WHERE
    assert refused.error["message"].startswith(WHERE) and "uniqueItems" in refused.error["message"]
    loose = shared.chat(response_format=schema_format(odd), max_tokens=200, temperature=1.0, seed=1)
    jsonschema.validate(json.loads(loose.json["choices"][0]["message"]["content"]), SCHEMA)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "schema", [{"type": "strange"}, {"$ref": "#/nowhere"}, {"$ref": "https://example.org/a.json"}]
)
def test_schemas_that_cannot_be_compiled(shared, schema, strict, stream):
    refused = shared.chat(response_format=schema_format(schema, strict=strict), stream=stream)
    assert refused.status == 400 and refused.error["param"] == WHERE, refused.error


@pytest.mark.parametrize(
    "fields",
    [{"json_schema": SCHEMA}, {"response_format": {"type": "json_object", "schema": SCHEMA}}],
    ids=["json_schema", "response_format.schema"],
)
def test_schemas_as_clients_of_llama_cpp_send_them(shared, fields):
    """Strands sends `json_schema` and `cache_prompt`; others send the schema beside the type."""
    asked = {"tools": [], "cache_prompt": True, "max_tokens": 200, "temperature": 1.0, "seed": 1}
    answer = shared.chat(**asked, **fields)
    assert answer.status == 200, answer.json
    assert answer.headers["x-ruvmlx-ignored"] == "cache_prompt"
    jsonschema.validate(json.loads(answer.json["choices"][0]["message"]["content"]), SCHEMA)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"json_schema": {"type": "strange"}}, "json_schema"),
        ({"json_schema": SCHEMA, "response_format": {"type": "text"}}, "json_schema"),
        ({"json_schema": "x"}, "json_schema"),
    ],
)
def test_a_schema_of_llama_cpp_that_cannot_be_used(shared, fields, param):
    refused = shared.chat(**fields)
    assert refused.status == 400 and refused.error["param"] == param, refused.error


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        (schema_format("x"), WHERE),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "response_format.json_schema.name"),
        ({"type": "json_object", "schema": {"type": "strange"}}, "response_format.schema"),
    ],
)
def test_other_forms_are_refused(shared, given, param):
    refused = shared.chat(response_format=given)
    assert refused.status == 400 and refused.error["param"] == param, refused.error


def ids_of(shared, text):
    return shared.serving.runtime.model.tokenizer.encode(text, add_bos=False)


@pytest.mark.parametrize("endpoint", ["chat", "text"])
def test_penalties_and_bias_change_the_tokens(client, shared, endpoint):
    """A bias of 100 forces a token and -100 forbids it; penalties end the repetition."""
    letter = ids_of(shared, "Q")[-1]

    def text(**more):
        want = {"model": shared.model, "max_tokens": 12, "temperature": 0, **more}
        if endpoint == "text":
            return client.completions.create(prompt="A new day", **want).choices[0].text
        return client.chat.completions.create(messages=HI, **want).choices[0].message.content

    forced = {str(letter): 100}
    only = text(logit_bias=forced)
    assert only == "Q" * 12
    assert "Q" not in text(logit_bias={str(letter): -100})
    mild = text(logit_bias={str(letter): 100}, frequency_penalty=2, presence_penalty=2)
    assert mild == only  # 2 + 12 * 2 is less than 100
    near = {str(letter): 100, str(ids_of(shared, "Z")[-1]): 98.5}
    alone, often = text(logit_bias=near), text(logit_bias=near, frequency_penalty=2)
    once = text(logit_bias=near, presence_penalty=2)
    assert alone == only
    assert 3 <= often.count("Z") <= 9 and set(often) == set("QZ")
    assert once.count("Z") >= 1 and set(once) == set("QZ")  # at the second token, only Q has lost something
    assert text(logit_bias={}, frequency_penalty=0) == text()


def test_the_repetition_penalty_reaches_the_sampler(shared, monkeypatch):
    """ollama's penalty has a window of 64 tokens by default. Open WebUI sends the names of llama.cpp and
    ollama also to the paths of OpenAI."""
    submit, seen = shared.serving.host.submit, []

    def submit_and_note(request):
        seen.append(request.sampling)
        return submit(request)

    monkeypatch.setattr(shared.serving.host, "submit", submit_and_note)
    plain = shared.chat(max_tokens=40).json["choices"][0]["message"]["content"]
    penal = shared.chat(max_tokens=40, repetition_penalty=1.6, repetition_window=9)
    assert penal.json["choices"][0]["message"]["content"] != plain
    for options in ({"repeat_penalty": 1.1}, {"repeat_penalty": 1.1, "repeat_last_n": -1}, {},
                    {"repeat_penalty": 1.1, "repeat_last_n": 0}, {"repeat_last_n": 5}):  # fmt: skip
        asked = {"model": shared.model, "messages": HI, "options": {"num_predict": 2, **options}}
        assert shared.ask("POST", "/api/chat", {**asked, "stream": False}).status == 200
        for path, prompt in (("chat/completions", {"messages": HI}), ("completions", {"prompt": "a"})):
            answer = shared.ask("POST", f"/v1/{path}", shared.body(**prompt, max_tokens=2, **options))
            assert answer.status == 200, answer.body
    found = [(sampling.repetition_penalty, sampling.repetition_window) for sampling in seen]
    assert found[:2] == [(1, 0), (1.6, 9)]
    assert found[2:] == [each for each in [(1.1, 64), (1.1, 0), (1, 0), (1, 0), (1, 0)] for _ in range(3)]
    for field in ("repetition_penalty", "repetition_window"):
        refused = shared.chat(repeat_penalty=1.1, **{field: 1})
        assert refused.status == 400 and refused.error["param"] == "repeat_penalty"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", "much"),
        ("repetition_penalty", 0),
        ("repetition_penalty", 2.1),
        ("repetition_window", -1),
        ("repeat_penalty", 2.1),
        ("repeat_last_n", -2),
        ("logit_bias", {"0": 101}),
        ("logit_bias", {"one": 1}),
        ("logit_bias", {"999999": 1}),
        ("logit_bias", [1, 2]),
    ],
)
def test_refused_values(shared, path, field, value):
    ask = {"prompt": "a"} if path == "/v1/completions" else {"messages": HI}
    refused = shared.ask("POST", path, shared.body(**ask, **{field: value}))
    assert refused.status == 400, refused.json
    assert refused.error["param"].startswith(field) and field in refused.error["message"]


def test_text_completions_have_no_tools_or_forms(shared):
    for field in ("tools", "response_format"):
        refused = shared.ask("POST", "/v1/completions", shared.body(prompt="a", **{field: None}))
        assert refused.status == 400 and refused.error["param"] == field
