"""`python -m ruvmlx.backends.mlx.kernels.selfcheck SHAPES` checks the GPU kernels of the KV path.

The kernels run on parts of a small random KV cache with pages in all three tiers (4, 8 and 16 bits). The
check compares a kernel's result with the result of its twin (the same function in plain MLX) on the CPU. If
the result is right, the check times the kernel against plain MLX on the GPU. SHAPES is `check_results.Shapes`
as JSON. The output is JSON lines: one line with the names of all cases, then one line before and one line
after each case. gpu_check.py reads these lines. To add a kernel, add a function that makes a `Case` to CASES.
"""

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from statistics import median

import numpy as np

from ruvmlx.backends.mlx.check_results import GRAPH, CheckResult, Shapes
from ruvmlx.models.config.alibi import alibi_slopes
from ruvmlx.models.config.model import ModelConfig
from ruvmlx.platform.gpu import gpu
from ruvmlx.platform.mx import mx, nn
from ruvmlx.tiers import HOT, PAGE, TIERS

from . import append, decode, demote, gather, pages, rope_append
from .pages import SequencePages, unpack
from .source import HEAD_DIMS

# The program uses an attention kernel that takes at most three times as long as MLX's attention. A layer of
# mlx-lm's decode step launches about 17 kernels, and attention is one of them. So the slowest allowed kernel
# makes the step an eighth longer. In return, the tiered cache needs half the memory in a long chat. A kernel
# that spills its registers, or runs on an emulated GPU, takes far more than three times as long.
MAX_SLOWNESS = 3.0
# RACES: the number of timed races, of which the median is taken. REPEATS: the maximum number of calls in a
# race
RACES, REPEATS = 5, 16
RACE_SECONDS = 0.02  # the maximum time (seconds) of the calls in a race; a slow kernel is called less often
LONG, BRIEF = 2048, 256  # the numbers of tokens of the caches with which the attention kernels are timed
LIFETIME = 150  # seconds after which the system ends the check, in case no process waits for the check
MAX_ROUNDED_SHARE = 0.001  # the maximum share of numbers that can differ by one rounding step

Arrays = Sequence[mx.array]
Run = Callable[[], Arrays]


@dataclass(frozen=True)
class Case:
    """The data for the check of one kernel. `run` calls the function that the backend calls. `twin` computes
    the same result in plain MLX.

    tolerance: the maximum error, relative to the largest number of the twin's array
    step: the maximum error, relative in the same way, of one number in a thousand, because rounding can
        change a number's code by one; 0: no such number
    race: the two functions that are timed against each other; None: run and twin
    timed: True if the kernel is timed
    slowest: the kernel fails if its time divided by the time of plain MLX is larger than this; inf: the time
        is reported, but cannot fail the kernel
    """

    name: str
    run: Run
    twin: Run
    tolerance: float
    step: float = 0.0
    race: tuple[Run, Run] | None = None
    timed: bool = True
    slowest: float = MAX_SLOWNESS


