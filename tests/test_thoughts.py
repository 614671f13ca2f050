"""Thinking models: ratings move the answer, not the thought, unless the user wants both."""

import itertools
import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from ruvmlx.apps.chat.steps.write import message_lines

from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.models.config.model import Message
from ruvmlx.models.load import load_model
from ruvmlx.models.text.thinking import split
from ruvmlx.runtime import Runtime, Turn
from ruvmlx.settings import Settings
from ruvmlx.sona import faults, measure_directions, unshown
from ruvmlx.sona.measure_directions import DirectionBank
from ruvmlx.sona.optional import style_bank
from ruvmlx.sona.sampled_replies import BegunReply

from .models.make_models import make_safetensors_model
from .sona.test_unshown import complete, stored_measures

OPENS = "{% if enable_thinking is not defined or enable_thinking %}{{ '<think>\\n' }}{% endif %}"
ALWAYS = "{{ '<think>\\n' }}"
PROMPT = [Message("user", "hello")]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """A random model with tokens for both tags; its template opens the thought, as R1's does."""
    folder = make_safetensors_model(tmp_path_factory.mktemp("thinker") / "m", max_context=512)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    usual = tokenizer["added_tokens"][0]
    first = max(tokenizer["model"]["vocab"].values()) + 1
    for i, text in enumerate(("<think>", "</think>")):
        tokenizer["added_tokens"].append({**usual, "id": first + i, "content": text, "special": False})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] += OPENS
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def open_thinker(thinker, home):
    def open_it(**settings):
        return Runtime.open(Settings(model=str(thinker), backend="native", threads=1, kv_disk=0, **settings))

    return open_it


def write_thought(runtime, closed=True):
    """The first reply by seed whose thought ends well before the reply does, or (not closed) never does."""
    for seed in itertools.count():
        request = GenerationRequest(
            messages=PROMPT, max_new_tokens=60, ignore_eos=True, sampling=Sampling(3.0, seed=seed)
        )
        *_, last = runtime.writer.generate(request)
        parts = split(last.response.text)
        if (closed and len(parts.answer) > 8) or (not closed and parts.is_open):
            return runtime.store.replies.get(request.request_id)


def test_the_text_begins_with_the_tag_that_the_template_wrote(open_thinker):
    with open_thinker() as runtime:
        reply = write_thought(runtime)
    parts = split(reply.text)
    assert reply.text.startswith("<think>\n") and parts.answer and not parts.is_open
    tokenizer = load_model(str(runtime.model.path)).tokenizer
    assert tokenizer.decode(reply.sampled_ids[: reply.thought]).endswith("</think>")
    assert tokenizer.decode(reply.rated_ids).lstrip() == parts.answer


@pytest.mark.parametrize("settled", [True, False])
def test_a_rating_is_that_of_the_answer_alone(open_thinker, settled):
    """From the trace that was taken while it was written, and from a second prefill: the same."""
    with open_thinker() as runtime:
        reply = write_thought(runtime)
        trace = runtime.learner.traces.held[reply.id]
        assert trace.tokens == reply.rated_ids and len(trace.hidden_states) == len(reply.rated_ids)
        again = runtime.learner.traces.replay(reply, runtime.learner.active.state)
        assert again.tokens == reply.rated_ids
        np.testing.assert_allclose(again.grad_b, trace.grad_b, atol=1e-4)
        np.testing.assert_allclose(again.logprob, reply.logprob, rtol=1e-4)
        if settled:
            runtime.learning.settle()
        assert runtime.rate(reply.id, "down").applied


def test_both_where_the_user_wants_it(open_thinker):
    with open_thinker(rate_thoughts=True) as runtime:
        reply = write_thought(runtime)
        assert reply.thought == 0 and runtime.learner.traces.held[reply.id].tokens == reply.sampled_ids


def test_a_thought_that_never_ended_is_rated_as_a_whole(open_thinker):
    with open_thinker() as runtime:
        reply = write_thought(runtime, closed=False)
        assert reply.thought == 0 and reply.id not in runtime.learner.traces.held and reply.logprob is None
        assert runtime.rate(reply.id, "down").applied


def test_thinking_is_the_templates_own_choice_unless_the_user_has_one(open_thinker):
    for setting, expected in (("auto", True), ("on", True), ("off", False)):
        with open_thinker(thinking=setting) as runtime:
            request = runtime.writer.prepare_request(GenerationRequest(messages=PROMPT))
            text = runtime.model.tokenizer.decode(request.input_ids)
            assert text.endswith("<think>\n") == expected, setting


