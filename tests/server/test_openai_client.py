"""OpenAI's own Python client against the server."""

import asyncio
import base64
import json

import numpy as np
import pytest

openai = pytest.importorskip("openai", reason="the dependency group `clients` is not installed")

HI = [{"role": "user", "content": "hello"}]


def test_a_whole_reply(client, running):
    done = client.chat.completions.create(model=running.model, messages=HI, max_tokens=6, temperature=0)
    choice = done.choices[0]
    assert done.object == "chat.completion" and done.model == running.model
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.message.tool_calls is None and choice.finish_reason == "length" and choice.index == 0
    assert done.usage.completion_tokens == 6 and done.usage.prompt_tokens > 5
    assert done.usage.total_tokens == done.usage.prompt_tokens + 6
    assert done.usage.prompt_tokens_details.cached_tokens == 0


def test_a_stream_is_the_whole_reply(client, running):
    """Same text, the role first, no empty tool_calls, no usage unless it was asked for."""
    asked = {"model": running.model, "messages": HI, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks][-1] == "length"
    assert {c.choices[0].finish_reason for c in chunks[:-1]} == {None}
    assert all("usage" not in c.model_fields_set and c.choices for c in chunks)
    assert all("tool_calls" not in c.choices[0].delta.model_fields_set for c in chunks)
    assert len({c.id for c in chunks}) == 1 and len(chunks) > 2  # a slow reader gets several tokens at once


