"""The simulator catches what a GPU would let pass: each small kernel here is wrong in one way."""

import numpy as np
import pytest

from ruvmlx.backends.mlx.kernels.source import Kernel

from . import simulator
from .simulator import KernelFault, Simulated

START = "KERNEL_START SHARED(float, shared, 64); (void)shared;\n"
KERNEL = Kernel("small", (("x", "float"), ("b", "uchar")), (("y", "float"),), (), threads=64, headers=())


@pytest.fixture
def outcome():
    """Run a body on 64 threads, x = 0..63; returns y."""

    built: dict[str, Simulated] = {}

    def outcome(body, seed=0):
        if body not in built:
            built[body] = Simulated(KERNEL, [()], START + body)
        x = np.arange(64, dtype=np.float32)
        return built[body]([x, np.zeros(64, np.uint8)], [(64,)], (1, 1, 1), (), seed)[0]

    return outcome


RIGHT = {
    "each its own": ("y[thread_at] = 2 * x[thread_at];", lambda i: 2 * i),
    "neighbours, a barrier between": (
        "shared[thread_at] = x[thread_at]; BARRIER(); y[thread_at] = shared[63 - thread_at];",
        lambda i: 63 - i,
    ),
    "neighbours in a simdgroup, its own barrier between": (
        "shared[thread_at] = x[thread_at]; SIMD_BARRIER(); y[thread_at] = shared[thread_at ^ 1];",
        lambda i: i ^ 1,
    ),
    "a butterfly": (
        "float s = x[thread_at]; for (int w = 1; w < 32; w *= 2) s += shuffle_xor(s, w); y[thread_at] = s;",
        lambda i: np.where(i < 32, 496, 496 + 1024),
    ),
    "simdgroups that go different ways": (
        "float s = x[thread_at]; if (simd_at) s = shuffle(s, 5); y[thread_at] = s;",
        lambda i: np.where(i < 32, i, 37),
    ),
    "words reused after a barrier": (
        "shared[thread_at] = 1; BARRIER(); float a = shared[0]; BARRIER();"
        " if (thread_at == 0) shared[0] = 5; BARRIER(); y[thread_at] = a + shared[0];",
        lambda i: 0 * i + 6,
    ),
}

WRONG = {
    "out of bounds": ("y[thread_at + 1] = 0;", "byte 256 of a buffer of 256 bytes"),
    "before the start": ("y[thread_at] = x[(int)thread_at - 1];", "byte -4 of"),
    "not aligned": ("y[thread_at] = load_u32(b, thread_at % 2);", "not aligned"),
    "past threadgroup memory": ("shared[thread_at + 1] = 0; y[thread_at] = 0;", r"shared\[64\] of 64"),
    "never written": ("y[thread_at] = shared[0];", "never written"),
    "no barrier before reading": (
        "shared[thread_at] = 1; y[thread_at] = shared[63 - thread_at];",
        "never written|no barrier",
    ),
    "a simdgroup's barrier between simdgroups": (
        "shared[thread_at] = 1; SIMD_BARRIER(); y[thread_at] = shared[63 - thread_at];",
        "never written|no barrier",
    ),
    "two write one word": ("shared[thread_at / 2] = 1; y[thread_at] = 0;", "no barrier"),
    "written while others read": (
        "shared[thread_at] = 1; BARRIER(); y[thread_at] = shared[63 - thread_at]; shared[thread_at] = 2;",
        "may read it|no barrier",
    ),
    "a shuffle that one lane skips": (
        "float s = 0; if (lane != 3) s = shuffle_xor(x[thread_at], 1); y[thread_at] = s;",
        "divergent",
    ),
    "a shuffle in two places": (
        "float s;\nif (lane < 9) s = shuffle_xor(x[thread_at], 1);\nelse s = shuffle_xor(x[thread_at], 1);\n"
        "y[thread_at] = s;",
        "divergent",
    ),
    "a barrier that a simdgroup skips": ("if (simd_at) BARRIER();\ny[thread_at] = 0;", "divergent"),
    "a shuffle past the simdgroup": (
        "y[thread_at] = shuffle(x[thread_at], thread_at);",
        "from lane 32|from lane [3-6]",
    ),
    "too much threadgroup memory": (
        "SHARED(float, more, 8129); more[thread_at] = 0; y[thread_at] = 0;",
        "32772 bytes of threadgroup memory",
    ),
}


@pytest.mark.parametrize("body,want", RIGHT.values(), ids=RIGHT)
def test_right_kernels_run_in_any_order(outcome, body, want):
    for seed in range(5):
        np.testing.assert_array_equal(outcome(body, seed), want(np.arange(64)))


@pytest.mark.parametrize("body,message", WRONG.values(), ids=WRONG)
def test_wrong_kernels_are_stopped(outcome, body, message):
    for seed in range(3):
        with pytest.raises(KernelFault, match=message):
            outcome(body, seed)


def test_outputs_that_are_not_written_are_nan(outcome):
    y = outcome("if (thread_at != 7) y[thread_at] = 0;")
    assert np.isnan(y).nonzero()[0].tolist() == [7]


def test_writing_to_an_input_is_seen(outcome):
    with pytest.raises(AssertionError, match="wrote to an input"):
        outcome("x[thread_at] = 5; y[thread_at] = 0;")


def test_halves_convert_like_numpy():
    """All 65,536 halves, and floats around every boundary between two of them."""
    kernel = Kernel(
        "halves", (("x", "float"),), (("bits", "uint"), ("back", "float")), (), threads=32, headers=()
    )
    body = (
        "KERNEL_START for (uint i = thread_at; i < 65536 * 3; i += 32)\n"
        "{ bits[i] = f32_to_half(x[i]); back[i] = half_to_f32(bits[i]); }"
    )
    every = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    with np.errstate(all="ignore"):
        middle = (every + np.roll(every, -1)) / 2  # ties
        x = np.concatenate([every, middle, np.nextafter(middle, np.float32(np.inf))])
        want = x.astype(np.float16)
    bits, back = Simulated(kernel, [()], body)([x], [x.shape, x.shape], (1, 1, 1))
    nan = np.isnan(want)
    np.testing.assert_array_equal(bits[~nan], want[~nan].view(np.uint16))
    np.testing.assert_array_equal(back[~nan], want[~nan].astype(np.float32))
    assert nan.sum() > 1000 and np.isnan(back[nan]).all()


@pytest.mark.parametrize(
    ("broken", "why"),
    [("abort();", "contexts ended with -6"), ("#error no contexts", "no contexts")],
)
def test_a_system_whose_contexts_fail_skips_with_the_reason(monkeypatch, broken, why):
    """As on a system where makecontext crashes, or is gone: the reason is there, and it is a skip."""
    program = simulator.CONTEXTS.replace("steps = steps + 10;", broken)
    if broken.startswith("#"):
        program = f"{broken}\n{program}"
    monkeypatch.setattr(simulator, "contexts_fail", lambda found: real(found, program))
    with pytest.raises(pytest.skip.Exception, match=f"makecontext does not work here.*{why}"):
        simulator.compiler()


real = simulator.contexts_fail
