/* This header computes attention over head-pages of codes (pages.h), with the vectors of matrix_kernel.h. The source
 * file of an instruction set includes this header after matrix_kernel.h. The compiler inlines all functions that have a
 * parameter `tier`, so `tier` is a constant in them.
 *
 * The kernels convert a row of queries to integers x with one float scale `step`. They convert a row of weights p_t s_t
 * in the same way; p_t is the softmax weight of token t, and s_t is the scale of the values of token t. Each x is
 * stored as `terms` int8 numbers: x = hi, or x = 254 hi + lo with |hi|, |lo| <= 127 (so no instruction saturates). The
 * kernels compute rows in chunks of n rows. With T = n * terms, the codes of a chunk are:
 *   step float [n], step * sum(x) float [n], -128 * sum(term) int32 [T], then for each 32 columns int8 [T][32]
 * A sum of up to 512 products with one term stays below 2^24, so its conversion to a float is exact. */
#include "page_terms.h"

#ifndef ODD_TOKENS /* ODD_TOKENS: 1 if the function `dots` accepts three tokens */
#define ODD_TOKENS 1
#endif

/* Return 1 if the rows for this tier are stored as 16-bit words instead of two int8 terms, in the same number of bytes.
 * The rows are words if the tier has codes of 8 bits and two terms, and if the instruction set has WORDS
 * (matrix_kernel.h). The sums are the same integers as with two terms. */
INLINE int as_words(const rvm_tier tier) { return WORDS && TIERS[tier].bits == 8 && page_terms(tier) == 2; }

/* Return the maximum number of rows in a chunk, which is the number of rows that fits into the registers. */
INLINE size_t most_rows(const rvm_tier tier) {
    if (as_words(tier)) return WORDS;
    return MAX_T / page_terms(tier) < 8 ? MAX_T / page_terms(tier) : 8;
}

INLINE size_t chunk_rows(size_t left, const rvm_tier tier) {
    if (left == 4 && most_rows(tier) == 3) return 2;
    if (left >= most_rows(tier)) return most_rows(tier);
    if (left >= 4) return 4;
    return left == 3 && !ODD_TOKENS && page_terms(tier) == 1 ? 2 : left;
}

INLINE f32x load_floats(const float *p) { return f_load((const uint8_t *)p, RVM_F32); }

/* Convert 16 numbers (half i of a block of 32) to their int8 terms, or to words, and store them. Add the terms to
 * `sums`. If rest is not NULL, add MIDDLE times the rounding errors of the 16 numbers to *rest. */
INLINE void code_half(f32x x, float step, float inverse, const rvm_tier tier, size_t i, uint8_t *to, i32x *sums,
                      f32x *rest) {
    const size_t terms = page_terms(tier);
    const f32x y = f_mul(x, f_all(inverse));
    if (as_words(tier)) {
        i_words(to + 2 * TILE * i, i_round(y));
        sums[0] = i_add(sums[0], i_round(y));
        return;
    }
    to += TILE * i;
    const i32x whole = i_round(y), high = terms == 2 ? i_round(f_mul(f_of(whole), f_all(1 / 254.0f))) : whole;
    if (rest) *rest = f_fma(f_all(MIDDLE), f_fma(f_all(-step), f_of(whole), x), *rest);
    i_bytes(to, high);
    sums[0] = i_add(sums[0], high);
    if (terms == 1) return;
    const i32x low = i_round(f_fma(f_of(high), f_all(-254), f_of(whole)));
    i_bytes(to + PAGE_BLOCK, low);
    sums[1] = i_add(sums[1], low);
}

/* Convert the row x [n] to codes, in blocks of 32 columns that are `apart` bytes apart. Return the scale `step` of the
 * codes, or 0 if all |x| < 1e-30. */
INLINE float code_row(const float *x, const size_t n, const rvm_tier tier, uint8_t *codes, size_t apart,
                      i32x *sums, f32x *rest) {
    const size_t terms = page_terms(tier);
    const float full = terms == 2 ? TWO_TERMS : ONE_TERM;
    i32x top = i_all(0);
    sums[0] = sums[1] = i_all(0);
    for (size_t k = 0; k < n; k += TILE) top = i_larger(top, load_floats(x + k));
    const uint32_t bits = (uint32_t)i_most(top);
    const float most = float_of(bits);
    if (bits >= 0x7f800000 || most < 1e-30f) {
        for (size_t k = 0; k < n; k += PAGE_BLOCK, codes += apart) memset(codes, 0, PAGE_BLOCK * terms);
        return bits >= 0x7f800000 ? NAN : 0;
    }
    const float step = most / full, inverse = full / most;
    for (size_t k = 0; k < n; k += PAGE_BLOCK, codes += apart)
        UNROLL for (size_t i = 0; i < 2; i++)
            code_half(load_floats(x + k + TILE * i), step, inverse, tier, i, codes, sums, rest);
    return step;
}

