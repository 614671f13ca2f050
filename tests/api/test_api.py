"""`import ruvmlx`: the public API on a tiny random model."""

import asyncio
import copy
import dataclasses
import gc
import inspect
import json
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import ruvmlx
from ruvmlx import api
from ruvmlx.engine.run import Run
from ruvmlx.errors import ModelNotFound, NotFound, RuvmlxError, UsageError


@pytest.fixture
def model(tiny_folder, home):
    with ruvmlx.open(tiny_folder, backend="reference", temperature=0, max_tokens=6) as opened:
        yield opened


def test_the_readme_story(model):
    """Chat, rate, ask again, take the rating back."""
    chat = model.chat(system="be terse")
    reply = chat.say("hello")
    assert reply.text == str(reply) and len(reply.token_ids) == reply.generation_tokens <= 6
    rating = reply.rate("up", note="good")
    assert rating.applied and rating.adapter_version == 1 and rating.logprob_after > rating.logprob_before
    assert model.adapter == "default@1" and rating.kl <= rating.kl_cap and rating.seconds > 0
    assert chat.again(temperature=0.9, seed=1).id != reply.id
    assert [turn.role for turn in chat.messages] == ["system", "user", "assistant"]
    assert model.learned().ratings == 1
    assert model.undo().ratings == 0 and model.adapter == "default@0"


def test_a_reply_can_be_a_dict_and_be_copied(model):
    """Its copies have no model; the open model rates them."""
    reply = model.reply("hello", seed=4)
    fields = dataclasses.asdict(reply)
    assert json.loads(json.dumps(fields))["text"] == reply.text and not any(name[0] == "_" for name in fields)
    assert dataclasses.replace(reply, text="new").rate("up").applied and "_model" not in repr(reply)
    for same in (copy.copy(reply), copy.deepcopy(reply), pickle.loads(pickle.dumps(reply))):
        assert same == reply and hash(same) == hash(reply)
        with pytest.raises(UsageError, match="copy of a reply"):
            same.rate("up")
        assert model.rate(same, "up").adapter_version


def test_a_stream_gives_the_reply_piece_by_piece(model):
    stream = model.chat().stream("hello", seed=3)
    text = "".join(stream)
    assert text == stream.reply.text and next(stream, None) is None


def test_the_same_seed_writes_the_same_reply(model):
    replies = [model.reply("hello", temperature=1.0, seed=7) for _ in range(2)]
    assert replies[0].token_ids == replies[1].token_ids and replies[0].id != replies[1].id


def test_messages_are_a_prompt_too(model):
    """The setting's system prompt is for plain words only."""
    words = [{"role": "system", "content": "be terse"}, {"role": "user", "content": "hello"}]
    assert model.reply(words).prompt_tokens > model.reply("hello").prompt_tokens
    with pytest.raises(UsageError, match="a message is"):
        model.reply([{"role": "user"}])


def test_a_stopped_reply_is_kept_and_can_be_continued(model):
    """The rest is written token for token as if it had never been stopped."""
    chat = model.chat()
    whole = model.chat().say("hello", max_tokens=40)
    with chat.stream("hello", max_tokens=40) as stream:
        next(stream)
    cut = stream.reply
    if cut.finish_reason == "cancelled":
        longer = chat.continue_reply(max_tokens=40 - cut.generation_tokens)
        assert longer.text == whole.text
    assert chat.messages[-1].content == whole.text


def test_a_stream_that_nobody_reads_ends(model):
    stream = model.chat().stream("hello", max_tokens=400)
    cancel = stream._cancel
    del stream
    gc.collect()
    assert cancel.is_set()
    assert model.reply("hello").generation_tokens <= 6


def test_an_edit_branches_the_chat(model):
    chat = model.chat()
    chat.say("hello")
    question = chat.messages[0]
    chat.say("good day", edit=question.id)
    assert chat.messages[0].content == "good day" and [m.branches for m in chat.messages] == [2, 1]


