/* This test compares every implementation of the matrix kernels with "scalar". The results must have the same bits as
 * "scalar", for the tested sizes, divisions of the work into tiles and tokens, alignments and values. The test needs
 * only rvm.h, like compare.c. */
#include "rvm.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    rvm_kind kind;
    size_t rows, cols, group, tokens;
    rvm_kind scale_kind;
    rvm_acts_kind acts;
    int affine, odd_values;
} round_of;

static uint32_t state;

static uint32_t noise(void) {
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

static float uniform(void) { return (float)noise() / 8388608.0f - 1.0f; } /* [-1, 1) */

/* Return memory of n bytes, rounded up to a multiple of 64, so that sanitizers detect an access past its end. */
static void *aligned(size_t n) {
    void *p = aligned_alloc(64, (n + 63) / 64 * 64);
    memset(p, 0x7e, (n + 63) / 64 * 64);
    return p;
}

static float *floats(size_t n) { return (float *)malloc(4 * (n + 1)) + 1; }

/* Return a random number of this kind as its bits, in the lowest bytes of the result. */
static uint32_t value(rvm_kind kind) {
    const float x = 0.3f * uniform();
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (kind == RVM_F32) return bits;
    return kind == RVM_BF16 ? bits >> 16 : (noise() & 0x8000) | (0x2800 + noise() % 0x1000);
}

static void *values(rvm_kind kind, size_t n) {
    const size_t size = kind == RVM_F32 ? 4 : 2;
    uint8_t *p = malloc(size * n);
    for (size_t i = 0; i < n; i++) {
        const uint32_t v = value(kind);
        memcpy(p + size * i, &v, size);
    }
    return p;
}

static void *random_bytes(size_t n) {
    uint8_t *p = malloc(n);
    for (size_t i = 0; i < n; i++) p[i] = (uint8_t)noise();
    return p;
}

static int failed;

#define CHECK(condition)                                                 \
    if (!(condition)) {                                                  \
        printf("%s:%d: %s is false\n", __FILE__, __LINE__, #condition);  \
        failed++;                                                        \
    }

static int is_super(rvm_kind kind) { return kind >= RVM_Q4_K; }

static rvm_acts_kind acts_of(int planes, int super) {
    if (super) return planes == 2 ? RVM_ACTS_SUPER_16 : RVM_ACTS_SUPER_8;
    return planes == 2 ? RVM_ACTS_16 : RVM_ACTS_8;
}

/* Return n GGUF blocks of random bytes, whose numbers of type float16 are finite. */
static uint8_t *blocks(rvm_kind kind, size_t n) {
    const size_t size = kind == RVM_Q4_K ? 144 : kind == RVM_Q5_K ? 176 : 210;
    uint8_t *p = random_bytes(n * size);
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < 2; k++) {
            const uint32_t v = value(RVM_F16);
            if (kind != RVM_Q6_K) memcpy(p + i * size + 2 * k, &v, 2);
            else if (k == 0) memcpy(p + i * size + 208, &v, 2);
        }
    return p;
}

static rvm_matrix *super_matrix(const round_of *r) {
    const size_t row_bytes = r->cols / 256 * (r->kind == RVM_Q4_K ? 144 : r->kind == RVM_Q5_K ? 176 : 210);
    const size_t half = r->rows / 16 * 16;
    rvm_matrix_spec spec;
    uint8_t *w = blocks(r->kind, r->rows * (r->cols / 256));
    CHECK(rvm_matrix_plan(r->kind, r->rows, r->cols, 0, NULL, NULL, RVM_F32, &spec) == RVM_OK);
    uint8_t *p = aligned(rvm_matrix_bytes(&spec));
    if (half) CHECK(rvm_matrix_pack(&spec, w, NULL, NULL, RVM_F32, 0, half, p) == RVM_OK);
    if (half < r->rows)
        CHECK(rvm_matrix_pack(&spec, w + half * row_bytes, NULL, NULL, RVM_F32, half, r->rows, p) == RVM_OK);
    CHECK(rvm_matrix_check(p, rvm_matrix_bytes(&spec)) == RVM_OK);
    free(w);
    return (rvm_matrix *)p;
}

/* Return the matrix W of this round of the test. A quantised W is packed in two calls if it has enough rows. */
static rvm_matrix *matrix(const round_of *r) {
    if (is_super(r->kind)) return super_matrix(r);
    const int quantised = r->kind == RVM_Q4 || r->kind == RVM_Q8;
    const size_t n = r->rows * r->cols, groups = quantised ? n / r->group : 1;
    const size_t row_bytes = r->cols * (r->kind == RVM_Q4 ? 1 : 2) / 2;
    rvm_matrix_spec spec;
    uint8_t *w = quantised ? random_bytes(r->rows * row_bytes) : values(r->kind, n);
    uint8_t *s = values(r->scale_kind, groups), *b = values(r->scale_kind, groups);
    const size_t size = r->scale_kind == RVM_F32 ? 4 : 2, half = r->rows / 16 * 16;
    CHECK(rvm_matrix_plan(r->kind, r->rows, r->cols, r->group, s, r->affine ? b : NULL, r->scale_kind,
                          &spec) == RVM_OK);
    CHECK(!quantised || spec.affine == (uint32_t)r->affine);
    uint8_t *p = aligned(rvm_matrix_bytes(&spec));
    if (quantised && half) {
        const size_t skip = half * (r->cols / r->group) * size;
        CHECK(rvm_matrix_pack(&spec, w, s, b, r->scale_kind, 0, half, p) == RVM_OK);
        if (half < r->rows)
            CHECK(rvm_matrix_pack(&spec, w + half * row_bytes, s + skip, b + skip, r->scale_kind, half,
                                  r->rows, p) == RVM_OK);
    } else {
        CHECK(rvm_matrix_pack(&spec, w, s, b, r->scale_kind, 0, r->rows, p) == RVM_OK);
    }
    CHECK(rvm_matrix_check(p, rvm_matrix_bytes(&spec)) == RVM_OK);
    CHECK(rvm_matrix_check(p, rvm_matrix_bytes(&spec) - 1) == RVM_BAD_ARGUMENT);
    free(w), free(s), free(b);
    return (rvm_matrix *)p;
}

static float *activations(const round_of *r) {
    static const float odd[] = {NAN, INFINITY, -INFINITY, 1e-40f, -1e-31f, 3e38f, 0, -0.0f, 1e30f, 2e-30f};
    const size_t n = r->tokens * (r->cols + 1);
    float *x = floats(n);
    for (size_t i = 0; i < n; i++) x[i] = uniform() * (noise() % 7 == 0 ? 8.0f : 1.0f);
    if (r->odd_values) {
        for (size_t i = 0; i < 64 && i < r->cols; i++) x[i] = 1e-38f * uniform();
        for (size_t k = 0; k < sizeof odd / sizeof *odd; k++) x[noise() % n] = odd[k];
    }
    return x;
}

/* Return y [tokens, rows + 3] of one implementation, computed in parts of different sizes. The function stores the
   activations in `acts`, so that the caller can compare them. */
static float *product(const rvm_matmul *m, const round_of *r, const rvm_matrix *w, const float *x,
                      void *acts) {
    const size_t stride = r->rows + 3, tiles = rvm_matrix_tiles(w), n = (r->tokens - 1) * stride + r->rows;
    const size_t some_tokens = noise() % (r->tokens + 1), some_tiles = noise() % (tiles + 1);
    float *y = floats(n);
    for (size_t i = 0; i < n; i++) y[i] = 12345;
    CHECK(m->acts(r->acts, x, r->cols + 1, r->tokens, r->cols, some_tokens, r->tokens, acts) == RVM_OK);
    CHECK(m->acts(r->acts, x, r->cols + 1, r->tokens, r->cols, 0, some_tokens, acts) == RVM_OK);
    CHECK(m->matmul(w, r->acts, acts, r->tokens, some_tiles, tiles, y, stride) == RVM_OK);
    for (size_t t = 0; t < r->tokens; t++)
        for (size_t i = 0; i < some_tiles * 16 && i < r->rows; i++) CHECK(y[t * stride + i] == 12345);
    CHECK(m->matmul(w, r->acts, acts, r->tokens, 0, some_tiles, y, stride) == RVM_OK);
    for (size_t t = 0; t + 1 < r->tokens; t++)
        for (size_t i = r->rows; i < stride; i++) CHECK(y[t * stride + i] == 12345);
    return y;
}

static int same(float a, float b) {
    return memcmp(&a, &b, 4) == 0 || (isnan(a) && isnan(b)) || (a == 0 && b == 0);
}

static void compare(const rvm_matmul *m, const round_of *r) {
    rvm_matrix *w = matrix(r);
    float *x = activations(r);
    CHECK(rvm_matrix_acts(w, r->acts & 31 ? r->acts & 31 : 16) == r->acts);
    const size_t bytes = rvm_acts_bytes(r->acts, r->tokens, r->cols),
                 n = (r->tokens - 1) * (r->rows + 3) + r->rows;
    void *acts[2] = {aligned(bytes), aligned(bytes)};
    float *got = product(m, r, w, x, acts[0]), *want = product(rvm_matmul_impl("scalar"), r, w, x, acts[1]);
    /* Activations of kind RVM_ACTS_16 have one of two forms (matrix.h), so their bytes can differ. For activations of
     * this kind, only the products show that the integers are equal. */
    CHECK(r->odd_values || r->acts == RVM_ACTS_16 || memcmp(acts[0], acts[1], bytes) == 0);
    int bad = 0;
    for (size_t i = 0; i < n; i++) bad += !same(got[i], want[i]);
    if (bad && failed++ < 20)
        printf("%s: kind %d, %zux%zu group %zu scales %d affine %d acts %d T %zu odd %d: %d of %zu differ\n", m->name,
               (int)r->kind, r->rows, r->cols, r->group, (int)r->scale_kind, r->affine, (int)r->acts, r->tokens,
               r->odd_values, bad, n);
    free(w), free(x - 1), free(acts[0]), free(acts[1]), free(got - 1), free(want - 1);
}

static int rounds;

static void all_sizes(const rvm_matmul *m, rvm_kind kind, rvm_kind scale_kind, size_t group, int affine,
                      rvm_acts_kind acts) {
    const size_t rows[] = {1, 3, 17, 33, 80}, blocks[] = {1, 3, 5}, cols[] = {1, 7, 33},
                 tokens[] = {1, 2, 3, 4, 5, 7, 8, 15, 16, 43};
    const int quantised = kind == RVM_Q4 || kind == RVM_Q8 || is_super(kind), few = getenv("RVM_FEW") != NULL;
    for (size_t i = 0; i < 5; i++)
        for (size_t j = 0; j < 3; j++)
            for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++)
                for (size_t odd = 0; odd < 2; odd++) {
                    if (few && (i + j + t + odd) % 3) continue;
                    round_of r = {kind,   rows[i],   quantised ? group * blocks[j] : cols[j],
                                  group,  tokens[t], scale_kind,
                                  acts,   affine,    (int)odd};
                    state = (uint32_t)++rounds;
                    compare(m, &r);
                }
}

