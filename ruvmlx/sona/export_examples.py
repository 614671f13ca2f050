"""Rated replies as training examples for other tools.

kto: prompt, completion, label.   sft: liked replies as chats.   dpo: pairs of a liked and a disliked reply to
the same prompt.
"""

from collections.abc import Iterator

from .adapter_history import AdapterHistory
from .objective import reward


def rows(history: AdapterHistory, format_: str) -> Iterator[dict]:
    """Training examples in the format "kto", "sft" or "dpo": one dict per line of the file."""
    examples = history.examples()
    given = [rating for _, _, rating in examples]
    scored = [(prompt, text, reward(rating, given)) for prompt, text, rating in examples]
    yield from {"kto": _kto, "sft": _sft, "dpo": _dpo}[format_](scored)


def _kto(scored: list[tuple[str, str, float]]) -> Iterator[dict]:
    for prompt, text, r in scored:
        yield {"prompt": prompt, "completion": text, "label": r > 0}


def _sft(scored: list[tuple[str, str, float]]) -> Iterator[dict]:
    for prompt, text, r in scored:
        if r > 0:
            yield {"messages": [_turn("user", prompt), _turn("assistant", text)]}


def _dpo(scored: list[tuple[str, str, float]]) -> Iterator[dict]:
    for prompt, chosen, high in scored:
        for other, rejected, low in scored:
            if prompt == other and high > 0 > low:
                yield {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