def test_a_chat_is_found_again(model):
    chat = model.chat()
    chat.say("hello")
    again = model.chat(chat.id[:8], system="new")
    assert again.id == chat.id and again.messages[0].content == "new"
    assert again.rate(5).applied
    with pytest.raises(NotFound):
        model.chat("nothing begins so")
    with pytest.raises(NotFound, match="no reply"):
        model.chat().rate("up")


def test_several_threads_may_use_one_model(model):
    """Calls wait for each other; each thread gets its own chat's replies."""

    def talk(n: int) -> list[str]:
        chat = model.chat()
        return [chat.say(f"question {n}").id, chat.say("and then?").id]

    with ThreadPoolExecutor(4) as pool:
        ids = [id for found in pool.map(talk, range(4)) for id in found]
    assert len(set(ids)) == 8


def test_a_rating_during_a_stream_waits_for_its_end(model):
    reply = model.reply("hello")
    stream = model.chat().stream("hello", max_tokens=30)
    next(stream)
    rated = []
    other = threading.Thread(target=lambda: rated.append(reply.rate("down")))
    other.start()
    assert stream.reply.generation_tokens
    other.join(60)
    assert rated[0].applied


def test_adapters_are_swapped_and_listed(model):
    model.reply("hello").rate("up")
    model.use_adapter("other")
    assert model.adapter == "other@0"
    model.use_adapter(None)
    assert model.adapter is None
    with pytest.raises(NotFound, match="no adapter"):
        model.learned()
    (known,) = ruvmlx.list_adapters()
    assert (known.name, known.version, known.model) == ("default", 1, model.name) and known.bytes > 0


def test_each_reply_may_have_its_adapter(model):
    """It answers and learns; the one in use stays in use, and learns from nothing of this."""
    hot = {"temperature": 1.0, "seed": 5, "max_tokens": 16}
    plain = model.reply("hello", adapter=None, **hot)
    assert plain.adapter is None and model.reply("hello", adapter="none", **hot).text == plain.text
    first = model.reply("hello", adapter="work", **hot)
    assert (first.adapter, first.text, model.adapter) == ("work", plain.text, "default@0")
    for _ in range(4):
        first.rate("down")
    assert model.reply("hello", adapter="work", **hot).text != plain.text
    assert model.reply("hello", **hot).text == plain.text and model.adapter == "default@0"
    chat = model.chat()
    said = chat.say("hello", adapter="work")
    assert said.adapter == "work" and chat.again(adapter=None).adapter is None
    assert model.reply("hello").adapter == "default"
    with pytest.raises(UsageError, match="a/b"):
        model.reply("hello", adapter="a/b")


def test_feedback_reaches_the_adapter_that_wrote_the_reply(model):
    """A rating, a preference and an edit; an id alone means the one in use, unless another is named."""
    one, two = (model.reply("hello", adapter="work", temperature=1.0, seed=i) for i in (1, 2))
    assert model.prefer(one, two).adapter_version == 1
    assert model.edit(two, "good day").adapter_version == 2
    assert one.rate(5).adapter_version == 3 and model.adapter == "default@0"
    assert model.rate(two.id, "up", adapter="work").adapter_version == 4
    assert model.rate(two.id, "up").adapter_version == 1 and model.adapter == "default@1"


def test_embeddings_are_unit_vectors(model, tiny_folder):
    vectors = np.array(model.embed(["a question", "another one"]))
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert np.allclose(ruvmlx.embed("a question", tiny_folder)[0], vectors[0], atol=1e-3)
    with pytest.raises(UsageError, match="empty"):
        model.embed([""])


