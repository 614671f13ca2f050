/* This header has the matrix kernels, written once for a vector of 16 lanes, one lane per row of a tile.
 *
 * The file of an instruction set defines the following names, includes this file, and defines rvm_matmul_<name>:
 *
 *   f32x     16 floats          f_zero()  f_all(float)  f_mul(a, b)  f_fma(a, b, c) = a * b + c
 *                               f_load(p, kind)   16 values of kind F16, BF16 or F32
 *                               f_store(y, a, n)  the first n <= 16
 *   i32x     16 int32           i_all(int32)  f_of(i32x)  i_join(high, low) = 254 * high + low
 *                               i_load8(p)  16 int8       i_mla(a, b, c) = a + b * c
 *   weights  a block: 16 rows x 32 columns as bytes         unpack(p, kind, m, w)   before products with m planes
 *   dots(acc, w, q, apart, m, kind)   acc[i] += w . q[i], i < m, for each row
 *                               q: m planes of 32 activations, `apart` bytes from one to the next
 *   dots_part(acc, w, q, apart, m, kind, from, n)   only of columns 4 from .. 4 (from + n) - 1, n a multiple of 4
 *   i_round(f32x)  i_add(a, b)  i_larger(i32x, f32x)  i_bytes(p, i32x)  i_sum(i32x)  i_most(i32x)
 *   prefetch_line(p), prefetch_block(p, kind), and prefetch_close(p) for later weights
 *   OFFSET8  the number that `unpack` subtracts from 8-bit weights: 0, or 128 if the instruction needs signed weights
 *   MAX_T    the number of tokens for which a block is unpacked once: 4, 8 or 16
 *   STEP     the number of planes whose dot products are computed together: 1, 2, 4 or 8; a token's planes always are
 *   FLOAT_T  float weights: the number of tokens computed together for one tile
 *   WIDE_T   float weights: the maximum number of tokens for which WIDE tiles have enough registers
 *
 * If the instruction set multiplies bytes slowly, the file also defines WORDS, the maximum number of tokens at a time, and
 *   dots_words(acc, p, q, m, kind)   acc[t] += w . q[t], t < m, for each row of the stored block at p of kind Q4 or Q8
 *                               q: int16 [m][32], with columns in the order in which i_words(p, i32x) stores 16 values
 * In a file with WORDS, 16-bit activations are stored as words instead of two planes, in the same number of bytes. The
 * activations for super-blocks still have planes. The dot products are the same integers as with planes. */
#include "matrix.h"

#ifndef WORDS
#define WORDS 0
INLINE void dots_words(i32x *acc, const uint8_t *p, const uint8_t *q, const size_t m, const uint32_t kind) {
    (void)acc, (void)p, (void)q, (void)m, (void)kind;
}
INLINE void i_words(uint8_t *to, i32x a) { (void)to, (void)a; }
#endif

enum { BLOCK_T = WORDS > STEP ? WORDS : STEP };

/* Return 1 if activations of this number of planes are stored as 16-bit words. */
INLINE int in_words(const size_t planes) { return WORDS && planes == 2; }

/* Run `dots` `rounds` times over one block in the registers and the L1 cache, and return the number of products. */
static inline uint64_t peak(uint64_t rounds, int32_t *sum) {
    _Alignas(64) uint8_t block[512], q[32 * MAX_T];
    for (size_t i = 0; i < sizeof block; i++) block[i] = (uint8_t)(37 * i);
    for (size_t i = 0; i < sizeof q; i++) q[i] = (uint8_t)(11 * i);
    weights w;
    unpack(block, RVM_Q4, MAX_T, &w);
    i32x acc[MAX_T];
    UNROLL for (size_t t = 0; t < MAX_T; t++) acc[t] = i_all(0);
    for (uint64_t i = 0; i < rounds; i++) {
        __asm__ volatile("" ::"r"(q), "r"(block) : "memory"); /* without this line the compiler would compute the products only once */
        UNROLL for (size_t t = 0; t < MAX_T; t += STEP) dots(acc + t, &w, q + 32 * t, 32, STEP, RVM_Q4);
    }
    *sum = 0;
    UNROLL for (size_t t = 0; t < MAX_T; t++) *sum ^= i_sum(acc[t]);
    return rounds * TILE * 32 * MAX_T;
}

