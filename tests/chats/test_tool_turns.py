"""Tools in a chat: a reply calls one, its result goes back, and the store has both."""

import json
import threading
from contextlib import closing
from dataclasses import replace

import pytest

from ruvmlx.chats import stored_replies
from ruvmlx.chats.chat_file import as_json, as_markdown, import_once
from ruvmlx.chats.tool_turns import ToolOffer, ToolResult, calls_of_json, readable_result, split_calls
from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.engine.context_window import REST_LEFT_OUT, Turn, as_messages, join_neighbours
from ruvmlx.errors import NotFound
from ruvmlx.models.text.tool_calls import ParsedCall
from ruvmlx.store import Store
from ruvmlx.store.drafts import Drafts

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
FORECAST = {
    "type": "function",
    "function": {"name": "forecast", "description": "Weather", "parameters": CITY},
}
OFFER = ToolOffer((FORECAST,))
REQUIRED = ToolOffer((FORECAST,), "forecast")


def options(most=8):
    return {"sampling": Sampling(0.0), "max_new_tokens": most, "cancel": threading.Event()}


def read_stream(chunks):
    """The whole reply, and the text as it streamed."""
    chunks = list(chunks)
    return chunks[-1].response, "".join(chunk.text for chunk in chunks)


@pytest.fixture
def required_call(open_tiny):
    """A runtime, and a chat whose last reply calls the tool."""
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        response, shown = read_stream(runtime.chats.say(chat, "The weather?", tools=REQUIRED, **options(200)))
        yield runtime, chat, response, shown


def test_a_required_call_is_no_text(required_call):
    """It is neither streamed nor shown; the store has it, with the same id."""
    runtime, chat, response, shown = required_call
    [call] = response.calls
    assert call.name == "forecast" and json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    assert response.text == shown == ""
    question, reply = runtime.chats.turns(chat)
    assert (question.calls, reply.calls, reply.content) == ((), (call,), "")
    assert "<tool_call>" in runtime.store.replies.get(reply.reply_id).text


def test_the_result_goes_back_and_the_answer_continues(required_call):
    runtime, chat, response, _ = required_call
    [turn] = runtime.chats.add_results(chat, [ToolResult(response.calls[0], "24 degrees")])
    assert (turn.role, turn.content, turn.calls) == ("tool", "24 degrees", response.calls)
    answer, _ = read_stream(runtime.chats.answer_results(chat, tools=OFFER, **options()))
    prompt = runtime.model.tokenizer.text_with_specials(runtime.store.replies.get("last").prompt_ids)
    places = [prompt.index(words) for words in ("Weather", "The weather?", "<tool_call>", "24 degrees")]
    asked = prompt.rindex('{"name": "forecast", "arguments": {"city"')
    assert places[0] < places[1] < asked < places[3]
    turns = runtime.chats.turns(chat)
    assert [t.role for t in turns] == ["user", "assistant", "tool", "assistant"]
    assert turns[-1].reply_id == answer.request_id
    assert runtime.store.replies.get(answer.request_id).prompt == "The weather?"


def test_a_result_follows_its_call_although_another_process_wrote(required_call):
    """The user takes minutes to allow a call. A second window sends a message meanwhile."""
    runtime, chat, response, _ = required_call
    with closing(Store(runtime.store.path)) as other:
        other.messages.add_user(chat, "From another window.")
    results = [ToolResult(response.calls[0], text) for text in ("24 degrees", "sunny")]
    saved = runtime.chats.add_results(chat, results)
    turns = runtime.chats.turns(chat)
    assert [turn.content for turn in saved] == ["24 degrees", "sunny"] and saved == turns[-2:]
    assert [turn.role for turn in turns] == ["user", "assistant", "tool", "tool"]
    other_call = replace(response.calls[0], id="none")
    with pytest.raises(NotFound, match="deleted meanwhile"):
        runtime.chats.add_results(chat, [ToolResult(other_call, "24 degrees")])


