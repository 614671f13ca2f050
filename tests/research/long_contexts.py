"""Measures decoding after up to 128k tokens, beside llama.cpp, with caches that nobody computed.

    python -m tests.research.long_contexts [--model M.gguf] [--threads N] [--rounds N] [--contexts 1024,8192]
    python -m tests.research.long_contexts --ours       without llama.cpp, in the processor time of one thread

To read a prompt of 128k tokens takes an hour of two cores. So each cache gets random keys and values in the
place of a prompt: the time of a step does not depend on them. ruvmlx's old pages get fewer bits, as after a
prompt. llama.cpp gets the state of a short prompt, repeated. Each measurement has a process of its own, and
the players take turns. A row has the median of the turns in tokens per second, and the bytes of the cache.
llama.cpp uses flash attention, with a cache of 16 bits and with q8_0.
"""

import argparse
import ctypes as C
import json
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from apps.bench.model import prompt
from apps.bench.other_runtimes import LlamaCpp
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.kv.cache import PagedCache, room_for
from ruvmlx.kv.policy import F16, TIERED
from ruvmlx.models.load import load_model
from ruvmlx.tiers import HOT, PAGE

STEPS, SHORT = 12, 256  # the measured steps of a turn; the tokens of llama.cpp's short prompt
POLICIES = {"ours, tiered": TIERED, "ours, f16": F16}
CACHES = {"llama.cpp, f16": "f16", "llama.cpp, q8_0": "q8_0"}
Measured = tuple[float, int]  # the seconds of a step, and the bytes of the cache
Clock = Callable[[], float]


def measure_ours(model: str | None, threads: int, context: int, player: str, clock: Clock) -> Measured:
    backend = NativeBackend(load_model(model), threads)
    cache, times = backend.new_cache(POLICIES[player]), []
    fill(cache, context)
    for token in prompt(STEPS):
        begun = clock()
        backend.decode(token, cache)
        times.append(clock() - begun)
    return statistics.median(times), cache.nbytes


def fill(cache: PagedCache, context: int) -> None:
    """Give the cache pages of random keys and values."""
    size = cache.pool.sizes[HOT]
    noise = np.random.default_rng(1).normal(0, 0.5, size // 2).astype(np.float16).tobytes()
    for _ in range(context // PAGE):
        with room_for([cache], PAGE):
            C.memmove(cache.pages[-1].number, noise, size)


def measure_llama_cpp(model: str | None, threads: int, context: int, player: str) -> Measured:
    peer = LlamaCpp(str(load_model(model).path), threads, context + 256, flash=True, kv=CACHES[player])
    peer.fill(prompt(SHORT))
    lib, handle = peer._lib, peer._context
    short = (C.c_uint8 * lib.llama_state_seq_get_size(handle, 0))()
    assert lib.llama_state_seq_get_data(handle, short, len(short), 0) == len(short)
    state, nbytes = repeated_state(bytes(short), context // SHORT)
    lib.llama_memory_clear(peer._memory, True)
    held = (C.c_uint8 * len(state)).from_buffer(state)
    assert lib.llama_state_seq_set_data(handle, held, len(state), 0) == len(state)
    peer._length = context
    return statistics.median(peer.go_on(prompt(STEPS))), nbytes


def repeated_state(short: bytes, times: int) -> tuple[bytearray, int]:
    """Return llama.cpp's state of a long sequence, and the bytes of its keys and values. The long sequence
    repeats the tokens of a short sequence.

    state = magic number, sequence, streams (1), cells, cells x (position, sequences (1), sequence),
        values are transposed (0), layers, layers x keys, layers x values
    keys, values = type, bytes of a row (uint64), rows
    """
    streams, cells = struct.unpack_from("<II", short, 8)
    meta, at = [struct.unpack_from("<iIi", short, 16 + 12 * i) for i in range(cells)], 16 + 12 * cells
    transposed, layers = struct.unpack_from("<II", short, at)
    assert (streams, cells, transposed) == (1, SHORT, 0)
    many = [struct.pack("<iIi", i, *meta[0][1:]) for i in range(cells * times)]
    made = bytearray(short[:12] + struct.pack("<I", cells * times) + b"".join(many) + short[at : at + 8])
    at, nbytes = at + 8, 0
    for _ in range(2 * layers):
        rows = cells * struct.unpack_from("<iQ", short, at)[1]
        made += short[at : at + 12] + short[at + 12 : at + 12 + rows] * times
        at, nbytes = at + 12 + rows, nbytes + rows * times
    assert at == len(short)
    return made, nbytes


def ask_process(flags: argparse.Namespace, player: str, context: int) -> Measured:
    words = ["--player", player, "--contexts", str(context), "--threads", str(flags.threads)]
    words += ["--model", flags.model] if flags.model else []
    words += ["--ours"] if flags.ours else []
    done = subprocess.run(
        [sys.executable, "-m", "tests.research.long_contexts", *words],
        stdout=subprocess.PIPE,
        check=True,
    )
    seconds, nbytes = json.loads(done.stdout)
    return seconds, nbytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contexts", default="1024,8192,32768,131072")
    parser.add_argument("--ours", action="store_true")
    parser.add_argument("--player", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    contexts = [int(word) for word in flags.contexts.split(",")]
    if flags.player:
        given = flags.model, flags.threads, contexts[0], flags.player
        clock = time.process_time if flags.ours else time.perf_counter
        is_ours = flags.player in POLICIES
        print(json.dumps(measure_ours(*given, clock) if is_ours else measure_llama_cpp(*given)))
        return
    if flags.ours:
        flags.threads = 1
    players = [*POLICIES, *([] if flags.ours else CACHES)]
    for context in contexts:
        turns = [[ask_process(flags, player, context) for player in players] for _ in range(flags.rounds)]
        for player, found in zip(players, zip(*turns, strict=True), strict=True):
            rate = 1 / statistics.median(seconds for seconds, _ in found)
            print(f"{context:7} {player:15} {rate:8.2f} tok/s  {found[0][1] / 1e6:8.1f} MB", flush=True)


if __name__ == "__main__":
    main()
