/* The packed forms of weights and activations: what every implementation of the matrix kernels reads.
 *
 * Weights: a head of 64 bytes, then tiles of 16 rows. Rows past the last are zeros.
 *
 *   quantised tile: for each group of columns
 *     scales [16], then biases [16] if affine, of scale_kind
 *     for each 32 columns of the group, 16 rows interleaved 4 bytes at a time:
 *       Q4  byte[j][r][i], j < 4:  low nibble = column 4j + i,  high nibble = column 16 + 4j + i
 *       Q8  byte[j][r][i], j < 8:  column 4j + i
 *   float tile: value[column][16]
 *
 * One vector of 16 x 4 bytes times 4 activations, repeated for all rows, is 16 partial dot products
 * (vpdpbusd, sdot by lane), so no sum across lanes is left. Everything is read once, in order.
 *
 * Activations: panels of 16 tokens, the last one with the n <= 16 tokens that are left.
 *
 *   quantised panel: for each 32 columns
 *     q int8 [n][planes][32], d float [n], d * sum float [n], -8 sum int32 [n], -128 sum int32 [n]
 *     8 bits: one plane, x = d q    16 bits: two, x = d (254 high + low)    sum: of what d multiplies
 *   float panel: x [column][n]
 *
 * 254 and not 256: then no part is -128, whose product with -128 or change of sign would overflow where the
 * instruction set adds in 16 bits. A block's sum stays below 254 * 32 * 255 * 127 + 128 * 32 * 32385 < 2^29.
 */
#ifndef RVM_MATRIX_H
#define RVM_MATRIX_H

#include "bits.h"
#include "rvm.h"

#include <string.h>

enum { TILE = RVM_TILE_ROWS, PANEL = 16, BLOCK_COLS = 32, HIGH = 254, MOST_16 = 127 * HIGH + 127 };

/* v to high by rounding v * TO_HIGH. A little less than 1 / 254: halfway cases go towards 0, so that 32385
 * becomes 127, 127. */
#define TO_HIGH 0.0039369685f

#define MATRIX_MAGIC "rvmtile1"

struct rvm_matrix {
    char magic[8];
    rvm_matrix_spec spec;
    uint64_t reserved[3];
};

_Static_assert(sizeof(struct rvm_matrix) == RVM_ALIGNMENT, "the head is one cache line");

static inline int is_quantised(uint32_t kind) { return kind == RVM_Q4 || kind == RVM_Q8; }
static inline size_t float_size(uint32_t kind) { return kind == RVM_F32 ? 4 : 2; }
static inline size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

/* int8 planes that activations of a quantised kind have. */
static inline size_t act_planes(uint32_t kind) { return kind == RVM_ACTS_16 ? 2 : 1; }

/* Bytes of one token's activations of 32 columns. */
static inline size_t act_bytes(size_t planes) { return BLOCK_COLS * planes + 16; }

/* What the largest of 32 activations becomes. */
static inline float act_most(size_t planes) { return planes == 2 ? (float)MOST_16 : 127.0f; }

/* Bytes of 16 rows x 32 columns. */
static inline size_t block_bytes(uint32_t kind) { return kind == RVM_Q4 ? 256 : 512; }

/* Bytes of the scales and biases of 16 rows. */
static inline size_t scales_bytes(const rvm_matrix_spec *s) {
    return TILE * float_size(s->scale_kind) * (s->affine ? 2 : 1);
}

static inline size_t tile_bytes(const rvm_matrix_spec *s) {
    size_t n = is_quantised(s->kind)
                   ? s->cols / s->group * scales_bytes(s) + s->cols / 32 * block_bytes(s->kind)
                   : s->cols * TILE * float_size(s->kind);
    return round_up(n, RVM_ALIGNMENT);
}

static inline size_t tile_count(const rvm_matrix_spec *s) { return (s->rows + TILE - 1) / TILE; }

static inline const uint8_t *tile_at(const rvm_matrix *w, size_t tile) {
    return (const uint8_t *)w + sizeof *w + tile * tile_bytes(&w->spec);
}

/* Tokens in the panel that begins with token t0. */
static inline size_t panel_tokens(size_t tokens, size_t t0) { return min_size(PANEL, tokens - t0); }

static inline float *acts_float(const void *acts, size_t cols, size_t t0) {
    return (float *)acts + t0 * cols;
}

static inline uint8_t *acts_panel(const void *acts, size_t planes, size_t cols, size_t t0) {
    return (uint8_t *)acts + t0 * (cols / BLOCK_COLS) * act_bytes(planes);
}

/* What follows the integers of a block; rest: where d[i] goes. */
static inline void store_sums(uint8_t *rest, size_t n, float d, int32_t sum) {
    const float bias = d * (float)sum;
    const int32_t zero[2] = {-8 * sum, -128 * sum};
    memcpy(rest, &d, 4);
    memcpy(rest + 4 * n, &bias, 4);
    memcpy(rest + 8 * n, &zero[0], 4);
    memcpy(rest + 12 * n, &zero[1], 4);
}

/* The i-th of an array of F16, BF16 or F32. */
static inline float float_at(const void *array, uint32_t kind, size_t i) {
    uint16_t h;
    float x;
    if (kind == RVM_F32) {
        memcpy(&x, (const uint8_t *)array + 4 * i, 4);
        return x;
    }
    memcpy(&h, (const uint8_t *)array + 2 * i, 2);
    return kind == RVM_F16 ? half_to_float(h) : float_of((uint32_t)h << 16);
}

#define INLINE static inline __attribute__((always_inline))

/* Loops of a constant few steps, so that what they index are registers. */
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* A field of the activations. */
INLINE float act_f32(const uint8_t *p) {
    float x;
    memcpy(&x, p, 4);
    return x;
}

INLINE int32_t act_i32(const uint8_t *p) {
    int32_t x;
    memcpy(&x, p, 4);
    return x;
}

/* What both functions of an implementation refuse. */
int rvm_matmul_refuses(const rvm_matrix *w, rvm_acts_kind kind, const void *acts, size_t tokens,
                       size_t tile_begin, size_t tile_end, const float *y, size_t y_stride);
int rvm_acts_refuses(rvm_acts_kind kind, const float *x, size_t x_stride, size_t tokens, size_t cols,
                     size_t token_begin, size_t token_end, const void *acts);

#endif
