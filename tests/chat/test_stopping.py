"""Esc at random tokens of the real model: it is idle soon, keeps the words, and the next turn equals an
uncached one.

`pytest tests/chat/test_stopping.py --full -s` does it 1,000 times. The test prints how long the app took;
`ruvmlx bench chat` measures it from the key to the terminal.
"""

import random
import time

import numpy as np
import pytest
from ruvmlx.apps.chat.app import ChatApp
from ruvmlx.apps.chat.options import ChatOptions

from ruvmlx.engine import GenerationRequest, LLMInferenceEngine, Sampling
from ruvmlx.engine.session import common_prefix
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.store import Store

from ..backends.exact_prompts import ExactPrompts
from .helpers import ask, until

GREEDY = Sampling(temperature=0.0)
LATEST = 40  # token at which Esc comes at the latest
TIE = 0.005  # nats between two tokens that rounding may exchange
TURNS = 6  # of one chat; then a new one begins
QUESTIONS = ("Tell me a story about the sea.", "Why is the sky blue?", "List ten animals.", "And then?")


@pytest.fixture(scope="module")
def backend(starter):
    return ExactPrompts(starter, threads=1)


class Pressing:
    """Presses Esc when the app has got token number `at`, and notes when the app is idle."""

    def __init__(self, app):
        self.app, self.at, self.took = app, 0, []
        self._pressed = 0.0

    def press_within(self, runtime):
        say = runtime.chats.say

        def pressing(*arguments, **options):
            for chunk in say(*arguments, **options):
                yield chunk
                if self.at and chunk.generated >= self.at and not chunk.response:
                    self.at, self._pressed = 0, time.perf_counter()
                    self.app.call_from_thread(self.app.simulate_key, "escape")

        runtime.chats.say = pressing
        return runtime

    def note_phase(self, phase):
        if phase == "idle" and self._pressed:
            self.took.append((time.perf_counter() - self._pressed) * 1e3)
            self._pressed = 0.0


async def test_esc_at_random_tokens_keeps_the_words_that_were_shown(starter, backend, home, full):
    """Greedy. The words that were shown are those that were kept; and every reply, with the stopped ones
    before it in its cache, has the tokens of a run that reads its whole prompt anew, ties aside."""

    def open_runtime():
        return pressing.press_within(
            Runtime(Store(home / "ruvmlx.db"), starter, backend, Settings(adapter="none", kv_disk=None))
        )

    rng, said = random.Random(6), []
    app = ChatApp(open_runtime, ChatOptions(sampling=GREEDY, max_new_tokens=1000, learn_when_idle=False))
    pressing = Pressing(app)
    async with app.run_test(size=(80, 24)) as pilot:
        app.watch(app, "phase", pressing.note_phase, init=False)
        await until(pilot, lambda: app.phase == "idle" or app.failure)
        for turn in range(1000 if full else 8):
            if turn % TURNS == 0:
                await new_chat(app, pilot)
            pressing.at = rng.randrange(1, LATEST)
            reply = await ask(app, pilot, rng.choice(QUESTIONS))
            said.append((reply.reply_id, reply.text))
        app.host.close_now()
    times = pressing.took
    print(
        f"\n{len(times)} of {len(said)} replies stopped; idle after: median {np.median(times):.1f} ms,"
        f" p99 {np.percentile(times, 99):.1f} ms, worst {max(times):.1f} ms"
    )
    assert len(times) >= 0.8 * len(said)  # a few end by themselves before
    store = Store(home / "ruvmlx.db")
    replies = [store.replies.get(reply_id) for reply_id, _ in said]
    assert [reply.text for reply in replies] == [text for _, text in said]
    ties = sum(ties_against_uncached(starter, backend, reply) for reply in replies)
    print(f"{ties} of {sum(len(reply.sampled_ids) for reply in replies)} tokens were ties")
    assert ties <= max(1, len(replies) // 100)


async def new_chat(app, pilot):
    before, app.chat.prompt.text = app.chat.state.session, "/new"
    await pilot.press("enter")
    await until(pilot, lambda: app.chat.state.session != before and app.phase == "idle")
    return app.chat.state.session


def ties_against_uncached(model, backend, reply):
    """Check every token against an engine without a session; return the number of ties. A prompt read in
    other pieces rounds differently (0.001 nats): if two tokens are equally likely, the other one counts as a
    tie, and the check continues from it."""
    done, ties = 0, 0
    while done < len(reply.sampled_ids):
        written = reply.sampled_ids[done:]
        request = GenerationRequest(
            input_ids=[*reply.prompt_ids, *reply.sampled_ids[:done]],
            max_new_tokens=len(written),
            sampling=GREEDY,
            ignore_eos=True,
            logprobs=2,
        )
        uncached = LLMInferenceEngine(model, backend).generate(request)
        same = common_prefix(written, uncached.token_ids)
        if same < len(written):
            (_, likeliest), (second, as_likely) = uncached.logprobs[same].top
            assert written[same] == second and likeliest - as_likely < TIE
            ties += 1
        done += same + 1
    return ties