/* Return the dot product of row r as a float, joined from the dot products of the row's terms. */
INLINE f32x joined(const i32x *acc, size_t r, const rvm_tier tier) {
    if (as_words(tier)) return f_of(acc[r]);
    acc += page_terms(tier) * r;
    return page_terms(tier) == 2 ? f_fma(f_all(254), f_of(acc[0]), f_of(acc[1])) : f_of(acc[0]);
}

/* Return the kind of weights of the matrix kernels whose codes have as many bits as the tier's codes. */
INLINE uint32_t kind_of(const rvm_tier tier) { return TIERS[tier].bits == 4 ? RVM_Q4 : RVM_Q8; }

/* Prefetch one block of a page into the L1 cache. The attention kernels prefetch half a page or more in this way; the
 * matrix kernels prefetch weights with prefetch_ahead. */
INLINE void prefetch_near(const uint8_t *p, const rvm_tier tier) {
    for (size_t i = 0; i < page_block(tier); i += 64) __builtin_prefetch(p + i);
}

/* Return 1 if the kernel multiplies codes as the page stores them, which is the code plus 128. If the result is 1, the
 * sums acc start from -128 * sum(x). */
INLINE int is_offset(const rvm_tier tier) {
    return page_zero(tier) && (OFFSET8 == 0 || as_words(tier));
}

/* Compute acc[t] = the sum of code . q[t] over `blocks` blocks of a tile, for each term t of n rows. start: -128 times
 * the sum of each term */
INLINE void tile_dots(i32x *acc, const uint8_t *tile, size_t blocks, const uint8_t *q, const uint8_t *start,
                      const size_t n, const rvm_tier tier, const uint8_t *soon) {
    const size_t T = n * page_terms(tier), used = as_words(tier) ? n : T;
    const uint32_t kind = kind_of(tier);
    UNROLL for (size_t t = 0; t < used; t++) acc[t] = i_all(is_offset(tier) ? act_i32(start + 4 * t) : 0);
    for (size_t b = 0; b < blocks; b++, q += 32 * T, tile += page_block(tier)) {
        weights w;
        if (soon) prefetch_near(soon, tier), soon += page_block(tier);
        if (as_words(tier)) {
            dots_words(acc, tile, q, n, kind);
            continue;
        }
        unpack(tile, kind, T, &w);
        UNROLL for (size_t t = 0; t < T; t += STEP)
            dots(acc + t, &w, q + 32 * t, 32, T - t < STEP ? T - t : STEP, kind);
    }
}

/* Compute the scores of n rows of queries for the 64 tokens of a page. */
INLINE void score_chunk(const uint8_t *page, const uint8_t *codes, const size_t n, const rvm_tier tier,
                        size_t head_dim, const uint8_t *soon, float *scores) {
    const size_t T = n * page_terms(tier), tile = key_tile(tier, head_dim);
    const uint8_t *start = codes + 8 * n, *q = start + 4 * T;
    for (size_t i = 0; soon && i < keys_at(tier); i += 64) __builtin_prefetch(soon + i);
    for (size_t i = 0; i < PAGE_TOKENS / TILE; i++) {
        const size_t at = keys_at(tier) + i * tile;
        const uint8_t *scales = page + 2 * TILE * i;
        const f32x s = f_load(scales + k_scales_at(), RVM_F16), b = f_load(scales + k_biases_at(), RVM_F16);
        i32x acc[16];
        tile_dots(acc, page + at, key_columns(head_dim) / PAGE_BLOCK, q, start, n, tier, soon ? soon + at : NULL);
        UNROLL for (size_t r = 0; r < n; r++) {
            f32x y = f_mul(f_mul(s, f_all(act_f32(codes + 4 * r))), joined(acc, r, tier));
            if (has_bias(tier)) y = f_fma(b, f_all(act_f32(codes + 4 * (n + r))), y);
            f_store(scores + r * PAGE_TOKENS + TILE * i, y, TILE);
        }
    }
}

