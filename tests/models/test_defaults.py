"""What a model gets where the user chose nothing: sampling and a system prompt, and who decided them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ruvmlx.engine import GenerationRequest, LLMInferenceEngine
from ruvmlx.models.config.families import FAMILIES
from ruvmlx.models.config.model import Message
from ruvmlx.models.config.sampling_defaults import ADVICE, sampling_defaults
from ruvmlx.models.load import _gguf_sampling, load_model
from ruvmlx.models.text.system_prompt import SystemPrompt, system_prompt
from ruvmlx.settings import SAMPLING
from tests.models.make_models import make_safetensors_model

SAYS_SO = (
    "{% if messages[0]['role'] != 'system' %}<s>system You are Tiny.</s>{% endif %}"
    "{% for m in messages %}<s>{{ m['role'] }} {{ m['content'] }}</s>{% endfor %}"
)
SILENT = "{% for m in messages %}<s>{{ m['role'] }} {{ m['content'] }}</s>{% endfor %}"
NO_PLACE = "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['content'] }}{% endif %}{% endfor %}"


@pytest.fixture
def model(tmp_path):
    def of(template, **more):
        folder = make_safetensors_model(tmp_path / "m")
        config = folder / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
        return replace(load_model(str(folder)), **more)

    return of


def test_every_family_has_advice():
    """Each row of families.py has a row of its makers' sampling, of settings that exist."""
    advised = {row.model_type for row in ADVICE if not row.name}
    assert {family.model_type for family in FAMILIES} <= advised
    assert all(set(row.sampling) <= set(SAMPLING) for row in ADVICE)


@pytest.mark.parametrize(
    ("model_type", "name", "temperature"),
    [
        ("llama", "Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf", 0.6),
        ("llama", "SmolLM2-1.7B-Instruct", 0.2),
        ("smollm3", "SmolLM3-3B-Q4_K_M.gguf", 0.6),
        ("llama", "Mistral-7B-Instruct-v0.3-Q4_K_M.gguf", 0.7),
        ("mistral", "Mistral-Nemo-Instruct-2407", 0.3),
        ("llama", "Mistral-Small-24B-Instruct-2501-Q4_K_M.gguf", 0.15),
        ("ministral3", "Ministral-3-3B-Instruct-2512", 0.1),
        ("ministral3", "Ministral-3-14B-Reasoning-2512", 0.7),
        ("qwen2", "qwen2.5-0.5b-instruct-q4_k_m.gguf", 0.7),
        ("qwen2", "DeepSeek-R1-Distill-Qwen-7B", 0.6),
        ("qwen2", "QwQ-32B-Q4_K_M.gguf", 0.6),
        ("qwen3", "Qwen3-4B", 0.6),
        ("qwen3", "Qwen3-4B-Instruct-2507", 0.7),
        ("phi3", "Phi-3-mini", None),
    ],
)
def test_makers_advice_by_name_then_by_family(model_type, name, temperature):
    """GGUF files call other families Llama, so their names decide; an unknown family has no advice."""
    assert sampling_defaults({}, model_type, [name]).get("temperature") == temperature


@pytest.mark.parametrize(
    ("model_type", "name", "penalty"),
    [
        ("qwen2", "qwen2-0_5b-instruct-q4_k_m.gguf", 1.1),
        ("qwen2", "Qwen2 1.5B Instruct", 1.1),
        ("qwen2", "qwen2.5-0.5b-instruct-q4_k_m.gguf", 1.1),
        ("qwen2", "Qwen2.5 1.5B Instruct", 1.1),
        ("qwen2", "Qwen2.5-3B-Instruct-Q4_K_M.gguf", 1.05),
        ("qwen2", "Qwen2-72B-Instruct", 1.05),
        ("qwen2", "Qwen2.5-0.5B", None),
        ("qwen2", "Qwen2.5-Math-7B-Instruct", None),
        ("qwen2", "DeepSeek-R1-Distill-Qwen2.5-7B-Instruct", None),
        ("qwen3", "Qwen3-4B-Instruct-2507", None),
    ],
)
def test_qwen2s_repetition_penalty_follows_its_size(model_type, name, penalty):
    """Small models loop without it; the base models, other kinds and Qwen3 have none."""
    found = sampling_defaults({}, model_type, [name])
    assert found.get("repetition_penalty") == penalty and found["top_p"]