/* WIDE: the number of tiles computed together for few tokens and float weights. With one tile, each addition to a sum
 * would wait for the previous addition.
 * AHEAD, CLOSE: with few tokens, the kernel prefetches weights AHEAD bytes ahead from memory, and CLOSE bytes ahead
 * into the L1 cache. Values of 2048 to 16384 for AHEAD, and of 640 to 1280 for CLOSE, are equally fast (matmul_bench).
 * AHEAD_COLS: how many columns ahead the kernel prefetches weights that are 16-bit floats. Weights that are 32-bit
 * floats are faster without prefetch. */
enum { WIDE = 4, AHEAD = 4096, CLOSE = 1024, AHEAD_COLS = 64 };

/* Prefetch weights after the block at p: AHEAD bytes later from memory, and CLOSE bytes later into the L1 cache. */
INLINE void prefetch_ahead(const uint8_t *p, uint32_t kind) {
    prefetch_block(p + AHEAD, kind);
    for (size_t i = 0; i < block_bytes(kind); i += 64) prefetch_close(p + CLOSE + i);
}

/* Return the start value with which a dot product gives (codes - zero point) . activations.  act: address of scale d */
INLINE i32x start_of(const uint8_t *act, size_t n, const size_t planes, uint32_t kind, int affine) {
    const int offset = kind == RVM_Q8 && !in_words(planes) ? OFFSET8 : 0;
    if (affine && offset) return i_all(-act_i32(act + 12 * n));
    if (affine || offset) return i_all(0);
    return i_all(act_i32(act + (kind == RVM_Q4 ? 8 : 12) * n));
}

/* Return 254 high + low as a float. For 4-bit weights, both are below 2^24, so floats join them exactly and faster. */
INLINE f32x joined_planes(i32x high, i32x low, uint32_t kind) {
    return kind == RVM_Q8 ? f_of(i_join(high, low)) : f_fma(f_all(HIGH), f_of(high), f_of(low));
}

/* Compute the dot products of one block and T <= BLOCK_T tokens, without scales.  d: the tokens' scales, then their sums */
INLINE void block_dots(f32x *dot, const weights *w, const uint8_t *p, const uint8_t *q, const uint8_t *d, size_t n,
                       const size_t T, const size_t planes, const uint32_t kind, const int affine) {
    const size_t parts = in_words(planes) ? 1 : planes;
    i32x acc[2 * BLOCK_T];
    UNROLL for (size_t t = 0; t < T; t++) {
        acc[parts * t] = i_all(0);
        acc[parts * t + parts - 1] = start_of(d + 4 * t, n, planes, kind, affine);
    }
    if (in_words(planes)) dots_words(acc, p, q, T, kind);
    else dots(acc, w, q, 32, T * planes, kind);
    UNROLL for (size_t t = 0; t < T; t++)
        dot[t] = parts == 2 ? joined_planes(acc[2 * t], acc[2 * t + 1], kind) : f_of(acc[t]);
}

/* Add the scaled dot products of one block and T <= BLOCK_T tokens to sum[t]. */
INLINE void add_block(f32x *sum, f32x s, f32x b, const weights *w, const uint8_t *p, const uint8_t *q, const uint8_t *d,
                      size_t n, const size_t T, const size_t planes, const uint32_t kind, const int affine) {
    f32x dot[BLOCK_T];
    block_dots(dot, w, p, q, d, n, T, planes, kind, affine);
    UNROLL for (size_t t = 0; t < T; t++) {
        sum[t] = f_fma(f_mul(s, f_all(act_f32(d + 4 * t))), dot[t], sum[t]);
        if (affine) sum[t] = f_fma(b, f_all(act_f32(d + 4 * t + 4 * n)), sum[t]);
    }
}

/* Return 1 for fewer than 16 tokens, because then the kernel waits for the weights, so prefetch is useful. */
INLINE int reads_ahead(size_t n) { return n != PANEL; }

/* Compute y[t][r], the dot product of x[t] and W[r], for one tile and the tokens i to i + T - 1 of a panel of n.
 *   act: the panel   y: the address of the result for token i and row 0   rows: the number of real rows in the tile */