/* Return total + sum_t p_t b_t, in which b_t is the bias of the values of token t; each vector lane has a separate sum.
   */
INLINE f32x biases_of(const uint8_t *biases, const float *p, f32x total) {
    UNROLL for (size_t i = 0; i < PAGE_TOKENS; i += TILE)
        total = f_fma(load_floats(p + i), f_load(biases + 2 * i, RVM_F16), total);
    return total;
}

/* Convert the weights p_t s_t of one row to integers. Return the scale `step` of these integers. */
INLINE float weight_row(const uint8_t *page, const float *scale, const float *p, const size_t n,
                        const rvm_tier tier, uint8_t *codes, int32_t *start, float *every) {
    const size_t terms = page_terms(tier);
    i32x sums[2];
    f32x rest;
    float w[PAGE_TOKENS];
    UNROLL for (size_t i = 0; i < PAGE_TOKENS; i += TILE)
        f_store(w + i, f_mul(load_floats(p + i), load_floats(scale + i)), TILE);
    if (has_bias(tier)) rest = biases_of(page + v_biases_at(), p, load_floats(every));
    const float step =
        code_row(w, PAGE_TOKENS, tier, codes, 32 * n * terms, sums, has_bias(tier) ? &rest : NULL);
    if (has_bias(tier)) f_store(every, rest, TILE);
    if (is_offset(tier))
        for (size_t t = 0; t < (as_words(tier) ? 1 : terms); t++) start[t] = -128 * i_sum(sums[t]);
    return step;
}

/* Add the values of a page, weighted by the softmax weights p of n rows, to `sum`. */
INLINE void value_chunk(const uint8_t *page, const float *p, const size_t n, const rvm_tier tier, size_t head_dim,
                        const uint8_t *soon, float *sum, size_t stride) {
    const size_t terms = page_terms(tier), width = value_rows(head_dim);
    uint8_t codes[PAGE_TOKENS * 16];
    int32_t start[16];
    float scale[PAGE_TOKENS], step[8];
    for (size_t i = 0; i < PAGE_TOKENS; i += TILE)
        f_store(scale + i, f_load(page + v_scales_at(tier) + 2 * i, RVM_F16), TILE);
    for (size_t r = 0; r < n; r++)
        step[r] = weight_row(page, scale, p + r * PAGE_TOKENS, n, tier, codes + 32 * terms * r,
                             start + (as_words(tier) ? 1 : terms) * r, sum + r * stride + width);
    for (size_t i = 0; i < width / TILE; i++) {
        const size_t at = values_at(tier, head_dim) + i * value_tile(tier);
        i32x acc[16];
        const uint8_t *q = codes;
        __asm__ volatile("" : "+r"(q)); /* this line stops gcc from loading all codes first, for which it has too few registers */
        tile_dots(acc, page + at, PAGE_TOKENS / PAGE_BLOCK, q, (const uint8_t *)start, n, tier,
                  soon ? soon + at : NULL);
        UNROLL for (size_t r = 0; r < n; r++) {
            float *y = sum + r * stride + TILE * i;
            f_store(y, f_fma(f_all(step[r]), joined(acc, r, tier), load_floats(y)), TILE);
        }
    }
}

/* ---- all rows, in chunks ---- */

#define CHUNK(n, size, tier, call)                       \
    if (most_rows(tier) >= (size) && (n) == (size)) {    \
        enum { rows_now = size };                        \
        call;                                            \
    }

#define EACH_CHUNK(tier, call)                                          \
    for (size_t r = 0, n; r < rows; r += n, soon = NULL) {              \
        n = chunk_rows(rows - r, tier);                                 \
        CHUNK(n, 8, tier, call)                                         \
        CHUNK(n, 4, tier, call)                                         \
        CHUNK(n, 3, tier, call)                                         \
        CHUNK(n, 2, tier, call)                                         \
        CHUNK(n, 1, tier, call)                                         \
    }

/* Define the functions scores_TIER and values_TIER for each tier with codes. In each function the tier is a constant.
   */
