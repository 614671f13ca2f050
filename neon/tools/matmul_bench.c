/* rvm_matmul_bench [impl ...]: measure the fraction of this machine's memory and arithmetic rates that
 * the matrix kernels reach.
 *
 * Rates use each thread's own processor time, so that other programs on a shared machine do not change them. The
 * program measures plain reads in the same rounds as the kernels, and the arithmetic limits once at its start. The
 * program prints medians of ROUNDS rounds.
 *   GEMV  up to FEW tokens; each round goes through matrices with WORKING_SET bytes of weights; GB/s of packed
 *         weights, and the fraction of the rate of a plain read of the same number of bytes
 *   GEMM  GMAC/s, and the fraction of the rate of vpdpbusd (quantised) or fma (float) on registers
 * Environment variables: WORKING_SET: megabytes, default 160; a few megabytes fit into the caches. BITS: bits of the
 * activations for quantised weights, 8 or 16 (default). KIND, COLS and THREADS select rows of the printed table; TOKENS
 * is the number of tokens. */
#define _DEFAULT_SOURCE
#include "rvm.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { ROUNDS = 7, MAX_THREADS = 8, FEW = 15 };
static size_t WORKING_SET = (size_t)160 << 20;
static int n_threads = 1, bits = RVM_ACTS_16;

