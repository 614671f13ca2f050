/* AVX-VNNI: vpdpbusd in 256 bits, unsigned weights times signed activations. */
#include "matrix_256.h"

enum { OFFSET8 = 0, MAX_T = 4, STEP = 1, FLOAT_T = 4, WIDE_T = 1 };

INLINE void unpack(const uint8_t *p, uint32_t kind, size_t T, weights *w) {
    (void)T;
    unpack_256(p, kind, OFFSET8, w);
}

INLINE i32x dot(i32x acc, const weights *w, const uint8_t *q, uint32_t kind) {
    (void)kind;
    for (size_t j = 0; j < 8; j++) {
        const __m256i x = _mm256_set1_epi32(act_i32(q + 4 * j));
        acc.a = _mm256_dpbusd_avx_epi32(acc.a, w->v[j].a, x);
        acc.b = _mm256_dpbusd_avx_epi32(acc.b, w->v[j].b, x);
    }
    return acc;
}

INLINE void dots(i32x *acc, const weights *w, const uint8_t *q, size_t m, uint32_t kind) {
    for (size_t t = 0; t < m; t++) acc[t] = dot(acc[t], w, q + 32 * t, kind);
}

#include "matrix_kernel.h"

const rvm_matmul rvm_matmul_avxvnni = {.name = "avxvnni", .acts = acts, .matmul = matmul};
