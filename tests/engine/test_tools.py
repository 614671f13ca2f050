"""Tools for any model: the form is told from the template, and forced calls parse in each form and
vocabulary, streamed and not."""

import base64
import json
from dataclasses import dataclass
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest

from ruvmlx.engine import Sampling
from ruvmlx.engine.constraint import matcher_for
from ruvmlx.engine.detokenize import StreamDecoder
from ruvmlx.engine.grammar import Constraint
from ruvmlx.engine.tools import prepare, tool_form
from ruvmlx.engine.types import GenerationRequest
from ruvmlx.errors import UsageError
from ruvmlx.models.config.model import Message, Tokenizer
from ruvmlx.models.text.chat_template import CHATML, LLAMA3, PLAIN
from ruvmlx.models.text.tekken import TekkenTokenizer
from ruvmlx.models.text.tool_calls import ArgumentsPiece, CallBegun, parse, shown_marks
from ruvmlx.sampling import Sampler
from tests.models.test_chat_template import Letters
from tests.models.test_chat_tools import ALL
from tests.models.test_tekken import small_tekken
from tests.models.test_tokenizers import gguf
from tests.models.tool_templates import LLAMA31, MISTRAL7, QWEN25
from tests.models.vocabularies import gguf_spm_keys, gguf_vocab_keys

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "unit": {"enum": ["°C", "°F"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOW = {"type": "object", "properties": {"zone": {"type": "boolean"}}, "additionalProperties": False}


def tool(name, parameters, **more):
    function = {"name": name, "description": f"Tells the {name}.", "parameters": parameters, **more}
    return {"type": "function", "function": function}


TOOLS = [tool("weather", WEATHER, strict=True), tool("get_time.now-1", NOW)]
SCHEMAS = {"weather": WEATHER, "get_time.now-1": NOW}
USER = Message("user", "What is the weather?")
MISTRALS = str.split(
    "[INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
)


def byte_level(folder, template, specials) -> Tokenizer:
    keys = gguf_vocab_keys()
    types = np.r_[keys["tokenizer.ggml.token_type"], np.full(len(specials), 3, np.int32)]
    tokens = [*keys["tokenizer.ggml.tokens"], *specials]
    keys |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    return gguf(folder, **(keys | {"tokenizer.chat_template": template}))


def sentencepiece(folder, template, specials) -> Tokenizer:
    keys = gguf_spm_keys()
    tokens = [*keys["tokenizer.ggml.tokens"], *specials]
    types = np.r_[keys["tokenizer.ggml.token_type"], np.full(len(specials), 3, np.int32)]
    scores = np.r_[keys["tokenizer.ggml.scores"], np.zeros(len(specials), np.float32)]
    keys |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    return gguf(folder, **(keys | {"tokenizer.ggml.scores": scores, "tokenizer.chat_template": template}))


def tekken(folder, version) -> Tokenizer:
    names = ["<unk>", "<s>", "</s>", *MISTRALS, "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"]
    special = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(names)]
    sizes = {"default_num_special_tokens": 32, "default_vocab_size": 32 + 261, "version": f"v{version}"}
    data = small_tekken(config=sizes, special_tokens=special)
    assert base64.b64decode(data["vocab"][65]["token_bytes"]) == b"A"
    (folder / "tekken.json").write_text(json.dumps(data))
    return TekkenTokenizer(folder / "tekken.json")


@dataclass(frozen=True)
class Case:
    make: object
    form: str
    in_template: bool = True


LLAMA_SPECIALS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"]
CASES = {
    "llama": Case(lambda folder: byte_level(folder, LLAMA31, LLAMA_SPECIALS), "llama"),
    "mistral v3, sentencepiece": Case(lambda folder: sentencepiece(folder, None, MISTRALS[:7]), "mistral"),
    "mistral v7's own template": Case(lambda folder: sentencepiece(folder, MISTRAL7, MISTRALS), "mistral"),
    "mistral v11, tekken": Case(lambda folder: tekken(folder, 11), "mistral11"),
    "mistral v13, tekken": Case(lambda folder: tekken(folder, 13), "mistral11"),
    "qwen": Case(lambda folder: byte_level(folder, QWEN25, []), "hermes"),
    "qwen, marks are tokens": Case(
        lambda folder: byte_level(folder, QWEN25, ["<tool_call>", "</tool_call>"]), "hermes"
    ),
    "no tools, byte-level": Case(lambda folder: byte_level(folder, CHATML, []), "hermes", False),
    "no tools, sentencepiece": Case(lambda folder: sentencepiece(folder, None, []), "hermes", False),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture
def model(case, tmp_path):
    tokenizer = case.make(tmp_path)
    return SimpleNamespace(tokenizer=tokenizer, shape=SimpleNamespace(vocab_size=tokenizer.vocab_size + 3))


def random_pieces(model, prepared, seed: int, most: int = 600) -> list[str]:
    """The text, token by token, that a model with random logits writes; [] if it did not finish. JSON's own
    characters are a bit likelier, so that it does."""
    rule = matcher_for(model, prepared.constraint)
    rng, draw = np.random.default_rng(seed), Sampler(Sampling(1.0, seed=seed), rule)
    tokenizer = model.tokenizer
    decoder = StreamDecoder(tokenizer, shown_marks(tokenizer))
    likely = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i)[:1] in (b'"', b"}", b"]")]
    pieces = []
    for _ in range(most):
        logits = rng.normal(size=model.shape.vocab_size).astype(np.float32) * 2
        logits[likely] += 2
        token = draw(logits)
        if token in tokenizer.eos_ids:
            return pieces
        pieces.append(decoder.add(token))
        if rule.is_complete:
            return pieces
    return []