#define TIER_FUNCTIONS(name, bits, rotated, terms)                                                               \
    static void scores_##name(const uint8_t *page, const uint8_t *codes, size_t rows, size_t head_dim,           \
                              const uint8_t *soon, float *scores) {                                              \
        const size_t size = row_codes(RVM_##name, head_dim);                                                     \
        EACH_CHUNK(RVM_##name, score_chunk(page, codes + r * size, rows_now, RVM_##name, head_dim, soon,         \
                                           scores + r * PAGE_TOKENS))                                                 \
    }                                                                                                            \
    static void values_##name(const uint8_t *page, const float *p, size_t rows, size_t head_dim,                 \
                              const uint8_t *soon, float *sum, size_t stride) {                                  \
        EACH_CHUNK(RVM_##name, value_chunk(page, p + r * PAGE_TOKENS, rows_now, RVM_##name, head_dim, soon,      \
                                           sum + r * stride, stride))                                                 \
    }

RVM_CODE_TIERS(TIER_FUNCTIONS)

/* Convert row i of a chunk of n rows of queries to codes. */
INLINE void query_row(const float *q, size_t head_dim, size_t i, size_t n, const rvm_tier tier, uint8_t *codes) {
    const size_t terms = page_terms(tier), T = n * terms, columns = key_columns(head_dim);
    float x[RVM_MAX_HEAD_DIM];
    int32_t sum[2], start[2];
    i32x sums[2];
    memcpy(x, q, head_dim * sizeof *x);
    memset(x + head_dim, 0, (columns - head_dim) * sizeof *x);
    uint8_t *to = codes + n * 8 + T * 4 + 32 * terms * i;
    const float step = code_row(x, columns, tier, to, 32 * T, sums, NULL);
    const size_t used = as_words(tier) ? 1 : terms;
    for (size_t t = 0; t < used; t++) sum[t] = i_sum(sums[t]), start[t] = -128 * sum[t];
    const float bias = step * (float)(used == 2 ? 254 * sum[0] + sum[1] : sum[0]);
    memcpy(codes + 4 * i, &step, 4);
    memcpy(codes + 4 * (n + i), &bias, 4);
    memcpy(codes + 8 * n + 4 * used * i, start, 4 * used);
}

#define TIER_QUERIES(name, bits, rotated, terms)                                                              \
    static void queries_##name(const float *q, size_t rows, size_t head_dim, uint8_t *codes) {                \
        const size_t size = row_codes(RVM_##name, head_dim);                                                  \
        for (size_t r = 0, n; r < rows; r += n) {                                                             \
            n = chunk_rows(rows - r, RVM_##name);                                                             \
            for (size_t i = 0; i < n; i++)                                                                    \
                query_row(q + (r + i) * head_dim, head_dim, i, n, RVM_##name, codes + r * size);              \
        }                                                                                                     \
    }

RVM_CODE_TIERS(TIER_QUERIES)

#define TIER_CODES(name, bits, rotated, terms) \
    case RVM_##name: queries_##name(q, rows, head_dim, codes); break;

static int page_queries(int tier, const float *q, size_t rows, size_t head_dim, void *codes) {
    if (page_refuses(tier, q, rows, head_dim, codes)) return RVM_BAD_ARGUMENT;
    switch (tier) { RVM_CODE_TIERS(TIER_CODES) }
    return RVM_OK;
}

#define TIER_SCORES(name, bits, rotated, terms) \
    case RVM_##name: scores_##name(page, codes, rows, head_dim, soon, scores); break;
#define TIER_VALUES(name, bits, rotated, terms) \
    case RVM_##name: values_##name(page, p, rows, head_dim, soon, sum, stride); break;

static int page_scores(int tier, const uint8_t *page, const void *codes, size_t rows, size_t head_dim,
                       const uint8_t *soon, float *scores) {
    if (page_refuses(tier, page, rows, head_dim, codes) || !scores) return RVM_BAD_ARGUMENT;
    switch (tier) { RVM_CODE_TIERS(TIER_SCORES) }
    return RVM_OK;
}

static int page_values(int tier, const uint8_t *page, const float *p, size_t rows, size_t head_dim,
                       const uint8_t *soon, float *sum, size_t stride) {
    if (page_refuses(tier, page, rows, head_dim, p) || !sum) return RVM_BAD_ARGUMENT;
    if (stride < sum_width(head_dim)) return RVM_BAD_ARGUMENT;
    switch (tier) { RVM_CODE_TIERS(TIER_VALUES) }
    return RVM_OK;
}
