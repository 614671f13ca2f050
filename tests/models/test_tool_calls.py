"""Calls are told from text, whole and in any pieces, in every form."""

import itertools
import json

import numpy as np
import pytest

from ruvmlx.models.text.tool_calls import (
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL11,
    ArgumentsPiece,
    CallBegun,
    CallParser,
    TextPiece,
    new_call_id,
    parse,
)

TRICKY = {"a": '}{"\\', "b": [1, {"c": None}], "d": "[TOOL_CALLS]</tool_call>", "é\n": -1.5e3}
ARGS = json.dumps(TRICKY)
NESTED = json.dumps(TRICKY, indent=2, ensure_ascii=False)
# (form, text) -> (answer, [(name, arguments)])
CASES = [
    (LLAMA, f'{{"name": "w", "parameters": {ARGS}}}', "", [("w", ARGS)]),
    (LLAMA, f' <|python_tag|> {{"name": "w", "parameters": {NESTED}}}', "", [("w", NESTED)]),
    (LLAMA, f'{{"parameters": {ARGS}, "name": "w"}}; {{"name":"v","parameters":{{}}}}', "",
     [("w", ARGS), ("v", "{}")]),
    (LLAMA, '{"type": "function", "name": "w"}', "", [("w", "{}")]),
    (LLAMA, '{"name": "other", "parameters": {}} and more', None, []),
    (LLAMA, '<|python_tag|>{"name": "other", "parameters": {}}', "", [("other", "{}")]),
    (LLAMA, '{"answer": 42}', None, []),
    (LLAMA, '{"name": 42}', None, []),
    (LLAMA, "{not json", None, []),
    (LLAMA, 'It is {"name": "w", "parameters": {}}', None, []),
    (LLAMA, '<|python_tag|>print("hi")', None, []),
    (LLAMA, '<think>hm {"name": "w"}</think>\n{"name": "w", "parameters": {"x": 1}}',
     '<think>hm {"name": "w"}</think>', [("w", '{"x": 1}')]),
    (MISTRAL, f'[TOOL_CALLS] [{{"name": "w", "arguments": {ARGS}}}, {{"name": "v", "arguments": {{}}, '
     '"id": "abcdefgh1"}]', "", [("w", ARGS), ("v", "{}")]),
    (MISTRAL, 'Let me see. [TOOL_CALLS][{"name": "w", "arguments": "{\\"a\\": 1}"}]', "Let me see.",
     [("w", '{"a": 1}')]),
    (MISTRAL, "[TOOL_CALLS]", None, []),
    (MISTRAL, "x [TOOL_CALLS] [nothing]\n", None, []),
    (MISTRAL11, f"Well.\n[TOOL_CALLS]w[ARGS]{ARGS}[TOOL_CALLS]v[CALL_ID]abcdefgh1[ARGS]{{}}", "Well.",
     [("w", ARGS), ("v", "{}")]),
    (MISTRAL11, '[TOOL_CALLS]w{"a": 1} Done.\n', "Done.", [("w", '{"a": 1}')]),
    (MISTRAL11, '[TOOL_CALLS][{"name": "w", "arguments": {"a": 1}}]', "", [("w", '{"a": 1}')]),
    (MISTRAL11, "[THINK]I [TOOL_CALLS]no[ARGS]{}[/THINK][TOOL_CALLS]w[ARGS]{}",
     "[THINK]I [TOOL_CALLS]no[ARGS]{}[/THINK]", [("w", "{}")]),
    (MISTRAL11, "[TOOL_CALLS]" + "far too long " * 30 + "{}", None, []),
    (HERMES, f'Sure.\n\n<tool_call>\n{{"name": "w", "arguments": {ARGS}}}\n</tool_call>\n<tool_call>\n'
     '{"name": "v", "arguments": {}}\n</tool_call>\n', "Sure.", [("w", ARGS), ("v", "{}")]),
    (HERMES, '<think>\n<tool_call>\n</think>\n<tool_call>{"arguments": {"a": 1}, "name": "w"}</tool_call> x.',
     "<think>\n<tool_call>\n</think>x.", [("w", '{"a": 1}')]),
    (HERMES, f'<tool_call>{{"name": "w", "parameters": {ARGS}, "arguments": {{"a": 1}}}}</tool_call>', "",
     [("w", ARGS)]),
    (LLAMA, f'{{"arguments": {{"a": 1}}, "parameters": {ARGS}, "name": "w"}}', "", [("w", '{"a": 1}')]),
    (LLAMA, '{"name": "w", "arguments": "{}", "parameters": "{}"}', "", [("w", "{}")]),
    (LLAMA, f'{{"name": "w", "arguments": null, "parameters": {ARGS}}}', "", [("w", ARGS)]),
    (LLAMA, f'{{"name": "w", "arguments": {{ }}, "parameters": {ARGS}}}', "", [("w", ARGS)]),
    (HERMES, f'<tool_call>{{"parameters": "{{}}", "name": "w", "arguments": {ARGS}}}</tool_call>', "",
     [("w", ARGS)]),
    (LLAMA, '{"name": "w", "arguments": {}, "parameters": {}}', "", [("w", "{}")]),
    (HERMES, '<tool_call>{"name": "w", "arguments": {}, "par', "", [("w", "{}")]),
    (HERMES, '<tool_call>{"name": "w", "arguments": {', "", [("w", "{")]),
    (HERMES, "a < b <tool_ca", None, []),
    (HERMES, '<tool_call>\n{"nam', None, []),
    (HERMES, '<tool_call>\n{"name": "w", "arguments": {"a": "cut', "", [("w", '{"a": "cut')]),
    (HERMES, '<tool_call>\n{"name": "w", "arguments": {}}\n</tool_', "", [("w", "{}")]),
    (HERMES, '<tool_call>{"name": "w", "arguments": {}}</tool_call>\n<tool', "", [("w", "{}")]),
    (HERMES, '<tool_call>{"name": "w", "arguments": {}}</tool_call> a <', "a <", [("w", "{}")]),
    (HERMES, "<tool_call>what?</tool_call>", None, []),
    (HERMES, f'{{"name": "w", "arguments": {ARGS}}}\n{{"name": "v", "arguments": {{}}}}', "",
     [("w", ARGS), ("v", "{}")]),
    (HERMES, '{"name": "w", "arguments": {}}\n</tool_call>\n', "", [("w", "{}")]),
    (HERMES, '{"name": "w", "arguments": {}}\n\nIt is so.', "It is so.", [("w", "{}")]),
    (HERMES, '{"name": "other", "arguments": {}}', None, []),
    (HERMES, 'It is {"name": "w", "arguments": {}}', None, []),
    (HERMES, " plain text\n\nand more \n", None, []),
    (HERMES, "", "", []),
    (HERMES, f'```json\n{{"name": "w", "arguments": {ARGS}}}\n```', "", [("w", ARGS)]),
    (HERMES, f'\n```\n  {{"name": "w", "arguments": {NESTED}}}\n{{"name": "v", "arguments": {{}}}}```\nDone.',
     "Done.", [("w", NESTED), ("v", "{}")]),
    (HERMES, '<think>hm</think>\n```json\n{"name": "w", "arguments": {}}\n``', "<think>hm</think>",
     [("w", "{}")]),
    (LLAMA, f'```json \n{{"name": "w", "parameters": {ARGS}}}\n```\n', "", [("w", ARGS)]),
    (HERMES, '```json\n{"name": "w", "arguments": {}}\n```\n'
     '<tool_call>{"name": "v", "arguments": {}}</tool_call> x', "x", [("w", "{}"), ("v", "{}")]),
    (LLAMA, '```json\n{"name": "other", "parameters": {}}\n```', None, []),
    (HERMES, '```json\n{"answer": 42}\n```', None, []),
    (HERMES, '```json\n{"name": "w", "arg', "", [("w", "")]),
    (HERMES, '```json\n{"nam', None, []),
    (HERMES, '```python\n{"name": "w", "arguments": {}}\n```', None, []),
    (HERMES, "```js", None, []),
    (HERMES, '``{"name": "w", "arguments": {}}', None, []),
    (HERMES, 'So: ```json\n{"name": "w", "arguments": {}}\n```', None, []),
    (MISTRAL, '```json\n{"name": "w", "arguments": {}}\n```', None, []),
]  # fmt: skip


