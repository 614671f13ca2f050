// This header defines the kernels' dialect in C++. The header also has a simulator of a GPU (SIMT), in which each
// thread is a fiber.
//
// These faults end the kernel with a message, which sim_run returns; the process continues:
//   * an access to a buffer that is out of bounds or not aligned to its width, in device memory or threadgroup memory
//   * a shuffle or barrier that not all threads of the simdgroup (threadgroup) reach at the same place
//   * two threads that touch one word of threadgroup memory, one of them writing, with no barrier between
//   * a read of threadgroup memory that no thread wrote (at the start the memory is full of NaN)
//   * more than 32 KB of threadgroup memory in one threadgroup
// The seed determines the random order in which threadgroups run, and threads after each barrier or shuffle.
//
// The simulator does not model the memory order between threadgroups or the time that an operation takes.
#pragma once
#ifdef __APPLE__ // <ucontext.h> needs _XOPEN_SOURCE here, which hides other functions without _DARWIN_C_SOURCE
#define _XOPEN_SOURCE 700
#define _DARWIN_C_SOURCE
#pragma clang diagnostic ignored "-Wdeprecated-declarations"
#endif
#include <csetjmp>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>

typedef unsigned int uint;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned long ulong;
struct uint2 { uint x, y; };
struct uint3 { uint x, y, z; };
struct uint4 { uint x, y, z, w; };

namespace sim {

enum { LANES = 32, MAX_THREADS = 1024, STACK = 128 * 1024, LOCAL_LIMIT = 32 * 1024 };
enum Wait { READY, SIMD, GROUP, DONE };

struct Fiber {
    ucontext_t start;
    jmp_buf at;
    bool started;
    Wait wait;
    int site;            // site: the number of the source line with the barrier or shuffle in which the thread waits
    unsigned collectives; // collectives: the number of barriers and shuffles that this thread has passed; a lane that left one out has another number
    uint posted, got;
    int from;            // from: -1: the thread waits at a barrier; -2: at a matrix product; else the lane whose value its shuffle reads
    uint words[6];
    float *product;
    unsigned simd_epoch, group_epoch; // simd_epoch, group_epoch: the number of barriers of each kind that this thread has passed
    size_t accesses;                  // accesses: the number of accesses of this thread to device memory
};

struct State {
    Fiber fiber[MAX_THREADS];
    char *stacks;
    int threads, current;
    unsigned serial; // serial: the number of the threadgroup that runs now
    uint3 group;
    size_t local_bytes, most_local_bytes, most_accesses;
    uint64_t random;
    jmp_buf scheduler, failed;
    char *message;
    size_t message_size;
    void (*body)(void *);
    void *arguments;
};
inline State S;

[[noreturn]] inline void fail(const char *format, ...) {
    va_list list;
    va_start(list, format);
    int n = snprintf(S.message, S.message_size, "threadgroup (%u, %u, %u) thread %d: ", S.group.x, S.group.y,
                     S.group.z, S.current);
    vsnprintf(S.message + n, S.message_size - n, format, list);
    va_end(list);
    _longjmp(S.failed, 1);
}

inline uint random_below(uint n) { // return a random number below n, by the generator splitmix64
    uint64_t z = S.random += 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return (uint)((z ^ z >> 31) % n);
}

inline void shuffled(int *order, int n) {
    for (int i = 0; i < n; i++) order[i] = i;
    for (int i = n - 1; i > 0; i--) {
        int j = random_below(i + 1), t = order[i];
        order[i] = order[j], order[j] = t;
    }
}

inline float f16(uint word, int i);

// Compute the matrix product C += A B of one simdgroup, whose lanes begin at thread `first`. The comment of
// attend_matrix.h says which lane holds which numbers.
inline void multiply_all(int first) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < LANES; lane++) {
        const uint *w = S.fiber[first + lane].words;
        int row = lane / 4, column = lane % 4;
        for (int i = 0; i < 2; i++) {
            for (int k = 0; k < 4; k++) a[row + k % 2 * 8][2 * column + k / 2 * 8 + i] = f16(w[k], i);
            for (int k = 0; k < 2; k++) b[2 * column + k * 8 + i][row] = f16(w[4 + k], i);
        }
    }
    for (int lane = 0; lane < LANES; lane++)
        for (int r = 0; r < 4; r++)
            for (int k = 0; k < 16; k++)
                S.fiber[first + lane].product[r] += a[lane / 4 + r / 2 * 8][k] * b[k][lane % 4 * 2 + r % 2];
}

