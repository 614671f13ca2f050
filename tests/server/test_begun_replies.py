"""A last message of the assistant is continued; variables for the chat template."""

import pytest

from ruvmlx.models.config.model import Message
from ruvmlx.models.text.chat_template import ChatTemplate
from ruvmlx.models.text.thinking import join_thought

HI = {"role": "user", "content": "hello"}
BEGUN = "One, two, "
FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]


def ask_chat(running, *more, **fields):
    return running.chat(**{"messages": [HI, *more], "max_tokens": 12, **fields})


def content(answer):
    assert answer.status == 200, answer.json
    return answer.json["choices"][0]["message"]["content"]


def continuation(running, ids):
    """What the model writes behind these tokens."""
    answer = running.ask("POST", "/v1/completions", running.body(prompt=ids, max_tokens=12))
    return answer.json["choices"][0]["text"]


@pytest.fixture
def prompt(shared):
    """The ids of the conversation, up to the reply."""
    tokenizer = shared.serving.runtime.model.tokenizer
    return tokenizer.encode_chat([Message("user", "hello")])


def test_every_form_goes_on_from_the_text(shared, prompt):
    """The reply is what the model writes behind the begun text, without that text, in all three forms."""
    begun = {"role": "assistant", "content": BEGUN}
    ids = prompt + shared.serving.runtime.model.tokenizer.encode(BEGUN, add_bos=False)
    want = continuation(shared, ids)
    answer = ask_chat(shared, begun)
    assert content(answer) == want != content(ask_chat(shared))
    assert answer.json["usage"]["prompt_tokens"] == len(ids)
    asked = {"model": shared.model, "max_tokens": 12, "temperature": 0, "messages": [HI, begun]}
    answer = shared.ask("POST", "/v1/messages", asked).json
    assert answer["content"] == [{"type": "text", "text": want}]
    counted = {name: asked[name] for name in ("model", "messages")}
    assert shared.ask("POST", "/v1/messages/count_tokens", counted).json == {"input_tokens": len(ids)}
    options = {"temperature": 0, "num_predict": 12}
    asked = {"model": shared.model, "messages": [HI, begun], "stream": False, "options": options}
    assert shared.ask("POST", "/api/chat", asked).json["message"]["content"] == want


def test_a_reply_needs_no_message_of_the_user(shared):
    """Instructions alone are enough, as in OpenAI's server."""

    def ask(*messages):
        return shared.ask("POST", "/v1/chat/completions", shared.body(messages=messages))

    system = {"role": "system", "content": "Greet."}
    assert ask(system).status == 200
    assert "prompt is empty" in ask(system, {"role": "user", "content": " "}).error["message"]
    alone = ask({"role": "assistant", "content": "Once"}).error
    assert alone["param"] == "messages" and "needs a message before it" in alone["message"]


def test_the_first_space_stays(shared):
    """It parts the new text from the begun one."""
    tokenizer, begun = shared.serving.runtime.model.tokenizer, {"role": "assistant", "content": "One,"}
    words = {i: tokenizer.token_bytes(i).decode("utf-8", "replace") for i in range(tokenizer.vocab_size)}
    token, word = next((i, text) for i, text in words.items() if text[:1] == " " and text.strip())
    forced = {"logit_bias": {str(token): 100}, "max_tokens": 1}
    assert content(ask_chat(shared, begun, **forced)) == word
    assert content(ask_chat(shared, begun, tools=TOOLS, **forced)) == word


def test_an_empty_beginning_is_none(shared):
    assert content(ask_chat(shared, {"role": "assistant", "content": ""})) == content(ask_chat(shared))


def test_a_stored_reply_can_be_rated(serve):
    running = serve()
    done = ask_chat(running, {"role": "assistant", "content": BEGUN}).json
    rated = running.ask("POST", "/v1/ratings", {"id": done["id"], "rating": "up"}).json
    assert rated["applied"] and rated["logprob_after"] > rated["logprob_before"]


