/* This test compares the functions on KV pages of every implementation with those of "scalar". Every implementation of
 * the matrix kernels must compute the same scores and sums of values, bit for bit. Every implementation of the layers
 * must demote pages to the same bytes, and compute attention that differs only by rounding. The test prints the same
 * kind of lines as compare.c. */
#include "rvm.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const size_t DIMS[] = {2, 18, 32, 64, 80, 96, 128, 256, 512};
enum { N_DIMS = sizeof DIMS / sizeof *DIMS, TOKENS = RVM_PAGE_TOKENS };

static uint32_t state;
static int failed, rounds;

#define CHECK(condition)                                                \
    if (!(condition)) {                                                 \
        printf("%s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
        failed++;                                                       \
    }

static uint32_t noise(void) {
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

static float uniform(void) { return (float)noise() / 8388608.0f - 1.0f; } /* [-1, 1) */

static float *floats(size_t n) {
    float *x = malloc(4 * n);
    for (size_t i = 0; i < n; i++) x[i] = uniform() * (noise() % 9 == 0 ? 8.0f : 1.0f);
    return x;
}

/* Return a head-page of random bytes, with scales and biases that are halves with magnitudes from 2^-8 to 2^8. */
static uint8_t *random_page(rvm_tier tier, size_t head_dim) {
    const size_t n = rvm_head_page_bytes(tier, head_dim), scales = 4 * TOKENS;
    uint8_t *page = aligned_alloc(64, n);
    for (size_t i = 0; i < n; i++) page[i] = (uint8_t)noise();
    for (size_t i = 0; i < scales; i++) {
        const uint16_t half = (uint16_t)((noise() & 0x8000) | (0x1c00 + noise() % 0x4000));
        memcpy(page + 2 * i, &half, 2);
    }
    return page;
}

/* Return a hot head-page of random numbers with |x| < 8; the padding is NaN. */
static uint8_t *hot_page(size_t head_dim) {
    const size_t n = rvm_head_page_bytes(RVM_HOT, head_dim), width = (head_dim + 15) / 16 * 16;
    uint16_t *page = aligned_alloc(64, n);
    for (size_t i = 0; i < n / 2; i++) page[i] = (uint16_t)((noise() & 0x8000) | noise() % 0x4800);
    for (size_t t = 0; t < TOKENS; t++)
        for (size_t d = head_dim; d < width; d++) page[TOKENS * head_dim + t * width + d] = 0x7e00;
    return (uint8_t *)page;
}

static int same(const float *a, const float *b, size_t n) {
    int bad = 0;
    for (size_t i = 0; i < n; i++)
        bad += !(memcmp(a + i, b + i, 4) == 0 || (isnan(a[i]) && isnan(b[i])) || (a[i] == 0 && b[i] == 0));
    return bad == 0;
}

static void spoil(float *x, size_t n) {
    static const float odd[] = {NAN, INFINITY, 1e-40f, 3e38f, 0, -0.0f, 1e30f, 2e-30f};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) x[noise() % n] = odd[i];
}

/* ---- scores and sums of values ---- */

static void scores_of(const rvm_matmul *m, rvm_tier tier, const uint8_t *page, const float *q, size_t rows,
                      size_t head_dim, float *scores) {
    void *codes = malloc(rvm_page_codes_bytes(tier, rows, head_dim));
    CHECK(m->page_queries(tier, q, rows, head_dim, codes) == RVM_OK);
    CHECK(m->page_scores(tier, page, codes, rows, head_dim, noise() % 2 ? page : NULL, scores) == RVM_OK);
    free(codes);
}

static void compare_kernels(const rvm_matmul *m, rvm_tier tier, size_t head_dim, size_t rows, int odd) {
    const rvm_matmul *twin = rvm_matmul_impl("scalar");
    const size_t width = (head_dim + 31) / 16 * 16, stride = width + noise() % 3, n = (rows - 1) * stride + width;
    uint8_t *page = random_page(tier, head_dim);
    float *q = floats(rows * head_dim), *p = floats(rows * TOKENS), *sum[2] = {floats(n), floats(n)};
    float *scores[2] = {floats(rows * TOKENS), floats(rows * TOKENS)};
    for (size_t i = 0; i < rows * TOKENS; i++) p[i] = fabsf(p[i]);
    if (odd) spoil(q, rows * head_dim), spoil(p, rows * TOKENS);
    memcpy(sum[1], sum[0], 4 * n);
    scores_of(m, tier, page, q, rows, head_dim, scores[0]);
    scores_of(twin, tier, page, q, rows, head_dim, scores[1]);
    CHECK(m->page_values(tier, page, p, rows, head_dim, NULL, sum[0], stride) == RVM_OK);
    CHECK(twin->page_values(tier, page, p, rows, head_dim, NULL, sum[1], stride) == RVM_OK);
    if (!same(scores[0], scores[1], rows * TOKENS) || !same(sum[0], sum[1], n))
        if (failed++ < 20)
            printf("%s: tier %d, head_dim %zu, %zu rows, odd %d differ\n", m->name, (int)tier, head_dim, rows,
                   odd);
    free(page), free(q), free(p), free(sum[0]), free(sum[1]), free(scores[0]), free(scores[1]);
}

static void kernels(const rvm_matmul *m) {
    const size_t rows[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 19};
    for (size_t i = 0; i < N_DIMS; i++)
        for (size_t j = 0; j < sizeof rows / sizeof *rows; j++)
            for (int tier = 0; tier < RVM_HOT; tier++)
                for (int odd = 0; odd < 2; odd++) {
                    state = (uint32_t)rounds++;
                    compare_kernels(m, (rvm_tier)tier, DIMS[i], rows[j], odd);
                }
    float x[TOKENS] = {0};
    CHECK(m->page_queries(RVM_HOT, x, 1, 64, x) == RVM_BAD_ARGUMENT);
    CHECK(m->page_queries(RVM_WARM, x, 1, 63, x) == RVM_BAD_ARGUMENT);
    CHECK(m->page_scores(RVM_WARM, NULL, x, 1, 64, NULL, x) == RVM_BAD_ARGUMENT);
    CHECK(m->page_values(RVM_WARM, (uint8_t *)x, x, 1, 64, NULL, x, 79) == RVM_BAD_ARGUMENT);
}

/* ---- demotion, and attention over demoted pages ---- */

static uint8_t *demoted(const rvm_layers *k, rvm_tier from, const uint8_t *page, rvm_tier to, size_t head_dim) {
    uint8_t *out = aligned_alloc(64, rvm_head_page_bytes(to, head_dim));
    CHECK(k->demote(from, page, to, out, 1, head_dim) == RVM_OK);
    return out;
}

static void compare_demotion(const rvm_layers *k, size_t head_dim) {
    const rvm_layers *twin = rvm_layers_impl("scalar");
    for (rvm_tier from = 1; from <= RVM_HOT; from++)
        for (rvm_tier to = 0; to < from; to++) {
            uint8_t *page = from == RVM_HOT ? hot_page(head_dim) : random_page(from, head_dim);
            uint8_t *got = demoted(k, from, page, to, head_dim), *want = demoted(twin, from, page, to, head_dim);
            if (memcmp(got, want, rvm_head_page_bytes(to, head_dim)) && failed++ < 20)
                printf("%s: head_dim %zu from %d to %d differ\n", k->name, head_dim, (int)from, (int)to);
            free(page), free(got), free(want), rounds++;
        }
}

/* Check that the sign of a zero does not change the bytes of demoted pages. The page has numbers >= 0, of which one in
   `apart` is 0. */
static void compare_zeros(const rvm_layers *k, size_t head_dim, uint32_t apart) {
    const size_t n = rvm_head_page_bytes(RVM_HOT, head_dim) / 2;
    uint8_t *plain = hot_page(head_dim), *signed_zeros = hot_page(head_dim);
    for (size_t i = 0; i < n; i++) {
        const int zero = noise() % apart == 0;
        const uint16_t number = zero ? 0 : (uint16_t)(1 + noise() % 0x47ff), other = zero ? 0x8000 : number;
        memcpy(plain + 2 * i, &number, 2), memcpy(signed_zeros + 2 * i, &other, 2);
    }
    for (rvm_tier to = 0; to < RVM_HOT; to++) {
        uint8_t *want = demoted(k, RVM_HOT, plain, to, head_dim);
        uint8_t *got = demoted(k, RVM_HOT, signed_zeros, to, head_dim);
        if (memcmp(got, want, rvm_head_page_bytes(to, head_dim)) && failed++ < 20)
            printf("%s: head_dim %zu to %d: -0 and 0 differ\n", k->name, head_dim, (int)to);
        free(got), free(want), rounds++;
    }
    free(plain), free(signed_zeros);
}

static void attend(const rvm_layers *k, rvm_attention *a, float *out) {
    a->out = out;
    a->scratch = malloc(4 * rvm_attention_scratch(a->queries * a->group, a->head_dim));
    CHECK(k->attend(a) == RVM_OK);
    free(a->scratch);
}

/* Check attention over pages of every tier, with a last page that is not full and a window that begins inside a page. */
static void compare_attention(const rvm_layers *k, size_t head_dim, size_t group, size_t queries) {
    enum { PAGES = RVM_HOT + 2, LAST = 21 };
    const size_t n = group * queries * head_dim;
    rvm_page pages[PAGES];
    float *q = floats(n), *turn = floats(queries * head_dim), *got = malloc(4 * n), *want = malloc(4 * n);
    for (int i = 0; i < PAGES; i++) {
        uint8_t *hot = hot_page(head_dim);
        for (size_t j = 0; j < rvm_head_page_bytes(RVM_HOT, head_dim); j += 2) hot[j + 1] &= 0xbf; /* below 2 */
        pages[i] = (rvm_page){i < RVM_HOT ? demoted(k, RVM_HOT, hot, (rvm_tier)i, head_dim) : hot,
                              (uint32_t)(i < RVM_HOT ? i : RVM_HOT), 0};
        if (i < RVM_HOT) free(hot);
    }
    rvm_attention a = {.pages = pages, .matmul = rvm_matmul_impl(NULL), .head_dim = head_dim, .group = group,
                       .q = q, .q_stride = group * head_dim, .turn = turn, .queries = queries,
                       .position = (PAGES - 1) * TOKENS + LAST - queries, .end_page = PAGES,
                       .window = 3 * TOKENS, .out_stride = group * head_dim};
    attend(k, &a, got);
    a.matmul = rvm_matmul_impl("scalar");
    attend(rvm_layers_impl("scalar"), &a, want);
    float most = 0, off = 0;
    for (size_t i = 0; i < n; i++) most = fmaxf(most, fabsf(want[i])), off = fmaxf(off, fabsf(got[i] - want[i]));
    if (!(off <= 0.01f * most) && failed++ < 20)
        printf("%s: attention at head_dim %zu, group %zu, %zu queries is off by %g of %g\n", k->name, head_dim,
               group, queries, (double)off, (double)most);
    for (int i = 0; i < PAGES; i++) free(pages[i].data);
    free(q), free(turn), free(got), free(want), rounds++;
}

static void layers(const rvm_layers *k) {
    for (size_t i = 0; i < N_DIMS; i++) {
        state = (uint32_t)i;
        compare_demotion(k, DIMS[i]);
        compare_zeros(k, DIMS[i], 1);
        compare_zeros(k, DIMS[i], 3);
        compare_attention(k, DIMS[i], 3, 1);
        compare_attention(k, DIMS[i], 1, 17);
    }
}

int main(void) {
    for (size_t i = 0; rvm_impl_name(i); i++) layers(rvm_layers_impl(rvm_impl_name(i)));
    for (size_t i = 0; rvm_matmul_impl_name(i); i++) {
        kernels(rvm_matmul_impl(rvm_matmul_impl_name(i)));
        printf("%s: compared\n", rvm_matmul_impl_name(i));
    }
    printf("%d rounds of pages, %d differences\n", rounds, failed);
    return failed ? 1 : 0;
}