INLINE void quantised_tile(const rvm_matrix_spec *spec, const uint8_t *p, const uint8_t *act, size_t n,
                           size_t i, const size_t T, const size_t planes, const uint32_t kind, const int affine,
                           float *y, size_t y_stride, size_t rows) {
    const uint32_t scale_kind = spec->scale_kind;
    const size_t scales = TILE * float_size(scale_kind), group = spec->group, cols = spec->cols;
    const size_t step = in_words(planes) ? WORDS : STEP < planes ? 1 : STEP / planes;
    const int ahead = reads_ahead(n) && i == 0;
    f32x sum[MAX_T];
    UNROLL for (size_t t = 0; t < T; t++) sum[t] = f_zero();
    for (size_t k = 0; k < cols; k += group) {
        const f32x s = f_load(p, scale_kind), b = affine ? f_load(p + scales, scale_kind) : s;
        if (ahead) prefetch_line(p + AHEAD), prefetch_close(p + CLOSE);
        p += affine ? 2 * scales : scales;
        for (size_t c = 0; c < group; c += 32, p += block_bytes(kind), act += n * act_bytes(planes)) {
            const uint8_t *q = act + 32 * planes * i, *d = act + 32 * planes * n + 4 * i;
            weights w;
            if (ahead) prefetch_ahead(p, kind);
            unpack(p, kind, T * planes, &w);
            UNROLL for (size_t t = 0; t < T; t += step)
                add_block(sum + t, s, b, &w, p, q + 32 * planes * t, d + 4 * t, n, T - t < step ? T - t : step, planes,
                          kind, affine);
        }
    }
    UNROLL for (size_t t = 0; t < T; t++) f_store(y + t * y_stride, sum[t], rows);
}

#include "super_kernel.h"

/* Compute y as quantised_tile does, for R consecutive tiles of float weights.  x: [cols, n], the panel's activations */
INLINE void float_tiles(const rvm_matrix_spec *spec, const uint8_t *p, const float *x, size_t n, size_t i,
                        const size_t R, const size_t T, const uint32_t kind, float *y, size_t y_stride,
                        size_t rows) {
    const size_t cols = spec->cols, apart = tile_bytes(spec), step = TILE * float_size(kind);
    f32x sum[16];
    UNROLL for (size_t j = 0; j < R * T; j++) sum[j] = f_zero();
    for (size_t k = 0; k < cols; k++, p += step, x += n) {
        f32x w[WIDE];
        if (T <= 4 && i == 0 && kind != RVM_F32 && k % 2 == 0) {
            const size_t beyond = k + AHEAD_COLS < cols ? 0 : (R - 1) * apart;
            UNROLL for (size_t r = 0; r < R; r++) prefetch_line(p + r * apart + beyond + AHEAD_COLS * step);
        }
        UNROLL for (size_t r = 0; r < R; r++) w[r] = f_load(p + r * apart, kind);
        UNROLL for (size_t t = 0; t < T; t++) {
            const f32x xt = f_all(x[i + t]);
            UNROLL for (size_t r = 0; r < R; r++) sum[r * T + t] = f_fma(w[r], xt, sum[r * T + t]);
        }
    }
    UNROLL for (size_t r = 0; r < R; r++)
        UNROLL for (size_t t = 0; t < T; t++)
            f_store(y + t * y_stride + r * TILE, sum[r * T + t], min_size(TILE, rows - r * TILE));
}

INLINE void any_tile(const rvm_matrix_spec *spec, const uint8_t *tile, const uint8_t *act, size_t n, size_t i,
                     const size_t T, const size_t planes, const uint32_t kind, const int affine, float *y,
                     size_t y_stride, size_t rows) {
    if (is_super(kind)) super_tile(spec, tile, act, n, i, T, planes, kind, y, y_stride, rows);
    else quantised_tile(spec, tile, act, n, i, T, planes, kind, affine, y, y_stride, rows);
}

/* Compute the tokens of a panel from token i on, T at a time, while at least T tokens are left. */
#define TOKENS_AT_A_TIME(T, n, planes, kind, affine) \
    for (; (n) - i >= (T); i += (T))                 \
    any_tile(spec, tile, act, n, i, T, planes, kind, affine, y + i * y_stride, y_stride, rows)

#define QUANTISED_PANEL(name, planes, kind, affine)                                                  \
    static void name(const rvm_matrix_spec *spec, const uint8_t *tile, const uint8_t *act, size_t n, \
                     float *y, size_t y_stride, size_t rows) {                                       \
        size_t i = 0;                                                                                \
        if (n == PANEL) {                                                                            \
            TOKENS_AT_A_TIME(MAX_T, PANEL, planes, kind, affine);                                    \
        } else if (n == 1) {                                                                         \
            any_tile(spec, tile, act, 1, 0, 1, planes, kind, affine, y, y_stride, rows);             \
        } else {                                                                                     \
            if (MAX_T > 4) TOKENS_AT_A_TIME(8, n, planes, kind, affine);                             \
            TOKENS_AT_A_TIME(4, n, planes, kind, affine);                                            \
            if (in_words(planes)) TOKENS_AT_A_TIME(3, n, planes, kind, affine);                      \
            TOKENS_AT_A_TIME(2, n, planes, kind, affine);                                            \
            TOKENS_AT_A_TIME(1, n, planes, kind, affine);                                            \
        }                                                                                            \
    }