def test_the_draft_of_an_answer_to_a_result_teaches_nothing(required_call, monkeypatch):
    """A later start can make the draft a reply, which the user can rate."""
    monkeypatch.setattr(stored_replies, "SAVE_EVERY", -1.0)
    runtime, chat, response, _ = required_call
    runtime.chats.add_results(chat, [ToolResult(response.calls[0], "24 degrees")])
    saved, put = [], Drafts.put
    monkeypatch.setattr(Drafts, "put", lambda *args: (saved.append(args[2]), put(*args)))
    read_stream(runtime.chats.answer_results(chat, tools=OFFER, **options()))
    read_stream(runtime.chats.say(chat, "And now?", **options()))
    assert [draft.teaches for draft in saved][:: len(saved) - 1] == [False, True]


def test_the_question_stays_before_large_results(required_call):
    """The results pushed it out of the prompt, and the model answered without it."""
    runtime, chat, response, _ = required_call
    results = [ToolResult(response.calls[0], letter * 100) for letter in "defg"]
    runtime.chats.add_results(chat, results)
    read_stream(runtime.chats.answer_results(chat, **options(48)))
    prompt = runtime.chats._model.tokenizer.text_with_specials(runtime.store.replies.get("last").prompt_ids)
    places = [prompt.index(words) for words in ("The weather?", "<tool_call>", REST_LEFT_OUT, "g" * 100)]
    assert places == sorted(places) and "d" * 100 not in prompt


@pytest.mark.parametrize("of", ["call", "answer", "rest", "rest of the rest"])
def test_a_rating_after_a_tool_teaches_nothing(required_call, of):
    """The store keeps the rating. The next question of the same chat teaches again. If a limit cut
    an answer off, the rest of the answer has the tool's words before it, so the rest teaches nothing."""
    runtime, chat, response, _ = required_call
    if of != "call":
        runtime.chats.add_results(chat, [ToolResult(response.calls[0], "24 degrees")])
        read_stream(runtime.chats.answer_results(chat, **options()))
    for _ in range(of.count("rest")):
        read_stream(runtime.chats.continue_reply(chat, **options()))
        reply = runtime.store.replies.get("last")
        assert reply.prompt == "The weather?" and not reply.teaches
    result = runtime.rate("last", "up")
    assert not result.applied and runtime.chats.turns(chat)[-1].rating == "up"
    read_stream(runtime.chats.say(chat, "And now?", **options()))
    assert runtime.rate("last", "up").applied


def test_calls_without_a_result_are_left_out(required_call):
    """A chat that was left at the question whether the call may run."""
    runtime, chat, _, _ = required_call
    read_stream(runtime.chats.say(chat, "Never mind.", tools=OFFER, **options()))
    assert '"arguments": {"city"' not in runtime.chats.prompt_text(chat)


def test_a_chat_with_calls_goes_on_without_tools(required_call):
    runtime, chat, response, _ = required_call
    runtime.chats.add_results(chat, [ToolResult(response.calls[0], "24 degrees")])
    read_stream(runtime.chats.answer_results(chat, tools=ToolOffer((FORECAST,), is_over=True), **options()))
    read_stream(runtime.chats.say(chat, "Thanks.", **options()))
    prompt = runtime.chats.prompt_text(chat)
    assert "24 degrees" in prompt and "You can call these functions" not in prompt
    runtime.chats.check_chat(chat)


def test_again_begins_at_the_question(required_call):
    runtime, chat, response, _ = required_call
    runtime.chats.add_results(chat, [ToolResult(response.calls[0], "24 degrees")])
    read_stream(runtime.chats.answer_results(chat, **options()))
    read_stream(runtime.chats.again(chat, **options()))
    turns = runtime.chats.turns(chat)
    assert [turn.role for turn in turns] == ["user", "assistant"] and turns[-1].branches == 2
    runtime.chats.next_sibling(chat, -1)
    assert [turn.role for turn in runtime.chats.turns(chat)] == ["user", "assistant", "tool", "assistant"]


