/* The kernels for AVX-512 without VNNI work like matrix_avx2.c, with 512 bits at a time. */
#include "matrix_512.h"

enum { OFFSET8 = 128, MAX_T = 16, STEP = 1, FLOAT_T = 16, WIDE_T = 4 };

INLINE void unpack(const uint8_t *p, uint32_t kind, size_t m, weights *w) {
    (void)m;
    unpack_512(p, kind, OFFSET8, w);
}

INLINE __m512i signed_pairs(__m512i w, __m512i x) {
    const __m512i same_sign = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
    return _mm512_maddubs_epi16(_mm512_abs_epi8(w), same_sign);
}

/* matrix_avx2.c says how many products of a kind fit into 16 bits. */
INLINE i32x dot(i32x acc, const weights *w, const uint8_t *q, uint32_t kind, size_t from, size_t n) {
    const __m512i ones = _mm512_set1_epi16(1);
    const size_t fit = kind == RVM_Q8 ? 1 : kind == RVM_Q6_K ? 2 : kind == RVM_Q5_K ? 4 : 8;
    UNROLL for (size_t j = from; j < from + n; j += fit) {
        __m512i pairs = _mm512_setzero_si512();
        UNROLL for (size_t k = j; k < j + fit; k++) {
            const __m512i x = _mm512_set1_epi32(act_i32(q + 4 * k));
            pairs = kind == RVM_Q8 ? signed_pairs(w->v[k], x) : _mm512_add_epi16(pairs, _mm512_maddubs_epi16(w->v[k], x));
        }
        acc = _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, ones));
    }
    return acc;
}

INLINE void dots_part(i32x *acc, const weights *w, const uint8_t *q, size_t apart, size_t m, uint32_t kind, size_t from,
                      size_t n) {
    UNROLL for (size_t t = 0; t < m; t++) acc[t] = dot(acc[t], w, q + apart * t, kind, from, n);
}

INLINE void dots(i32x *acc, const weights *w, const uint8_t *q, size_t apart, size_t m, uint32_t kind) {
    dots_part(acc, w, q, apart, m, kind, 0, 8);
}

/* 16-bit products, as in matrix_avx2.c. */
#define WORDS 8

INLINE void i_words(uint8_t *to, i32x a) { _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(a)); }

/* Add the two sums of each row, rows 0 .. 7 and 8 .. 15, and return one sum per row. */
INLINE __m512i add_twos(__m512i low, __m512i high) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_permutex2var_epi32(low, even, high), _mm512_permutex2var_epi32(low, odd, high));
}

INLINE void dots_words(i32x *acc, const uint8_t *p, const uint8_t *q, size_t m) {
    __m512i sum[WORDS][2];
    UNROLL for (size_t r = 0; r < m; r++) UNROLL for (size_t i = 0; i < 2; i++) sum[r][i] = _mm512_setzero_si512();
    UNROLL for (size_t j = 0; j < 8; j++) {
        UNROLL for (size_t i = 0; i < 2; i++) {
            const __m512i w = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(p + 64 * j + 32 * i)));
            UNROLL for (size_t r = 0; r < m; r++) {
                int64_t x;
                memcpy(&x, q + 64 * r + 8 * j, 8);
                sum[r][i] = _mm512_add_epi32(sum[r][i], _mm512_madd_epi16(w, _mm512_set1_epi64(x)));
            }
        }
    }
    UNROLL for (size_t r = 0; r < m; r++) acc[r] = _mm512_add_epi32(acc[r], add_twos(sum[r][0], sum[r][1]));
}

#include "matrix_kernel.h"
#include "page_kernel.h"

const rvm_matmul rvm_matmul_avx512 = {
    .name = "avx512",
    .acts = acts,
    .matmul = matmul,
    .page_queries = page_queries,
    .page_scores = page_scores,
    .page_values = page_values,
    .peak = peak,
};