inline void pause() {
    if (!_setjmp(S.fiber[S.current].at)) _longjmp(S.scheduler, 1);
}

// Let the threads [first, first + n) continue if all wait at one place; fail if all wait, but at different places.
inline void release(int first, int n, Wait kind) {
    Fiber &one = S.fiber[first];
    for (int i = first; i < first + n; i++) {
        Fiber &f = S.fiber[i];
        if (f.wait != kind) return; // this thread has not arrived at a barrier or shuffle yet
    }
    for (int i = first; i < first + n; i++) {
        Fiber &f = S.fiber[i];
        bool skipped = kind == SIMD ? f.collectives != one.collectives : f.group_epoch != one.group_epoch;
        if (f.site != one.site || skipped)
            fail("divergent: thread %d is at line %d, thread %d at line %d", first, one.site, i, f.site);
    }
    if (one.from == -2) multiply_all(first);
    for (int i = first; i < first + n; i++) {
        Fiber &f = S.fiber[i];
        if (kind == SIMD && f.from >= 0) f.got = S.fiber[first + f.from].posted;
    }
    for (int i = first; i < first + n; i++) {
        Fiber &f = S.fiber[i];
        f.collectives++;
        if (f.from == -1) f.simd_epoch++;
        if (kind == GROUP) f.group_epoch++;
        f.wait = READY;
    }
}

inline void collective(Wait kind, int site) {
    Fiber &f = S.fiber[S.current];
    f.wait = kind, f.site = site;
    if (kind == SIMD) release(S.current / LANES * LANES, LANES, SIMD);
    else release(0, S.threads, GROUP);
    if (f.wait != READY) pause();
}

inline void barrier(Wait kind, int site) {
    S.fiber[S.current].from = -1;
    collective(kind, site);
}

inline float exchange(float x, uint from, int site) {
    Fiber &f = S.fiber[S.current];
    if (from >= LANES) fail("shuffle from lane %u at line %d", from, site);
    memcpy(&f.posted, &x, 4);
    f.from = (int)from;
    collective(SIMD, site);
    memcpy(&x, &f.got, 4);
    return x;
}

inline void matrix_product(float *c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1, int site) {
    Fiber &f = S.fiber[S.current];
    const uint words[] = {a0, a1, a2, a3, b0, b1};
    memcpy(f.words, words, sizeof words);
    f.product = c, f.from = -2;
    collective(SIMD, site);
}

// ---- device memory ----

template <typename T> struct Global {
    char *base;
    size_t bytes;
    int64_t at; // at: the offset from the start of the buffer in bytes
    Global operator+(int64_t n) const { return {base, bytes, at + n * (int64_t)sizeof(T)}; }
    template <typename W> W *word(int64_t offset) const {
        int64_t a = at + offset;
        S.fiber[S.current].accesses++;
        if (a < 0 || a + (int64_t)sizeof(W) > (int64_t)bytes)
            fail("byte %lld of a buffer of %zu bytes", (long long)a, bytes);
        if (a % sizeof(W)) fail("byte %lld read or written as %zu bytes: not aligned", (long long)a, sizeof(W));
        return (W *)(base + a);
    }
    T &operator[](int64_t i) const { return *word<T>(i * (int64_t)sizeof(T)); }
};

// ---- threadgroup memory ----

struct Touch { // for the last thread that wrote (read) a word: 1 + the number of barriers that it had passed; 0: none
    unsigned write_group, write_simd, read_group, read_simd;
    int writer;
    int reader, reader_simd; // reader, reader_simd: the number of the thread (and of its simdgroup) that read last; -1: several
};

