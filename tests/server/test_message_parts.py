"""Anthropic's form of a model that thinks first, without a model: bodies to turns, parts to events."""

import json

import msgspec
import pytest
from ruvmlx.apps.server import chat
from ruvmlx.apps.server.anthropic_bodies import CountBody, MessagesBody, conversation, wants_thought
from ruvmlx.apps.server.bodies import SystemTurn, UserTurn
from ruvmlx.apps.server.errors import ApiError
from ruvmlx.apps.server.messages import BlockEvents
from ruvmlx.apps.server.writing import ReplyPart

from ruvmlx.models.config.model import Message
from ruvmlx.models.text.thinking import join_thought, split, tag_of


def body(kind=CountBody, **fields):
    given = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return msgspec.convert(given, kind)


def test_a_thought_of_an_earlier_reply():
    """It is put back with the model's tag; a model without one never reads it."""
    turn = [
        {"type": "thinking", "thinking": "two and two", "signature": ""},
        {"type": "text", "text": "Four."},
        {"type": "text", "text": "Really."},
    ]
    hi = {"role": "user", "content": "hi"}
    asked = body(messages=[hi, {"role": "assistant", "content": turn}, hi])
    text = conversation(asked, "[THINK]")[1].content
    assert text == "[THINK]\ntwo and two\n[/THINK]\n\nFour.\n\nReally."
    assert (split(text).thought, split(text).answer) == ("two and two", "Four.\n\nReally.")
    assert conversation(asked, None)[1] == Message("assistant", "Four.\n\nReally.")


def test_a_document_of_plain_text():
    """The model reads a document in a message and in the result of a call, with its title and its context."""
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "noon"}}
    text = {"type": "text", "text": "When?"}
    blocks = {"type": "document", "source": {"type": "content", "content": [text]}}
    named = {**plain, "title": "Time", "context": "Rome", "citations": {"enabled": False}}
    hi = {"role": "user", "content": [named, text, {**blocks, "cache_control": {"type": "ephemeral"}}]}
    [told] = conversation(body(messages=[hi]), None)
    assert told == Message("user", "Time\n\nRome\n\nnoon\n\nWhen?\n\nWhen?")
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [plain, blocks]}
    turns = conversation(body(messages=[hi, call, {"role": "user", "content": [result]}]), None)
    assert turns[-1].content == "noon\n\nWhen?"
    cited = {**plain, "citations": {"enabled": True}}
    for content, place in (([cited], "[0]"), ([{**result, "content": [plain, cited]}], "[0].content[1]")):
        with pytest.raises(ApiError) as refused:
            conversation(body(messages=[hi, call, {"role": "user", "content": content}]), None)
        assert refused.value.param == f"messages[2].content{place}.citations.enabled"


def test_a_document_that_is_no_text(shared):
    source = {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}
    told = [{"role": "user", "content": [{"type": "document", "source": source}]}]
    asked = {"model": shared.model, "max_tokens": 2, "messages": told}
    error = shared.ask("POST", "/v1/messages", asked).json["error"]
    assert error["param"] == "messages[0].content[0].source.type"
    assert "the server reads text alone" in error["message"]


@pytest.mark.parametrize("tag", ["<think>", "[THINK]"])
def test_joined_is_what_split_takes_apart(tag):
    assert split(join_thought("a\nb", "c </think> d", tag)).answer == "c </think> d"
    assert split(join_thought("a\nb", "c", tag)).thought == "a\nb"


@pytest.mark.parametrize(
    ("template", "tag"),
    [
        (None, None), ("{{ messages }}", None), ("x <think> y", "<think>"),
        ("m.content.split('</think>')", "<think>"), ("[/THINK]", "[THINK]"),
    ],
)  # fmt: skip
def test_the_tag_of_a_template(template, tag):
    assert tag_of(template) == tag


def test_what_a_request_says_of_thinking():
    on, ignored = {"type": "enabled", "budget_tokens": 20}, list[str]()

    def wants(body, tag):
        return wants_thought(body, tag, ignored)

    assert wants(body(thinking=on), "<think>") is True
    assert wants(body(), "<think>") is wants(body(thinking={"type": "adaptive"}), None) is None
    assert wants(body(thinking={"type": "disabled"}), None) is False
    assert ignored == []
    assert wants(body(thinking=on), None) is None and ignored == ["thinking"]
    with pytest.raises(ApiError, match=r"^thinking\.budget_tokens: must be below"):
        wants(body(MessagesBody, thinking=on, max_tokens=20), "<think>")
    assert wants(body(MessagesBody, thinking=on, max_tokens=21), "<think>") is True


def test_a_thought_is_a_block_of_its_own():
    blocks, found = BlockEvents(), []
    for part in (
        ReplyPart(0),
        ReplyPart(0, thought="a"),
        ReplyPart(0, thought="b", text="c"),
        ReplyPart(0, text="d"),
    ):
        found += blocks.of(part)
    found += blocks.of(ReplyPart(0, text="e", response=object()))
    events = json.loads(msgspec.json.encode(found))
    told = [(e["type"].removeprefix("content_block_"), e["index"]) for e in events]
    assert told == [
        ("start", 0), ("delta", 0), ("delta", 0), ("stop", 0),
        ("start", 1), ("delta", 1), ("delta", 1), ("delta", 1), ("stop", 1),
    ]  # fmt: skip
    assert events[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert [e["delta"] for e in events if "delta" in e][1:3] == [
        {"type": "thinking_delta", "thinking": "b"},
        {"type": "text_delta", "text": "c"},
    ]


def test_a_reply_without_text_has_no_block():
    assert list(BlockEvents().of(ReplyPart(0, response=object()))) == []


def test_the_nonce_of_a_chat():
    """A proxy may have turned an agent's system prompt into OpenAI's form."""
    system = chat.messages_of([SystemTurn("x-anthropic-billing-header: a=b;\nBe."), UserTurn("hi")], None)
    assert system == [Message("system", "Be."), Message("user", "hi")]