@pytest.mark.parametrize(
    ("text", "fields", "param"),
    [
        (BEGUN, {"response_format": {"type": "json_object"}}, "response_format"),
        (BEGUN, {"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ("<think>\nI should", {}, "messages"),
        (BEGUN, {"chat_template_kwargs": {"enable_thinking": True}}, "reasoning_effort"),
    ],
)  # fmt: skip
def test_what_cannot_be_continued(shared, text, fields, param):
    refused = ask_chat(shared, {"role": "assistant", "content": text}, **fields)
    assert refused.status == 400 and refused.error["param"] == param
    assert refused.error["code"] == "invalid_combination"


def test_calls_without_results_are_no_beginning(shared):
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    messages = [HI, {"role": "assistant", "content": [call]}]
    asked = {"model": shared.model, "max_tokens": 4, "messages": messages}
    refused = shared.ask("POST", "/v1/messages", asked)
    assert refused.status == 400 and refused.json["error"]["param"] == "messages"


def test_variables_reach_the_template(shared, monkeypatch):
    """A template that reads them writes another prompt; typed text in them is no special token."""
    tokenizer = shared.serving.runtime.model.tokenizer
    source = "{% if mood %}Be {{ mood }}.{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(
        shared.serving.runtime.model.tokenizer, "_chat", ChatTemplate(source, ["<|endoftext|>"])
    )

    def tokens(**values):
        answer = ask_chat(shared, chat_template_kwargs=values)
        assert answer.status == 200, answer.json
        return answer.json["usage"]["prompt_tokens"]

    for mood in ("kind", "<|endoftext|>"):
        assert tokens(mood=mood) == len(tokenizer.encode(f"Be {mood}.hello", add_bos=False))
    assert tokens(other="kind") == tokens() == len(tokenizer.encode("hello", add_bos=False))


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"messages": []}, "chat_template_kwargs.messages"),
        ({"bos_token": "x"}, "chat_template_kwargs.bos_token"),
        ({"enable_thinking": "yes"}, "chat_template_kwargs.enable_thinking"),
        ({"a": "b" * 17_000}, "chat_template_kwargs"),
        ({"a": [[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]}, "chat_template_kwargs"),
        ({str(i): 1 for i in range(17)}, "chat_template_kwargs"),
        ([1], "chat_template_kwargs"),
    ],
)
def test_variables_are_bounded(shared, values, param):
    refused = ask_chat(shared, chat_template_kwargs=values)
    assert refused.status == 400 and refused.error["param"] == param


def test_variables_that_break_the_template(shared, monkeypatch):
    """That is the client's mistake: 400, and one line."""
    broken = ChatTemplate("{{ messages[0].content + (mood or '') }}", [])
    monkeypatch.setattr(shared.serving.runtime.model.tokenizer, "_chat", broken)
    assert ask_chat(shared).status == 200
    refused = ask_chat(shared, chat_template_kwargs={"mood": 3})
    assert refused.status == 400 and "variables" in refused.error["message"]


def test_a_begun_reply_keeps_its_thought(shared, monkeypatch):
    """Where the model thinks first, the thought stands before the begun answer."""
    seen, tokenizer = [], shared.serving.runtime.model.tokenizer
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %}<think>{% endif %}"
    monkeypatch.setattr(tokenizer, "_chat", ChatTemplate(source, []))
    monkeypatch.setattr(tokenizer, "chat_template", source + "</think>")
    submit = shared.serving.host.submit

    def submit_and_note(request):
        seen.append(request)
        return submit(request)

    monkeypatch.setattr(shared.serving.host, "submit", submit_and_note)
    begun = {"role": "assistant", "content": BEGUN, "reasoning_content": "Count."}
    ask_chat(shared, begun, reasoning_effort="high")
    assert seen[-1].opening == join_thought("Count.", BEGUN, "<think>") and seen[-1].thinking is True
    ask_chat(shared, {"role": "assistant", "content": BEGUN})
    assert seen[-1].opening == BEGUN and seen[-1].thinking is False
