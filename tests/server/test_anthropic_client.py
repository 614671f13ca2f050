"""Anthropic's own Python client against the server."""

import json

import pytest

anthropic = pytest.importorskip("anthropic", reason="the dependency group `clients` is not installed")

HI = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0}  # the newest client has no argument for it
UNCOUNTED = ("max_tokens", "temperature")
NONCE = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={};"


@pytest.fixture
def request_fields(shared):
    return {"model": shared.model, "messages": HI, "max_tokens": 8, "extra_body": GREEDY}


@pytest.fixture
def body(request_fields):
    """The same as JSON."""
    return {**{name: value for name, value in request_fields.items() if name != "extra_body"}, **GREEDY}


@pytest.fixture
def claude(shared):
    """Anthropic's own client, as Claude Code configures it: the address without /v1."""
    url = f"http://127.0.0.1:{shared.port}"
    with anthropic.Anthropic(base_url=url, api_key="none-needed", max_retries=0, timeout=600) as found:
        yield found


def test_a_whole_reply(claude, request_fields, shared):
    """The text is that of OpenAI's endpoint."""
    done = claude.messages.create(**request_fields)
    other = shared.chat("hello").json["choices"][0]["message"]["content"]
    assert (done.type, done.role, done.model) == ("message", "assistant", shared.model)
    assert [block.type for block in done.content] == ["text"] and done.content[0].text == other
    assert (done.stop_reason, done.stop_sequence) == ("max_tokens", None)
    assert done.usage.output_tokens == 8
    assert done.usage.input_tokens + done.usage.cache_read_input_tokens > 5


