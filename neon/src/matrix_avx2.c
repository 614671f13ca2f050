/* AVX2: vpmaddubsw multiplies unsigned by signed bytes and adds pairs in 16 bits, where they saturate.
 * 4 bits: eight pairs are at most 8 * 2 * 15 * 127 = 30480, which fits.
 * 8 bits: |w| times x with the sign of w; one pair is at most 2 * 128 * 127 = 32512, which fits. */
#include "matrix_256.h"

enum { OFFSET8 = 128, MAX_T = 4, STEP = 1, FLOAT_T = 4, WIDE_T = 1 };

INLINE void unpack(const uint8_t *p, uint32_t kind, size_t T, weights *w) {
    (void)T;
    unpack_256(p, kind, OFFSET8, w);
}

INLINE __m256i signed_pairs(__m256i w, __m256i x) {
    return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
}

INLINE i32x dot(i32x acc, const weights *w, const uint8_t *q, uint32_t kind) {
    const __m256i ones = _mm256_set1_epi16(1);
    i32x pairs = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    for (size_t j = 0; j < 8; j++) {
        const __m256i x = _mm256_set1_epi32(act_i32(q + 4 * j));
        if (kind == RVM_Q4) {
            pairs.a = _mm256_add_epi16(pairs.a, _mm256_maddubs_epi16(w->v[j].a, x));
            pairs.b = _mm256_add_epi16(pairs.b, _mm256_maddubs_epi16(w->v[j].b, x));
        } else {
            acc.a = _mm256_add_epi32(acc.a, _mm256_madd_epi16(signed_pairs(w->v[j].a, x), ones));
            acc.b = _mm256_add_epi32(acc.b, _mm256_madd_epi16(signed_pairs(w->v[j].b, x), ones));
        }
    }
    if (kind == RVM_Q8) return acc;
    acc.a = _mm256_add_epi32(acc.a, _mm256_madd_epi16(pairs.a, ones));
    acc.b = _mm256_add_epi32(acc.b, _mm256_madd_epi16(pairs.b, ones));
    return acc;
}

INLINE void dots(i32x *acc, const weights *w, const uint8_t *q, size_t m, uint32_t kind) {
    for (size_t t = 0; t < m; t++) acc[t] = dot(acc[t], w, q + 32 * t, kind);
}

#include "matrix_kernel.h"

const rvm_matmul rvm_matmul_avx2 = {.name = "avx2", .acts = acts, .matmul = matmul};
