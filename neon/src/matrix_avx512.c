/* This file has the matrix kernels for AVX-512 without VNNI. These kernels work like the kernels of matrix_avx2.c, with
   512 bits at a time. */
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

/* The comments of matrix_avx2.c say how many products of each kind of weights fit into 16 bits. */
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

/* The kernel multiplies activations of 16 bits as words, as matrix_avx2.c does. */
#define WORDS 8

/* Store the integers a as words, and change the order 0, 1, 2, 3 of each four words to 0, 2, 1, 3. */
INLINE void i_words(uint8_t *to, i32x a) {
    const __m256i words = _mm512_cvtepi32_epi16(a);
    _mm256_storeu_si256((__m256i *)to, _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8));
}

/* Add the products of four columns, whose weights are the bytes of w, to acc for all m tokens. q: the activations of
   these columns for the first token, as 16-bit words */
INLINE void add_columns(i32x *acc, __m512i w, const uint8_t *q, const size_t m) {
    const __m512i even = _mm512_and_si512(w, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16(w, 8);
    UNROLL for (size_t t = 0; t < m; t++) {
        const __m512i x = _mm512_set1_epi32(act_i32(q + 64 * t)), y = _mm512_set1_epi32(act_i32(q + 64 * t + 4));
        acc[t] = _mm512_add_epi32(_mm512_add_epi32(acc[t], _mm512_madd_epi16(even, x)), _mm512_madd_epi16(odd, y));
    }
}

INLINE void dots_words(i32x *acc, const uint8_t *p, const uint8_t *q, const size_t m, const uint32_t kind) {
    const __m512i low = _mm512_set1_epi8(15);
    const size_t steps = kind == RVM_Q4 ? 4 : 8;
    UNROLL for (size_t j = 0; j < steps; j++) {
        const __m512i w = _mm512_loadu_si512(p + 64 * j);
        add_columns(acc, kind == RVM_Q4 ? _mm512_and_si512(w, low) : w, q + 8 * j, m);
        if (kind == RVM_Q4) add_columns(acc, _mm512_and_si512(_mm512_srli_epi16(w, 4), low), q + 32 + 8 * j, m);
    }
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