static double cpu_time(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Return memory of n bytes; large arrays get huge pages, as the runtime's weights do. */
static void *memory(size_t n) {
    const size_t large = (size_t)2 << 20;
    void *p = NULL;
    if (posix_memalign(&p, n < large ? 64 : large, n)) abort();
#ifdef MADV_HUGEPAGE
    if (n >= large) madvise(p, n, MADV_HUGEPAGE);
#endif
    memset(p, 1, n);
    return p;
}

/* ---- limits ---- */

/* Define a function that returns the bytes per second of a plain read with the widest registers. */
#define READ_RATE(name)                                                                   \
    static double name(const uint8_t *p, size_t n) {                                      \
        typedef uint64_t v8 __attribute__((vector_size(64), aligned(64), may_alias));     \
        v8 a = {0}, b = {0};                                                              \
        const double start = cpu_time();                                                  \
        for (size_t i = 0; i + 128 <= n; i += 128) {                                      \
            a |= *(const v8 *)(p + i);                                                    \
            b |= *(const v8 *)(p + i + 64);                                               \
        }                                                                                 \
        const double seconds = cpu_time() - start;                                        \
        a |= b;                                                                           \
        __asm__ volatile("" ::"m"(a));                                                    \
        return (double)n / seconds;                                                       \
    }

READ_RATE(read_plain)
#if defined(__x86_64__)
__attribute__((target("avx2"))) READ_RATE(read_256)
__attribute__((target("avx512f"))) READ_RATE(read_512)

static double read_rate(const uint8_t *p, size_t n) {
    if (__builtin_cpu_supports("avx512f")) return read_512(p, n);
    return __builtin_cpu_supports("avx2") ? read_256(p, n) : read_plain(p, n);
}
#else
static double read_rate(const uint8_t *p, size_t n) { return read_plain(p, n); }
#endif

#if defined(__x86_64__)
#define R16(op)                                                                                      \
    op "0\n" op "1\n" op "2\n" op "3\n" op "4\n" op "5\n" op "6\n" op "7\n" op "8\n" op "9\n" op     \
       "10\n" op "11\n" op "12\n" op "13\n" op "14\n" op "15\n"
#define CHAINS(op, perstep)                                                                             \
    const long steps = 4000000;                                                                         \
    const double start = cpu_time();                                                                    \
    for (long i = 0; i < steps; i++)                                                                    \
        __asm__ volatile(R16(op)::: "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", \
                         "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");                 \
    return (double)steps * 16 * (perstep) / (cpu_time() - start);

__attribute__((target("avx512f"))) static double peak_int8_512(void) {
    CHAINS("vpdpbusd %%zmm31, %%zmm30, %%zmm", 64)
}
__attribute__((target("avx512f"))) static double peak_float_512(void) {
    CHAINS("vfmadd231ps %%zmm31, %%zmm30, %%zmm", 16)
}

static double peak(int quantised) {
    if (!__builtin_cpu_supports("avx512vnni")) return 0;
    return quantised ? peak_int8_512() : peak_float_512();
}
#else
static double peak(int quantised) { return 0 * quantised; }
#endif

/* ---- one measurement ---- */

typedef struct {
    const rvm_matmul *impl;
    rvm_matrix **w;
    size_t count, tokens;
    rvm_acts_kind kind;
    void *acts;
    float *y;
    int thread;
    double seconds, read;
    const uint8_t *buffer;
} job;

/* macOS has no pthread_barrier_t. This struct is a barrier at which each thread waits until all threads have arrived;
   `passed` counts how often they all arrived. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t all;
    int waiting, passed;
} barrier = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0};

static void meet(void) {
    pthread_mutex_lock(&barrier.lock);
    const int round = barrier.passed;
    if (++barrier.waiting == n_threads) {
        barrier.waiting = 0, barrier.passed++;
        pthread_cond_broadcast(&barrier.all);
    }
    while (round == barrier.passed) pthread_cond_wait(&barrier.all, &barrier.lock);
    pthread_mutex_unlock(&barrier.lock);
}

static void *work(void *arg) {
    job *j = arg;
    const size_t tiles = rvm_matrix_tiles(j->w[0]), rows = rvm_matrix_rows(j->w[0]);
    const size_t begin = tiles * (size_t)j->thread / (size_t)n_threads,
                 end = tiles * (size_t)(j->thread + 1) / (size_t)n_threads;
    if (j->buffer) {
        meet();
        const size_t share = WORKING_SET / (size_t)n_threads / 128 * 128;
        j->read = read_rate(j->buffer + share * (size_t)j->thread, share);
    }
    meet();
    const double start = cpu_time();
    for (size_t i = 0; i < j->count; i++)
        j->impl->matmul(j->w[i], j->kind, j->acts, j->tokens, begin, end, j->y, rows);
    j->seconds = cpu_time() - start;
    return NULL;
}

/* Run the job on all threads, and return the seconds of the slowest thread. *read: the bytes per second that all
   threads together read. */
static double measure(job proto, double *read) {
    pthread_t threads[MAX_THREADS];
    job jobs[MAX_THREADS];
    double slowest = 0;
    *read = 0;
    for (int i = 0; i < n_threads; i++) {
        jobs[i] = proto;
        jobs[i].thread = i;
        if (pthread_create(&threads[i], NULL, work, &jobs[i])) abort();
    }
    for (int i = 0; i < n_threads; i++) {
        pthread_join(threads[i], NULL);
        if (jobs[i].seconds > slowest) slowest = jobs[i].seconds;
        *read += jobs[i].read;
    }
    return slowest;
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *x) {
    qsort(x, ROUNDS, sizeof *x, ascending);
    return x[ROUNDS / 2];
}

/* Return a packed matrix of random numbers, whose scales are halves with a small exponent. */
static rvm_matrix *noise(const rvm_matrix_spec *spec) {
    uint8_t *p = memory(rvm_matrix_bytes(spec));
    const size_t group = spec->group ? spec->group : 1, n = spec->rows * spec->cols;
    uint16_t *weights = memory(4 * n), *scales = memory(4 * (n / group));
    for (size_t i = 0; i < n / 2; i++) weights[i] = (uint16_t)(0x2000 + rand() % 0x1000);
    for (size_t i = 0; i < n / group; i++) scales[i] = (uint16_t)(0x2000 + rand() % 0x1000);
    if (rvm_matrix_pack(spec, weights, scales, scales, RVM_F16, 0, spec->rows, p)) abort();
    free(weights);
    free(scales);
    return (rvm_matrix *)p;
}

static void bench(const rvm_matmul *impl, const char *name, rvm_matrix_spec spec, size_t tokens,
                  const uint8_t *buffer, double int8, double fma) {
    const size_t bytes = rvm_matrix_bytes(&spec);
    size_t count = tokens <= FEW ? (WORKING_SET + bytes - 1) / bytes : 1;
    rvm_matrix **w = malloc(count * sizeof *w);
    w[0] = noise(&spec);
    for (size_t i = 1; i < count; i++) {
        w[i] = memory(bytes);
        memcpy(w[i], w[0], bytes);
    }
    float *x = memory(4 * tokens * spec.cols), *y = memory(4 * tokens * spec.rows);
    for (size_t i = 0; i < tokens * spec.cols; i++) x[i] = (float)(rand() % 2001 - 1000) / 1000;
    const rvm_acts_kind kind = rvm_matrix_acts(w[0], bits);
    void *acts = memory(rvm_acts_bytes(kind, tokens, spec.cols));
    const double start = cpu_time();
    impl->acts(kind, x, spec.cols, tokens, spec.cols, 0, tokens, acts);
    const double acts_us = 1e6 * (cpu_time() - start);
    double seconds[ROUNDS], share[ROUNDS], read;
    job j = {.impl = impl,
             .w = w,
             .count = count,
             .tokens = tokens,
             .kind = kind,
             .acts = acts,
             .y = y,
             .buffer = tokens <= FEW ? buffer : NULL};
    for (int r = 0; r < ROUNDS; r++) {
        seconds[r] = measure(j, &read);
        share[r] = (double)(bytes * count) / seconds[r] / (read > 0 ? read : 1);
    }
    const double s = median(seconds) / (double)count, macs = (double)(spec.rows * spec.cols * tokens);
    printf("%-13s%-9s%6zux%-6zuT=%-4zu%d thr %9.1f us  acts %6.1f us", impl->name, name, (size_t)spec.rows,
           (size_t)spec.cols, tokens, n_threads, 1e6 * s, acts_us);
    if (tokens <= FEW)
        printf("%8.1f GB/s %4.0f%% of a plain read\n", (double)bytes / s / 1e9, 100 * median(share));
    else
        printf("%8.1f GMAC/s %4.0f%% of peak\n", macs / s / 1e9,
               100 * macs / s / (spec.group ? int8 : fma) / n_threads);
    fflush(stdout);
    for (size_t i = 0; i < count; i++) free(w[i]);
    free(w), free(x), free(y), free(acts);
}

int main(int argc, char **argv) {
    const size_t shapes[][2] = {{576, 576}, {1536, 576}, {576, 1536}, {49152, 576}, {4096, 14336}};
    const struct {
        const char *name;
        rvm_matrix_spec spec;
    } kinds[] = {{"q4 g32", {RVM_Q4, RVM_F16, 1, 32, 0, 0}}, {"q4 g32 s", {RVM_Q4, RVM_F16, 0, 32, 0, 0}},
                 {"q4 g64", {RVM_Q4, RVM_F16, 1, 64, 0, 0}}, {"q8 g32 s", {RVM_Q8, RVM_F16, 0, 32, 0, 0}},
                 {"q8 g64", {RVM_Q8, RVM_F16, 1, 64, 0, 0}}, {"q4_k", {RVM_Q4_K, RVM_F16, 0, 256, 0, 0}},
                 {"q5_k", {RVM_Q5_K, RVM_F16, 0, 256, 0, 0}}, {"q6_k", {RVM_Q6_K, RVM_F16, 0, 256, 0, 0}},
                 {"f16", {RVM_F16, 0, 0, 0, 0, 0}},
                 {"bf16", {RVM_BF16, 0, 0, 0, 0, 0}},        {"f32", {RVM_F32, 0, 0, 0, 0, 0}}};
    const char *only_kind = getenv("KIND"), *only_cols = getenv("COLS"), *only_tokens = getenv("TOKENS");
    const char *threads = getenv("THREADS");
    if (getenv("WORKING_SET")) WORKING_SET = (size_t)atol(getenv("WORKING_SET")) << 20;
    if (getenv("BITS")) bits = atoi(getenv("BITS"));
    uint8_t *buffer = memory(WORKING_SET);
    const double int8 = peak(1), fma = peak(0);
    if (int8 > 0) printf("one thread: vpdpbusd %.0f GMAC/s, fma %.0f GMAC/s\n", int8 / 1e9, fma / 1e9);
    for (int i = argc > 1 ? 1 : 0; i < (argc > 1 ? argc : 1); i++) {
        const rvm_matmul *impl = rvm_matmul_impl(argc > 1 ? argv[i] : NULL);
        if (!impl) return printf("no implementation %s here\n", argv[i]), 1;
        for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
            for (size_t s = 0; s < 5; s++)
                for (size_t t = 0; t < (only_tokens ? 1 : 3); t++)
                    for (n_threads = 1; n_threads <= 2; n_threads++) {
                        const size_t tokens = only_tokens ? (size_t)atol(only_tokens) : (const size_t[]){1, 2, 256}[t];
                        rvm_matrix_spec spec = kinds[k].spec;
                        spec.rows = shapes[s][0], spec.cols = shapes[s][1];
                        if (only_kind && strncmp(only_kind, kinds[k].name, strlen(only_kind))) continue;
                        if (only_cols && (size_t)atol(only_cols) != spec.cols) continue;
                        if (threads && atoi(threads) != n_threads) continue;
                        if (spec.rows * spec.cols > 1u << 25 && spec.group == 0) continue;
                        if (spec.cols % (spec.group ? spec.group : 1)) continue;
                        bench(impl, kinds[k].name, spec, tokens, buffer, int8, fma);
                    }
    }
    free(buffer);
    return 0;
}