/* Check sizes for which the AMX kernel needs more than one slice of columns, more than one group of panels, and an odd
   number of tiles; and sizes for which the kernel for pairs of tiles needs more than one part. */
static void large(const rvm_matmul *m) {
    const rvm_kind kinds[] = {RVM_Q4, RVM_Q4, RVM_Q8, RVM_Q8, RVM_Q4_K, RVM_Q5_K, RVM_Q6_K};
    const int few = getenv("RVM_FEW") != NULL;
    for (size_t i = 0; i < 7; i++)
        for (int planes = 1; planes <= 2; planes++) {
            const int super = is_super(kinds[i]);
            if (few && i && i != 4) continue;
            const round_of r = {kinds[i], 45, super ? 2304 : 2112, super ? 256 : 64, 291, RVM_F16,
                                acts_of(planes, super), i % 2 == 0 && !super, 0};
            const round_of many_rows = {kinds[i], 557, few ? 256 : 512, 256, 277, RVM_F16, acts_of(planes, 1), 0, 0};
            state = (uint32_t)++rounds;
            if (!few || !super) compare(m, &r);
            if (super) compare(m, &many_rows);
        }
}

static void all_kinds(const rvm_matmul *m) {
    for (rvm_kind kind = RVM_Q4; kind <= RVM_Q8; kind++)
        for (rvm_kind scale_kind = RVM_F16; scale_kind <= RVM_F32; scale_kind++)
            for (size_t group = 32; group <= 128; group *= 2)
                for (int affine = 0; affine < 2; affine++) {
                    all_sizes(m, kind, scale_kind, group, affine, RVM_ACTS_16);
                    if (scale_kind == RVM_F16) all_sizes(m, kind, scale_kind, group, affine, RVM_ACTS_8);
                }
    for (rvm_kind kind = RVM_Q4_K; kind <= RVM_Q6_K; kind++) {
        all_sizes(m, kind, RVM_F16, 256, 0, RVM_ACTS_SUPER_16);
        all_sizes(m, kind, RVM_F16, 256, 0, RVM_ACTS_SUPER_8);
    }
    for (rvm_kind kind = RVM_F16; kind <= RVM_F32; kind++) all_sizes(m, kind, RVM_F32, 32, 0, RVM_ACTS_FLOAT);
}

