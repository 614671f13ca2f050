/* This header defines the packed forms of weights and activations, which every implementation of the matrix kernels reads.
 *
 * Packed weights are a head of 64 bytes, then tiles of 16 rows. In the last tile, rows past the matrix's last row are
 * zeros.
 *
 *   quantised tile: for each group of columns
 *     scales [16], then biases [16] if affine, of type scale_kind
 *     for each 32 columns of the group, 16 rows interleaved 4 bytes at a time:
 *       Q4  byte[j][r][i], j < 4:  low nibble = column 4j + i,  high nibble = column 16 + 4j + i
 *       Q8  byte[j][r][i], j < 8:  column 4j + i
 *   tile of super-blocks: Q6_K: d f16 [cols / 256][16], rounded up to 64 bytes
 *     for each 256 columns
 *     Q4_K, Q5_K  d f16 [16], dmin f16 [16], byte b < 12 of the six-bit scales and lows, as in GGUF: [12][16]
 *     Q6_K        scales int8 [16 groups of 16 columns][16]
 *     for each 32 columns, byte[j][r][i] of Q4 with the low nibbles, then
 *       Q5_K  byte[r][i], bit j < 8: the fifth bit of column 4j + i
 *       Q6_K  byte[h][r][i], h < 2, bits 2j and 2j + 1, j < 4: the fifth and sixth of column 16h + 4j + i
 *     Apart from padding, the size is the same as in GGUF. All blocks start at multiples of 64 bytes.
 *   float tile: value[column][16]
 *
 * One instruction (vpdpbusd with 512 bits) or four (sdot by lane, four rows each) multiply 16 rows x 4 bytes by 4
 * activations and add to 16 dot products, one for each row. So these kernels add no numbers across vector lanes, and
 * they read the codes of a tile in order.
 *
 * Activations are stored in panels of 16 tokens; the last panel has the n <= 16 remaining tokens. A plane is one int8
 * part of each activation.
 *
 *   quantised panel: for each 32 columns
 *     q int8 [n][planes][32], d float [n], d * sum float [n], -8 sum int32 [n], -128 sum int32 [n]
 *     8 bits: one plane, x = d q    16 bits: two planes, x = d (254 high + low)    sum: the sum of the 32 factors of d
 *     An implementation with WORDS (matrix_kernel.h) has q int16 [n][32] in place of two planes.
 *   panel for super-blocks: for each 256 columns
 *     q int8 [4][n][planes][64], d float [n], sum float [8 blocks of 32][n],
 *     -32 times the sum of each plane int32 [16 halves of a block][planes][n]
 *   float panel: x [column][n]
 *
 * In a full panel for super-blocks, 64 columns of a token and plane are one cache line, which is one row of an AMX tile.
 *
 * The factor of the high part of a 16-bit activation is 254, not 256, so that no part is -128: the product of -128 and
 * -128, or its change of sign, would overflow on instruction sets that add in 16 bits. A block's sum stays below 254 *
 * 32 * 255 * 127 + 128 * 32 * 32385 < 2^29; the sum of a plane and 256 columns, with integer scales, stays below 256 *
 * 128 * 32 * 127 < 2^27. For super-blocks, the kernels convert the dot products of the two planes to floats before they
 * join them. */
#ifndef RVM_MATRIX_H
#define RVM_MATRIX_H

#include "bits.h"
#include "rvm.h"

#include <string.h>

enum { TILE = RVM_TILE_ROWS, PANEL = 16, BLOCK_COLS = 32, HIGH = 254, MOST_16 = 127 * HIGH + 127 };
enum { SUPER_COLS = 256, SUPER_HEAD = 256, LINE_COLS = 64 };

/* The high part of an activation v is round(v * TO_HIGH). TO_HIGH is a little less than 1 / 254, so halfway cases round
 * towards 0, and v = 32385 becomes high = 127, low = 127. */
#define TO_HIGH 0.0039369685f

#define MATRIX_MAGIC "rvmtile1"

struct rvm_matrix {
    char magic[8];
    rvm_matrix_spec spec;
    uint64_t reserved[3];
};

_Static_assert(sizeof(struct rvm_matrix) == RVM_ALIGNMENT, "the head is one cache line");

static inline int is_super(uint32_t kind) { return kind >= RVM_Q4_K && kind <= RVM_Q6_K; }
static inline int is_quantised(uint32_t kind) { return kind == RVM_Q4 || kind == RVM_Q8 || is_super(kind); }
static inline size_t float_size(uint32_t kind) { return kind == RVM_F32 ? 4 : 2; }
static inline size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

