/* This file computes the matrix kernels directly from their formulas. Every other implementation must give the same
   bits as this file. */
#include "matrix.h"

#include <math.h>

/* Quantise the activations of n columns of one token, and return their scale d. One plane: q[k] = round(x[k] / d), d =
 * max |x| / 127. Two planes: d = max |x| / 32385, and q[k] is the high part and low[k] the low part of round(x[k] / d).
 * d is NaN if any x is NaN or infinite, and 0 if all |x| < 1e-30. */
static float quantise(const float *x, size_t n, size_t planes, int8_t *q, int8_t *low) {
    uint32_t top = 0;
    for (size_t k = 0; k < n; k++) {
        const uint32_t magnitude = bits_of(x[k]) & 0x7fffffff;
        if (magnitude > top) top = magnitude;
    }
    const float most = float_of(top);
    memset(q, 0, n);
    memset(low, 0, n);
    if (top >= 0x7f800000) return NAN;
    if (most < 1e-30f) return 0;
    const float inverse = act_most(planes) / most;
    for (size_t k = 0; k < n; k++) {
        const float v = x[k] * inverse, high = nearbyintf(planes == 2 ? v * TO_HIGH : v);
        q[k] = (int8_t)high;
        if (planes == 2) low[k] = (int8_t)(nearbyintf(v) - HIGH * high);
    }
    return most / act_most(planes);
}

/* Return activation k of a block as an integer, joined from its planes. */
static int32_t whole(const int8_t *q, size_t planes, size_t k) {
    return planes == 2 ? HIGH * q[k] + q[32 + k] : q[k];
}

/* Quantise and store the activations of one block of 32 columns, for token i of a panel of n tokens. */
static void act_block(const float *x, size_t planes, size_t i, size_t n, uint8_t *block) {
    int8_t q[64];
    int32_t sum = 0;
    const float d = quantise(x, 32, planes, q, q + 32);
    for (size_t k = 0; k < 32; k++) sum += whole(q, planes, k);
    memcpy(block + 32 * planes * i, q, 32 * planes);
    store_sums(block + 32 * planes * n + 4 * i, n, d, sum);
}

/* Quantise and store the activations of 256 columns in the form for super-blocks, for token i of a panel of n tokens.
   */
static void act_super(const float *x, size_t planes, size_t i, size_t n, uint8_t *super) {
    int8_t q[2][SUPER_COLS];
    int32_t sum[16] = {0}, high[16] = {0};
    const float d = quantise(x, SUPER_COLS, planes, q[0], q[1]);
    for (size_t k = 0; k < SUPER_COLS; k++) {
        high[k / 16] += q[0][k];
        sum[k / 16] += planes == 2 ? HIGH * q[0][k] + q[1][k] : q[0][k];
    }
    for (size_t line = 0; line < SUPER_COLS / LINE_COLS; line++)
        for (size_t p = 0; p < planes; p++)
            memcpy(line_at(super, planes, n, line, i) + LINE_COLS * p, q[p] + LINE_COLS * line, LINE_COLS);
    store_super_sums(super, planes, n, i, d, sum, high);
}

static int acts_scalar(rvm_acts_kind kind, const float *x, size_t x_stride, size_t tokens, size_t cols,
                       size_t token_begin, size_t token_end, void *acts) {
    if (rvm_acts_refuses(kind, x, x_stride, tokens, cols, token_begin, token_end, acts))
        return RVM_BAD_ARGUMENT;
    for (size_t t = token_begin; t < token_end; t++) {
        const size_t i = t % PANEL, t0 = t - i, n = panel_tokens(tokens, t0);
        const size_t planes = act_planes(kind);
        const float *row = x + t * x_stride;
        uint8_t *panel = acts_panel(acts, kind, cols, t0);
        if (kind == RVM_ACTS_FLOAT) {
            for (size_t k = 0; k < cols; k++) memcpy(acts_float(acts, cols, t0) + k * n + i, row + k, 4);
        } else if (is_super_acts(kind)) {
            for (size_t k = 0; k < cols; k += SUPER_COLS, panel += n * super_act_bytes(planes))
                act_super(row + k, planes, i, n, panel);
        } else {
            for (size_t k = 0; k < cols; k += 32, panel += n * act_bytes(planes))
                act_block(row + k, planes, i, n, panel);
        }
    }
    return RVM_OK;
}

/* Return the sum over k of code[k] * q[k], for row r of a block of 32 columns. */
static int32_t block_dot(const uint8_t *w, uint32_t kind, size_t r, const int8_t *q, size_t planes) {
    int32_t sum = 0;
    for (size_t k = 0; k < 32; k++) sum += (int32_t)block_code(w, kind, r, k) * whole(q, planes, k);
    return sum;
}