def test_models_on_this_machine_are_listed(starter_file):
    first = ruvmlx.list_models()[0]
    assert (first.name, first.path, first.problem) == ("starter", starter_file, "") and first.bits < 6


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda model: ruvmlx.open("no/such/folder/here"), ModelNotFound),
        (lambda model: ruvmlx.open(colour="red"), UsageError),
        (lambda model: ruvmlx.open(max_tokens=0), UsageError),
        (lambda model: model.reply(""), UsageError),
        (lambda model: model.reply("hi", temperature=-1.0), UsageError),
        (lambda model: model.reply("hi", max_tokens=0), UsageError),
        (lambda model: model.reply("hi", volume=11), UsageError),
        (lambda model: model.reply("hello").rate("great"), UsageError),
        (lambda model: model.rate("nothing", "up"), NotFound),
        (lambda model: model.undo(), NotFound),
    ],
)
def test_errors_are_one_line(model, call, error):
    with pytest.raises(error) as e:
        call(model)
    assert isinstance(e.value, ruvmlx.RuvmlxError) and "\n" not in str(e.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.rate(m.chat().messages, "up"),
        lambda m: m.rate({}, "up"),
        lambda m: m.prefer([], []),
        lambda m: m.edit("x", None),
        lambda m: m.chat([]),
        lambda m: m.chat(system=5),
        lambda m: m.chat().say(None),
        lambda m: m.reply(None),
        lambda m: m.reply(b"hi"),
        lambda m: m.reply(["hi"]),
        lambda m: m.reply("half \ud83d"),
        lambda m: m.reply([{"role": "user", "content": None}]),
        lambda m: m.reply("hi", adapter=5),
        lambda m: m.reply("hi", adapter="a/b"),
        lambda m: m.reply("hi", temperature="hot"),
        lambda m: m.reply("hi", temperature=10**400),
        lambda m: m.reply("hi", max_tokens=1.5),
        lambda m: m.reply("hi", max_tokens=None),
        lambda m: m.reply("hi", top_k=True),
        lambda m: m.reply("hi", seed=2**70),
        lambda m: m.reply("hi", logit_bias={5: 1.0}),
        lambda m: m.reply("hi", logit_bias=((5, "x"),)),
        lambda m: m.chat().say("hi", edit="x"),
        lambda m: m.chat().again([]),
        lambda m: m.chat().continue_reply(1.5),
        lambda m: m.rate("\ud83d", "up"),
        lambda m: m.rate("x", "up", adapter="a/b"),
        lambda m: m.rate("x", "up", note=0),
        lambda m: m.embed(3),
        lambda m: m.use_adapter("a/b"),
        lambda m: ruvmlx.open(temperature=10**400),
        lambda m: ruvmlx.MicroAdapter(m, "a/b"),
        lambda m: ruvmlx.MicroAdapter(m).accumulate("x", "up", 3),
        lambda m: ruvmlx.MicroAdapter(m).apply_with_ewc(1, "x"),
        lambda m: m.embed([None]),
        lambda m: m.use_adapter(5),
        lambda m: ruvmlx.MicroAdapter(None),
        lambda m: ruvmlx.MicroAdapter(m, "none"),
        lambda m: ruvmlx.MicroAdapter(m).accumulate(None, "up"),
    ],
)
def test_a_wrong_type_is_named_and_the_store_is_not_blamed(model, call):
    with pytest.raises(UsageError) as raised:
        call(model)
    assert "damaged" not in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: ruvmlx.open(temperature="hot"), "temperature = 'hot' (from this call): expected a number"),
        (lambda m: m.reply({"role": "user"}), "a prompt is a text or a list of messages; got dict."),
        (lambda m: m.embed(b"hello"), "a text to embed is a text; got bytes."),
    ],
)
def test_an_error_names_what_the_call_gave(model, call, words):
    with pytest.raises(UsageError) as raised:
        call(model)
    assert words in str(raised.value)


def test_a_turn_is_no_reply_and_its_error_says_where_the_id_is(model):
    chat = model.chat()
    chat.say("hello")
    with pytest.raises(UsageError, match=r"got Turn.*turn\.reply_id"):
        model.rate(chat.messages[-1], "up")
    assert model.rate(chat.messages[-1].reply_id, "up", note=None).applied


def test_none_is_no_adapter_in_every_call(model):
    model.use_adapter("none")
    assert model.adapter is None
    assert model.reply("hello", adapter="none").text == model.reply("hello", adapter=None).text


