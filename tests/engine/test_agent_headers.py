"""Headers of agents are dropped, and nothing else is."""

import pytest

from ruvmlx.engine.agent_headers import without_agent_headers

HEADER = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch={};"


@pytest.mark.parametrize("between", ["\n", "", " ", "\n\n"])
def test_two_requests_of_an_agent_have_one_system_prompt(between):
    """Whether the next block follows on a line of its own or not."""
    one, two = (HEADER.format(nonce) + between + "You are an agent.\nx = 1;" for nonce in ("eb6c6", "1c8b4"))
    assert (
        one != two and without_agent_headers(one) == without_agent_headers(two) == "You are an agent.\nx = 1;"
    )


def test_several_headers_go():
    assert without_agent_headers(f"\n{HEADER.format(1)}\nX-Anthropic-Other: a=b;\nYou") == "You"
    assert without_agent_headers(HEADER.format(2)) == ""


@pytest.mark.parametrize(
    "text",
    [
        "",
        "You are an agent.",
        "  indented",
        "Today is 2026-11-22.",
        "What is x-anthropic-billing-header: a=b; good for?",
        "You are an agent.\nx-anthropic-billing-header: a=b;",
        "x-anthropic is a name; y=z;",
    ],
)
def test_all_else_stays(text):
    assert without_agent_headers(text) == text