template <typename T> struct Store {
    T *data = nullptr;
    Touch *touch = nullptr;
    size_t n = 0;
    unsigned serial = 0;
    const char *name;
    Store(const char *name_) : name(name_) {}
    Store *open(size_t n_) {
        if (serial == S.serial) return this;
        if (n_ != n) data = (T *)realloc(data, n_ * sizeof(T)), touch = (Touch *)realloc(touch, n_ * sizeof(Touch)), n = n_;
        memset((void *)data, 0xff, n * sizeof(T)); // these bytes are NaN in every float format
        memset((void *)touch, 0, n * sizeof(Touch));
        serial = S.serial;
        S.local_bytes += n * sizeof(T);
        if (S.local_bytes > S.most_local_bytes) S.most_local_bytes = S.local_bytes;
        if (S.local_bytes > LOCAL_LIMIT) fail("%zu bytes of threadgroup memory", S.local_bytes);
        return this;
    }
};

template <typename T> struct Ref {
    Store<T> *store;
    int64_t i;

    Touch &touch() const {
        if (i < 0 || i >= (int64_t)store->n) fail("%s[%lld] of %zu", store->name, (long long)i, store->n);
        return store->touch[i];
    }
    operator T() const {
        Touch &t = touch();
        const Fiber &f = S.fiber[S.current];
        const int mine = S.current / LANES;
        if (!t.write_group) fail("%s[%lld] is read and was never written", store->name, (long long)i);
        after_writer(t, "read");
        if (t.read_group != f.group_epoch + 1) t.read_group = f.group_epoch + 1, t.reader_simd = mine, t.read_simd = 0;
        if (t.reader_simd != mine) t.reader_simd = -1;
        t.reader = t.read_simd == f.simd_epoch + 1 && t.reader != S.current ? -1 : S.current;
        t.read_simd = f.simd_epoch + 1;
        return store->data[i];
    }
    T operator=(T x) const {
        Touch &t = touch();
        const Fiber &f = S.fiber[S.current];
        if (t.write_group) after_writer(t, "written");
        bool others = t.reader_simd != S.current / LANES;
        bool lanes = t.read_simd == f.simd_epoch + 1 && t.reader != S.current;
        if (t.read_group == f.group_epoch + 1 && (others || lanes))
            fail("%s[%lld] is written while another thread may read it", store->name, (long long)i);
        t.writer = S.current, t.write_group = f.group_epoch + 1, t.write_simd = f.simd_epoch + 1;
        return store->data[i] = x;
    }
    T operator=(const Ref &other) const { return *this = (T)other; }

    void after_writer(const Touch &t, const char *what) const {
        const Fiber &f = S.fiber[S.current];
        if (t.writer == S.current || t.write_group != f.group_epoch + 1) return;
        if (t.writer / LANES == S.current / LANES && t.write_simd != f.simd_epoch + 1) return;
        fail("%s[%lld] is %s, thread %d wrote it: no barrier between", store->name, (long long)i, what, t.writer);
    }
};

template <typename T> struct Local {
    Store<T> *store;
    int64_t at;
    Local operator+(int64_t n) const { return {store, at + n}; }
    Ref<T> operator[](int64_t i) const { return {store, at + i}; }
};

// ---- running ----

inline void enter() {
    S.body(S.arguments);
    S.fiber[S.current].wait = DONE;
    _longjmp(S.scheduler, 1);
}

inline void resume(int i) {
    Fiber &f = S.fiber[i];
    S.current = i;
    if (_setjmp(S.scheduler)) return;
    if (f.started) _longjmp(f.at, 1);
    f.started = true;
    getcontext(&f.start);
    f.start.uc_stack.ss_sp = S.stacks + (size_t)i * STACK;
    f.start.uc_stack.ss_size = STACK;
    f.start.uc_link = nullptr;
    makecontext(&f.start, enter, 0);
    setcontext(&f.start);
}

inline void stuck() {
    for (int i = 0; i < S.threads; i++)
        if (S.fiber[i].wait != DONE) {
            S.current = i;
            fail("divergent: it waits at line %d for threads that do not come", S.fiber[i].site);
        }
}

