"""Drafted decoding beside plain decoding: speed, and how often guesses are right.

python -m tests.research.drafts speed [--model M] [--threads N] [--questions N] [--rounds N] [--impl avx2]
python -m tests.research.drafts guesses [--model M]
python -m tests.research.drafts calls [--model M] [--threads N] [--rounds N]

speed: the twenty prompts of copy_prompts.json, whose replies repeat their prompt, and the ordinary questions
of tests/first_replies. Each reply is written plain and drafted, in turns. Both must be equal. A ratio
compares the decode times of one prompt: processor time with one thread, else time on the clock; of several
rounds the fastest. guesses: the share of right guesses by the length of the match. `PRIOR` of
ruvmlx/engine/draft_length.py is near these shares. calls: the time of a call of 1, 2, 4 and 8 tokens after
CONTEXT tokens, by the same clocks, and of its parts by the clock. These are numbers of the fastest of
10 * rounds calls.

calls on an EPYC with AVX2, 26 November 2026, milliseconds of processor time of a call of 1, 2, 4 and 8
tokens, before and after products with words of 16 bits. starter: 8.7, 11.3, 21.2, 42.9; then 8.7, 9.6,
13.3, 25.8. Qwen2.5-0.5B Q4_K_M: 37.3, 57.5, 129.6, 174.5; then 37.0, 46.6, 73.6, 102.8. Without VNNI the
arithmetic limits such calls: a token and a block of 16 rows x 32 columns need 32 multiplications of 256
bits, 32 additions and 16 loads, at least 6.8 ns there. The kernels take 9.2 ns (`matmul_bench`, 8 tokens).
"""

import argparse
import ctypes as C
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.engine import GenerationRequest, LLMInferenceEngine, Sampling
from ruvmlx.engine.batch import generate_many
from ruvmlx.engine.draft_length import MATCHES
from ruvmlx.engine.prompt_lookup import PromptLookup
from ruvmlx.kernels.decoder import _lib
from ruvmlx.kv.policy import F16, TIERED
from ruvmlx.models.config.model import Message, Model
from ruvmlx.models.load import load_model
from tests.first_replies.questions import questions

COPIES = Path(__file__).with_name("copy_prompts.json")
MAX_TOKENS = 400
CONTEXT = 264  # tokens; the page of the next 8 tokens has room for them
PARTS = ("embed", "qkv", "attend", "o", "gate_up", "down", "head")  # RVM_PART_EMBED .. of rvm_decoder.h


@dataclass(frozen=True)
class Prompt:
    kind: str  # "copy" or "question"
    text: str


def prompts(count: int) -> list[Prompt]:
    """Return the twenty copies and `count` ordinary questions."""
    asked = [question.text for half in ("choose", "report") for question in questions(half)]
    copies = [Prompt("copy", entry["prompt"]) for entry in json.loads(COPIES.read_text("utf-8"))]
    return copies + [Prompt("question", text) for text in asked[:count]]


def request(model: Model, prompt: Prompt) -> GenerationRequest:
    """Copies are greedy. Questions are sampled as the model's makers advise."""
    values = (
        {"temperature": 0.7} | dict(model.default_sampling)
        if prompt.kind == "question"
        else {"temperature": 0.0}
    )
    return GenerationRequest(
        messages=[Message("user", prompt.text)],
        sampling=Sampling(**values, seed=1),
        max_new_tokens=MAX_TOKENS,
    )


def decode_seconds(engine: LLMInferenceEngine, asked: GenerationRequest, is_processor_time: bool):
    """Return the decode time of a reply, and the reply."""
    clock = time.process_time if is_processor_time else time.perf_counter
    run = engine.run(asked)
    for _ in run.prefill():
        pass
    run.draw()
    begun = clock()
    while run.draw():
        pass
    seconds, response = clock() - begun, run.end().response
    engine.sessions.clear()
    return seconds, response


