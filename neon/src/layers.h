/* This header is for layers.c, attend.c and demote.c. The build compiles each of these files once for each instruction
 * set (RVM_IMPL). */
#ifndef RVM_LAYERS_H
#define RVM_LAYERS_H

#include "lanes.h"
#include "rvm.h"

#define LAYERS_JOIN__(a, b) a##_##b
#define LAYERS_JOIN(a, b) LAYERS_JOIN__(a, b)
#define LAYER(name) LAYERS_JOIN(rvm_##name, RVM_IMPL)

#define REQUIRE(condition) \
    if (!(condition)) return RVM_BAD_ARGUMENT

/* attend.c and demote.c define these functions; layers.c puts them into the table rvm_layers. */
int LAYER(append)(const float *k, const float *v, size_t stride, const float *turn, size_t tokens, size_t head_dim,
                  size_t at, uint16_t *keys, uint16_t *values);
int LAYER(attend)(const rvm_attention *a);
int LAYER(merge)(const float *partial, size_t parts, size_t stride, size_t rows, size_t head_dim, float *out);
int LAYER(demote)(rvm_tier from, const uint8_t *src, rvm_tier to, uint8_t *dst, size_t n, size_t head_dim);

/* Compute y = scale * x, after RoPE has turned x by the angles of one position.  turn: cos [half], then sin [half]. */
static inline void rope_head(const float *restrict x, const float *restrict turn, size_t half, float scale,
                      float *restrict y) {
    const float *c = turn, *s = turn + half;
    SIMD()
    for (size_t i = 0; i < half; i++) {
        y[i] = scale * (x[i] * c[i] - x[i + half] * s[i]);
        y[i + half] = scale * (x[i] * s[i] + x[i + half] * c[i]);
    }
}

static inline void to_halves(const float *x, size_t n, uint16_t *y) {
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) l_store_half(y + i, l_load(x + i));
    for (; i < n; i++) y[i] = float_to_half(x[i]);
}

static inline void from_halves(const uint16_t *x, size_t n, float *y) {
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) l_store(y + i, l_load_half(x + i));
    for (; i < n; i++) y[i] = half_to_float(x[i]);
}

#endif
