/* AVX2: vpmaddubsw multiplies unsigned by signed bytes and adds pairs in 16 bits, where they saturate.
 * 4 bits: eight pairs are at most 8 * 2 * 15 * 127 = 30480, which fits.
 * 5 bits: four pairs, 4 * 2 * 31 * 127 = 31496; 6 bits: two, 2 * 2 * 63 * 127 = 32004.
 * 8 bits: |w| times x, where x gets the sign of w; one pair is at most 2 * 128 * 127 = 32512, which fits. */
#include "matrix_256.h"

enum { OFFSET8 = 128, MAX_T = 4, STEP = 4, FLOAT_T = 4, WIDE_T = 1 };

/* Return both halves of a sum, and hide from the compiler how they were computed. If gcc saw how the halves were
 * computed, gcc would add the products as a tree, which needs more registers than AVX2 has: with such a tree the kernel
 * takes 1.3 times as long (matmul_bench, 8 tokens on a Zen 3). */
INLINE i32x in_order(__m256i a, __m256i b) {
    __asm__("" : "+x"(a), "+x"(b));
    return (i32x){a, b};
}

INLINE i32x add_pairs(i32x pairs, i32x w, __m256i x) {
    return in_order(_mm256_add_epi16(pairs.a, _mm256_maddubs_epi16(w.a, x)),
                    _mm256_add_epi16(pairs.b, _mm256_maddubs_epi16(w.b, x)));
}

INLINE i32x add_fours(i32x acc, i32x pairs) {
    const __m256i ones = _mm256_set1_epi16(1);
    return in_order(_mm256_add_epi32(acc.a, _mm256_madd_epi16(pairs.a, ones)),
                    _mm256_add_epi32(acc.b, _mm256_madd_epi16(pairs.b, ones)));
}

INLINE void dots_q4(i32x *acc, const weights *w, const uint8_t *q, size_t apart, size_t m) {
    i32x pairs[STEP];
    UNROLL for (size_t t = 0; t < m; t++) pairs[t] = i_all(0);
    UNROLL for (size_t j = 0; j < 4; j++) {
        i32x high, low = bytes_q4(w, j, &high);
        UNROLL for (size_t t = 0; t < m; t++) pairs[t] = add_pairs(pairs[t], low, four(q + apart * t + 4 * j));
        UNROLL for (size_t t = 0; t < m; t++) pairs[t] =
            add_pairs(pairs[t], high, four(q + apart * t + 16 + 4 * j));
    }
    UNROLL for (size_t t = 0; t < m; t++) acc[t] = add_fours(acc[t], pairs[t]);
}

INLINE void dots_q8(i32x *acc, const weights *w, const uint8_t *q, size_t apart, size_t m) {
    UNROLL for (size_t j = 0; j < 8; j++) {
        const i32x v = bytes_q8(w, j, OFFSET8), size = {_mm256_abs_epi8(v.a), _mm256_abs_epi8(v.b)};
        UNROLL for (size_t t = 0; t < m; t++) {
            const __m256i x = four(q + apart * t + 4 * j);
            const i32x pairs = {_mm256_maddubs_epi16(size.a, _mm256_sign_epi8(x, v.a)),
                                _mm256_maddubs_epi16(size.b, _mm256_sign_epi8(x, v.b))};
            acc[t] = add_fours(acc[t], pairs);
        }
    }
}

INLINE void dots_part(i32x *acc, const weights *w, const uint8_t *q, size_t apart, size_t m, uint32_t kind, size_t from,
                      size_t n) {
    const size_t fit = kind == RVM_Q6_K ? 2 : 4;
    UNROLL for (size_t j = from; j < from + n; j += fit) {
        i32x pairs[STEP];
        UNROLL for (size_t t = 0; t < m; t++) pairs[t] = i_all(0);
        UNROLL for (size_t k = j; k < j + fit; k++) {
            const i32x v = bytes_super(w, k, kind);
            UNROLL for (size_t t = 0; t < m; t++) pairs[t] = add_pairs(pairs[t], v, four(q + apart * t + 4 * k));
        }
        UNROLL for (size_t t = 0; t < m; t++) acc[t] = add_fours(acc[t], pairs[t]);
    }
}

INLINE void dots(i32x *acc, const weights *w, const uint8_t *q, size_t apart, size_t m, uint32_t kind) {
    if (kind == RVM_Q4) dots_q4(acc, w, q, apart, m);
    else if (is_super(kind)) dots_part(acc, w, q, apart, m, kind, 0, 8);
    else dots_q8(acc, w, q, apart, m);
}

/* vpmaddwd multiplies 2 columns of 8 rows by activations of 16 bits and adds the two products. vpmaddubsw multiplies as
 * many numbers by only one of the two planes, its 16-bit sums must be added again, and 8-bit weights need extra work
 * for their sign. The bytes 0 and 2 of a row's four columns are one pair, and the bytes 1 and 3 are the other pair, so
 * a mask unpacks the first pair and a shift unpacks the second pair. i_words stores each four activations in the same
 * order: 0, 2, 1, 3. */
#define WORDS 4

INLINE void i_words(uint8_t *to, i32x x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    _mm256_storeu_si256((__m256i *)to, _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8));
}

/* Return acc plus the products of one pair of columns. */
INLINE i32x add_words(i32x acc, i32x w, __m256i x) {
    return in_order(_mm256_add_epi32(acc.a, _mm256_madd_epi16(w.a, x)),
                    _mm256_add_epi32(acc.b, _mm256_madd_epi16(w.b, x)));
}

/* Add the products of four columns, whose weights are the bytes of w, to acc for all m tokens. q: the activations of
   these columns for the first token, as 16-bit words */
INLINE void add_columns(i32x *acc, i32x w, const uint8_t *q, const size_t m) {
    const __m256i low = _mm256_set1_epi16(255);
    const i32x even = {_mm256_and_si256(w.a, low), _mm256_and_si256(w.b, low)};
    const i32x odd = {_mm256_srli_epi16(w.a, 8), _mm256_srli_epi16(w.b, 8)};
    UNROLL for (size_t t = 0; t < m; t++) acc[t] = add_words(acc[t], even, four(q + 64 * t));
    UNROLL for (size_t t = 0; t < m; t++) acc[t] = add_words(acc[t], odd, four(q + 64 * t + 4));
}

INLINE void dots_words(i32x *acc, const uint8_t *p, const uint8_t *q, const size_t m, const uint32_t kind) {
    const weights w = {p};
    const size_t steps = kind == RVM_Q4 ? 4 : 8;
    UNROLL for (size_t j = 0; j < steps; j++) {
        i32x high;
        add_columns(acc, kind == RVM_Q4 ? bytes_q4(&w, j, &high) : bytes_q8(&w, j, 0), q + 8 * j, m);
        if (kind == RVM_Q4) add_columns(acc, high, q + 32 + 8 * j, m);
    }
}

#include "matrix_kernel.h"
#include "page_kernel.h"

const rvm_matmul rvm_matmul_avx2 = {
    .name = "avx2",
    .acts = acts,
    .matmul = matmul,
    .page_queries = page_queries,
    .page_scores = page_scores,
    .page_values = page_values,
    .peak = peak,
};