def compare_speed(model: Model, threads: int, count: int, rounds: int, impl: str | None = None) -> None:
    backend = NativeBackend(model, threads=threads, impl=impl)
    engines = [LLMInferenceEngine(model, backend, TIERED, speculate=how) for how in ("off", "auto")]
    ratios, times = defaultdict(list), defaultdict(lambda: [0.0, 0.0])
    for prompt in prompts(count):
        fastest, replies = [float("inf")] * 2, [None] * 2
        for turn in range(rounds):
            for i in (0, 1) if turn % 2 == 0 else (1, 0):
                seconds, replies[i] = decode_seconds(engines[i], request(model, prompt), threads == 1)
                fastest[i] = min(fastest[i], seconds)
        plain, drafted = replies
        assert plain.token_ids == drafted.token_ids, prompt
        if len(plain.token_ids) < 8:
            continue
        ratios[prompt.kind].append(fastest[0] / fastest[1])
        times[prompt.kind] = [a + b for a, b in zip(times[prompt.kind], fastest, strict=True)]
        counts = (
            f"{len(plain.token_ids):4} tokens, {drafted.drafted:3} drafted, {drafted.accepted:3} accepted"
        )
        print(f"{ratios[prompt.kind][-1]:5.2f}x {counts}  {prompt.text[:50]!r}", flush=True)
    clock = "processor time" if threads == 1 else "time on the clock"
    for kind, some in ratios.items():
        plain, drafted = times[kind]
        found = f"{plain / drafted:.2f}x in all, mean {statistics.mean(some):.2f}x, slowest {min(some):.2f}x"
        print(f"{kind}: {found} of {len(some)} ({clock}, {backend.kernels})")
    print(f"a drafted token adds {engines[1].draft_length.slope:.2f} steps to a check")


def call_seconds(backend: NativeBackend, width: int, rounds: int) -> list[float]:
    """Return the seconds of the fastest call of `width` tokens, then those of its parts."""
    profile, parts = _lib().rvm_decoder_profile, (C.c_double * len(PARTS))()
    profile.restype, profile.argtypes = None, [C.c_void_p, C.c_void_p]
    clock = time.process_time if backend.decoder.threads == 1 else time.perf_counter
    cache, seconds = backend.new_cache(F16), []
    backend.prefill([i % 250 for i in range(CONTEXT)], cache)
    for _ in range(10 * rounds):
        profile(backend.decoder.handle, parts)
        begun = clock()
        backend.decode_drafted(1, range(2, width + 1), cache)
        whole = clock() - begun
        profile(backend.decoder.handle, parts)
        cache.trim(1)
        seconds.append([whole, *parts])
    return min(seconds)


def print_calls(model: Model, threads: int, rounds: int) -> None:
    backend = NativeBackend(model, threads=threads)
    plain = 0.0
    for width in (1, 2, 4, 8):
        whole, *parts = call_seconds(backend, width, rounds)
        plain = plain or whole
        each = "  ".join(f"{name} {1e3 * part:.2f}" for name, part in zip(PARTS, parts, strict=True))
        print(
            f"{width} tokens: {1e3 * whole:6.2f} ms, {whole / plain:.2f} of a call of 1  ({each})", flush=True
        )
    print(f"{threads} threads, {backend.kernels}")


def guess_counts(model: Model) -> Iterator[tuple[str, int, bool]]:
    """Yield (kind, length of the match, whether the guess was right) at each token of each reply."""
    engine, some = LLMInferenceEngine(model, NativeBackend(model)), prompts(100)
    asked = {(made := request(model, prompt)).request_id: (prompt, made) for prompt in some}
    for response in generate_many(engine, [made for _, made in asked.values()]):
        prompt, made = asked[response.request_id]
        lookup = PromptLookup(engine.prompt_ids(made))
        for token in response.token_ids:
            if guess := lookup.draft(1):
                yield prompt.kind, guess.match, guess.tokens[0] == token
            lookup.add(token)


def print_guesses(model: Model) -> None:
    counts = defaultdict(lambda: [0, 0])
    for kind, match, is_right in guess_counts(model):
        group = next(end for end in MATCHES if match < end)
        counts[kind, group][0] += is_right
        counts[kind, group][1] += 1
    for (kind, end), (right, all_) in sorted(counts.items()):
        print(f"{kind:9} match under {end:2}: {right / all_:.2f} of {all_} guesses are right")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("speed", "guesses", "calls"))
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--impl", help="instructions of the C library; by default the fastest")
    flags = parser.parse_args(arguments)
    model = load_model(flags.model)
    if flags.what == "speed":
        compare_speed(model, flags.threads, flags.questions, flags.rounds, flags.impl)
    elif flags.what == "calls":
        print_calls(model, flags.threads, flags.rounds)
    else:
        print_guesses(model)


if __name__ == "__main__":
    main()