def test_a_stream_is_the_whole_reply(claude, request_fields):
    whole = claude.messages.create(**request_fields)
    with claude.messages.stream(**request_fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 8
    total = [m.usage.input_tokens + m.usage.cache_read_input_tokens for m in (whole, final)]
    assert total[0] == total[1]


def test_the_events_of_a_stream(shared, body):
    """In Anthropic's order, each named by its type; the usage of message_start counts the whole prompt."""
    answer = shared.ask("POST", "/v1/messages", {**body, "stream": True})
    events = [event.split("\n") for event in answer.body.decode().strip().split("\n\n")]
    names = [name.removeprefix("event: ") for name, _ in events]
    data = [json.loads(line.removeprefix("data: ")) for _, line in events]
    assert names == [each["type"] for each in data]
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    usage = data[-2]["usage"]
    count = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert data[0]["message"]["usage"]["input_tokens"] == count
    assert data[0]["message"]["content"] == [] and data[1]["content_block"] == {"type": "text", "text": ""}


def test_stop_sequences(claude, request_fields):
    whole = claude.messages.create(**{**request_fields, "max_tokens": 20}).content[0].text
    stop = whole[len(whole) // 2 :][:2]
    done = claude.messages.create(**{**request_fields, "max_tokens": 20}, stop_sequences=["not in it", stop])
    assert (done.stop_reason, done.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in done.content) == whole[: whole.index(stop)]
    with claude.messages.stream(**{**request_fields, "max_tokens": 20}, stop_sequences=[stop]) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"system": "Be brief."},
        {"system": [{"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}}]},
        {"messages": [*HI, {"role": "assistant", "content": "Hi."}, *HI]},
        {"messages": [*HI, *HI]},
        {"thinking": {"type": "disabled"}},
    ],
)
def test_count_tokens(claude, request_fields, more):
    """As many as the reply's own usage says."""
    given = {**request_fields, **more}
    done = claude.messages.create(**given)
    del given["max_tokens"], given["extra_body"]
    count = claude.messages.count_tokens(**given).input_tokens
    assert count == done.usage.input_tokens + done.usage.cache_read_input_tokens


def test_blocks_are_texts(claude, request_fields, shared):
    """A text, one block, and two blocks with an empty line between them."""
    texts = []
    for content in (
        "a\n\nb",
        [{"type": "text", "text": "a\n\nb"}],
        [{"type": "text", "text": t} for t in "ab"],
    ):
        messages = [{"role": "user", "content": content}]
        texts.append(claude.messages.create(**{**request_fields, "messages": messages}).content[0].text)
    assert len(set(texts)) == 1
    assert texts[0] == shared.chat("a\n\nb").json["choices"][0]["message"]["content"]


def test_options(claude, request_fields):
    """top_k 1 is greedy at any temperature; metadata and the marks of a cache change nothing."""
    greedy = claude.messages.create(**request_fields).content[0].text
    drawn = {**request_fields, "metadata": {"user_id": "u"}}
    drawn["extra_body"] = {"temperature": 5.0, "top_k": 1, "top_p": 0.9, "service_tier": "auto"}
    marked = [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    drawn["messages"] = [{"role": "user", "content": marked}]
    assert claude.messages.create(**drawn).content[0].text == greedy


def test_the_nonce_of_an_agent_is_not_read(claude, request_fields):
    """Two requests whose accounting line differs have one prompt: the one without it."""
    plain = {"type": "text", "text": "You are brief."}
    counts, texts = set(), set()
    for first in (
        [],
        [{"type": "text", "text": NONCE.format("1f")}],
        [{"type": "text", "text": NONCE.format("22ab")}],
    ):
        done = claude.messages.create(**request_fields, system=[*first, plain])
        counts.add(done.usage.input_tokens + done.usage.cache_read_input_tokens)
        texts.add(done.content[0].text)
    joined = claude.messages.create(**request_fields, system=f"{NONCE.format('x')}\nYou are brief.")
    assert {joined.content[0].text} == texts and len(counts) == 1
    quoted = claude.messages.create(**request_fields, system=f"You are brief.\n{NONCE.format('x')}")
    assert quoted.usage.input_tokens + quoted.usage.cache_read_input_tokens > max(counts)


def test_a_rating(serve):
    """The message's id is what a rating takes."""
    running = serve()
    with anthropic.Anthropic(base_url=running.url.removesuffix("/v1"), api_key="x", max_retries=0) as client:
        done = client.messages.create(model=running.model, messages=HI, max_tokens=4)
    rated = running.ask("POST", "/v1/ratings", {"id": done.id, "rating": "up"})
    assert rated.status == 200 and rated.json["applied"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [*HI, {"role": "assistant", "content": "<think>so"}]}, "messages"),
        ({"messages": [{"role": "developer", "content": "so"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "auto"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "odd"}}}},
            "output_config.format.schema",
        ),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"service_tier": "fast"}, "service_tier"),
        ({"seed": 1}, "seed"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_refused_fields(shared, body, fields, named, path):
    body |= fields
    if path.endswith("count_tokens"):  # has neither of these; it refuses other fields of a reply by name
        body = {name: value for name, value in body.items() if name in fields or name not in UNCOUNTED}
    elif fields.get("max_tokens", 1) is None:
        del body["max_tokens"]
    refused = shared.ask("POST", path, body)
    assert refused.status == 400 and set(refused.json) == {"type", "error"}
    assert refused.json["type"] == "error" and refused.json["error"]["type"] == "invalid_request_error"
    assert refused.json["error"]["message"].startswith(f"{named}: ")
    assert refused.json["error"]["param"] == named


def test_errors_are_the_clients_own(claude, request_fields, serve):
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.create(**{**request_fields, "model": "another-model"})
    assert caught.value.body["error"]["type"] == "not_found_error"
    long = [{"role": "user", "content": "long " * 300}]
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 511 maximum"):
        claude.messages.create(**{**request_fields, "messages": long})
    with (
        pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 511 maximum"),
        claude.messages.stream(**{**request_fields, "messages": long}) as stream,
    ):
        stream.get_final_message()
    with pytest.raises(anthropic.APIStatusError) as caught:
        claude.post(
            "/v1/messages", cast_to=object, body={}, options={"headers": {"content-type": "text/plain"}}
        )
    assert caught.value.status_code == 415


def test_keys(serve, request_fields):
    """x-api-key, as the client sends it, and as a bearer token; errors in Anthropic's form."""
    running = serve(keys=["a" * 20])
    url = running.url.removesuffix("/v1")
    for given in ({"api_key": "a" * 20}, {"auth_token": "a" * 20}):
        with anthropic.Anthropic(base_url=url, max_retries=0, **given) as client:
            assert (
                client.messages.create(**{**request_fields, "model": running.model}).usage.output_tokens == 8
            )
    with anthropic.Anthropic(base_url=url, api_key="b" * 20, max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            client.messages.create(**request_fields)
        assert caught.value.body["error"]["type"] == "authentication_error"


def test_paths_that_there_are_not(shared):
    """Below Anthropic's paths, errors of routing are Anthropic's, too."""
    for method, path, status in (("GET", "/v1/messages", 405), ("POST", "/v1/messages/batches", 404)):
        refused = shared.ask(method, path, b"" if method == "POST" else None)
        assert refused.status == status and refused.json["type"] == "error"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/models", 401),
        ("GET", "/v1/models/none", 401),
        ("POST", "/v1/messages/count_tokens", 401),
        ("POST", "/v1/messages/batches", 401),
        ("GET", "/v1/files", 401),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/models/none", 404),
        ("GET", "/v1/models?limit=0", 400),
        ("GET", "/v1/models?after_id=none", 404),
        ("POST", "/v1/complete", 404),
        ("GET", "/v1/files", 404),
        ("GET", "/messages", 404),
    ],
)
def test_a_client_of_anthropics_kind_reads_every_error_of_its_paths(serve, one, method, path, status):
    """The header `anthropic-version` asks for the form. Without this header, the other clients get theirs."""
    running, key = one(lambda: serve(keys=["a" * 20])), {} if status == 401 else {"x_api_key": "a" * 20}
    body = {} if method == "POST" else None
    refused = running.ask(method, path, body, anthropic_version="2023-06-01", **key)
    assert refused.status == status and refused.json["type"] == "error", refused.body
    assert refused.json["error"]["message"] and refused.json["error"]["type"]
    if not path.startswith(("/v1/messages", "/v1/models?")):  # OpenAI's list has one page
        assert running.ask(method, path, body, **key).error["message"]