@pytest.mark.parametrize("dialect, text, answer, calls", CASES, ids=[c[1][:30] for c in CASES])
def test_a_whole_reply(dialect, text, answer, calls):
    """None: all of it is the answer."""
    got, found = parse(text, dialect, ["w", "v"])
    assert got == (text if answer is None else answer)
    assert [(call.name, call.arguments) for call in found] == calls


def in_pieces(dialect, pieces):
    """(answer, [(name, arguments)]), and every event in its order."""
    parser = CallParser(dialect, ["w", "v"])
    events = [event for piece in pieces for event in parser.add(piece)] + parser.end()
    answer, calls = "", []
    for event in events:
        if isinstance(event, TextPiece):
            assert event.text
            answer += event.text
        elif isinstance(event, CallBegun):
            assert event.index == len(calls)
            calls.append((event.name, ""))
        else:
            assert isinstance(event, ArgumentsPiece) and event.text and event.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    assert parser.calls == len(calls)
    return answer, calls, events


@pytest.mark.parametrize("dialect, text, answer, calls", CASES, ids=[c[1][:30] for c in CASES])
def test_a_stream_says_the_same(dialect, text, answer, calls):
    """Character by character, and cut at random places."""
    want = (text if answer is None else answer), calls
    rng = np.random.default_rng(len(text))
    cuts = [sorted(rng.integers(0, len(text) + 1, size=rng.integers(0, 9))) for _ in range(20)]
    ways = [list(text)] + [[text[a:b] for a, b in itertools.pairwise([0, *cut, len(text)])] for cut in cuts]
    for pieces in ways:
        assert in_pieces(dialect, pieces)[:2] == want, pieces