enum { MANY = 19 }; /* MANY: the number of tokens: a panel of 16 and three more */

/* Check the sums of 16 and 32 bits for overflow: all weights are 0 or at their maximum, and all activations are x. */
static void extreme(const rvm_matmul *m, rvm_kind kind, int high, int affine, rvm_acts_kind acts_kind, float x) {
    rvm_matrix_spec spec;
    uint8_t w[16 * 64];
    float s[32], b[32], rows[MANY * 64], y[MANY * 16];
    const float most = kind == RVM_Q4 ? 15 : 255, zero = affine ? 0 : kind == RVM_Q4 ? -8 : -128;
    memset(w, high ? 255 : 0, sizeof w);
    for (int i = 0; i < 32; i++) s[i] = 1, b[i] = zero;
    for (int k = 0; k < MANY * 64; k++) rows[k] = x;
    CHECK(rvm_matrix_plan(kind, 16, 64, 32, s, b, RVM_F32, &spec) == RVM_OK && spec.affine == (uint32_t)affine);
    rvm_matrix *p = aligned(rvm_matrix_bytes(&spec));
    void *acts = aligned(rvm_acts_bytes(acts_kind, MANY, 64));
    CHECK(rvm_matrix_pack(&spec, w, s, b, RVM_F32, 0, 16, p) == RVM_OK);
    CHECK(m->acts(acts_kind, rows, 64, MANY, 64, 0, MANY, acts) == RVM_OK);
    CHECK(m->matmul(p, acts_kind, acts, MANY, 0, 1, y, 16) == RVM_OK);
    const float want = 64 * x * ((high ? most : 0) + zero);
    for (int i = 0; i < MANY * 16; i++) CHECK(y[i] == want);
    free(p), free(acts);
}