def test_continuing_a_thought_goes_on_with_it(open_thinker):
    """The second half of a reply that was cut within its thought is thought, too."""
    how = {"max_new_tokens": 5, "cancel": threading.Event()}
    with open_thinker(temperature=0) as runtime:
        chat = runtime.chats.new_chat()
        list(runtime.chats.say(chat, "hello", **how))
        before = runtime.store.replies.get("last")
        list(runtime.chats.continue_reply(chat, **how))
        after = runtime.store.replies.get("last")
    assert split(before.text).is_open and split(after.text).is_open
    assert after.text.startswith(before.text) and after.text.count("<think>") == 1


def test_the_next_turn_keeps_the_thought_out_of_the_words_that_people_see(open_thinker):
    """A saved turn has both parts; what is shown of it is the answer."""
    with open_thinker() as runtime:
        reply = write_thought(runtime)
        assert message_lines([Turn("assistant", reply.text)]) == [f"Assistant: {split(reply.text).answer}"]


# -- replies that no user sees -------------------------------------------------------------------------


@pytest.fixture
def prompt_ends(monkeypatch):
    """The fixture returns a list. The list gets the last 12 tokens of each prompt to which the model writes a
    reply for its own measurements."""
    found, of = [], BegunReply.of.__func__

    def read(cls, backend, prompt, pause, adapter=None):
        found.append(prompt[-12:])
        return of(cls, backend, prompt, pause, adapter)

    monkeypatch.setattr(BegunReply, "of", classmethod(read))
    for module in (unshown, faults):

        def begin_all(backend, prompts, pause, adapter=None):
            return [BegunReply.of(backend, prompt, pause, adapter) for prompt in prompts]

        monkeypatch.setattr(module, "begin_replies", begin_all)
    for module in (unshown, faults, measure_directions, style_bank):
        monkeypatch.setattr(module, "MAX_REPLY_TOKENS", 4)
    return found


@pytest.mark.parametrize(("opens", "end"), [(OPENS, "assistant\n"), (ALWAYS, "<think>\n\n</think>\n\n")])
def test_sampled_replies_to_a_question_are_answers(
    thinker, home, tmp_path, prompt_ends, monkeypatch, opens, end
):
    """They are too short for a thought and an answer, so what was measured was the thought."""
    monkeypatch.setattr(faults, "questions", lambda: ("Why?", "How?"))
    folder = Path(shutil.copytree(thinker, tmp_path / "m"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"].replace(OPENS, opens)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with Runtime.open(Settings(model=str(folder), backend="native", threads=1, kv_disk=0)) as runtime:
        model, backend = runtime.model, runtime.backend
        faults.sample(model, backend, None, lambda: None)
        bank = DirectionBank(np.arange(3, 9))
        bank.add(model, backend, "Why?", np.ones(model.config.hidden_size, np.float32), 1, lambda: None)
        builder = style_bank.BasisBuilder(model, backend, style_bank.StyleBank(), ["Who?"], [])
        builder._sample(lambda *_: None, lambda: None)
        texts = [model.tokenizer.decode(prompt) for prompt in prompt_ends]
    assert len(texts) == 4 and all(text.endswith(end) for text in texts)


def test_unshown_replies_come_after_the_thought_of_the_rated_reply(open_thinker, prompt_ends):
    with open_thinker() as runtime:
        reply = write_thought(runtime)
        runtime.rate(reply.id, "up")
        assert complete(runtime) == 1
        assert prompt_ends == [reply.context_ids[-12:]] and list(stored_measures(runtime)) == [reply.id]


def test_a_reply_without_an_answer_is_compared_with_nothing(open_thinker, prompt_ends):
    """Its unshown replies would be thoughts, too."""
    with open_thinker() as runtime:
        runtime.rate(write_thought(runtime, closed=False).id, "down")
        assert complete(runtime) == 0 and not prompt_ends and not stored_measures(runtime)


def test_a_thought_without_an_end_is_not_measured(open_thinker, prompt_ends, monkeypatch):
    """Some models begin a thought without the template."""
    with open_thinker(thinking="off") as runtime:
        reply = write_thought_free(runtime)
        runtime.rate(reply, "up")
        tokens = runtime.model.tokenizer.encode("<think>so", add_bos=False)
        monkeypatch.setattr(unshown, "sampled_replies", lambda *_: [(tokens, False)] * unshown.REPLIES)
        assert complete(runtime) == 0 and not stored_measures(runtime)


def write_thought_free(runtime):
    request = GenerationRequest(messages=PROMPT, max_new_tokens=9, ignore_eos=True, sampling=Sampling(seed=1))
    list(runtime.writer.generate(request))
    return request.request_id