def test_an_endpoint_of_another_api_keeps_its_form_of_errors(shared):
    header = {"anthropic_version": "2023-06-01"}
    assert shared.ask("POST", "/v1/chat/completions", {}, **header).error
    assert isinstance(shared.ask("POST", "/api/nothing", {}, **header).json["error"], str)


def test_a_ping_in_silence(serve, request_fields, body):
    """While the reply waits for its turn, the stream is kept alive by events that the client knows."""
    from ruvmlx.apps.server.limits import ServerLimits

    running = serve(limits=ServerLimits(keep_alive=0.01))
    running.slow_down(0.05)
    long = {**body, "stream": True}
    streamed = running.ask("POST", "/v1/messages", long).body
    assert b'event: ping\ndata: {"type": "ping"}\n\n' in streamed and b"\n: " not in streamed
    url = running.url.removesuffix("/v1")
    with (
        anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as client,
        client.messages.stream(**request_fields) as stream,
    ):
        assert stream.get_final_message().usage.output_tokens == 8


def test_models(claude, shared):
    """The list and one of it; other clients read OpenAI's form at the same path."""
    page = claude.models.list(limit=1000)
    names = [model.id for model in page]
    assert names == [card["id"] for card in shared.ask("GET", "/v1/models").json["data"]]
    assert not page.has_more and (page.first_id, page.last_id) == (names[0], names[-1])
    one = claude.models.retrieve(names[-1])
    context = shared.serving.runtime.model.context
    assert (one.id, one.display_name, one.type, one.max_input_tokens) == (
        names[-1],
        names[-1],
        "model",
        context,
    )
    assert int(one.created_at.timestamp()) == shared.serving.started
    with pytest.raises(anthropic.NotFoundError, match="no such model"):
        claude.models.retrieve("gpt-4")


def test_pages_of_models(claude):
    """Anthropic's client reads the list of models page by page. The parameter `before_id` asks for the page
    that ends before the model with this id."""
    names = [model.id for model in claude.models.list()]
    first = claude.models.list(limit=1)
    assert len(names) > 1 and first.has_more and [model.id for model in first.data] == names[:1]
    assert [model.id for model in first] == [model.id for model in claude.beta.models.list(limit=1)] == names
    before = claude.models.list(before_id=names[-1], limit=1)
    assert [model.id for model in before.data] == names[-2:-1] and before.has_more == (len(names) > 2)
    last = claude.models.list(after_id=names[-1])
    assert last.data == [] and last.first_id is None and not last.has_more
    with pytest.raises(anthropic.NotFoundError, match="after_id: there is no such model"):
        claude.models.list(after_id="gpt-4")
    with pytest.raises(anthropic.BadRequestError, match="limit"):
        claude.models.list(limit=0)