def test_an_error_ends_a_stream_once(model):
    stream = model.stream("")
    with pytest.raises(UsageError, match="empty"):
        next(stream)
    assert next(stream, None) is None
    with pytest.raises(UsageError, match="ended by an error"):
        _ = stream.reply


def test_a_closed_model_says_so(tiny_folder, home):
    model = ruvmlx.open(tiny_folder, backend="reference")
    model.close()
    model.close()
    with pytest.raises(UsageError, match="closed"):
        model.reply("hello")


def test_closing_ends_a_reply(tiny_folder, home):
    model = ruvmlx.open(tiny_folder, backend="reference", max_tokens=450)
    stream = model.chat().stream("hello", temperature=2.0, seed=5)
    next(stream)
    model.close()
    assert stream.reply.finish_reason in ("cancelled", "stop")


def test_closing_ends_a_reply_that_begins_meanwhile(tiny_folder, home, monkeypatch):
    """`close` runs in another thread as soon as the runtime has the work."""
    model = ruvmlx.open(tiny_folder, backend="reference", max_tokens=450)
    submit, closing = model._submit, threading.Thread(target=model.close)

    def submit_and_close(*arguments):
        found = submit(*arguments)
        closing.start()
        while model._closing is None:
            time.sleep(0.001)
        return found

    monkeypatch.setattr(model, "_submit", submit_and_close)
    stream = model.stream("hello", temperature=0, logit_bias=((0, 100.0),))
    assert stream.reply.finish_reason == "cancelled"
    closing.join()


async def test_asyncio(tiny_folder, home):
    """The same calls, awaited."""
    settings = {"backend": "reference", "temperature": 0, "max_tokens": 6}
    async with await ruvmlx.aopen(tiny_folder, **settings) as model:
        chat = await model.chat(system="be terse")
        stream = chat.stream("hello")
        pieces = [piece async for piece in stream]
        reply = await stream.reply()
        assert "".join(pieces) == reply.text
        assert (await model.rate(reply, "up")).applied and (await chat.rate("down")).applied
        assert (await model.learned()).ratings == 1 and (await model.undo()).ratings == 1
        assert (await chat.again(seed=1)).text and len(await chat.messages()) == 3
        assert len((await model.embed("hello"))[0]) > 1
        assert (await model.reply("hello")).text and chat.id
        with pytest.raises(UsageError):
            await chat.say("")
        async with model.stream("hello") as begun:
            assert "".join([piece async for piece in begun]) == (await begun.reply()).text
        await model.use_adapter(None)
        assert model.name


async def test_open_replies_take_no_thread_of_the_program(tiny_folder, home, monkeypatch):
    """The loop's executor has one thread, and two replies are open; `close` ends both."""
    draw = Run.draw

    def draw_slowly(run, record=True):
        time.sleep(0.05)
        run.request.ignore_eos = True
        return draw(run, record)

    monkeypatch.setattr(Run, "draw", draw_slowly)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    async with await ruvmlx.aopen(tiny_folder, backend="reference", temperature=0) as model:
        tasks = [asyncio.create_task(model.reply("hello", max_tokens=400)) for _ in range(2)]
        status = asyncio.create_task(model.learned())
        await asyncio.sleep(0.2)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 5), 10) == 5
        await asyncio.wait_for(model.close(), 10)
        assert [task.finish_reason for task in await asyncio.gather(*tasks)] == ["cancelled"] * 2
        assert (await status).ratings == 0


async def test_a_wrong_option_is_an_error_of_the_call(tiny_folder, home):
    async with await ruvmlx.aopen(tiny_folder, backend="reference") as model:
        with pytest.raises(UsageError, match="no option 'volume'"):
            model.stream("hello", volume=11)


async def test_a_stopped_stream_stays_stopped(tiny_folder, home):
    """Also if it is stopped before its first piece, and for every reader of the stream."""
    settings = {"backend": "reference", "temperature": 0, "max_tokens": 300}
    async with await ruvmlx.aopen(tiny_folder, **settings) as model:
        stream = model.stream("hello")
        stream.stop()
        reply = await stream.reply()
        assert reply.finish_reason == "cancelled" and not reply.token_ids[1:]
        for _ in range(2):  # every reader gets the end
            assert await asyncio.wait_for(anext(stream, None), 60) is None


