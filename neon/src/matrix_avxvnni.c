/* AVX-VNNI: vpdpbusd multiplies unsigned weights by signed activations, 256 bits at a time. */
#include "matrix_256.h"

enum { OFFSET8 = 0, MAX_T = 4, STEP = 4, FLOAT_T = 4, WIDE_T = 1 };

INLINE i32x add_dot(i32x acc, i32x w, __m256i x) {
    return (i32x){_mm256_dpbusd_avx_epi32(acc.a, w.a, x), _mm256_dpbusd_avx_epi32(acc.b, w.b, x)};
}

INLINE void dots_part(i32x *acc, const weights *w, const uint8_t *q, size_t apart, size_t m, uint32_t kind, size_t from,
                      size_t n) {
    UNROLL for (size_t j = from; j < from + n; j++) {
        const i32x v = bytes_super(w, j, kind);
        UNROLL for (size_t t = 0; t < m; t++) acc[t] = add_dot(acc[t], v, four(q + apart * t + 4 * j));
    }
}

INLINE void dots(i32x *acc, const weights *w, const uint8_t *q, size_t apart, size_t m, uint32_t kind) {
    if (is_super(kind)) {
        dots_part(acc, w, q, apart, m, kind, 0, 8);
        return;
    }
    UNROLL for (size_t j = 0; j < 8; j++) {
        i32x high, v = kind == RVM_Q8 ? bytes_q8(w, j, OFFSET8) : bytes_q4(w, j, &high);
        UNROLL for (size_t t = 0; t < m; t++) acc[t] = add_dot(acc[t], v, four(q + apart * t + 4 * j));
        if (kind == RVM_Q8) continue;
        UNROLL for (size_t t = 0; t < m; t++) acc[t] = add_dot(acc[t], high, four(q + apart * t + 16 + 4 * j));
        if (j == 3) return;
    }
}

#include "matrix_kernel.h"
#include "page_kernel.h"

const rvm_matmul rvm_matmul_avxvnni = {
    .name = "avxvnni",
    .acts = acts,
    .matmul = matmul,
    .page_queries = page_queries,
    .page_scores = page_scores,
    .page_values = page_values,
    .peak = peak,
};
