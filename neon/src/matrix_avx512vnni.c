/* AVX-512 with VNNI: vpdpbusd multiplies unsigned weights by signed activations, four columns at a time. */
#include "matrix_512.h"

enum { OFFSET8 = 0 };

INLINE void unpack(const uint8_t *p, uint32_t kind, weights *w) {
    const __m512i low = _mm512_set1_epi8(15);
    for (size_t j = 0; j < 4; j++) {
        if (kind == RVM_Q4) {
            const __m512i both = _mm512_loadu_si512(p + 64 * j);
            w->v[j] = _mm512_and_si512(both, low);
            w->v[4 + j] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        } else {
            w->v[j] = _mm512_loadu_si512(p + 64 * j);
            w->v[4 + j] = _mm512_loadu_si512(p + 256 + 64 * j);
        }
    }
}

INLINE i32x dot(i32x acc, const weights *w, const uint8_t *q, uint32_t kind) {
    (void)kind;
    for (size_t j = 0; j < 8; j++) acc = _mm512_dpbusd_epi32(acc, w->v[j], spread_q(q + 4 * j));
    return acc;
}

#include "matrix_kernel.h"

const rvm_matmul rvm_matmul_avx512vnni = {.name = "avx512vnni", .acts = acts, .matmul = matmul};
