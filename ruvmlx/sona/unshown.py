"""Replies that nobody saw to the questions that a user rated: what the rated reply is compared with.

A user who gives three stars to a reply of 80 words may want short replies, or the question may need 80 words.
The measures of a few other replies to the question tell these apart. The original model writes the replies
in idle time. Only their measures are kept.
"""

import io
import json
import zipfile
from collections.abc import Mapping

import numpy as np

from ..backends.base import Backend, original_model
from ..models.config.model import Model
from ..models.text import thinking
from ..pausing import Pause
from ..store import Store
from .sampled_replies import BegunReply, sampled_replies
from .taste_measures import MEASURES, measure_text

REPLIES = 4  # to each question
MAX_REPLY_TOKENS = 96  # the maximum number of tokens in a reply
MAX_PROMPT_TOKENS = 2048  # longer prompts are left out: reading them takes long
MAX_QUESTIONS = 1000  # the newest questions whose measures are kept
SAVE_AFTER = 8  # questions
TEMPERATURE = 0.7
_NAME = "replies/unshown"  # of the stored measures; no adapter can have it


def load(store: Store, fingerprint: str) -> dict[str, np.ndarray]:
    """Return {id of a rated reply: measures [REPLIES, M] of unshown replies to its question}."""
    data = store.checkpoints.measurement(fingerprint, _NAME)
    try:
        with np.load(io.BytesIO(data or b""), allow_pickle=False) as f:
            found = dict(zip(json.loads(str(f["ids"])), f["measures"].astype(np.float32), strict=True))
    except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile):
        return {}
    return {id_: measures for id_, measures in found.items() if measures.shape == (REPLIES, len(MEASURES))}


def _save(store: Store, fingerprint: str, found: Mapping[str, np.ndarray]) -> None:
    out, ids = io.BytesIO(), [*found][-MAX_QUESTIONS:]
    np.savez(
        out,
        ids=np.array(json.dumps(ids)),
        measures=np.stack([found[id_] for id_ in ids]).astype(np.float16),
    )
    store.checkpoints.put_measurement(fingerprint, _NAME, out.getvalue())


def complete(store: Store, model: Model, backend: Backend, rated: list[str], pause: Pause) -> int:
    """Write unshown replies for the rated replies that have none, and keep their measures. Return the number
    of questions. `pause` may raise an exception to stop; the finished part is kept. Used only in the
    backend's thread."""
    found = {id_: one for id_, one in load(store, model.fingerprint).items() if store.replies.tokens(id_)}
    missing, done = [id_ for id_ in rated if id_ not in found], 0
    try:
        for id_ in missing:
            prompt = store.replies.get(id_).prompt_ids
            if 0 < len(prompt) <= MAX_PROMPT_TOKENS:
                found[id_] = _measure(model, backend, prompt, seed=len(found), pause=pause)
                done += 1
                if done % SAVE_AFTER == 0:
                    _save(store, model.fingerprint, found)
    finally:
        if done % SAVE_AFTER:
            _save(store, model.fingerprint, found)
    return done


def _measure(model: Model, backend: Backend, prompt: list[int], seed: int, pause: Pause) -> np.ndarray:
    with original_model(backend):
        first = BegunReply.of(backend, prompt)
        begun = [first, *(first.fork() for _ in range(REPLIES - 1))]
        replies = sampled_replies(
            backend, model.tokenizer, begun, np.random.default_rng([seed, 37]), MAX_REPLY_TOKENS,
            TEMPERATURE, pause,
        )  # fmt: skip
    decode = model.tokenizer.decode
    return np.stack([measure_text(thinking.split(decode(ids)).answer, ended) for ids, ended in replies])