def test_only_a_result_can_be_answered(required_call):
    runtime, chat, _, _ = required_call
    with pytest.raises(NotFound, match="no result of a tool"):
        read_stream(runtime.chats.answer_results(chat, **options()))


def test_a_long_result_is_one_line(required_call):
    runtime, chat, response, _ = required_call
    [turn] = runtime.chats.add_results(chat, [ToolResult(response.calls[0], "word " * 200_000)])
    assert turn.content.startswith("(The result is too long: 1,000,000 characters.")
    counted = []
    readable_result("a" * 10_000_000, 1024, lambda text: counted.append(text) or 1)
    assert counted == []  # that would take seconds


def test_calls_come_back_from_files_and_forks(required_call, tmp_path):
    runtime, chat, response, _ = required_call
    runtime.chats.add_results(chat, [ToolResult(response.calls[0], "24 degrees")])
    fork = runtime.store.chats.fork(chat)
    other = Store(tmp_path / "other.db")
    data = json.dumps(as_json(runtime.store, chat)).encode()
    imported = import_once(other, data, "f.json").session_id
    for store, copy in ((runtime.store, fork), (other, imported)):
        _, reply, result = store.messages.branch(copy)
        assert calls_of_json(reply.calls) == calls_of_json(result.calls) == response.calls
        assert (result.role, result.content) == ("tool", "24 degrees")
    assert f"## Tool\n\nforecast {response.calls[0].arguments}\n\n24 degrees" in as_markdown(other, imported)


@pytest.mark.parametrize("calls", ['[{"id": "a", "name": "b", "arguments": "no object"}]', "[3]", "7", "{}"])
def test_odd_calls_of_a_file_are_left_out(tmp_path, calls):
    store = Store(tmp_path / "s.db")
    data = '[{"role": "assistant", "content": "x", "calls": ' + calls + "}]"
    chat = import_once(store, data.encode(), "f").session_id
    assert [row.calls for row in store.messages.branch(chat)] == [""]


@pytest.mark.parametrize("number", ["NaN", "1e999", "-Infinity"])
def test_a_number_that_json_does_not_have_is_no_argument(tiny, tmp_path, number):
    """JSON does not have the numbers NaN and infinity. So the program refuses a tool call with one of these
    numbers, from a model and from a file."""
    request = GenerationRequest(tools=(FORECAST,), shows_calls=True)
    said = f'<tool_call>\n{{"name": "forecast", "arguments": {{"city": {number}}}}}\n</tool_call>'
    assert split_calls(tiny.tokenizer, request, said) == (said, [])
    said = said.replace(number, "1e99")
    assert len(split_calls(tiny.tokenizer, request, said)[1]) == 1
    calls = '[{"id": "a", "name": "f", "arguments": {"x": 1e999}}]'
    file = f'[{{"role": "user", "content": "q"}}, {{"role": "assistant", "content": "", "calls": {calls}}}]'
    store = Store(tmp_path / "ruvmlx.db")
    chat = import_once(store, file.encode(), "f").session_id
    exported = json.dumps(as_json(store, chat)).encode()
    assert not import_once(store, exported, "g").is_new


def test_neighbours_with_calls_stay_apart():
    """Two results in a row are two messages; replies with calls are not joined to others."""
    one, two = ParsedCall("1", "f", "{}"), ParsedCall("2", "g", '{"a": 1}')
    turns = [
        Turn("user", "q"),
        Turn("assistant", "Let me see.", calls=(one, two)),
        Turn("tool", "first", calls=(one,)),
        Turn("tool", "", calls=(two,)),
        Turn("assistant", "", calls=(one,)),
        Turn("assistant", "Done."),
        Turn("assistant", "Really."),
    ]
    messages = join_neighbours(as_messages(turns))
    assert [m.role for m in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert [call["id"] for call in messages[1].tool_calls] == ["1", "2"]
    assert (messages[2].tool_call_id, messages[3].name) == ("1", "g")
    assert messages[-1].content == "Done.\n\nReally."