@pytest.mark.parametrize("call", ["say", "again", "continue_reply"])
async def test_a_cancelled_task_ends_its_reply(tiny_folder, home, monkeypatch, call):
    """What was written until then is in the chat, and the model is free for the next reply."""
    draw, drawn = Run.draw, []

    def go_on(run, record=True):
        run.request.ignore_eos = True
        drawn.append(run)
        return draw(run, record)

    monkeypatch.setattr(Run, "draw", go_on)
    async with await ruvmlx.aopen(tiny_folder, backend="reference", temperature=0) as model:
        chat = await model.chat()
        cut = await chat.say("hello", max_tokens=3)
        drawn.clear()
        words = ("and then?",) if call == "say" else ()
        task = asyncio.create_task(getattr(chat, call)(*words, max_tokens=400))
        while len(drawn) < 3:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        last = (await chat.messages())[-1]
        assert last.finish_reason == "cancelled" and last.reply_id != cut.id and len(drawn) < 400
        assert (await chat.again(max_tokens=2)).finish_reason == "length"


def test_every_public_name_is_explained():
    """Docstrings of what `__all__` names, and of every public method."""
    for name in ruvmlx.__all__:
        thing = getattr(ruvmlx, name)
        assert inspect.getdoc(thing), name
        assert name in dir(ruvmlx)
        if inspect.isclass(thing) and thing.__module__.startswith("ruvmlx.api."):
            for member, value in vars(thing).items():
                if not member.startswith("_") and (callable(value) or isinstance(value, property)):
                    assert inspect.getdoc(value), f"{name}.{member}"


def test_both_apis_have_the_same_methods():
    pairs = (ruvmlx.AsyncModel, api.LocalModel), (ruvmlx.AsyncChat, api.Chat)
    found = [{name for name in vars(kind) if name[0] != "_"} - {"id"} for pair in pairs for kind in pair]
    assert found[::2] == found[1::2]


def test_importing_is_light_and_silent():
    """Nothing heavy is imported before a model is opened, and nothing is printed."""
    heavy = "('numpy', 'mlx', 'mlx_lm', 'textual', 'click', 'tokenizers')"
    code = f"import sys, ruvmlx; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ruvmlx.nothing
    assert issubclass(UsageError, RuvmlxError)


def test_on_the_starter_model(starter_file, home):
    """A real reply, a real rating."""
    with ruvmlx.open(starter_file, backend="native", temperature=0, max_tokens=8) as model:
        reply = model.chat().say("What is the capital of France?")
        assert "Paris" in reply.text or reply.generation_tokens == 8
        rating = reply.rate(5)
        assert rating.applied and rating.logprob_after > rating.logprob_before
        alike, other = (
            model.embed(["How is tea made?", "How do I make tea?"]),
            model.embed("Who won?"),
        )
        assert np.dot(alike[0], alike[1]) > np.dot(alike[0], other[0])


def test_preferences(model):
    """Choose one of two replies, rewrite one, and take both back."""
    chat = model.chat()
    first = chat.say("hello")
    second = chat.again(temperature=0.9, seed=1)
    chosen = model.prefer(second, first.id)
    assert (chosen.better, chosen.worse, chosen.kind) == (second.id, first.id, "compare")
    assert chosen.applied and chosen.margin_after > chosen.margin_before and chosen.seconds > 0
    edited = model.edit(second, "hi there")
    assert (edited.worse, edited.kind, edited.adapter_version) == (second.id, "edit", 2)
    assert chat.messages[-1].content == "hi there" and chat.messages[-1].reply_id == edited.better
    assert model.learned().preferences == 2
    assert model.undo().preferences == 1 and model.undo().adapter_version == 0
    with pytest.raises(ruvmlx.RuvmlxError, match="one question"):
        model.prefer(first, model.reply("another question"))
