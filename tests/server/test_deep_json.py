"""JSON that is nest as deeply as it gets, wherever a request has JSON: an answer or a 400, never a 500."""

import pytest

DEPTHS = (60, 150, 300, 480, 700, 990, 100_000)
INSIDE = ("1.5", '"x"')
CALL = '{"id": "c", "type": "function", "function": {"name": "f", "arguments": %s}}'
PLACES = {
    "parameters of a tool": '"tools": [{"type": "function", "function": {"name": "f", "parameters": %s}}]',
    "a schema": '"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": %s}}',
    "metadata": '"metadata": %s',
    "an unknown field": '"unknown": %s',
    "a temperature": '"temperature": %s',
    "a message": '"messages": %s',
    "a call": '"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [%s]},'
    ' {"role": "tool", "tool_call_id": "c", "content": "y"}]',
}


def nest(inside, depth, is_list):
    begin, end = ("[", "]") if is_list else ('{"default": ', "}")
    return begin * depth + inside + end * depth


@pytest.mark.parametrize("place", PLACES)
def test_deep_json_is_no_internal_error(shared, place):
    for depth in DEPTHS:
        for inside in INSIDE:
            for is_list in (True, False):
                deep = nest(inside, depth, is_list)
                if place == "a call":
                    escaped = deep.replace('"', '\\"')
                    deep = CALL % f'"{escaped}"'
                field = PLACES[place] % deep
                messages = "" if '"messages"' in field else '"messages": [{"role": "user", "content": "x"}], '
                body = f'{{"model": "{shared.model}", "max_tokens": 2, {messages}{field}}}'
                answer = shared.ask("POST", "/v1/chat/completions", body.encode())
                assert answer.status in (200, 400), (depth, inside, is_list, answer.body[:300])
                assert answer.status == 200 or "\n" not in answer.error["message"]