/* Return the number of int8 planes of quantised activations of this kind. */
static inline size_t act_planes(uint32_t kind) { return kind == RVM_ACTS_16 || kind == RVM_ACTS_SUPER_16 ? 2 : 1; }

static inline int is_super_acts(uint32_t kind) { return kind == RVM_ACTS_SUPER_8 || kind == RVM_ACTS_SUPER_16; }

/* Return the number of bytes of one token's activations of 32 columns (act_bytes), or of 256 columns for super-blocks
   (super_act_bytes). */
static inline size_t act_bytes(size_t planes) { return BLOCK_COLS * planes + 16; }
static inline size_t super_act_bytes(size_t planes) { return (SUPER_COLS + 64) * planes + 36; }

/* Return the number of columns of activations that share one scale. */
static inline size_t act_cols(uint32_t kind) { return is_super_acts(kind) ? SUPER_COLS : BLOCK_COLS; }

/* Return the number of bytes of all quantised activations of one token. */
static inline size_t token_bytes(uint32_t kind, size_t cols) {
    const size_t planes = act_planes(kind);
    return cols / act_cols(kind) * (is_super_acts(kind) ? super_act_bytes(planes) : act_bytes(planes));
}

/* Return the integer to which the largest of the activations that share a scale is converted. */
static inline float act_most(size_t planes) { return planes == 2 ? (float)MOST_16 : 127.0f; }

/* Return the number of bytes of a block of quantised weights, 16 rows x 32 columns, without scales. */
static inline size_t block_bytes(uint32_t kind) {
    return kind == RVM_Q8 ? 512 : kind == RVM_Q6_K ? 384 : kind == RVM_Q5_K ? 320 : 256;
}

/* Return the number of bytes of 16 rows x 256 columns of super-blocks; the first SUPER_HEAD bytes are scales. */
static inline size_t super_bytes(uint32_t kind) { return SUPER_HEAD + SUPER_COLS / BLOCK_COLS * block_bytes(kind); }

/* Return the number of bytes of a tile before its first super-block. */
static inline size_t super_front(const rvm_matrix_spec *s) {
    return s->kind == RVM_Q6_K ? round_up(2 * TILE * (s->cols / SUPER_COLS), RVM_ALIGNMENT) : 0;
}

/* Return the address of the scales d of super-block i, which starts at p. */
static inline const uint8_t *super_scale(const rvm_matrix_spec *s, const uint8_t *tile, size_t i, const uint8_t *p) {
    return s->kind == RVM_Q6_K ? tile + 2 * TILE * i : p;
}

/* Return the number of bytes of the scales and biases of one group of columns, for 16 rows. */
static inline size_t scales_bytes(const rvm_matrix_spec *s) {
    return TILE * float_size(s->scale_kind) * (s->affine ? 2 : 1);
}

static inline size_t tile_bytes(const rvm_matrix_spec *s) {
    size_t n = is_super(s->kind) ? super_front(s) + s->cols / SUPER_COLS * super_bytes(s->kind)
               : is_quantised(s->kind)
                   ? s->cols / s->group * scales_bytes(s) + s->cols / 32 * block_bytes(s->kind)
                   : s->cols * TILE * float_size(s->kind);
    return round_up(n, RVM_ALIGNMENT);
}

static inline size_t tile_count(const rvm_matrix_spec *s) { return (s->rows + TILE - 1) / TILE; }

static inline const uint8_t *tile_at(const rvm_matrix *w, size_t tile) {
    return (const uint8_t *)w + sizeof *w + tile * tile_bytes(&w->spec);
}

/* Return the number of tokens in the panel that begins with token t0. */
static inline size_t panel_tokens(size_t tokens, size_t t0) { return min_size(PANEL, tokens - t0); }

static inline float *acts_float(const void *acts, size_t cols, size_t t0) {
    return (float *)acts + t0 * cols;
}

static inline uint8_t *acts_panel(const void *acts, uint32_t kind, size_t cols, size_t t0) {
    return (uint8_t *)acts + t0 * token_bytes(kind, cols);
}

/* Return the address of token i's activations of 64 columns from column 64 * line on. super: the activations of n
   tokens for the 256 columns of a super-block */
static inline uint8_t *line_at(const uint8_t *super, size_t planes, size_t n, size_t line, size_t i) {
    return (uint8_t *)super + LINE_COLS * planes * (line * n + i);
}

/* These functions return addresses in the activations of n tokens for a super-block, after the integers: of token i's
 * scale d, of the sum of its block b, and of the start value (-32 times the sum) of its half h in a plane. */
