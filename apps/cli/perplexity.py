"""The command `ruvmlx perplexity` measures how well a model predicts a text."""

import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from ruvmlx.errors import UsageError, unreadable
from ruvmlx.text import backend_in_words, size
from ruvmlx.tiers import HOT

from .number_types import WholeNumber
from .options import load_and_open, model_options, resolve
from .output import json_option, log, print_json
from .text_output import facts as table_of_facts
from .verb import Verb

if TYPE_CHECKING:
    from ruvmlx.backends.base import Backend
    from ruvmlx.engine.perplexity import Perplexity

MAX_TEXT_BYTES = 16 << 20  # the maximum size of the text; its tokens take 150 times as much memory


@click.command(cls=Verb)
@click.argument("file")
@click.option("--ctx", type=WholeNumber(min=2), help="Window, in tokens; the model's context by default.")
@model_options
@json_option
def perplexity(file: str, ctx: int | None, as_json: bool, **flags: Any) -> None:
    """Measure the original model's perplexity on a text FILE (- is standard input), token by token.

    With a tiered cache, the same tokens also run with an f16 cache; kl_vs_f16 is the cost of the tiers.
    """
    from ruvmlx.backends.select import cache_policy
    from ruvmlx.engine.perplexity import perplexity as measure

    settings = resolve(flags)
    text = _read(file)
    model, backend = load_and_open(settings, ctx)
    tokens = model.tokenizer.encode(text)
    context = min(ctx or model.shape.max_context, model.shape.max_context)
    policy = cache_policy(settings.kv, backend, model.shape, settings.kv_tiers)
    found = measure(backend, tokens, context, policy, progress=_Progress(len(tokens)))
    kv = found.kv.facts() | found.kv.byte_facts()
    facts = {
        "ppl": found.ppl,
        "nll": found.nll,
        "tokens": found.tokens,
        "ppl_f16": found.ppl_f16,
        "kl_vs_f16": found.kl_vs_f16,
        "kv": kv,
        "backend": backend.name,
        "kernels": backend.kernels,
    }
    if as_json:
        print_json(facts)
    else:
        _show(found, backend)


def _show(found: "Perplexity", backend: "Backend") -> None:
    """Print for people the perplexity of the text, and how much the tiers of the KV cache change the model's
    predictions."""
    rows = [
        (
            "perplexity",
            f"{found.ppl:.2f} for {found.tokens:,} tokens of the text, by the original model (lower is "
            "better; 1 is the best)",
        ),
        (
            "cache",
            f"{size(found.kv.bytes)} with the setting in use ({found.kv.policy}); "
            f"{size(found.kv.f16_bytes)} with 16 bits for every number",
        ),
        ("computed by", backend_in_words(backend.name, backend.kernels)),
    ]
    if found.ppl_f16 is not None and found.kl_vs_f16 is not None:
        cost = (
            f"{found.ppl_f16:.2f} with 16 bits for every number of the KV cache (f16); the predictions then "
            f"differ by {found.kl_vs_f16:.4f} (KL divergence, in nats per token; 0: they are the same)"
        )
        if not any(found.kv.tokens[:HOT]):
            cost += ". This text is so short that both caches have 16 bits for every number"
        rows.insert(1, ("compared", cost))
    table_of_facts(rows)


def _read(file: str) -> str:
    from ruvmlx.chats.chat_file import read_limited

    if file == "-" and sys.stdin is None:
        raise UsageError("standard input is closed; name a file with the text.")
    try:
        with nullcontext(sys.stdin.buffer) if file == "-" else open(file, "rb") as opened:
            return read_limited(opened, file, MAX_TEXT_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise unreadable(file, e) from e


class _Progress:
    """An object of this class prints the progress to stderr every five seconds, if stderr is a terminal."""

    def __init__(self, total: int):
        self._total, self._next = total, time.monotonic() + 5

    def __call__(self, done: int) -> None:
        if sys.stderr is not None and sys.stderr.isatty() and time.monotonic() > self._next:
            self._next = time.monotonic() + 5
            log(f"{done} of {self._total} tokens")


VERBS = [perplexity]
