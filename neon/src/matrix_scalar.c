/* The matrix kernels as their formulas say: the twin that every other implementation must equal. */
#include "matrix.h"

#include <math.h>

/* q[k] = round(x[k] / d), d = max |x| / 127.  With a NaN or an infinity d is NaN; when all are tiny d is 0.
 */
static float quantise_block(const float *x, int8_t *q) {
    uint32_t top = 0;
    for (size_t k = 0; k < 32; k++) {
        const uint32_t magnitude = float_bits(x[k]) & 0x7fffffff;
        if (magnitude > top) top = magnitude;
    }
    const float most = bits_float(top);
    memset(q, 0, 32);
    if (top >= 0x7f800000) return NAN;
    if (most < 1e-30f) return 0;
    const float inverse = 127.0f / most;
    for (size_t k = 0; k < 32; k++) q[k] = (int8_t)nearbyintf(x[k] * inverse);
    return most / 127.0f;
}

/* Token i of n: its 32 columns of one block. */
static void act_block(const float *x, size_t i, size_t n, uint8_t *block) {
    int8_t q[32];
    int32_t sum = 0;
    const float d = quantise_block(x, q);
    for (size_t k = 0; k < 32; k++) sum += q[k];
    const float bias = d * (float)sum;
    const int32_t zero[2] = {-8 * sum, -128 * sum};
    uint8_t *rest = block + 32 * n + 4 * i;
    memcpy(block + 32 * i, q, 32);
    memcpy(rest, &d, 4);
    memcpy(rest + 4 * n, &bias, 4);
    memcpy(rest + 8 * n, &zero[0], 4);
    memcpy(rest + 12 * n, &zero[1], 4);
}

static int acts_scalar(rvm_kind kind, const float *x, size_t x_stride, size_t tokens, size_t cols,
                       size_t token_begin, size_t token_end, void *acts) {
    if (rvm_acts_refuses(kind, x, x_stride, tokens, cols, token_begin, token_end, acts))
        return RVM_BAD_ARGUMENT;
    for (size_t t = token_begin; t < token_end; t++) {
        const size_t i = t % PANEL, t0 = t - i, n = panel_tokens(tokens, t0);
        const float *row = x + t * x_stride;
        if (is_quantised(kind)) {
            for (size_t k = 0; k < cols; k += 32)
                act_block(row + k, i, n, acts_block(acts, cols, t0, n, k / 32));
        } else {
            for (size_t k = 0; k < cols; k++) memcpy(acts_float(acts, cols, t0) + k * n + i, row + k, 4);
        }
    }
    return RVM_OK;
}

/* sum_k w[k] * q[k] for row r of a block of 32 columns */
static int32_t block_dot(const uint8_t *w, uint32_t kind, size_t r, const int8_t *q) {
    int32_t sum = 0;
    for (size_t k = 0; k < 32; k++) {
        if (kind == RVM_Q8) {
            sum += w[k / 4 * 64 + 4 * r + k % 4] * q[k];
        } else {
            const int both = w[k % 16 / 4 * 64 + 4 * r + k % 4];
            sum += (k < 16 ? both & 15 : both >> 4) * q[k];
        }
    }
    return sum;
}

/* Row r of a tile times token i of a panel of n. */
static float dot_quantised(const rvm_matrix_spec *spec, const uint8_t *p, size_t r, const uint8_t *act,
                           size_t i, size_t n) {
    float y = 0, s = 0, b = 0;
    for (size_t k = 0; k < spec->cols; k += 32, act += n * ACT_BYTES, p += block_bytes(spec->kind)) {
        if (k % spec->group == 0) {
            s = float_at(p, spec->scale_kind, r);
            b = spec->affine ? float_at(p, spec->scale_kind, TILE + r) : 0;
            p += scales_bytes(spec);
        }
        int32_t sum = block_dot(p, spec->kind, r, (const int8_t *)act + 32 * i);
        if (!spec->affine) sum += act_i32(act + (spec->kind == RVM_Q4 ? 40 : 44) * n + 4 * i);
        y = fmaf(s * float_at(act + 32 * n, RVM_F32, i), (float)sum, y);
        if (spec->affine) y = fmaf(b, float_at(act + 36 * n, RVM_F32, i), y);
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

static int matmul_scalar(const rvm_matrix *w, const void *acts, size_t tokens, size_t tile_begin,
                         size_t tile_end, float *y, size_t y_stride) {
    if (rvm_matmul_refuses(w, acts, tokens, tile_begin, tile_end, y, y_stride)) return RVM_BAD_ARGUMENT;
    const rvm_matrix_spec *spec = &w->spec;
    const int quantised = is_quantised(spec->kind);
    for (size_t t = 0; t < tokens; t++) {
        const size_t i = t % PANEL, t0 = t - i, n = panel_tokens(tokens, t0);
        for (size_t row = tile_begin * TILE; row < smaller(tile_end * TILE, spec->rows); row++) {
            const uint8_t *tile = tile_at(w, row / TILE);
            const float sum =
                quantised
                    ? dot_quantised(spec, tile, row % TILE, acts_block(acts, spec->cols, t0, n, 0), i, n)
                    : dot_float(spec, tile, row % TILE, acts_float(acts, spec->cols, t0), i, n);
            memcpy(y + t * y_stride + row, &sum, 4);
        }
    }
    return RVM_OK;
}

#include "page_scalar.h"

const rvm_matmul rvm_matmul_scalar = {
    .name = "scalar",
    .acts = acts_scalar,
    .matmul = matmul_scalar,
    .page_queries = page_queries_scalar,
    .page_scores = page_scores_scalar,
    .page_values = page_values_scalar,
};
