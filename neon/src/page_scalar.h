/* This header computes attention over head-pages of codes directly from the formulas, one number at a time.
 * page_kernel.h must give the same bits. The codes of a row are: step, step * sum(x), then x [columns] as int16 (two
 * terms) or int8 (one term). */
#include "page_terms.h"

/* Convert the row x [n] to integers that one or two int8 terms (`terms`) can hold. Return the scale of the integers. */
static float integers(const float *x, size_t n, size_t terms, int16_t *to) {
    const float full = terms == 2 ? TWO_TERMS : ONE_TERM;
    uint32_t top = 0;
    memset(to, 0, n * sizeof *to);
    for (size_t k = 0; k < n; k++)
        if ((bits_of(x[k]) & 0x7fffffff) > top) top = bits_of(x[k]) & 0x7fffffff;
    const float most = float_of(top);
    if (top >= 0x7f800000) return NAN;
    if (most < 1e-30f) return 0;
    const float inverse = full / most;
    for (size_t k = 0; k < n; k++) to[k] = (int16_t)nearbyintf(x[k] * inverse);
    return most / full;
}

/* Return the code of a page in row r and column c. tiles: the address of the page's tiles, which have `columns`
   columns. */
static int code(const uint8_t *tiles, rvm_tier tier, size_t columns, size_t r, size_t c) {
    const uint8_t *block = tiles + (r / TILE * (columns / 32) + c / 32) * page_block(tier);
    const size_t k = c % 32;
    if (TIERS[tier].bits == 8) return block[k / 4 * 64 + 4 * (r % TILE) + k % 4] - 128;
    const int both = block[k % 16 / 4 * 64 + 4 * (r % TILE) + k % 4];
    return k < 16 ? both & 15 : both >> 4;
}

/* Return sum_k code(r, k) x[k] as a float. The sum over each of the two terms is an exact integer, and 254 * high + low
   is rounded once. */
static float integer_dot(const uint8_t *tiles, rvm_tier tier, size_t columns, size_t r, const int16_t *x) {
    int32_t high = 0, low = 0;
    for (size_t k = 0; k < columns; k++) {
        const int q = code(tiles, tier, columns, r, k);
        const int h = page_terms(tier) == 2 ? (int)nearbyintf((float)x[k] * (1 / 254.0f)) : 0;
        high += q * h;
        low += q * (x[k] - 254 * h);
    }
    return page_terms(tier) == 2 ? fmaf(254, (float)high, (float)low) : (float)low;
}

static int page_queries_scalar(int tier, const float *q, size_t rows, size_t head_dim, void *codes) {
    if (page_refuses(tier, q, rows, head_dim, codes)) return RVM_BAD_ARGUMENT;
    const size_t columns = key_columns(head_dim), size = row_codes((rvm_tier)tier, head_dim);
    for (size_t r = 0; r < rows; r++) {
        float x[RVM_MAX_HEAD_DIM] = {0};
        int16_t integer[RVM_MAX_HEAD_DIM];
        int32_t sum = 0;
        uint8_t *to = (uint8_t *)codes + r * size;
        memcpy(x, q + r * head_dim, head_dim * sizeof *x);
        const float step = integers(x, columns, page_terms((rvm_tier)tier), integer);
        for (size_t k = 0; k < columns; k++) sum += integer[k];
        const float bias = step * (float)sum;
        memcpy(to, &step, 4);
        memcpy(to + 4, &bias, 4);
        for (size_t k = 0; k < columns; k++) {
            if (page_terms((rvm_tier)tier) == 2) memcpy(to + 8 + 2 * k, integer + k, 2);
            else to[8 + k] = (uint8_t)integer[k];
        }
    }
    return RVM_OK;
}

static int page_scores_scalar(int tier, const uint8_t *page, const void *codes, size_t rows, size_t head_dim,
                              const uint8_t *soon, float *scores) {
    if (page_refuses(tier, page, rows, head_dim, codes) || !scores) return RVM_BAD_ARGUMENT;
    const size_t columns = key_columns(head_dim), size = row_codes((rvm_tier)tier, head_dim);
    (void)soon;
    for (size_t r = 0; r < rows; r++) {
        const uint8_t *from = (const uint8_t *)codes + r * size;
        int16_t x[RVM_MAX_HEAD_DIM];
        for (size_t k = 0; k < columns; k++) {
            if (page_terms((rvm_tier)tier) == 2) memcpy(x + k, from + 8 + 2 * k, 2);
            else x[k] = (int8_t)from[8 + k];
        }
        for (size_t t = 0; t < PAGE_TOKENS; t++) {
            const float s = float_at(page + k_scales_at(), RVM_F16, t) * act_f32(from);
            float y = s * integer_dot(page + keys_at((rvm_tier)tier), (rvm_tier)tier, columns, t, x);
            if (has_bias((rvm_tier)tier)) y = fmaf(float_at(page + k_biases_at(), RVM_F16, t), act_f32(from + 4), y);
            scores[r * PAGE_TOKENS + t] = y;
        }
    }
    return RVM_OK;
}

static int page_values_scalar(int tier, const uint8_t *page, const float *p, size_t rows, size_t head_dim,
                              const uint8_t *soon, float *sum, size_t stride) {
    if (page_refuses(tier, page, rows, head_dim, p) || !sum) return RVM_BAD_ARGUMENT;
    if (stride < sum_width(head_dim)) return RVM_BAD_ARGUMENT;
    const size_t width = value_rows(head_dim);
    (void)soon;
    for (size_t r = 0; r < rows; r++, p += PAGE_TOKENS, sum += stride) {
        float w[PAGE_TOKENS], *every = sum + width;
        int16_t x[PAGE_TOKENS];
        for (size_t t = 0; t < PAGE_TOKENS; t++)
            w[t] = p[t] * float_at(page + v_scales_at((rvm_tier)tier), RVM_F16, t);
        const float step = integers(w, PAGE_TOKENS, page_terms((rvm_tier)tier), x);
        for (size_t t = 0; has_bias((rvm_tier)tier) && t < PAGE_TOKENS; t++)
            every[t % TILE] = fmaf(p[t], float_at(page + v_biases_at(), RVM_F16, t), every[t % TILE]);
        for (size_t t = 0; has_bias((rvm_tier)tier) && step > 0 && t < PAGE_TOKENS; t++)
            every[t % TILE] = fmaf(MIDDLE, fmaf(-step, x[t], w[t]), every[t % TILE]);
        const uint8_t *values = page + values_at((rvm_tier)tier, head_dim);
        for (size_t d = 0; d < width; d++)
            sum[d] = fmaf(step, integer_dot(values, (rvm_tier)tier, PAGE_TOKENS, d, x), sum[d]);
    }
    return RVM_OK;
}
