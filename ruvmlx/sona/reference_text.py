"""The reference text: a few everyday questions with plain answers, and some prose (reference_text.json)."""

import hashlib
import json
from collections.abc import Callable
from importlib import resources

import numpy as np

from ..backends.base import Backend
from ..models.model import Message, Tokenizer
from ..progress import Count


def texts() -> list[tuple[str, str]]:
    """(question, answer) pairs of the reference text; prose has an empty question."""
    return json.loads(
        resources.files(__package__).joinpath("reference_text.json").read_text(encoding="utf-8")
    )


def digest() -> str:
    """Hash of the text, so that a calibration with another text is not used."""
    return hashlib.sha256(json.dumps(texts()).encode()).hexdigest()[:16]


def read(
    backend: Backend,
    tokenizer: Tokenizer,
    max_context: int,
    pause: Callable[[], None] | None = None,
    count: Count | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Read the texts with the backend's model and current LoRA.

    Returns the hidden states that predict the texts' tokens [T, D], those tokens [T], the state at each
    text's end [E, D], and how many of the T are in answers; the others are in prose. The ends are separate,
    because the length of a reply is taste: KL is not measured there.
    """
    states, following, ends, answers = [], [], [], 0
    for question, answer in texts():
        tokens, first = encoded(tokenizer, question, answer, max_context)
        hidden = backend.hidden_states(tokens, pause)[first - 1 :]
        states.append(hidden[:-1])
        ends.append(hidden[-1:])
        following += tokens[first:]
        answers = len(following) if question else answers
        if count:
            count.add(1)
    return np.concatenate(states), np.asarray(following, np.int32), np.concatenate(ends), answers


def encoded(tokenizer: Tokenizer, question: str, answer: str, limit: int) -> tuple[list[int], int]:
    """Tokens of a question with its answer, and the index where the answer begins; prose begins at 1."""
    if not question:
        return tokenizer.encode(answer)[:limit], 1
    prompt = tokenizer.encode_chat([Message("user", question)])
    tokens = prompt + tokenizer.encode(answer, add_bos=False)
    return tokens[:limit], min(len(prompt), limit // 2)