QUANTISED_PANEL(panel_8_q4_affine, 1, RVM_Q4, 1)
QUANTISED_PANEL(panel_8_q4_symmetric, 1, RVM_Q4, 0)
QUANTISED_PANEL(panel_8_q8_affine, 1, RVM_Q8, 1)
QUANTISED_PANEL(panel_8_q8_symmetric, 1, RVM_Q8, 0)
QUANTISED_PANEL(panel_16_q4_affine, 2, RVM_Q4, 1)
QUANTISED_PANEL(panel_16_q4_symmetric, 2, RVM_Q4, 0)
QUANTISED_PANEL(panel_16_q8_affine, 2, RVM_Q8, 1)
QUANTISED_PANEL(panel_16_q8_symmetric, 2, RVM_Q8, 0)
QUANTISED_PANEL(panel_8_q4_k, 1, RVM_Q4_K, 1)
QUANTISED_PANEL(panel_8_q5_k, 1, RVM_Q5_K, 1)
QUANTISED_PANEL(panel_8_q6_k, 1, RVM_Q6_K, 0)
QUANTISED_PANEL(panel_16_q4_k, 2, RVM_Q4_K, 1)
QUANTISED_PANEL(panel_16_q5_k, 2, RVM_Q5_K, 1)
QUANTISED_PANEL(panel_16_q6_k, 2, RVM_Q6_K, 0)

typedef void quantised_panel(const rvm_matrix_spec *, const uint8_t *, const uint8_t *, size_t, float *,
                             size_t, size_t);

static quantised_panel *panel_for(const rvm_matrix_spec *spec, size_t planes) {
    static quantised_panel *const all[2][2][2] = {
        {{panel_8_q4_symmetric, panel_8_q4_affine}, {panel_8_q8_symmetric, panel_8_q8_affine}},
        {{panel_16_q4_symmetric, panel_16_q4_affine}, {panel_16_q8_symmetric, panel_16_q8_affine}}};
    static quantised_panel *const super[2][3] = {{panel_8_q4_k, panel_8_q5_k, panel_8_q6_k},
                                                 {panel_16_q4_k, panel_16_q5_k, panel_16_q6_k}};
    if (is_super(spec->kind)) return super[planes - 1][spec->kind - RVM_Q4_K];
    return all[planes - 1][spec->kind == RVM_Q8][spec->affine];
}

#define FLOATS_AT_A_TIME(T, n, kind) \
    for (; (n) - i >= (T); i += (T)) \
    float_tiles(spec, tile, x, n, i, 1, T, kind, y + i * y_stride, y_stride, rows)

#define FLOAT_PANEL(name, kind)                                                                            \
    static void name##_wide(const rvm_matrix_spec *spec, const uint8_t *tile, const float *x, size_t n,    \
                            float *y, size_t y_stride, size_t rows) {                                      \
        if (n == 1) float_tiles(spec, tile, x, 1, 0, WIDE, 1, kind, y, y_stride, rows);                    \
        if (n == 2 && WIDE_T >= 2) float_tiles(spec, tile, x, 2, 0, WIDE, 2, kind, y, y_stride, rows);     \
        if (n == 3 && WIDE_T >= 3) float_tiles(spec, tile, x, 3, 0, WIDE, 3, kind, y, y_stride, rows);     \
        if (n == 4 && WIDE_T >= 4) float_tiles(spec, tile, x, 4, 0, WIDE, 4, kind, y, y_stride, rows);     \
    }                                                                                                      \
    static void name(const rvm_matrix_spec *spec, const uint8_t *tile, const float *x, size_t n, float *y, \
                     size_t y_stride, size_t rows) {                                                       \
        size_t i = 0;                                                                                      \
        if (n == PANEL) {                                                                                  \
            FLOATS_AT_A_TIME(FLOAT_T, PANEL, kind);                                                        \
        } else {                                                                                           \
            if (FLOAT_T > 4) FLOATS_AT_A_TIME(8, n, kind);                                                 \
            FLOATS_AT_A_TIME(4, n, kind);                                                                  \
            FLOATS_AT_A_TIME(2, n, kind);                                                                  \
            FLOATS_AT_A_TIME(1, n, kind);                                                                  \
        }                                                                                                  \
    }