inline void run_group(uint3 at) {
    static int order[MAX_THREADS];
    S.group = at, S.serial++, S.local_bytes = 0;
    for (int i = 0; i < S.threads; i++) {
        Fiber &f = S.fiber[i];
        f.started = false, f.wait = READY, f.collectives = 0, f.simd_epoch = f.group_epoch = 0, f.from = -1, f.accesses = 0;
    }
    for (int left = S.threads; left > 0;) {
        bool moved = false;
        shuffled(order, S.threads);
        for (int k = 0; k < S.threads; k++) {
            if (S.fiber[order[k]].wait != READY) continue;
            resume(order[k]);
            moved = true;
            left -= S.fiber[order[k]].wait == DONE;
        }
        if (!moved) stuck();
    }
    for (int i = 0; i < S.threads; i++)
        if (S.fiber[i].accesses > S.most_accesses) S.most_accesses = S.fiber[i].accesses;
}

// Run the kernel `body` in all threads of all threadgroups. Return 0, or 1 and a message after a fault. groups: the
// number of threadgroups in x, y, z. used: the maximum number of bytes of a threadgroup's memory, and the maximum
// number of accesses of one thread to device memory.
inline int run(void (*body)(void *), void *arguments, const uint *groups, int threads, uint64_t seed, char *message,
               size_t message_size, size_t *used) {
    if (!S.stacks) S.stacks = (char *)malloc((size_t)MAX_THREADS * STACK);
    S.body = body, S.arguments = arguments, S.threads = threads, S.random = seed;
    S.message = message, S.message_size = message_size, S.most_local_bytes = S.most_accesses = 0;
    int n = (int)(groups[0] * groups[1] * groups[2]);
    int *order = (int *)malloc(n * sizeof(int));
    shuffled(order, n);
    int failed = _setjmp(S.failed);
    if (!failed)
        for (volatile int k = 0; k < n; k = k + 1) {
            uint i = (uint)order[k];
            run_group({i % groups[0], i / groups[0] % groups[1], i / groups[0] / groups[1]});
        }
    free(order);
    used[0] = S.most_local_bytes, used[1] = S.most_accesses;
    return failed;
}

} // namespace sim

