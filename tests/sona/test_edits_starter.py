"""Five edits of the starter model's replies, native backend: replies to other questions become as the edits
are."""

import re

import numpy as np

from ruvmlx.backends.select import open_backend
from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.models.config.model import Message
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.sona.instant import KL_CAP
from ruvmlx.store import Store

ASKED = (
    "How does a bicycle stay upright?",
    "What is the best way to learn a language?",
    "Why is the sea salty?",
    "How do I boil an egg?",
    "What does a lawyer do?",
)
UNSEEN = (
    "How do magnets work?",
    "What is a good breakfast?",
    "Why do leaves turn red?",
    "How can I sleep better?",
    "What is a bank?",
    "Why do we need glasses?",
)


def write_reply(runtime, question: str, seed: int, limit: int):
    request = GenerationRequest(
        messages=[Message("user", question)], max_new_tokens=limit, sampling=Sampling(0.7, seed=seed)
    )
    return [chunk.response for chunk in runtime.writer.generate(request)][-1]


def lengths(runtime) -> list[int]:
    return [write_reply(runtime, question, 5, 120).generation_tokens for question in UNSEEN]


def test_five_edits_to_one_sentence_make_unseen_replies_shorter(starter, home):
    """Tokens of six replies of at most 120, before and after; and all of it can be taken back."""
    backend = open_backend("native", starter)
    with Runtime(Store(home / "ruvmlx.db"), starter, backend, Settings(kv_disk=None)) as runtime:
        before = lengths(runtime)
        replies = [write_reply(runtime, question, seed, 100) for seed, question in enumerate(ASKED)]
        for reply in replies:
            first = re.split(r"(?<=[.!?])\s", reply.text.strip())[0]
            assert len(first) < len(reply.text.strip())
            learned = runtime.choices.edit(reply.request_id, first).preference
            assert learned.applied and learned.kl <= KL_CAP
        after = lengths(runtime)
        assert np.mean(after) < 0.85 * np.mean(before), (before, after)
        for _ in ASKED:
            runtime.undo()
        assert runtime.status().adapter_version == 0 and lengths(runtime) == before