/* Check the sums of super-blocks for overflow: d, dmin and, if the kind has them, the scales and lows of groups are 1.
   */
static void extreme_super(const rvm_matmul *m, rvm_kind kind, int high, rvm_acts_kind acts_kind, float x) {
    const size_t size = kind == RVM_Q4_K ? 144 : kind == RVM_Q5_K ? 176 : 210;
    const uint16_t one = 0x3c00;
    rvm_matrix_spec spec;
    uint8_t w[16 * 210];
    float rows[MANY * 256], y[MANY * 16];
    memset(w, high ? 255 : 0, sizeof w);
    for (size_t r = 0; r < 16; r++) {
        uint8_t *b = w + r * size;
        if (kind == RVM_Q6_K) memset(b + 192, 1, 16), memcpy(b + 208, &one, 2);
        else memcpy(b, &one, 2), memcpy(b + 2, &one, 2), memset(b + 4, 1, 8), memset(b + 12, 0x11, 4);
    }
    for (int k = 0; k < MANY * 256; k++) rows[k] = x;
    CHECK(rvm_matrix_plan(kind, 16, 256, 0, NULL, NULL, RVM_F32, &spec) == RVM_OK);
    rvm_matrix *p = aligned(rvm_matrix_bytes(&spec));
    void *acts = aligned(rvm_acts_bytes(acts_kind, MANY, 256));
    CHECK(rvm_matrix_pack(&spec, w, NULL, NULL, RVM_F32, 0, 16, p) == RVM_OK);
    CHECK(m->acts(acts_kind, rows, 256, MANY, 256, 0, MANY, acts) == RVM_OK);
    CHECK(m->matmul(p, acts_kind, acts, MANY, 0, 1, y, 16) == RVM_OK);
    const float top = kind == RVM_Q4_K ? 15 : kind == RVM_Q5_K ? 31 : 63, zero = kind == RVM_Q6_K ? -32 : -1;
    const float want = 256 * x * ((high ? top : 0) + zero);
    for (int i = 0; i < MANY * 16; i++) CHECK(y[i] == want);
    free(p), free(acts);
}