#define FN inline
#define CONST_FN inline constexpr
#define CONSTANT constexpr
#define THREAD
#define GLOBAL_IN(T) sim::Global<T>
#define GLOBAL_OUT(T) sim::Global<T>
#define LOCAL(T) sim::Local<T>
#define SHARED(T, name, n)                     \
    static sim::Store<T> name##_store(#name); \
    const sim::Local<T> name = {name##_store.open(n), 0}
#define BARRIER() sim::barrier(sim::GROUP, __LINE__)
#define SIMD_BARRIER() sim::barrier(sim::SIMD, __LINE__)
#define UNROLL
#define KERNEL_START                         \
    const uint3 group_at = sim::S.group;     \
    const uint thread_at = sim::S.current;   \
    const uint lane = thread_at % 32, simd_at = thread_at / 32; \
    (void)lane, (void)simd_at;

#define shuffle_xor(x, mask) sim::exchange(x, sim::S.current % 32 ^ (mask), __LINE__)
#define shuffle(x, from) sim::exchange(x, from, __LINE__)

using std::exp2;
using std::fabs;
using std::fma;
using std::fmax;
using std::fmin;
using std::rint;
using std::sqrt;
FN int min(int a, int b) { return a < b ? a : b; }
FN int max(int a, int b) { return a > b ? a : b; }

// the flag -ffp-contract=off forbids the compiler to fuse this product with a sum
FN float product(float x, float y) { return x * y; }
FN float as_f32(uint bits) { float x; memcpy(&x, &bits, 4); return x; }
FN uint as_u32(float x) { uint bits; memcpy(&bits, &x, 4); return bits; }

FN float half_to_f32(uint bits) {
    uint e = bits >> 10 & 31, f = bits & 1023, sign = (bits & 0x8000u) << 16;
    if (e == 31) return as_f32(sign | 0x7f800000u | f << 13);
    if (e) return as_f32(sign | (e + 112) << 23 | f << 13);
    float x = (float)f * 0x1p-24f;
    return sign ? -x : x;
}

FN uint f32_to_half(float x) { // this function rounds a float to the nearest 16-bit float, ties to even
    uint bits = as_u32(x), sign = bits >> 16 & 0x8000u, a = bits & 0x7fffffffu;
    if (a > 0x7f800000u) return sign | 0x7e00u;
    if (a >= 0x477ff000u) return sign | 0x7c00u;
    if (a < 0x38800000u) return sign | (uint)(int)rint(as_f32(a) * 0x1p24f);
    uint odd = a >> 13 & 1;
    return sign | ((a + 0xfffu + odd - 0x38000000u) >> 13);
}

struct half { // half: a 16-bit float as in Metal and CUDA; each operation first converts its operands to floats
    ushort bits;
    half() = default;
    explicit half(float x) : bits((ushort)f32_to_half(x)) {}
    operator float() const { return half_to_f32(bits); }
};
struct bfloat { // bfloat: the upper 16 bits of a float, after rounding to nearest, ties to even
    ushort bits;
    bfloat() = default;
    explicit bfloat(float x) {
        const uint w = as_u32(x);
        bits = x != x ? 0x7fc0 : (ushort)((w + 0x7fffu + (w >> 16 & 1)) >> 16);
    }
    operator float() const { return as_f32((uint)bits << 16); }
};

inline float sim::f16(uint word, int i) { return half_to_f32(word >> 16 * i & 0xffffu); }
FN uint pack_halves(float low, float high) { return f32_to_half(low) | f32_to_half(high) << 16; }
FN uint half2_sub(uint a, uint b) {
    return pack_halves(sim::f16(a, 0) - sim::f16(b, 0), sim::f16(a, 1) - sim::f16(b, 1));
}
FN float fast_exp2(float x) { return exp2(x); }
FN uint half2_fma(uint a, uint b, uint c) {
    return pack_halves(fma(sim::f16(a, 0), sim::f16(b, 0), sim::f16(c, 0)), fma(sim::f16(a, 1), sim::f16(b, 1), sim::f16(c, 1)));
}
FN uint byte_permute(uint a, uint b, uint select) {
    uint64_t both = (uint64_t)b << 32 | a;
    uint out = 0;
    for (int i = 0; i < 4; i++) out |= (uint)(both >> 8 * (select >> 4 * i & 7) & 255) << 8 * i;
    return out;
}
#define multiply(c, ...) sim::matrix_product(c, __VA_ARGS__, __LINE__)
FN uint4 load_local_u32x4(sim::Local<uint> p, int64_t i) {
    if ((p.at + i) % 4) sim::fail("threadgroup word %lld read as four: not aligned", (long long)(p.at + i));
    return {p[i], p[i + 1], p[i + 2], p[i + 3]};
}
FN uint4 load_local_halves(sim::Local<ushort> p, int64_t i) {
    if ((p.at + i) % 8) sim::fail("threadgroup half %lld read as eight: not aligned", (long long)(p.at + i));
    uint w[4];
    for (int k = 0; k < 4; k++) w[k] = (uint)p[i + 2 * k] | (uint)p[i + 2 * k + 1] << 16;
    return {w[0], w[1], w[2], w[3]};
}

FN uint load_u32(sim::Global<uchar> p, int64_t at) { return *p.word<uint>(at); }
FN uint2 load_u32x2(sim::Global<uchar> p, int64_t at) {
    struct alignas(8) W { uint2 v; };
    return p.word<W>(at)->v;
}
FN uint4 load_u32x4(sim::Global<uchar> p, int64_t at) {
    struct alignas(16) W { uint4 v; };
    uint4 v; // a test's buffer can start at any multiple of 8 bytes, because the simulator checks only offsets
    memcpy(&v, (const char *)p.word<W>(at), 16);
    return v;
}
FN uint load_u16(sim::Global<uchar> p, int64_t at) { return *p.word<ushort>(at); }
FN void store_u16(sim::Global<uchar> p, int64_t at, uint x) { *p.word<ushort>(at) = (ushort)x; }
FN void store_u32(sim::Global<uchar> p, int64_t at, uint x) { *p.word<uint>(at) = x; }
FN void store_u32x4(sim::Global<uchar> p, int64_t at, uint4 x) {
    struct alignas(16) W { uint4 v; };
    memcpy((char *)p.word<W>(at), &x, 16);
}