def test_a_gguf_files_size_label_finds_its_advice():
    """The file may have any name: the metadata say what it is."""
    said = {"basename": "Qwen2.5", "size_label": "0.5B", "finetune": "Instruct", "name": "My Own"}
    metadata = {f"general.{key}": value for key, value in said.items()}
    found = _gguf_sampling(metadata, "qwen2", Path("model.gguf"))
    assert found == {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}


def test_the_models_own_files_come_before_advice():
    """One setting in generation_config.json is enough: no advice is mixed with it."""
    assert sampling_defaults({"top_k": 7}, "qwen2", ["Qwen2.5"]) == {"top_k": 7}


@pytest.mark.parametrize(
    "values", [{"top_p": 0.0}, {"min_p": 1.0}, {"top_k": -1}, {"top_k": 1e12}, {"temperature": float("nan")}]
)
def test_a_value_that_no_user_may_set_is_left_out(values):
    """Each reply would be an error, although the user chose nothing."""
    assert sampling_defaults(values | {"presence_penalty": -0.5}) == {"presence_penalty": -0.5}


def test_who_decides_the_system_prompt(model):
    """The user, then the measured default, then the chat template, by one function."""
    says = model(SAYS_SO)
    assert system_prompt(says, "be kind") == SystemPrompt("be kind", "yours")
    assert system_prompt(says, "") == SystemPrompt("", "none")
    assert system_prompt(says) == SystemPrompt("You are Tiny.", "template")
    says.tokenizer.default_system = "Hm."
    assert system_prompt(says) == SystemPrompt("Hm.", "measured")
    assert system_prompt(says, "mine") == SystemPrompt("mine", "yours")
    for template in (SILENT, NO_PLACE):
        assert system_prompt(model(template)) == SystemPrompt("", "none")


def test_a_default_never_joins_a_system_message(model):
    """It heads conversations that have none; an empty system message is the user's word, too, and a request
    with tools has a program's."""
    asked, own, default = Message("user", "hi"), Message("system", ""), Message("system", "Hm.")
    template = SAYS_SO + "{% if tools %}{{ tools }}{% endif %}"
    plain, says = model(template).tokenizer, model(template).tokenizer
    says.default_system = "Hm."
    assert says.encode_chat([asked]) == plain.encode_chat([default, asked]) != plain.encode_chat([asked])
    assert says.encode_chat([own, asked]) == plain.encode_chat([own, asked])
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    assert says.encode_chat([asked], tools=tools) == plain.encode_chat([asked], tools=tools)


def test_the_engine_and_learning_read_what_the_function_says(model):
    """The prompt's tokens are those of the conversation with the default."""
    from ruvmlx.backends.reference import ReferenceBackend

    plain, says = model(SAYS_SO), model(SAYS_SO)
    says.tokenizer.default_system = "Hm."
    engine = LLMInferenceEngine(says, ReferenceBackend(says))
    asked = [Message("user", "hi")]
    ids = engine.prompt_ids(GenerationRequest(messages=asked))
    assert ids == plain.tokenizer.encode_chat([Message("system", "Hm."), *asked])
    assert ids == says.tokenizer.encode_chat(asked)
    own = [Message("system", "mine"), *asked]
    assert engine.prompt_ids(GenerationRequest(messages=own)) == plain.tokenizer.encode_chat(own)


def test_the_starter_has_both(starter):
    """Its own template would add a line; the measured default is sent instead."""
    assert starter.tokenizer.default_system is not None and system_prompt(starter).origin == "measured"
    assert starter.tokenizer.chat_text([Message("user", "?")]).count("trained by Hugging Face") == 1
    prompt = starter.tokenizer.text_with_specials(starter.tokenizer.encode_chat([Message("user", "?")]))
    assert "Hugging Face" not in prompt and prompt.startswith("<|im_start|>system\n<|im_end|>")


def test_a_files_repetition_penalty_is_left_out_unless_the_model_loops_without_it():
    """It would count the prompt's tokens, too. A folder of Qwen2.5 gets what its GGUF file gets."""
    own = {"temperature": 0.3, "repetition_penalty": 1.1}
    assert sampling_defaults(own) == {"temperature": 0.3}
    assert sampling_defaults(own, "qwen2", ["Qwen/Qwen2.5-0.5B-Instruct"]) == own
    coder = "Qwen/Qwen2.5-Coder-0.5B-Instruct"
    assert sampling_defaults(own, "qwen2", [coder]) == sampling_defaults(own, "qwen2") == {"temperature": 0.3}
