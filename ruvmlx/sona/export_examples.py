"""This module exports rated replies as training examples for other tools, in one of three formats.

kto: each rated or compared reply gives a prompt, a completion and a label (True: liked, or the better reply).
sft: each reply with the label True gives a chat of two messages: the prompt and the reply.
dpo: each pair of a better and a worse reply to the same prompt gives one example. The pairs come from the
    user's preferences. A prompt without a preference gives one example for each pair of a liked and a
    disliked reply.
"""

from collections import Counter
from collections.abc import Iterator

from .adapter_history import AdapterHistory
from .objective import reward


def rows(history: AdapterHistory, format_: str) -> Iterator[dict]:
    """Yield training examples in the format "kto", "sft" or "dpo": one dict per line of the file."""
    examples = history.examples()
    counts = Counter(rating for _, _, rating in examples)
    stars = [counts[star] for star in "12345"]
    scored = [(prompt, text, reward(rating, stars)) for prompt, text, rating in examples]
    pairs = history.pairs.texts()
    known = {(prompt, text) for prompt, text, _ in scored}
    for prompt, better, worse in pairs:
        both = ((prompt, better, 1.0), (prompt, worse, -1.0))
        scored += [row for row in both if row[:2] not in known]
        known |= {row[:2] for row in both}
    if format_ == "dpo":
        yield from _dpo(scored, pairs)
    else:
        yield from {"kto": _kto, "sft": _sft}[format_](scored)


def _kto(scored: list[tuple[str, str, float]]) -> Iterator[dict]:
    for prompt, text, r in scored:
        yield {"prompt": prompt, "completion": text, "label": r > 0}


def _sft(scored: list[tuple[str, str, float]]) -> Iterator[dict]:
    for prompt, text, r in scored:
        if r > 0:
            yield {"messages": [_turn("user", prompt), _turn("assistant", text)]}


def _dpo(scored: list[tuple[str, str, float]], pairs: list[tuple[str, str, str]]) -> Iterator[dict]:
    """Yield an example for each preference. For a prompt without a preference, yield an example for each pair
    of a liked and a disliked reply."""
    for prompt, chosen, rejected in pairs:
        yield {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    compared = {prompt for prompt, _, _ in pairs}
    for prompt, chosen, high in scored:
        for other, rejected, low in scored:
            if prompt == other and high > 0 > low and prompt not in compared:
                yield {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
