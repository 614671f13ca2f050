"""The page store of `serve`: a verb that writes it, and what the next start reads of it.

The page store may lose anything, so no state of a trial has it. Wrong is a reply that differs because of it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from .crash_bases import open_runtime

PROMPTS = ("a long question " * 20, "another long question " * 20)
KEPT = 8  # MB of pages
Opener = Callable[..., Any]  # settings -> an open Runtime
CLOSE = 1e-3  # nats: a prompt that is read in two parts has other roundings


def write_pages(opener: Opener = open_runtime) -> None:
    """Write what a server writes of its KV caches when it ends, and at a request of more than a page."""
    write_replies(KEPT, opener)


def read_pages(opener: Opener = open_runtime) -> list[str]:
    """Let the model write the replies twice: with the page store after the crash, and without a page store.
    Return a line for each reply that differs between the two runs."""
    _, found = write_replies(KEPT, opener)
    _, wanted = write_replies(0, opener)
    return [
        f"with the page store the reply to {prompt[:14]!r} is {a}, without it {b}"
        for prompt, a, b in zip(PROMPTS, found, wanted, strict=True)
        if not is_close(a, b)
    ]


def write_replies(
    kept: int, opener: Opener = open_runtime
) -> tuple[list[int], list[list[tuple[int, float]]]]:
    """Return the number of tokens that the KV caches had of each prompt, and for each prompt the reply, as
    [(token, its log-probability in nats)].

    kept: MB of pages
    """
    from ruvmlx.engine import GenerationRequest, Sampling

    cached, replies = list[int](), list[list[tuple[int, float]]]()
    with opener(kv_disk=kept) as runtime:
        for prompt in PROMPTS:
            request = GenerationRequest(
                prompt=prompt, max_new_tokens=5, sampling=Sampling(temperature=0), ignore_eos=True,
                logprobs=1, resumable=True,
            )  # fmt: skip
            *_, last = runtime.writer.generate(request)
            cached.append(last.response.cached_tokens)
            replies.append([(entry.token_id, entry.logprob) for entry in last.response.logprobs])
    return cached, replies


def is_close(one: Sequence[tuple[int, float]], other: Sequence[tuple[int, float]]) -> bool:
    """Are the tokens the same, and their log-probabilities within CLOSE?"""
    same = [token for token, _ in one] == [token for token, _ in other]
    return same and all(abs(a[1] - b[1]) < CLOSE for a, b in zip(one, other, strict=True))