static void extremes(const rvm_matmul *m) {
    for (rvm_kind kind = RVM_Q4_K; kind <= RVM_Q6_K; kind++)
        for (int high = 0; high < 2; high++)
            for (int sign = -1; sign <= 1; sign += 2) {
                extreme_super(m, kind, high, RVM_ACTS_SUPER_8, (float)(127 * sign));
                extreme_super(m, kind, high, RVM_ACTS_SUPER_16, (float)(32385 * sign));
            }
    for (rvm_kind kind = RVM_Q4; kind <= RVM_Q8; kind++)
        for (int high = 0; high < 2; high++)
            for (int affine = 0; affine < 2; affine++)
                for (int sign = -1; sign <= 1; sign += 2) {
                    extreme(m, kind, high, affine, RVM_ACTS_8, (float)(127 * sign));
                    extreme(m, kind, high, affine, RVM_ACTS_16, (float)(32385 * sign));
                }
}

/* Check every integer from -32385 to 32385 as an activation, beside an activation that makes the scale 1. Quantisation
   must not change the activation. */
static void every_integer(const rvm_matmul *m) {
    uint8_t w[32 * 32 / 2] = {0};
    float s[32], b[32], x[32], y[32];
    rvm_matrix_spec spec;
    for (int i = 0; i < 32; i++) w[16 * i + i / 2] = i % 2 ? 16 : 1, s[i] = 1, b[i] = 0; /* the identity */
    CHECK(rvm_matrix_plan(RVM_Q4, 32, 32, 32, s, b, RVM_F32, &spec) == RVM_OK);
    rvm_matrix *p = aligned(rvm_matrix_bytes(&spec));
    void *acts = aligned(rvm_acts_bytes(RVM_ACTS_16, 1, 32));
    CHECK(rvm_matrix_pack(&spec, w, s, b, RVM_F32, 0, 32, p) == RVM_OK);
    x[0] = -32385;
    for (int v = -32385; v <= 32385; v += 31) {
        for (int i = 1; i < 32; i++) x[i] = v + i > 32386 ? 0 : (float)(v + i - 1);
        CHECK(m->acts(RVM_ACTS_16, x, 32, 1, 32, 0, 1, acts) == RVM_OK);
        CHECK(m->matmul(p, RVM_ACTS_16, acts, 1, 0, 2, y, 32) == RVM_OK);
        CHECK(memcmp(x, y, sizeof x) == 0);
    }
    free(p), free(acts);
}

int main(void) {
    for (size_t i = 0; rvm_matmul_impl_name(i); i++) {
        const rvm_matmul *m = rvm_matmul_impl(rvm_matmul_impl_name(i));
        all_kinds(m);
        large(m);
        extremes(m);
        every_integer(m);
        printf("%s: compared\n", m->name);
    }
    printf("%d rounds of matrices, %d differences\n", rounds, failed);
    return failed ? 1 : 0;
}