FLOAT_PANEL(panel_f16, RVM_F16)
FLOAT_PANEL(panel_bf16, RVM_BF16)
FLOAT_PANEL(panel_f32, RVM_F32)

typedef void float_panel(const rvm_matrix_spec *, const uint8_t *, const float *, size_t, float *, size_t,
                         size_t);

static float_panel *float_panel_for(uint32_t kind, int wide) {
    if (kind == RVM_F16) return wide ? panel_f16_wide : panel_f16;
    if (kind == RVM_BF16) return wide ? panel_bf16_wide : panel_bf16;
    return wide ? panel_f32_wide : panel_f32;
}

/* Return a number of tiles whose weights, at most 256 KiB or one tile, stay in the L2 cache during all panels. */
static size_t chunk_tiles(const rvm_matrix_spec *spec) {
    const size_t n = (size_t)(256 << 10) / tile_bytes(spec);
    return n ? n : 1;
}

static void quantised_chunk(const rvm_matrix *w, rvm_acts_kind kind, const void *acts, size_t tokens, size_t begin,
                            size_t end, float *y, size_t y_stride) {
    const rvm_matrix_spec *spec = &w->spec;
    quantised_panel *panel = panel_for(spec, act_planes(kind));
    const size_t apart = tile_bytes(spec); /* apart: computed once here, because tile_bytes needs two divisions */
    for (size_t t = 0; t < tokens; t += PANEL) {
        const size_t n = panel_tokens(tokens, t);
        const uint8_t *act = acts_panel(acts, kind, spec->cols, t), *p = tile_at(w, begin);
        for (size_t tile = begin; tile < end; tile++, p += apart)
            panel(spec, p, act, n, y + t * y_stride + tile * TILE, y_stride, min_size(TILE, spec->rows - tile * TILE));
    }
}

static void float_chunk(const rvm_matrix *w, const void *acts, size_t tokens, size_t begin, size_t end,
                        float *y, size_t y_stride) {
    const rvm_matrix_spec *spec = &w->spec;
    for (size_t t = 0; t < tokens; t += PANEL) {
        const size_t n = panel_tokens(tokens, t);
        const float *x = acts_float(acts, spec->cols, t);
        for (size_t tile = begin; tile < end;) {
            const int wide = n <= WIDE_T && end - tile >= WIDE;
            float_panel_for(spec->kind, wide)(spec, tile_at(w, tile), x, n, y + t * y_stride + tile * TILE,
                                              y_stride, spec->rows - tile * TILE);
            tile += wide ? WIDE : 1;
        }
    }
}

static int matmul(const rvm_matrix *w, rvm_acts_kind kind, const void *acts, size_t tokens, size_t tile_begin,
                  size_t tile_end, float *y, size_t y_stride) {
    if (rvm_matmul_refuses(w, kind, acts, tokens, tile_begin, tile_end, y, y_stride)) return RVM_BAD_ARGUMENT;
    const size_t step = tokens <= PANEL ? tile_end - tile_begin : chunk_tiles(&w->spec);
    for (size_t tile = tile_begin; tile < tile_end; tile += step) {
        const size_t end = min_size(tile + step, tile_end);
        if (kind == RVM_ACTS_FLOAT) float_chunk(w, acts, tokens, tile, end, y, y_stride);
        else quantised_chunk(w, kind, acts, tokens, tile, end, y, y_stride);
    }
    return RVM_OK;
}

/* Return the scale d of n activations (matrix_scalar.c), and set *inverse = 1 / d, or to 0 if d is 0 or NaN. */
INLINE float scale_of(const float *x, size_t n, const size_t planes, float *inverse) {
    i32x largest = i_all(0);
    for (size_t k = 0; k < n; k += 16) largest = i_larger(largest, f_load((const uint8_t *)(x + k), RVM_F32));
    const uint32_t top = (uint32_t)i_most(largest);
    const float most = float_of(top);
    const int none = top >= 0x7f800000 || most < 1e-30f;
    *inverse = none ? 0 : act_most(planes) / most;
    return top >= 0x7f800000 ? NAN : none ? 0 : most / act_most(planes);
}