class Sample:
    """A random cache made by the twins: two pages in each lower tier, then three hot pages (float16). The
    last page is partly filled, with NaN after its last token. q: [T, n_heads, D]; k, v: [T, n_kv_heads, D];
    turn: [T, D]."""

    tokens, fresh = (2 * HOT + 2) * PAGE + 37, 9

    def __init__(self, shapes: Shapes):
        self.shapes, self.dim = shapes, shapes.head_dim
        self._rng = np.random.default_rng(20)
        n = self.tokens
        self.q = self.numbers(n, shapes.n_heads)
        self.k, self.v = self.numbers(n, shapes.n_kv_heads), self.numbers(n, shapes.n_kv_heads)
        angles = np.outer(np.arange(n), 10000.0 ** (-np.arange(self.dim // 2) / (self.dim // 2)))
        self.turn = mx.array(np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32))

    def numbers(self, tokens: int, heads: int) -> mx.array:
        """Return random keys or values [tokens, heads, D] in the model's dtype. Some channels are far from
        zero, as in real keys."""
        x = self._rng.normal(size=(tokens, heads, self.dim)) * self._rng.uniform(0.3, 2, self.dim)
        return mx.array(x.astype(np.float32)).astype(getattr(mx, self.shapes.dtype))

    @cached_property
    def hot(self) -> mx.array:
        """Return the hot pages of all tokens: uint8 [pages, n_kv_heads, bytes]."""
        rows = append.append_ops(self.k, self.v, self.turn)
        free = mx.full((*rows.shape[:2], -self.tokens % PAGE, rows.shape[3]), 255, mx.uint8)
        whole = mx.concatenate([rows, free], axis=2).reshape(*rows.shape[:2], -1, PAGE, rows.shape[3])
        return mx.contiguous(whole.transpose(2, 0, 1, 3, 4)).reshape(whole.shape[2], rows.shape[0], -1)

    @cached_property
    def pools(self) -> list[mx.array]:
        """Return the pools (arrays of pages) by tier: two pages in each lower tier, and the hot (16-bit) form
        of all pages in the hot tier."""
        found = [self.hot]
        # demote the older pages of each tier to the next lower tier; keep the newest two of each lower tier
        for to in reversed(range(HOT)):
            found.append(demote.demote_ops(found[-1][: 2 * to + 2], self.dim, to))
        found = [pool[-2:] for pool in found[:0:-1]] + [self.hot]
        mx.eval(*found)
        return [mx.contiguous(pool) for pool in found]

    @property
    def view(self) -> SequencePages:
        return SequencePages([[1, 0]] * HOT + [[2 * HOT, 2 * HOT + 1, 2 * HOT + 2]], self.tokens)

    def view_of(self, tokens: int) -> SequencePages:
        """Return the page list of a sequence of `tokens` tokens. The list repeats the sample's full pages.
        Each tier has the same even number of pages; if this is not possible, the hot tier has more pages."""
        pairs = tokens // PAGE // 2
        n = pairs // len(TIERS)
        hot = [2 * HOT, 2 * HOT + 1] * (pairs - n * HOT)
        return SequencePages([[0, 1] * n] * HOT + [hot], tokens)

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.shapes.n_heads, self.shapes.n_kv_heads, self.dim

    def table(self, view: SequencePages) -> pages.GPUPageTable:
        """Return the page table of one sequence. If the model has ALiBi, the table has ALiBi's slopes, so the
        attention's cases run the kernels with slopes."""
        slopes = alibi_slopes(self.shapes.n_heads) if self.shapes.alibi else None
        with on_the_gpu():
            return pages.GPUPageTable([view], *self.heads, slopes=slopes)

    @property
    def tolerance(self) -> float:
        """Return the maximum relative error for the dtype: bfloat16 has 8 significant bits, and CUDA's matrix
        units have 11."""
        return 0.02 if self.shapes.dtype == "bfloat16" else 0.005


def on_the_gpu() -> mx.StreamContext:
    """Return the context in which page tables are made. A table that is made on the CPU chooses the twins, so
    the check would compare the twins with themselves."""
    return mx.stream(gpu.device if gpu.kind else mx.cpu)


# The cases ----------------------------------------------------------------------------------------


def cases(shapes: Shapes) -> list[Case]:
    """Return the cases: first the case of mlx-lm's own graph, then one or two cases for each kernel if
    kernels exist for the model's head size."""
    if shapes.head_dim not in HEAD_DIMS:
        return [graph_case(shapes)]
    with mx.stream(mx.cpu):
        sample = Sample(shapes)
        made = [make(sample) for make in CASES]
    return [graph_case(shapes), *made]


def append_case(s: Sample) -> Case:
    k, v, turn = s.k[: s.fresh], s.v[: s.fresh], s.turn[3 : 3 + s.fresh]
    return Case(
        "append",
        lambda: [append.append(k, v, turn).view(mx.float16)],
        lambda: [append.append_ops(k, v, turn).view(mx.float16)],
        s.tolerance,
    )


def rope_append_case(s: Sample) -> Case:
    """Return the case of the kernel rope_append. In the open page (the page that is being filled), the rows
    without a token are zeros, because NaN cannot be compared."""
    q, k, v = (x[:1].reshape(1, -1) for x in (s.q, s.k, s.v))
    table, turn = s.table(s.view), s.turn[s.tokens - 1 :]
    opened = mx.zeros((1, s.shapes.n_kv_heads, 2, PAGE, 2 * s.dim), mx.uint8)

    def arrays(made: rope_append.Turned) -> Arrays:
        return [made.q, made.q_rotated, made.open.view(mx.float16)]

    return Case(
        "rope_append",
        lambda: arrays(rope_append.rope_append(q, k, v, turn, opened, table)),
        lambda: arrays(rope_append.rope_append_ops(q, k, v, turn, opened, table)),
        s.tolerance,
    )


def demote_case(to: int) -> Callable[[Sample], Case]:
    """Return a function that makes the case in which pages are demoted (converted to fewer bits) from the
    next higher tier to tier `to`. The case compares the numbers; the tests compare the bytes. A small error
    before the rounding can change a code by one."""

    def case(s: Sample) -> Case:
        ids, source = [1, 0, 1], s.pools[to + 1]
        run = lambda: demote.demote(source, ids, s.dim, to)  # noqa: E731
        twin = lambda: demote.demote_ops(source[mx.array(ids)], s.dim, to)  # noqa: E731
        return Case(
            f"demote_{TIERS[to].name}",
            lambda: unpack(run(), to, s.dim),
            lambda: unpack(twin(), to, s.dim),
            1e-4,
            step=0.01 if TIERS[to].bits == 8 else 0.15,
            race=(lambda: [run()], lambda: [twin()]),
        )

    return case


def decode_case(s: Sample) -> Case:
    """Return a case of attend_decode and attend_merge, timed against MLX's own attention over the same
    tokens."""
    wide, pools, dtype = s.q[:1].astype(mx.float32), s.pools, s.q.dtype
    new = rope_append.Turned(wide, demote.rotate(wide), s.hot[-1:])
    table, long = s.table(s.view), s.table(s.view_of(LONG))

    def twin() -> Arrays:
        return [decode.attend_ops(new.q, new.q_rotated, pools, new.open, table)]

    return Case(
        "attend_decode", lambda: [decode.attend(new, pools, table, dtype)], twin, s.tolerance,
        race=(lambda: [decode.attend(new, pools, long, dtype)], own_attention(s, LONG)),
    )  # fmt: skip


def short_decode_case(s: Sample) -> Case:
    """Return the case of `decode_case` with few tokens. With few tokens, kernel launches and idle simdgroups
    (groups of GPU threads) take much of the time. The kernel does not fail this case if it is slow."""
    wide, pools, dtype = s.q[:1].astype(mx.float32), s.pools, s.q.dtype
    new = rope_append.Turned(wide, demote.rotate(wide), s.hot[-2:-1])
    table = s.table(s.view_of(BRIEF))

    def run() -> Arrays:
        return [decode.attend(new, pools, table, dtype)]

    def twin() -> Arrays:
        return [decode.attend_ops(new.q, new.q_rotated, pools, new.open, table)]

    name = f"attend_decode_{BRIEF}"
    return Case(name, run, twin, s.tolerance, race=(run, own_attention(s, BRIEF)), slowest=math.inf)


def own_attention(s: Sample, tokens: int) -> Run:
    """Return a function that runs MLX's own attention of one query over `tokens` tokens."""
    query = s.q[:1].swapaxes(0, 1)[None]  # [1, n_heads, 1, D]
    k, v = (s.numbers(tokens, s.shapes.n_kv_heads).swapaxes(0, 1)[None] for _ in range(2))
    k, v = mx.contiguous(k), mx.contiguous(v)
    return lambda: [mx.fast.scaled_dot_product_attention(query, k, v, scale=s.dim**-0.5)]


def gather_case(s: Sample) -> Case:
    """Return the case of the kernel gather: a prompt continues after pages of all tiers. The kernel must put
    all keys and values into one array, which MLX's own attention reads."""
    rows = append.append_ops(s.k[: s.fresh], s.v[: s.fresh], s.turn[: s.fresh])
    with on_the_gpu():
        new = gather.chunk(s.view, s.fresh, *s.heads)
    return Case(
        "gather",
        lambda: list(gather.keys_and_values(s.pools, rows, new)),
        lambda: list(gather.gather_ops(s.pools, rows, new, 0)),
        s.tolerance,
    )


DEMOTIONS = tuple(demote_case(to) for to in reversed(range(HOT)))
CASES = append_case, rope_append_case, *DEMOTIONS, decode_case, short_decode_case, gather_case


def graph_case(shapes: Shapes) -> Case:
    """Return a case of one random mlx-lm layer, with a 4-bit MLP. The case runs 5 tokens, then one more
    token."""
    from ruvmlx.backends.mlx import graph
    from ruvmlx.models.config.layout import matrices, vectors

    small = ModelConfig(
        model_type="llama",
        hidden_size=64,
        n_layers=1,
        n_heads=shapes.n_heads,
        n_kv_heads=shapes.n_kv_heads,
        head_dim=shapes.head_dim,
        intermediate_size=128,
        vocab_size=96,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_context=64,
        tie_word_embeddings=False,
    )
    rng = np.random.default_rng(21)
    sizes = [(f"{module}.weight", size) for module, size in matrices(small)]
    weights = {name: (rng.normal(size=size) * size[1] ** -0.5).astype(np.float32) for name, size in sizes}
    weights |= {name: np.ones(size, np.float32) for name, size in vectors(small)}

    def run() -> Arrays:
        from ruvmlx.backends.mlx.plain_cache import MLXCache

        model = graph.build(small, weights, getattr(mx, shapes.dtype), False)
        nn.quantize(model, group_size=32, bits=4, class_predicate=lambda path, _: ".mlp." in path)
        cache = MLXCache(1, None)
        return [model(mx.array([ids]), cache.layers) for ids in ([3, 1, 4, 1, 5], [9])]

    def twin() -> Arrays:
        """Run without compilation: for compiled functions on a CPU, MLX needs a C++ compiler, which users
        often do not have."""
        mx.disable_compile()
        try:
            return run()
        finally:
            mx.enable_compile()

    return Case(GRAPH, run, twin, 0.05, timed=False)


# Judging ------------------------------------------------------------------------------------------


def run_case(case: Case) -> CheckResult:
    """Run, compare and time a case. If the case raises an error, the result has this error."""
    try:
        why = difference(_numbers(case.run, gpu.device), _numbers(case.twin, mx.cpu), case)
        ratio = None if why or not case.timed else slowness(*(case.race or (case.run, case.twin)))
    except Exception as error:  # noqa: BLE001 - the check exists to catch such errors
        return CheckResult.of_error(case.name, str(error), type(error).__name__)
    if ratio is not None and not ratio <= case.slowest:
        why = f"takes {ratio:.1f} times as long as plain MLX; {case.slowest:g} times is the limit"
    return CheckResult(case.name, not why, why, ratio and round(ratio, 3))


def _numbers(run: Run, device: mx.Device | mx.DeviceType) -> list[np.ndarray]:
    with mx.stream(device):
        arrays = [array.astype(mx.float32) for array in run()]
        mx.eval(*arrays)
        return [np.array(array) for array in arrays]


def difference(got: Sequence[np.ndarray], want: Sequence[np.ndarray], case: Case) -> str:
    """Return a text about the first array of `got` that differs too much from the array in `want`; "" if
    there is none."""
    for a, b in zip(got, want, strict=True):
        if a.shape != b.shape:
            return f"gives an array {list(a.shape)} instead of {list(b.shape)}"
        if not np.isfinite(a).all():
            return f"gives NaN or infinity in {np.count_nonzero(~np.isfinite(a))} of {a.size} numbers"
        off, largest = np.abs(a - b), np.abs(b).max()
        wrong = np.count_nonzero(off > case.tolerance * largest)
        allowed = MAX_ROUNDED_SHARE * a.size if case.step else 0
        if wrong > allowed or off.max() > max(case.tolerance, case.step) * largest:
            return f"{wrong} of {a.size} numbers are wrong, by up to {off.max():.2g} of {largest:.2g}"
    return ""


def slowness(ours: Run, rival: Run) -> float:
    """Return the median of the time of `ours` divided by the time of `rival`; the two run on the GPU in
    turns."""
    with mx.stream(gpu.device):
        # the first call of a function compiles its kernel, so it is not a part of the race
        once = max(gpu.seconds(ours), gpu.seconds(rival), 1e-9)
        calls = max(1, min(REPEATS, int(RACE_SECONDS / once)))
        many = [partial(_many, run, calls) for run in (ours, rival)]
        times = [[gpu.seconds(run) for run in many] for _ in range(RACES)]
    return median(a / b for a, b in times)


def _many(run: Run, calls: int) -> list[mx.array]:
    return [array for _ in range(calls) for array in run()]


# Running the check --------------------------------------------------------------------------------


def warm_up(shapes: Shapes) -> None:
    """Run the cases of the kernels once, so that these kernels are compiled before the first reply."""
    with mx.stream(gpu.device):
        for case in cases(shapes):
            if case.name != GRAPH:
                mx.eval(*case.run())


def main(shapes: Shapes) -> None:
    signal.alarm(LIFETIME)
    to_check = cases(shapes)
    _say(cases=[case.name for case in to_check])
    for case in to_check:
        _say(begun=case.name)
        _say(result=asdict(run_case(case)))
    # end the process at once, because MLX's own clean-up at the end of Python is not a part of the check
    os._exit(0)


def _say(**event: object) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    main(Shapes(**json.loads(sys.argv[1])))