def test_arguments_stream_as_they_come():
    """The name at once, then piece by piece; nothing is kept until the end."""
    parser = CallParser(HERMES, ["w"])
    assert [type(p) for p in parser.add('<tool_call>\n{"name": "w", ')] == [CallBegun]
    assert parser.add('"arguments": {"a": "x')[0].text == '{"a": "x'
    assert parser.add("yz")[0].text == "yz"
    assert parser.add('"}')[0].text == '"}'
    assert parser.add("}\n</tool_call>") == parser.end() == []


def test_text_streams_as_it_comes():
    parser = CallParser(MISTRAL, ["w"])
    assert parser.add("Let me [TO") == [TextPiece("Let me")]
    assert parser.add("P] see") == [TextPiece(" [TOP] see")]
    assert parser.end() == []


def test_junk_is_text_or_calls_and_never_an_error():
    """Random strings of the forms' own pieces: no exception, and the text between calls is not lost."""
    marks = [
        "[TOOL_CALLS]",
        "[ARGS]",
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "<think>",
        "</think>",
        "```json\n",
    ]
    parts = [*marks, *'{}[]":\\, x1', '"name"', '"w"', '"arguments"']
    rng = np.random.default_rng(3)
    for dialect in (LLAMA, MISTRAL, MISTRAL11, HERMES):
        for _ in range(2000):
            pieces = [parts[i] for i in rng.integers(len(parts), size=rng.integers(1, 25))]
            answer, calls, _ = in_pieces(dialect, pieces)
            whole, found = parse("".join(pieces), dialect, ["w", "v"])
            assert (whole, [(c.name, c.arguments) for c in found]) == (answer, calls)
            if not calls:
                assert answer == "".join(pieces)


def test_ids_are_mistrals():
    found = {new_call_id() for _ in range(100)}
    assert len(found) == 100 and all(len(i) == 9 and i.isalnum() and i.isascii() for i in found)