/* Store 16 activations as integers, one byte in each plane. Return the integers. *high: the first plane. */
INLINE i32x integers(const float *x, float inverse, const size_t planes, size_t apart, uint8_t *q, i32x *high) {
    const f32x v = f_mul(f_load((const uint8_t *)x, RVM_F32), f_all(inverse));
    const i32x whole = i_round(v);
    *high = planes == 2 ? i_round(f_mul(v, f_all(TO_HIGH))) : whole;
    i_bytes(q, *high);
    if (planes == 2) i_bytes(q + apart, i_join(i_round(f_mul(v, f_all(-TO_HIGH))), whole));
    return whole;
}

/* Store 16 activations as 16-bit words. Return them as integers. */
INLINE i32x words(const float *x, float inverse, uint8_t *q) {
    const i32x whole = i_round(f_mul(f_load((const uint8_t *)x, RVM_F32), f_all(inverse)));
    i_words(q, whole);
    return whole;
}

/* Quantise 32 activations. Return their scale d. */
INLINE float quantise(const float *x, const size_t planes, uint8_t *q, int32_t *sum) {
    float inverse;
    const float d = scale_of(x, 32, planes, &inverse);
    i32x high;
    *sum = 0;
    if (inverse == 0) memset(q, 0, 32 * planes);
    else if (in_words(planes)) *sum = i_sum(i_add(words(x, inverse, q), words(x + 16, inverse, q + 32)));
    else *sum = i_sum(i_add(integers(x, inverse, planes, 32, q, &high),
                            integers(x + 16, inverse, planes, 32, q + 16, &high)));
    return d;
}

/* Quantise and store all activations of token i of a panel of n tokens. x: the token's row of floats */
INLINE void quantised_acts(const float *x, size_t cols, const size_t planes, size_t i, size_t n, uint8_t *block) {
    for (size_t k = 0; k < cols; k += 32, block += n * act_bytes(planes)) {
        int32_t sum;
        const float d = quantise(x + k, planes, block + 32 * planes * i, &sum);
        store_sums(block + 32 * planes * n + 4 * i, n, d, sum);
    }
}

/* Quantise and store all activations of token i of a panel of n tokens, in the form for super-blocks. */
INLINE void super_acts(const float *x, size_t cols, const size_t planes, size_t i, size_t n, uint8_t *super) {
    for (size_t k = 0; k < cols; k += SUPER_COLS, super += n * super_act_bytes(planes)) {
        int32_t sum[16] = {0}, high[16] = {0};
        float inverse;
        const float d = scale_of(x + k, SUPER_COLS, planes, &inverse);
        for (size_t h = 0; h < 16; h++) {
            uint8_t *q = line_at(super, planes, n, h / 4, i) + h % 4 * 16;
            i32x first;
            if (inverse == 0) {
                memset(q, 0, 16), memset(q + LINE_COLS * (planes - 1), 0, 16);
                continue;
            }
            sum[h] = i_sum(integers(x + k + 16 * h, inverse, planes, LINE_COLS, q, &first));
            high[h] = i_sum(first);
        }
        store_super_sums(super, planes, n, i, d, sum, high);
    }
}

static void float_acts(const float *x, size_t cols, size_t i, size_t n, float *panel) {
    if (n == 1) memcpy(panel, x, 4 * cols);
    else for (size_t k = 0; k < cols; k++) panel[k * n + i] = x[k];
}

static int acts(rvm_acts_kind kind, const float *x, size_t x_stride, size_t tokens, size_t cols,
                size_t token_begin, size_t token_end, void *to) {
    if (rvm_acts_refuses(kind, x, x_stride, tokens, cols, token_begin, token_end, to))
        return RVM_BAD_ARGUMENT;
    for (size_t t = token_begin; t < token_end; t++) {
        const size_t i = t % PANEL, t0 = t - i, n = panel_tokens(tokens, t0);
        const float *row = x + t * x_stride;
        if (kind == RVM_ACTS_FLOAT) float_acts(row, cols, i, n, acts_float(to, cols, t0));
        else if (kind == RVM_ACTS_8) quantised_acts(row, cols, 1, i, n, acts_panel(to, kind, cols, t0));
        else if (kind == RVM_ACTS_16) quantised_acts(row, cols, 2, i, n, acts_panel(to, kind, cols, t0));
        else if (kind == RVM_ACTS_SUPER_8) super_acts(row, cols, 1, i, n, acts_panel(to, kind, cols, t0));
        else super_acts(row, cols, 2, i, n, acts_panel(to, kind, cols, t0));
    }
    return RVM_OK;
}
