"""/system and /prompt show what the model really reads."""

import io

import pytest
from ruvmlx.apps.chat.options import ChatOptions
from ruvmlx.apps.chat.plain import PlainChat

from ruvmlx import settings
from ruvmlx.engine import Sampling
from ruvmlx.models.load import load_model

OWN = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def run_plain(runtime, *lines, system=None):
    sink, options = io.StringIO(), ChatOptions(system=system, sampling=Sampling(0.0), max_new_tokens=4)
    assert PlainChat(runtime, options, io.StringIO("".join(f"{line}\n" for line in lines)), sink).run() == 0
    return sink.getvalue()


def test_the_prompt_begins_with_what_the_model_got(open_tiny):
    """Token by token, with the special ones; "..." stands for the next message."""
    with open_tiny() as runtime:
        said = run_plain(runtime, "Hello", "/prompt", system="Be brief.")
        reply = runtime.store.replies.get("last")
        shown = said.split("\n", 2)[2] if "(cut" in said else said.split("\n", 1)[1]
        assert runtime.model.tokenizer.text_with_specials(reply.prompt_ids).strip() in said
        assert "Be brief." in shown and "Hello" in shown
        assert "..." in run_plain(runtime, "/prompt") and "Be brief." not in run_plain(runtime, "/prompt")


def test_the_prompt_is_the_one_of_the_next_reply(open_tiny):
    """It was that of the last reply, with the system prompt that the user had replaced."""
    with open_tiny() as runtime:
        said = run_plain(runtime, "Hello", "/system Be long.", "/prompt", system="Be brief.")
        assert "Be long." in said.partition("Assistant:")[2].partition("Be long.")[2]
        assert "Be brief." not in said


def test_the_templates_own_system_prompt_is_shown(starter_file, open_tiny):
    """SmolLM2's template writes one where the user has none; the tiny model's does not."""
    with open_tiny() as runtime:
        assert run_plain(runtime, "/system").strip() == "No system prompt."
        runtime.chats._model = starter = load_model("starter")
        assert run_plain(runtime, "/system").strip() == "No system prompt."  # a measured one, which is empty
        starter.tokenizer.default_system = None
        assert runtime.chats.template_system() == OWN
        assert f"No system prompt of yours. The model's template sends its own: {OWN}" in run_plain(
            runtime, "/system"
        )
        assert "System prompt: Be brief." in run_plain(runtime, "/system", system="Be brief.")


@pytest.mark.parametrize("word", ["none", ""])
def test_none_is_no_system_prompt(word, monkeypatch):
    """The word itself is never sent: by flag, variable, file and in the chat."""
    assert not settings.load({"system": word}).system
    monkeypatch.setenv("RUVMLX_SYSTEM", word)
    assert not settings.load().system


def test_none_removes_the_system_prompt_of_a_chat(open_tiny):
    with open_tiny() as runtime:
        run_plain(runtime, "Hello", system="Be brief.")
        none = settings.load({"system": "none"}).system
        options = ChatOptions(session="continue", system=none, replaces_system=True)
        PlainChat(runtime, options, io.StringIO("/system\n"), sink := io.StringIO()).run()
        assert sink.getvalue().strip() == "No system prompt."
