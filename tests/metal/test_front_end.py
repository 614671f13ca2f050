"""Every Metal source, compiled by a clang that thinks like Metal's; and mistakes that it must refuse."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from ruvmlx.backends.mlx.kernels import decode
from ruvmlx.backends.mlx.kernels.export import KERNELS, source, title
from ruvmlx.backends.mlx.kernels.source import Kernel, Template, folder, text
from ruvmlx.platform.mx import mx

from .front_end import PRELUDE, clang, complaints, concrete, size


@pytest.fixture(autouse=True)
def needs_clang():
    clang()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_metal_would_take_it(kernel):
    """Each kernel with each of its template values; two compilers at a time."""
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda chosen: complaints(source(kernel, chosen)), kernel.values)
        refused = {title(kernel, c): said for c, said in zip(kernel.values, found, strict=True) if said}
    assert not refused


# What is planted in the header that all kernels share, before HELPER, and what is said of it.
IN_HEADER = {
    "a bare constant": (
        "constexpr int LIMIT = 3;",
        "program scope variable must reside in constant address space",
    ),
    "a variable at program scope": (
        "int counter;",
        "program scope variable must reside in constant address space",
    ),
    "a pointer without an address space": (
        "FN float one(float *x) { return x[0]; }",
        "pointer type must have explicit address space qualifier: 'float *'",
    ),
    "a reference without one": (
        "template <typename X> FN X one(const X &x) { return x; }",
        "reference type must have explicit address space qualifier: 'X &'",
    ),
    "a pointer to a template without one": (
        "template <int N> struct Row { int n; }; FN int one(Row<3> *x) { return x[0].n; }",
        "pointer type must have explicit address space qualifier: 'Row<3> *'",
    ),
    "a device pointer for a threadgroup one": (
        "FN float one(threadgroup float *x) { return x[0]; }FN float two(device float *x) { return one(x); }",
        "cannot pass pointer to address space '__global' as a pointer to address space '__local'",
    ),
    "threadgroup memory in a helper": (
        "FN float one() { threadgroup float x[8]; x[0] = 1; return x[0]; }",
        "non-kernel function variable cannot be declared in local address space",
    ),
    "a threadgroup pointer cast to device": (
        "FN device float *one(threadgroup float *x) { return (device float *)x; }",
        "cast from '__local float *' to '__global float *' converts between mismatching address spaces",
    ),
    "recursion": (
        "FN int one(int n) { return n < 2 ? 1 : n * one(n - 1); }",
        "a function reaches itself: '_Z3one",
    ),
    "recursion over two functions": (
        "int two(int n); FN int one(int n) { return two(n - 1); } int two(int n) { return !n || one(n); }",
        "a function reaches itself: '_Z3one",
    ),
    "recursion of one template instance": (
        "template <int N> FN int one(int n) { return n < N ? n : one<N>(n / 2); }"
        "FN int two(int n) { return one<3>(n); }",
        "a function reaches itself: '_Z3one",
    ),
    "double": ("FN float one(float x) { return (float)((double)x / 3); }", "use of type 'double'"),
    "a double literal": ("FN float one(float x) { return x * 0.1; }", "double precision constant"),
    "clamp of our own": (
        "FN float clamp(float x, float a, float b) { return x < a ? a : x < b ? x : b; }",
        "'clamp' is a function of Metal's library",
    ),
    "rotate of our own, a template": (
        "template <typename X> FN X rotate(X a, X b) { return a + b; }",
        "'rotate' is a function of Metal's library",
    ),
    "select of our own": (
        "FN\nfloat4 select(float4 a, float4 b, bool c) { return c ? b : a; }",
        "'select' is a function of Metal's library",
    ),
    "dot as a macro": ("#define dot(a, b) ((a) * (b))", "'dot' is a function of Metal's library"),
    "a lambda": (
        "FN float one(float x) { auto f = [&](float y) { return x * y; }; return f(2); }",
        "not in Metal: '[&](float y)",
    ),
    "a lambda that names what it takes": (
        "FN float one(float x) { return [x](float y) { return x * y; }(2); }",
        "not in Metal: '[x](float y)",
    ),
    "goto": ("FN int one() { goto end; end: return 1; }", "not in Metal: 'goto'"),
    "a derived class": ("struct One { int n; }; struct Two : One {};", "not in Metal: 'struct Two : One"),
    "a pointer in a macro, without an address space": (
        "#define ROW(T) T *\nFN float one(ROW(float) x) { return x[0]; }",
        "pointer type must have explicit address space qualifier: 'float *'",
    ),
    "a virtual function": ("struct One { virtual int f(); };", "virtual functions are not supported"),
    "a static variable in a function": (
        "FN int one() { static int n = 0; return n++; }",
        "static local variable must reside in constant address space",
    ),
    "a function of OpenCL": (
        "FN float one(float x) { return mad(x, x, x); }",
        "use of undeclared identifier 'mad'",
    ),
    "an ambiguous call": ("FN float one(int x) { return exp2(x); }", "call to 'exp2' is ambiguous"),
    "a pointer to a function": (
        "FN float one(float (*f)(float)) { return f(1); }",
        "pointers to functions are not allowed",
    ),
    "as_type between sizes": (
        "FN uint one(float4 x) { return as_type<uint>(x); }",
        "as_type between types of different sizes",
    ),
}
# ... and in attend_merge's body for 64 numbers a head, before its own threadgroup memory (512 floats).
IN_BODY = {
    "too much threadgroup memory": (
        "SHARED(float, much, 8192); (void)much;",
        "34816 bytes of threadgroup memory, 32768 at most",
    ),
    "threadgroup memory in a block": (
        "if (lane) { SHARED(float, inner, 8); }",
        "can only be declared in the outermost scope of a kernel function",
    ),
    "a constant in a function": (
        "CONSTANT int LIMIT = 3; (void)LIMIT;",
        "automatic variable qualified with an address space: 'constant constexpr int LIMIT =",
    ),
    "a device array as a threadgroup pointer": (
        "threadgroup float *p = out;",
        "cannot initialize a variable of type '__local float *",
    ),
    "a pointer without an address space": (
        "float *p = 0;",
        "pointer type must have explicit address space qualifier: 'float *'",
    ),
    "writing to an input": ("o[0] = 1;", "read-only variable is not assignable"),
    "a variable of a reserved name": ("int kernel = 0;", "expected unqualified-id"),
    "a swizzle of a scalar": ("float y = o.x;", "is not a structure"),
}
MERGED = (64, mx.float32)
HELPER, SHARED = "FN float as_f32(", "SHARED(float, sums, SIMDS * D);"
PLANTED = [(HELPER, "header", *planted) for planted in IN_HEADER.items()]
PLANTED += [(SHARED, "body", *planted) for planted in IN_BODY.items()]
# A few always run, to show that clang still refuses; all of them when the checker has changed.
CHECKER = pytest.mark.full(
    *(f"tests/metal/{name}" for name in ("front_end.py", "metal_rules.py", PRELUDE.name))
)
MISTAKES = [
    pytest.param(at, *mistake, id=f"{where}: {name}", marks=[CHECKER] if i % 6 else [])
    for i, (at, where, name, mistake) in enumerate(PLANTED)
]


def with_whole_headers(kernel: Kernel, chosen: Sequence[Template]) -> str:
    """The source of a kernel with all words of the dialect, of which it may use a few."""
    pruned = kernel.header("metal").strip()
    whole = source(kernel, tuple(chosen))
    assert whole.count(pruned) == 1
    return whole.replace(pruned, "".join(text(name) for name in ("dialect_metal.h", *kernel.headers)))


@pytest.mark.parametrize("at,wrong,complaint", MISTAKES)
def test_a_planted_mistake_is_refused(at, wrong, complaint):
    whole = with_whole_headers(decode.MERGE, MERGED)
    assert whole.count(at) == 1
    said = complaints(whole.replace(at, f"{wrong}\n{at}"))
    assert complaint in "\n".join(said)


def test_what_is_right_is_taken():
    """The mistakes' nearest right relatives, all at once: no check refuses everything of its kind."""
    whole = with_whole_headers(decode.MERGE, MERGED)
    right = """CONSTANT int LIMIT = 3, TABLE_OF[2] = {1, 2};
        FN float one(THREAD float *x, LOCAL(float) y, GLOBAL_IN(float) z, constant int &n) {
            float rows[2][2] = {{x[0], y[n]}, {z[0], 1}};
            return rows[n] [1] + rows[(n)][(n + 1) % 2] + (x)[0];
        }
        template <int N> FN int two(int n) { return N ? two<N / 2>(n) : n; }
        enum class Kind : int { ONE };
        struct Cell { int n; int twice() const { return 2 * n; } };
        template <> FN int two<0>(int n) { return n; }
        FN int three(int n) { return min(two<8>(n), LIMIT & TABLE_OF[0]); }
        FN float clamped(float x) { return metal::clamp(x, 0.0f, 1.0f) * dot(float4(x), float4(2)); }"""
    assert complaints(whole.replace(HELPER, f"{right}\n{HELPER}")) == []
    assert complaints(whole.replace(SHARED, f"{SHARED} SHARED(float, more, 7680); (void)more;")) == []


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_bare_constants_are_refused(kernel):
    """pages.h as it was, with `constexpr int PAGE = 64;` at program scope; the file's line is named."""
    whole = with_whole_headers(kernel, kernel.values[0])
    bare = whole.replace("#define CONSTANT constant constexpr", "#define CONSTANT constexpr")
    assert bare != whole
    said = [line for line in complaints(bare) if "must reside in constant address space" in line]
    lines = (folder() / "pages.h").read_text().splitlines()
    page = 1 + next(i for i, line in enumerate(lines) if line.startswith("CONSTANT int PAGE "))
    assert any(line.startswith(f"pages.h:{page}:") for line in said)


def test_types_as_template_values():
    text = (
        "template <int D, typename T>\n[[kernel]] void f(\n  device half* x [[buffer(0)]]) {\nx[D] = 1;\n}\n"
    )
    text += 'template [[host_name("f")]] [[kernel]] decltype(f<3, half>) f<3, half>;\n'
    assert concrete(text) == (
        "__kernel void f(\n  device half* x ) { constexpr int D = 3; (void)D; typedef half T;\nx[D] = 1;\n}\n"
    )


def test_sizes_of_llvm_types_are_counted():
    assert [size(x) for x in ("float", "[3 x i16]", "[2 x [5 x float]]", "[4 x <4 x half>]")] == [
        4,
        6,
        40,
        32,
    ]
