"""The page store of `serve`: a verb that writes it, and what the next start reads of it.

The page store may lose anything, so no state of a trial has it. Wrong is a reply that differs because of it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from .crash_bases import open_runtime

PROMPTS = ("a long question " * 20, "another long question " * 20)
KEPT = 8  # MB of pages
TOKENS = 5  # of each reply
Opener = Callable[..., Any]  # settings -> an open Runtime
Reply = list[tuple[int, float]]  # (token, its log-probability in nats)
CLOSE = 1e-5  # nats


def write_pages(opener: Opener = open_runtime) -> None:
    """Write what a server writes of its KV caches when it ends, and at a request of more than a page."""
    write_replies(KEPT, opener)


def read_pages(opener: Opener = open_runtime) -> list[str]:
    """After the crash, let the model write the replies with the page store. Compare each reply with the two
    replies that `replies_from_memory` gives for the same cached tokens. Return a line for each reply that
    differs from both."""
    faults = []
    for prompt, cached, found in zip(PROMPTS, *write_replies(KEPT, opener), strict=True):
        wanted = replies_from_memory(prompt, cached, opener)
        if not any(is_close(found, reply) for reply in wanted):
            faults.append(
                f"with {cached} tokens of the page store the reply to {prompt[:14]!r} is {found},"
                f" with these tokens in memory it is {wanted}"
            )
    return faults


def write_replies(kept: int, opener: Opener = open_runtime) -> tuple[list[int], list[Reply]]:
    """Return the number of tokens that the KV caches had of each prompt, and the reply to each prompt.

    kept: MB of pages
    """
    with opener(kv_disk=kept) as runtime:
        both = [write_reply(runtime, runtime.model.tokenizer.encode(prompt)) for prompt in PROMPTS]
    return [cached for cached, _ in both], [reply for _, reply in both]


def replies_from_memory(prompt: str, cached: int, opener: Opener = open_runtime) -> list[Reply]:
    """Return the two replies that can follow if the KV cache in memory has `cached` tokens of the prompt.

    The older pages of a long cache have fewer bits. So a reply depends a little on what the cache had after
    these tokens. For the first reply, the cache starts with only these tokens. For the second reply, the
    cache starts with these tokens and other tokens after them. Together they are as many as the tokens of the
    whole prompt and its reply.
    """
    replies = []
    for is_long in (False, True):
        with opener(kv_disk=0) as runtime:
            ids = runtime.model.tokenizer.encode(prompt)
            other = next(token for token in ids if token != ids[cached])
            more = [other] * (len(ids) + TOKENS - cached) if is_long else []
            if cached:
                write_reply(runtime, [*ids[:cached], *more], 1)
            found, reply = write_reply(runtime, ids)
            assert found == cached, f"the cache in memory has {found} tokens, {cached} are wanted"
        replies.append(reply)
    return replies


def write_reply(runtime: Any, ids: Sequence[int], tokens: int = TOKENS) -> tuple[int, Reply]:
    """Let the model write a reply. Return the number of the prompt's tokens that the KV caches had, and the
    reply."""
    from ruvmlx.engine import GenerationRequest, Sampling

    request = GenerationRequest(
        input_ids=ids, max_new_tokens=tokens, sampling=Sampling(temperature=0), ignore_eos=True,
        logprobs=1, resumable=True,
    )  # fmt: skip
    *_, last = runtime.writer.generate(request)
    return last.response.cached_tokens, [(entry.token_id, entry.logprob) for entry in last.response.logprobs]


def is_close(one: Reply, other: Reply) -> bool:
    """Are the tokens the same, and their log-probabilities within CLOSE?"""
    same = [token for token, _ in one] == [token for token, _ in other]
    return same and all(abs(a[1] - b[1]) < CLOSE for a, b in zip(one, other, strict=True))