@pytest.mark.parametrize("choice", ["required", "function"])
def test_forced_calls_parse(case, model, choice):
    """Whole and streamed; arguments fit the schema."""
    function = "weather" if choice == "function" else ""
    prepared = prepare(model, [USER], TOOLS, "auto" if function else choice, function)
    assert (prepared.form.dialect.name, prepared.form.in_template) == (case.form, case.in_template)
    finished = 0
    for seed in range(30):
        pieces = random_pieces(model, prepared, seed)
        if not pieces:
            continue
        finished += 1
        answer, calls = parse("".join(pieces), prepared.form.dialect, prepared.names)
        assert answer == "" and calls
        assert len(calls) == 1 if function else len(calls) <= 8
        for call in calls:
            assert not function or call.name == function
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        parser = prepared.parser()
        streamed = [event for piece in pieces for event in parser.add(piece)] + parser.end()
        begun = [event.name for event in streamed if isinstance(event, CallBegun)]
        assert begun == [call.name for call in calls]
        pieces = [event for event in streamed if isinstance(event, ArgumentsPiece)]
        texts = ["".join(p.text for p in pieces if p.index == i) for i in range(len(calls))]
        assert texts == [call.arguments for call in calls]
    assert finished >= 10


ANSWER = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"],
          "additionalProperties": False}  # fmt: skip


def test_a_reply_is_calls_or_the_answer(case, model):
    """With a form for the answer, the model still decides whether it calls."""
    prepared = prepare(model, [USER], TOOLS, answer=Constraint.json_schema(ANSWER))
    called = answered = 0
    for seed in range(60):
        text = "".join(random_pieces(model, prepared, seed, 300))
        if not text:
            continue
        answer, calls = parse(text, prepared.form.dialect, prepared.names)
        called, answered = called + bool(calls), answered + (not calls)
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        if not calls:
            jsonschema.validate(json.loads(answer), ANSWER)
    assert called and answered
    plain = Constraint.json_schema(ANSWER)
    assert prepare(model, [USER], TOOLS, "none", answer=plain).constraint == plain
    assert prepare(model, [USER], (), answer=plain).constraint == plain


def test_history_renders(model):
    """Calls and results, with ids as other programs make them."""
    call = {"id": "call_0123456789abcdef", "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Zürich"}}}  # fmt: skip
    chat = [USER, Message("assistant", "", (call,)), Message("tool", "sunny", (), call["id"], "weather"),
            Message("assistant", "It is sunny."), USER]  # fmt: skip
    prepared = prepare(model, chat, TOOLS)
    assert prepared.constraint is None and prepared.fields()["shows_calls"]
    text = model.tokenizer.chat_text(prepared.messages, tools=prepared.tools)
    for words in ("Tells the weather.", "sunny", "It is sunny.", '"city": "Z'):
        assert words in text
    assert model.tokenizer.encode_chat(prepared.messages, tools=prepared.tools)
    none = prepare(model, chat, TOOLS, "none")
    assert "Tells the" not in model.tokenizer.chat_text(none.messages, tools=none.tools)
    assert not none.fields()["shows_calls"]


