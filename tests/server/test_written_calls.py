"""Calls come back in the order in which the model wrote them, if they say the same."""

import pytest
from ruvmlx.apps.server import written_calls
from ruvmlx.apps.server.written_calls import WrittenCalls

from ruvmlx.models.config.model import Message
from ruvmlx.models.text.tool_calls import ParsedCall


def message(arguments, id="a"):
    call = {"id": id, "type": "function", "function": {"name": "edit", "arguments": arguments}}
    return Message("assistant", "", (call,))


def arguments_of(calls, *given):
    [call] = calls.restore_message(message(*given)).tool_calls
    found = call["function"]["arguments"]
    return list(found.items()) if isinstance(found, dict) else found


@pytest.fixture
def calls():
    found = WrittenCalls()
    found.add(ParsedCall("a", "edit", '{"path": "x", "all": false}'))
    found.add(ParsedCall("cut", "edit", '{"path": "x'))
    return found


def test_the_order_is_the_models(calls):
    assert arguments_of(calls, {"all": False, "path": "x"}) == [("path", "x"), ("all", False)]


@pytest.mark.parametrize(
    "given",
    [
        ({"all": True, "path": "x"},),
        ({"all": False, "path": "x"}, "another"),
        ({"path": "x"}, "cut"),
        ("no object",),
    ],
)
def test_what_says_something_else_stays(calls, given):
    arguments = given[0]
    assert arguments_of(calls, *given) == (
        list(arguments.items()) if isinstance(arguments, dict) else arguments
    )


@pytest.mark.parametrize("limit, most", [("MAX_CALLS", 2), ("MAX_LETTERS", 20)])
def test_only_the_last_calls_are_kept(calls, monkeypatch, limit, most):
    monkeypatch.setattr(written_calls, limit, most)
    calls.add(ParsedCall("b", "edit", "{}"))
    assert arguments_of(calls, {"all": False, "path": "x"}) == [("all", False), ("path", "x")]
    assert calls.restore_message(Message("user", "hello")) == Message("user", "hello")