/* Return y for row r of a tile of 4-bit or 8-bit weights and token i of a panel of n tokens. */
static float dot_quantised(const rvm_matrix_spec *spec, const uint8_t *p, size_t r, const uint8_t *act,
                           size_t planes, size_t i, size_t n) {
    float y = 0, s = 0, b = 0;
    for (size_t k = 0; k < spec->cols; k += 32, act += n * act_bytes(planes), p += block_bytes(spec->kind)) {
        const uint8_t *rest = act + 32 * planes * n;
        if (k % spec->group == 0) {
            s = float_at(p, spec->scale_kind, r);
            b = spec->affine ? float_at(p, spec->scale_kind, TILE + r) : 0;
            p += scales_bytes(spec);
        }
        int32_t sum = block_dot(p, spec->kind, r, (const int8_t *)act + 32 * planes * i, planes);
        if (!spec->affine) sum += act_i32(rest + (spec->kind == RVM_Q4 ? 8 : 12) * n + 4 * i);
        y = fmaf(s * float_at(rest, RVM_F32, i), (float)sum, y);
        if (spec->affine) y = fmaf(b, float_at(rest + 4 * n, RVM_F32, i), y);
    }
    return y;
}

/* Return the sum over 256 columns from k on of scale * code * q, or scale * (code - 32) * q in Q6_K.  q: a plane of token
 * i's activations */
static int32_t super_dot(const rvm_matrix_spec *spec, const uint8_t *tile, size_t k, size_t r, const uint8_t *super,
                         size_t planes, size_t plane, size_t i, size_t n) {
    const int six = spec->kind == RVM_Q6_K;
    int32_t sum = 0;
    for (size_t b = 0; b < 8; b++) {
        int f[2];
        const uint8_t *block = rvm_super_block(spec, tile, k + 32 * b, r, f);
        const int8_t *q = (const int8_t *)line_at(super, planes, n, b / 2, i) + LINE_COLS * plane + 32 * (b % 2);
        for (size_t c = 0; c < 32; c++)
            sum += f[six ? c / 16 : 0] * ((int)block_code(block, spec->kind, r, c) - (six ? 32 : 0)) * q[c];
    }
    return sum;
}

/* Return y for row r of a tile of super-blocks and one token. */
static float dot_super(const rvm_matrix_spec *spec, const uint8_t *tile, size_t r, const uint8_t *act, size_t planes,
                       size_t i, size_t n) {
    float y = 0;
    for (size_t k = 0; k < spec->cols; k += SUPER_COLS, act += n * super_act_bytes(planes)) {
        const float da = act_f32(super_d(act, planes, n, i)),
                    first = (float)super_dot(spec, tile, k, r, act, planes, 0, i, n);
        float d[2], lows = 0, dot = first;
        int f[2];
        rvm_super_floats(spec, tile, k, r, d);
        if (planes == 2) dot = fmaf(HIGH, first, (float)super_dot(spec, tile, k, r, act, planes, 1, i, n));
        y = fmaf(d[0] * da, dot, y);
        if (spec->kind == RVM_Q6_K) continue;
        for (size_t b = 0; b < 8; b++) {
            rvm_super_block(spec, tile, k + 32 * b, r, f);
            lows = fmaf((float)f[1], act_f32(super_sum(act, planes, n, i, b)), lows);
        }
        y = fmaf(d[1] * da, lows, y);
    }
    return y;
}

static float dot_float(const rvm_matrix_spec *spec, const uint8_t *tile, size_t r, const float *x, size_t i,
                       size_t n) {
    float y = 0;
    for (size_t k = 0; k < spec->cols; k++)
        y = fmaf(float_at(tile, spec->kind, k * TILE + r), x[k * n + i], y);
    return y;
}

static int matmul_scalar(const rvm_matrix *w, rvm_acts_kind kind, const void *acts, size_t tokens,
                         size_t tile_begin, size_t tile_end, float *y, size_t y_stride) {
    if (rvm_matmul_refuses(w, kind, acts, tokens, tile_begin, tile_end, y, y_stride)) return RVM_BAD_ARGUMENT;
    const rvm_matrix_spec *spec = &w->spec;
    const size_t planes = act_planes(kind);
    for (size_t t = 0; t < tokens; t++) {
        const size_t i = t % PANEL, t0 = t - i, n = panel_tokens(tokens, t0);
        for (size_t row = tile_begin * TILE; row < min_size(tile_end * TILE, spec->rows); row++) {
            const uint8_t *tile = tile_at(w, row / TILE);
            const float sum =
                kind == RVM_ACTS_FLOAT
                    ? dot_float(spec, tile, row % TILE, acts_float(acts, spec->cols, t0), i, n)
                : is_super_acts(kind)
                    ? dot_super(spec, tile, row % TILE, acts_panel(acts, kind, spec->cols, t0), planes, i, n)
                    : dot_quantised(spec, tile, row % TILE, acts_panel(acts, kind, spec->cols, t0), planes, i, n);
            memcpy(y + t * y_stride + row, &sum, 4);
        }
    }
    return RVM_OK;
}

#include "page_scalar.h"

static uint64_t peak_scalar(uint64_t rounds, int32_t *sum) {
    int8_t w[32], q[32];
    for (int k = 0; k < 32; k++) w[k] = (int8_t)(5 * k), q[k] = (int8_t)(11 * k);
    uint32_t total = 0;
    for (uint64_t i = 0; i < rounds; i++)
        for (int k = 0; k < 32; k++) total += (uint32_t)(w[k] * q[(k + i) % 32]);
    *sum = (int32_t)total;
    return 32 * rounds;
}

const rvm_matmul rvm_matmul_scalar = {
    .name = "scalar",
    .acts = acts_scalar,
    .matmul = matmul_scalar,
    .page_queries = page_queries_scalar,
    .page_scores = page_scores_scalar,
    .page_values = page_values_scalar,
    .peak = peak_scalar,
};