static inline uint8_t *super_d(const uint8_t *super, size_t planes, size_t n, size_t i) {
    return (uint8_t *)super + SUPER_COLS * planes * n + 4 * i;
}
static inline uint8_t *super_sum(const uint8_t *super, size_t planes, size_t n, size_t i, size_t b) {
    return super_d(super, planes, n, i) + 4 * n * (1 + b);
}
static inline uint8_t *super_start(const uint8_t *super, size_t planes, size_t n, size_t i, size_t h, size_t plane) {
    return super_d(super, planes, n, i) + 4 * n * (9 + h * planes + plane);
}

/* Store one token's scale d and the multiples of its sum, which follow the integers of a block. rest: the address of
   d[i] */
static inline void store_sums(uint8_t *rest, size_t n, float d, int32_t sum) {
    const float bias = d * (float)sum;
    const int32_t zero[2] = {-8 * sum, -128 * sum};
    memcpy(rest, &d, 4);
    memcpy(rest + 4 * n, &bias, 4);
    memcpy(rest + 8 * n, &zero[0], 4);
    memcpy(rest + 12 * n, &zero[1], 4);
}

/* Store token i's scale d, sums and start values for a super-block. sum, high: for each 16 columns, the sum of the
   activations and of plane 0 */
static inline void store_super_sums(uint8_t *super, size_t planes, size_t n, size_t i, float d, const int32_t *sum,
                                    const int32_t *high) {
    memcpy(super_d(super, planes, n, i), &d, 4);
    for (size_t b = 0; b < 8; b++) {
        const float both = (float)(sum[2 * b] + sum[2 * b + 1]);
        memcpy(super_sum(super, planes, n, i, b), &both, 4);
    }
    for (size_t h = 0; h < 16; h++) {
        const int32_t start[2] = {-32 * (planes == 2 ? high[h] : sum[h]), -32 * (sum[h] - HIGH * high[h])};
        for (size_t p = 0; p < planes; p++) memcpy(super_start(super, planes, n, i, h, p), &start[p], 4);
    }
}

/* Return number i of an array of F16, BF16 or F32. */
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

/* UNROLL makes the compiler unroll a short loop of constant length, so that the arrays that the loop indexes stay in
   registers. */
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* Hide from the compiler how the code computed the address p. Otherwise gcc stores a hundred addresses on the stack, and
   loads one of them before each product. */
#define HIDE_ORIGIN(p) __asm__("" : "+r"(p))

/* Return the float at address p of the activations, which can be unaligned. */
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

/* These functions for super-blocks (matrix_super.c) pack a row of GGUF blocks into row `row` of a tile, and read a row
   back as floats. */
size_t rvm_super_source(uint32_t kind); /* returns the number of bytes of a GGUF block */
void rvm_super_pack(const rvm_matrix_spec *s, const uint8_t *blocks, size_t row, uint8_t *tile);
void rvm_super_row(const rvm_matrix_spec *s, const uint8_t *tile, size_t row, float *out);

/* Find what a product needs of row r and columns k .. k + 31 of a tile. factors: for Q4_K and Q5_K, the six-bit scale
   and the six-bit minimum of these 32 weights; for Q6_K, the scales of the first and the last 16 weights. Return the
   address at which the packed codes of these columns begin. */
const uint8_t *rvm_super_block(const rvm_matrix_spec *s, const uint8_t *tile, size_t k, size_t r, int factors[2]);

/* Set d[0] = d and d[1] = -dmin (0 for Q6_K) of row r and the super-block of column k. */
void rvm_super_floats(const rvm_matrix_spec *s, const uint8_t *tile, size_t k, size_t r, float d[2]);

/* Return the code of row r and column c in a block of 32 columns. */
static inline unsigned block_code(const uint8_t *block, uint32_t kind, size_t r, size_t c) {
    const size_t at = 4 * r + c % 4, j = c / 4;
    if (kind == RVM_Q8) return block[64 * j + at];
    const unsigned both = block[64 * (j % 4) + at], low = c < 16 ? both & 15 : both >> 4;
    if (kind == RVM_Q5_K) return low | (block[256 + at] >> j & 1u) << 4;
    if (kind == RVM_Q6_K) return low | (block[256 + 64 * (c / 16) + at] >> 2 * (j % 4) & 3u) << 4;
    return low;
}

/* Return 1 if the arguments of the kernel `matmul`, or of the kernel `acts`, are invalid. */
int rvm_matmul_refuses(const rvm_matrix *w, rvm_acts_kind kind, const void *acts, size_t tokens,
                       size_t tile_begin, size_t tile_end, const float *y, size_t y_stride);
int rvm_acts_refuses(rvm_acts_kind kind, const float *x, size_t x_stride, size_t tokens, size_t cols,
                     size_t token_begin, size_t token_end, const void *acts);

#endif