def test_the_form_is_told_from_what_a_template_writes():
    found = {
        name: tool_form(Letters(source))
        for name, source in (ALL | {"a": CHATML, "b": LLAMA3, "c": PLAIN}).items()
    }
    names = {name: (form.dialect.name, form.in_template) for name, form in found.items()}
    assert names == {
        "llama 3.1": ("llama", True), "qwen 2.5": ("hermes", True), "qwen 3": ("hermes", True),
        "mistral 7": ("mistral", True), "others": ("hermes", False), "built in, v3": ("mistral", True),
        "built in, v7": ("mistral", True), "built in, v11": ("mistral11", True),
        "built in, v13": ("mistral11", True), "built in, v15": ("mistral11", True),
        "a": ("hermes", False), "b": ("hermes", False), "c": ("hermes", False),
    }  # fmt: skip
    assert [name for name, form in found.items() if form.call_ids] == ["built in, v11"]


def test_system_text_and_tools_share_a_turn(tmp_path):
    model = SimpleNamespace(tokenizer=byte_level(tmp_path, CHATML, []), shape=SimpleNamespace(vocab_size=267))
    prepared = prepare(model, [Message("system", "Be brief."), USER], TOOLS)
    assert [m.role for m in prepared.messages] == ["system", "user"]
    assert prepared.messages[0].content.startswith("Be brief.\n\nYou can call")


@pytest.mark.parametrize(
    "tools, more, words",
    [
        ([{"type": "retrieval"}], {}, r"tools\[0\] must be"),
        ([*TOOLS, tool("a b", NOW)], {}, r"tools\[2\] has the name 'a b'"),
        ([tool("a", [1])], {}, r"tools\[0\] has parameters"),
        ([*TOOLS, TOOLS[0]], {}, "two tools have the name weather"),
        (TOOLS, {"function": "rain"}, "asks for rain; the tools are: weather, get_time.now-1"),
        ([], {"choice": "required"}, "asks for a tool; the tools are: none"),
        (TOOLS, {"choice": "always"}, "must be one of none, auto, required"),
        ([tool("a", NOW)] * 600, {}, "600 tools were given"),
    ],
)
def test_wrong_tools_are_one_line(tools, more, words, tmp_path):
    model = SimpleNamespace(tokenizer=byte_level(tmp_path, CHATML, []))
    with pytest.raises(UsageError, match=words) as error:
        prepare(model, [USER], tools, **more)
    assert "\n" not in str(error.value)


def test_a_strict_tool_with_a_keyword_that_is_not_known_is_refused(tmp_path):
    """Without `strict` the keyword is no restriction."""
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    model = SimpleNamespace(tokenizer=byte_level(tmp_path, CHATML, []), shape=SimpleNamespace(vocab_size=267))
    matcher_for(model, prepare(model, [USER], [tool("f", odd)], "required").constraint)
    strict = prepare(model, [USER], [tool("f", odd, strict=True)], "required")
    with pytest.raises(UsageError, match="uniqueItems"):
        matcher_for(model, strict.constraint)


def test_an_engine_writes_a_forced_call(engine, tiny):
    """The tiny model's template has no tools: they are in its system text."""
    prepared = prepare(tiny, [Message("user", "?")], TOOLS[1:], function="get_time.now-1")
    responses = [
        engine.generate(
            GenerationRequest(**prepared.fields(), max_new_tokens=99, sampling=Sampling(1.0, seed=s))
        )
        for s in range(6)
    ]
    done = [r for r in responses if r.finish_reason == "stop"]
    assert len(done) >= 2
    for response in done:
        answer, (call,) = parse(response.text, prepared.form.dialect)
        assert answer == "" and call.name == "get_time.now-1"
        jsonschema.validate(json.loads(call.arguments), NOW)


def test_marks_are_text_only_where_calls_are_asked_for(tmp_path):
    tokenizer = tekken(tmp_path, 11)
    ids = [tokenizer.special_tokens["[TOOL_CALLS]"], *tokenizer.encode("th", add_bos=False)]
    texts = [
        "".join(map(StreamDecoder(tokenizer, shown).add, ids)) for shown in (None, shown_marks(tokenizer))
    ]
    assert texts == ["th", "[TOOL_CALLS]th"]
