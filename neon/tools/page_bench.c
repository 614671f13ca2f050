/* rvm_page_bench [matmul impl [layers impl]]: this program measures the nanoseconds of attention on a head-page of each
 * tier.
 *
 *   cached   the same few pages again and again, which are in a cache
 *   memory   a sequence of PAGES pages of about 2 MiB each, one head after the other, as a decoder reads it
 *   SMALL=1 in the environment turns huge pages off
 * The times are medians of ROUNDS measurements of one thread's processor time. A measurement's number of rows is the
 * number of query heads in a group x the number of queries. */
#define _GNU_SOURCE
#include "rvm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { ROUNDS = 9, PAGES = 64, CACHED = 4 };

static double cpu_time(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void *memory(size_t n) {
    void *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) abort();
#ifdef MADV_HUGEPAGE
    if (!getenv("SMALL")) madvise(p, n, MADV_HUGEPAGE);
#endif
    return p;
}

static float uniform(void) { return (float)(rand() % 20001 - 10000) / 10000; }

/* Make one head-page of random numbers in every tier. */
static void noise(uint8_t *tiers[RVM_HOT + 1], size_t head_dim) {
    const size_t n = rvm_head_page_bytes(RVM_HOT, head_dim) / 2;
    float *x = malloc(4 * n);
    for (size_t i = 0; i < n; i++) x[i] = 2 * uniform();
    for (int tier = 0; tier <= RVM_HOT; tier++) tiers[tier] = memory(rvm_head_page_bytes((rvm_tier)tier, head_dim));
    rvm_layers_impl(NULL)->to_half(x, n, (uint16_t *)(void *)tiers[RVM_HOT]);
    for (int tier = 0; tier < RVM_HOT; tier++)
        rvm_pages_demote(RVM_HOT, tiers[RVM_HOT], (rvm_tier)tier, tiers[tier], 1, head_dim);
    free(x);
}

static double once(const rvm_layers *k, rvm_attention *a, size_t heads, size_t times) {
    const double start = cpu_time();
    for (size_t i = 0; i < times; i++)
        for (a->head = 0; a->head < heads; a->head++)
            if (k->attend(a)) abort();
    return 1e9 * (cpu_time() - start) / (double)(times * heads * a->end_page);
}

static double nanoseconds(const rvm_layers *k, rvm_attention *a, size_t heads, size_t times) {
    double ns[ROUNDS];
    for (int r = 0; r < ROUNDS; r++) ns[r] = once(k, a, heads, times);
    qsort(ns, ROUNDS, sizeof *ns, ascending);
    return ns[ROUNDS / 2];
}

/* Measure the nanoseconds of attention on a head-page of each tier, with pages in a cache and with pages from memory.
   */
static void bench(const rvm_layers *k, const rvm_matmul *m, size_t head_dim, size_t group, size_t queries) {
    uint8_t *one[RVM_HOT + 1];
    noise(one, head_dim);
    const size_t rows = group * queries, n = rows * head_dim;
    float *q = malloc(4 * n), *turn = malloc(4 * queries * head_dim), *out = malloc(4 * n);
    float *scratch = memory(4 * rvm_attention_scratch(rows, head_dim));
    for (size_t i = 0; i < n; i++) q[i] = 2 * uniform();
    for (size_t i = 0; i < queries * head_dim; i++) turn[i] = i % head_dim < head_dim / 2;
    for (int tier = RVM_HOT; tier >= 0; tier--) {
        const size_t bytes = rvm_head_page_bytes((rvm_tier)tier, head_dim), heads = ((size_t)1 << 21) / bytes;
        rvm_page pages[PAGES];
        for (size_t i = 0; i < PAGES; i++) {
            pages[i] = (rvm_page){memory(heads * bytes), (uint32_t)tier, 0};
            for (size_t h = 0; h < heads; h++) memcpy(pages[i].data + h * bytes, one[tier], bytes);
        }
        rvm_attention a = {.pages = pages, .matmul = m, .head_dim = head_dim, .group = group, .q = q,
                           .q_stride = group * head_dim, .turn = turn, .queries = queries,
                           .position = PAGES * RVM_PAGE_TOKENS, .end_page = PAGES, .out = out,
                           .out_stride = group * head_dim, .scratch = scratch};
        const double far = nanoseconds(k, &a, heads, 1 + 20 / heads);
        uint8_t *made[PAGES];
        for (size_t i = 0; i < PAGES; i++) made[i] = pages[i].data, pages[i].data = made[i % CACHED];
        const double near = nanoseconds(k, &a, 1, 20 + 200 / rows);
        printf("%-11s %-7s D=%-4zu G=%zu queries=%-3zu %-5s cached %7.0f ns   memory %7.0f ns  %5.1f GB/s\n",
               m->name, k->name, head_dim, group, queries, rvm_tier_name((size_t)tier), near, far, (double)bytes / far);
        fflush(stdout);
        for (size_t i = 0; i < PAGES; i++) munmap(made[i], heads * bytes);
    }
    free(q), free(turn), free(out);
}

int main(int argc, char **argv) {
    const rvm_matmul *m = rvm_matmul_impl(argc > 1 ? argv[1] : NULL);
    const rvm_layers *k = rvm_layers_impl(argc > 2 ? argv[2] : NULL);
    if (!m || !k) return printf("no such implementation here\n"), 1;
    const size_t rows[][3] = {{64, 3, 1}, {128, 4, 1}, {64, 3, 16}, {128, 4, 12}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) bench(k, m, rows[i][0], rows[i][1], rows[i][2]);
    return 0;
}
