"""Tools with the vocabularies of Llama 3 and Mistral, which llama-models and mistral-common carry, on a
random model: prompts are mistral-common's own, and forced calls parse, whole and streamed."""

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.engine import LLMInferenceEngine, Sampling
from ruvmlx.engine.tools import prepare
from ruvmlx.engine.types import GenerationRequest
from ruvmlx.models.config.model import Model
from ruvmlx.models.load import load_model
from ruvmlx.models.text.tokenizer_json import folder_tokenizer
from ruvmlx.models.text.tool_calls import ArgumentsPiece, CallBegun, parse
from tests.models.make_models import make_safetensors_model
from tests.models.mistral_data import conversations, encoder, mistral_file, tekken_of_version, tools
from tests.models.test_tokenizer_families import json_body, merges_of, pieces_of
from tests.models.tool_templates import LLAMA31

from .test_tools import SCHEMAS, TOOLS, USER


@dataclass(frozen=True)
class Vocabulary:
    """file: of mistral-common, or None; version: of a tekken.json that is made from it."""

    form: str
    mark: str
    file: str | None = None
    version: int | None = None


MISTRAL_MARK = "[TOOL_CALLS]"
VOCABULARIES = {
    "llama 3": Vocabulary("llama", "<|python_tag|>"),
    "mistral v3": Vocabulary("mistral", MISTRAL_MARK, "mistral_instruct_tokenizer_240323.model.v3"),
    "mistral v7": Vocabulary("mistral", MISTRAL_MARK, "mistral_instruct_tokenizer_241114.model.v7"),
    "tekken v3": Vocabulary("mistral", MISTRAL_MARK, "tekken_240718.json"),
    "tekken v11": Vocabulary("mistral11", MISTRAL_MARK, "tekken_240718.json", 11),
    "tekken v13": Vocabulary("mistral11", MISTRAL_MARK, "tekken_240718.json", 13),
}


@dataclass(frozen=True)
class Case:
    vocabulary: Vocabulary
    model: Model
    path: Path | None  # the tokenizer's file, for mistral-common


@pytest.fixture(scope="module", params=VOCABULARIES)
def case(request, tmp_path_factory):
    vocabulary = VOCABULARIES[request.param]
    folder = tmp_path_factory.mktemp("real") / "m"
    folder.mkdir()
    path = mistral_tokenizer(vocabulary, folder) if vocabulary.file else llama_tokenizer(folder)
    vocab = folder_tokenizer(folder).vocab_size
    kept = {file.name: file.read_bytes() for file in folder.iterdir()}
    make_safetensors_model(folder, vocab_size=vocab, max_context=4096)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).unlink(missing_ok=True)
    for name, data in kept.items():
        (folder / name).write_bytes(data)
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = folder_tokenizer(folder).eos_id
    (folder / "config.json").write_text(json.dumps(config))
    return Case(vocabulary, load_model(str(folder)), path)


def mistral_tokenizer(vocabulary: Vocabulary, folder: Path) -> Path:
    if not find_spec("mistral_common"):
        pytest.skip("needs mistral-common, which carries the vocabulary")
    source = mistral_file(str(vocabulary.file))
    if vocabulary.version:
        return tekken_of_version(vocabulary.version, folder / "tekken.json")
    is_tekken = source.suffix == ".json"
    (folder / ("tekken.json" if is_tekken else "tokenizer.model")).write_bytes(source.read_bytes())
    return source


def llama_tokenizer(folder: Path) -> None:
    if not find_spec("llama_models"):
        pytest.skip("needs llama-models, which carries the vocabulary")
    from llama_models.llama3.tokenizer import Tokenizer

    library = Tokenizer.get_instance()
    pieces, special = pieces_of(library), library.special_tokens
    body = json_body(pieces, merges_of(pieces), library.pat_str, {t: (i, True) for t, i in special.items()})
    body["model"]["ignore_merges"] = True
    (folder / "tokenizer.json").write_text(json.dumps(body))
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "chat_template": LLAMA31}))


def test_prompts_are_mistral_commons(case):
    """Definitions, calls and results, as `prepare` hands them to the template."""
    if case.path is None:
        pytest.skip("Meta's library renders another template than the model's own")
    theirs, compared = encoder(case.path), 0
    version = case.vocabulary.version or (7 if "v7" in str(case.vocabulary.file) else 3)
    for name, messages in conversations(version, with_tools=True).items():
        prepared = prepare(case.model, messages, tools())
        ours = case.model.tokenizer.encode_chat(prepared.messages, tools=prepared.tools)
        assert ours == theirs(prepared.messages, tools()), name
        compared += 1
    assert compared >= 6


def closing(tokenizer: Any) -> tuple[tuple[int, float], ...]:
    """A bias for what ends JSON: of 130,000 tokens hardly one does."""
    ends = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) in (b'"', b"}", b"]", b'"}')]
    return tuple((i, 12.0) for i in ends)


@pytest.mark.parametrize("function", ["", "weather"], ids=["required", "weather"])
def test_forced_calls_parse(case, function):
    """The mark is the vocabulary's own token, where it has one and the form begins with it."""
    model = case.model
    prepared = prepare(model, [USER], TOOLS, "required", function)
    assert prepared.form.dialect.name == case.vocabulary.form and prepared.form.in_template
    mark = model.tokenizer.special_tokens[case.vocabulary.mark]
    engine, bias = (
        LLMInferenceEngine(model, NativeBackend(model, threads=1, chunk=64)),
        closing(model.tokenizer),
    )
    finished = 0
    for seed in range(6):

        def request(seed=seed):
            sampling = Sampling(1.0, seed=seed, logit_bias=bias)
            return GenerationRequest(**prepared.fields(), max_new_tokens=300, sampling=sampling)

        whole = engine.generate(request())
        if whole.finish_reason != "stop":
            continue
        finished += 1
        assert (whole.token_ids[0] == mark) == (case.vocabulary.form != "llama")
        answer, calls = parse(whole.text, prepared.form.dialect, prepared.names)
        assert answer == "" and calls and all(function in ("", call.name) for call in calls)
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        parser = prepared.parser()
        pieces = [
            piece for chunk in engine.stream(request()) for piece in parser.add(chunk.text)
        ] + parser.end()
        assert [p.name for p in pieces if isinstance(p, CallBegun)] == [call.name for call in calls]
        arguments = [p for p in pieces if isinstance(p, ArgumentsPiece)]
        for i, call in enumerate(calls):
            assert "".join(p.text for p in arguments if p.index == i) == call.arguments
    assert finished >= 3
