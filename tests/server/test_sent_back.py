"""Replies as the helpers of OpenAI's Python client return them, sent back in the next request. The helpers
add fields of their own to a reply, and the client sends these fields, too."""

import pytest

pydantic = pytest.importorskip("pydantic", reason="the dependency group `clients` is not installed")
openai = pytest.importorskip("openai", reason="the dependency group `clients` is not installed")

HI = [{"role": "user", "content": "hello"}]


class Time(pydantic.BaseModel):
    """This class is the format of the answer, and of the arguments of the tool."""

    utc: bool


TOOL = openai.pydantic_function_tool(Time)


@pytest.fixture
def client(roomy):
    with openai.OpenAI(base_url=roomy.url, api_key="x", max_retries=0, timeout=600) as found:
        yield found


def in_both_forms(items):
    """Return the items as objects, and also as dictionaries."""
    return [*items], [item.model_dump(warnings=False) for item in items]


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # OpenAI's client causes them
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_message(client, roomy, stream):
    asked = {"model": roomy.model, "messages": HI, "max_tokens": 200, "temperature": 1.0, "seed": 1}
    counts = []
    for more in ({"response_format": Time}, {"tools": [TOOL], "tool_choice": "required"}):
        if stream:
            with client.chat.completions.stream(**asked, **more) as events:
                done = events.until_done().get_final_completion()
        else:
            done = client.chat.completions.parse(**asked, **more)
        reply = done.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "noon"} for call in reply.tool_calls or ()
        ]
        for [said] in in_both_forms([reply]):
            told = [*HI, said, *results, *HI]
            usage = client.chat.completions.create(model=roomy.model, messages=told, max_tokens=1).usage
            counts.append(usage.prompt_tokens)
    assert counts[0] == counts[1] and counts[2] == counts[3]


def test_a_part_with_the_fields_of_its_message(roomy):
    """OpenAI's library of agents for JavaScript sends an earlier reply in this form."""
    beside = {"role": "assistant", "refusal": None, "reasoning_content": "why", "tool_calls": []}
    answers = []
    for more in ({}, beside):
        part = {"type": "text", "text": "Hi there.", **more}
        told = [*HI, {"role": "assistant", "content": [part]}, *HI]
        answers.append(roomy.ask("POST", "/v1/chat/completions", roomy.body(messages=told)))
    assert [answer.status for answer in answers] == [200, 200], answers[1].body
    said = [answer.json["choices"][0]["message"]["content"] for answer in answers]
    assert said[0] == said[1] and "role" in answers[1].headers["x-ruvmlx-ignored"]


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("stream", [False, True])
def test_the_items_of_a_response(client, roomy, stream):
    asked = {"model": roomy.model, "input": HI, "max_output_tokens": 200, "temperature": 1.0}
    counts = []
    for more in ({"text_format": Time}, {"tools": [TOOL], "tool_choice": "required"}):
        if stream:
            with client.responses.stream(**asked, **more) as events:
                done = events.until_done().get_final_response()
        elif "tools" in more:
            function = {"type": "function", **TOOL["function"]}
            done = client.responses.parse(**asked, tools=[function], tool_choice="required")
        else:
            done = client.responses.parse(**asked, **more)
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "noon"}
            for item in done.output
            if item.type == "function_call"
        ]
        for items in in_both_forms(done.output):
            told = [*HI, *items, *results, *HI]
            usage = client.responses.create(model=roomy.model, input=told, max_output_tokens=1).usage
            counts.append(usage.input_tokens)
    assert counts[0] == counts[1] and counts[2] == counts[3]


def test_the_items_that_the_server_kept(client, roomy):
    """A program can copy a stored conversation into a new one."""
    said = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
    function = {"type": "function", **TOOL["function"]}
    more = {"tools": [function], "tool_choice": "required", "max_output_tokens": 200, "temperature": 1.0}
    first = client.responses.create(model=roomy.model, input=said, **more)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": said[0]["content"]}
        for item in first.output
    ]
    asked = {"model": roomy.model, "max_output_tokens": 1}
    second = client.responses.create(**asked, input=results, previous_response_id=first.id)
    items = client.responses.input_items.list(second.id, order="asc").data
    again = client.responses.create(**asked, input=[item.model_dump() for item in items])
    assert again.usage.input_tokens == second.usage.input_tokens