def test_usage_of_a_stream(client, running):
    """The last chunk has it, and no choices; the others have null."""
    chunks = list(
        client.chat.completions.create(
            model=running.model, messages=HI, max_tokens=5, stream=True,
            stream_options={"include_usage": True}, temperature=0,
        )
    )  # fmt: skip
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 5
    assert all(c.usage is None and "usage" in c.model_fields_set for c in chunks[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_several_replies(client, running, stream):
    """n replies with ids of their own, each drawn anew; the prompt is counted once."""
    asked = {"model": running.model, "messages": HI, "max_tokens": 5, "n": 3, "seed": 7, "temperature": 1.0}
    one = client.chat.completions.create(**{**asked, "n": 1})
    if stream:
        chunks = list(client.chat.completions.create(**asked, stream=True))
        texts = [
            "".join(c.choices[0].delta.content or "" for c in chunks if c.choices[0].index == i)
            for i in range(3)
        ]
        ids = {c.choices[0].reply_id for c in chunks}
        assert chunks[0].id in ids
    else:
        done = client.chat.completions.create(**asked)
        texts, ids = [c.message.content for c in done.choices], {c.reply_id for c in done.choices}
        assert done.id == done.choices[0].reply_id and [c.index for c in done.choices] == [0, 1, 2]
        assert done.usage.prompt_tokens == one.usage.prompt_tokens and done.usage.completion_tokens == 15
    assert len(ids) == 3 and len(set(texts)) == 3 and texts[0] == one.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client, running, stream):
    asked = {
        "model": running.model, "messages": HI, "max_tokens": 6, "temperature": 0, "logprobs": True,
        "top_logprobs": 3,
    }  # fmt: skip
    if stream:
        chunks = client.chat.completions.create(**asked, stream=True)
        tokens = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    else:
        tokens = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert len(tokens) == 6
    for token in tokens:
        assert len(token.top_logprobs) == 3 and token.logprob <= 0
        assert token.top_logprobs[0].logprob == token.logprob  # greedy: the likeliest was drawn
        assert token.top_logprobs[0].logprob >= token.top_logprobs[2].logprob
        assert bytes(token.bytes).decode("utf-8", "replace") == token.token


@pytest.mark.parametrize("stream", [False, True])
def test_the_tokens_of_a_stop_text_have_no_logprobs(client, running, stream):
    """Nor has the beginning of one in a stream. A stop text that does not come changes nothing."""
    asked = {"model": running.model, "messages": HI, "max_tokens": 12, "temperature": 0, "logprobs": True}
    text = client.chat.completions.create(**asked).choices[0].message.content
    for stop in (text[5:8], text[4:9] + "no"):
        done = client.chat.completions.create(**asked, stop=[stop], stream=stream)
        choices = [chunk.choices[0] for chunk in done] if stream else done.choices
        said = "".join((c.delta if stream else c.message).content or "" for c in choices)
        tokens = [bytes(token.bytes) for c in choices if c.logprobs for token in c.logprobs.content]
        assert said == text.partition(stop)[0]
        told = b"".join(tokens).decode("utf-8", "replace")
        assert told.startswith(said) and (len(tokens) == 12 if said == text else len(told) < len(said) + 2)


def test_logprobs_of_the_best_of_several(serve):
    """Each token once, whether it streams or the best reply comes as a whole."""
    running = serve(best_of=2)
    asked = {"max_tokens": 6, "temperature": 1.0, "seed": 1, "logprobs": True}
    whole = running.chat(**asked).json
    assert len(whole["choices"][0]["logprobs"]["content"]) == whole["usage"]["completion_tokens"]
    told = running.chat(**asked, stream=True, stream_options={"include_usage": True}).body.decode()
    events = [json.loads(e.removeprefix("data: ")) for e in told.split("\n\n") if e.startswith("data: {")]
    streamed = [c for e in events for c in e["choices"] if c["logprobs"]]
    assert sum(len(c["logprobs"]["content"]) for c in streamed) == events[-1]["usage"]["completion_tokens"]


def test_logprobs_without_alternatives(client, running):
    done = client.chat.completions.create(
        model=running.model, messages=HI, max_tokens=2, logprobs=True, temperature=0
    )
    assert [t.top_logprobs for t in done.choices[0].logprobs.content] == [[], []]


def test_stop_ends_the_reply_before_it(client, running):
    asked = {"model": running.model, "messages": HI, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    at = len(whole) // 2
    for stop in (whole[at : at + 2], ["not in it", whole[at : at + 2]]):
        done = client.chat.completions.create(**asked, stop=stop).choices[0]
        assert done.finish_reason == "stop" and whole.startswith(done.message.content)
        assert whole[at : at + 2] not in done.message.content


def test_seed_and_options(client, running):
    """The same seed, the same reply; greedy needs none."""
    asked = {"model": running.model, "messages": HI, "max_tokens": 12, "temperature": 1.5, "top_p": 0.95}

    def text(**more):
        return client.chat.completions.create(**asked, **more).choices[0].message.content

    assert text(seed=3) == text(seed=3) != text(seed=4)
    assert text(seed=3, extra_body={"top_k": 1}) == text(seed=4, extra_body={"top_k": 1})


def test_both_names_of_the_limit(client, running):
    for name in ("max_tokens", "max_completion_tokens"):
        done = client.chat.completions.create(model=running.model, messages=HI, temperature=0, **{name: 3})
        assert done.usage.completion_tokens == 3


def test_without_a_limit_the_context_is_the_limit(client, running):
    context = running.serving.runtime.model.context
    done = client.chat.completions.create(model=running.model, messages=HI, temperature=0)
    reached = done.usage.total_tokens == context
    assert (done.choices[0].finish_reason == "length") == reached and done.usage.completion_tokens > 20


def test_parts_are_joined_and_developer_is_system(client, running):
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    asked = {"model": running.model, "max_tokens": 8, "temperature": 0}
    texts = [
        client.chat.completions.create(
            messages=[{"role": role, "content": "Be brief."}, {"role": "user", "content": content}], **asked
        )
        for role, content in (("system", "hello"), ("developer", parts))
    ]
    assert texts[0].choices[0].message.content == texts[1].choices[0].message.content
    assert texts[0].usage.prompt_tokens == texts[1].usage.prompt_tokens


def test_errors_are_the_clients_own(client, running):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=running.model, messages=HI, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4", messages=HI)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="reads at most"):
        client.chat.completions.create(
            model=running.model, messages=[{"role": "user", "content": "long " * 300}]
        )
    with pytest.raises(openai.BadRequestError, match="reads at most"):  # before the stream begins
        client.chat.completions.create(
            model=running.model, messages=[{"role": "user", "content": "long " * 300}], stream=True
        )


def test_a_prompt_that_is_too_long_has_the_code_that_agents_look_for(client, running):
    langchain = pytest.importorskip("langchain_openai")
    exceptions = pytest.importorskip("langchain_core.exceptions")
    long = [{"role": "user", "content": "long " * 300}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=running.model, messages=long)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "messages"
    model = langchain.ChatOpenAI(model=running.model, base_url=running.url, api_key="x", max_retries=0)
    with pytest.raises(exceptions.ContextOverflowError):
        model.invoke("long " * 300)


def test_a_limit_beyond_the_context_is_told(client, running):
    """The usage has what there was room for, whole and as a stream; not where the limit fits."""
    for more in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        got = client.chat.completions.create(
            model=running.model, messages=HI, max_tokens=10_000, stop=["e", "a", "i", " "], **more
        )
        usage = [chunk.usage for chunk in got][-1] if more else got.usage
        assert usage.max_tokens == 512 - usage.prompt_tokens
    usage = client.chat.completions.create(model=running.model, messages=HI, max_tokens=2).usage
    assert not hasattr(usage, "max_tokens")


def test_models(client, running):
    names = [model.id for model in client.models.list()]
    assert names == [running.model, f"{running.model}@default", f"{running.model}@none"]
    assert client.models.retrieve(names[1]).id == names[1]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


@pytest.mark.parametrize("encoding", [None, "float", "base64"])
def test_embeddings(client, running, encoding):
    """The client asks for base64 by itself; one unit vector for each text, as the runtime's own."""
    given = {} if encoding is None else {"encoding_format": encoding}
    done = client.embeddings.create(model=running.model, input=["one text", "another"], **given)
    vectors = [row.embedding for row in done.data]
    if encoding == "base64":
        vectors = [np.frombuffer(base64.b64decode(vector), "<f4") for vector in vectors]
    own = running.ask("POST", "/v1/embeddings", {"model": running.model, "input": "another"})
    np.testing.assert_allclose(vectors[1], own.json["data"][0]["embedding"], rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert np.abs(np.subtract(*vectors)).max() > 0.01
    assert [row.index for row in done.data] == [0, 1] and done.usage.prompt_tokens > 2


@pytest.mark.parametrize("stream", [False, True])
def test_completions(client, running, stream):
    """A prompt as text and as its tokens; the model goes on without the chat template."""
    ids = running.serving.runtime.model.tokenizer.encode("Once upon")
    asked = {"model": running.model, "max_tokens": 6, "temperature": 0}
    by_text = client.completions.create(prompt="Once upon", logprobs=2, **asked)
    choice = by_text.choices[0]
    assert by_text.object == "text_completion" and by_text.usage.prompt_tokens == len(ids)
    assert len(choice.logprobs.tokens) == 6 and choice.logprobs.text_offset[0] == 0
    if stream:
        chunks = list(
            client.completions.create(
                prompt=ids, stream=True, stream_options={"include_usage": True}, **asked
            )
        )
        assert "".join(c.choices[0].text for c in chunks[:-1]) == choice.text
        assert chunks[-1].usage.completion_tokens == 6
    else:
        several = client.completions.create(prompt=["Once upon", "Other"], n=2, **asked)
        assert [c.index for c in several.choices] == [0, 1, 2, 3]
        assert several.choices[0].text == several.choices[1].text == choice.text
        assert several.usage.completion_tokens == 24
        prompts = sum(len(running.serving.runtime.model.tokenizer.encode(t)) for t in ("Once upon", "Other"))
        assert several.usage.prompt_tokens == prompts  # each prompt once
        assert client.completions.create(prompt=ids, **asked).choices[0].text == choice.text


def test_a_prompt_is_not_a_mixture(running):
    for prompt in ([], ["a", 1], [[1], "a"], [[]], ""):
        refused = running.ask("POST", "/v1/completions", running.body(prompt=prompt))
        assert refused.status == 400, prompt


async def test_the_asynchronous_client_in_parallel(running):
    """Eight at once: each gets its own reply, equal to the one it gets alone."""
    async with openai.AsyncOpenAI(base_url=running.url, api_key="x", max_retries=0) as client:

        async def text(word: str) -> str:
            done = await client.chat.completions.create(
                model=running.model, messages=[{"role": "user", "content": word}], max_tokens=8, temperature=0
            )
            return done.choices[0].message.content

        words = [f"word {i}" for i in range(8)]
        together = await asyncio.gather(*map(text, words))
        assert together == [await text(word) for word in words]
