/* AVX2: vpmaddubsw multiplies unsigned by signed bytes and adds pairs in 16 bits, where they saturate.
 * 4 bits: eight pairs are at most 8 * 2 * 15 * 127 = 30480, which fits.
 * 5 bits: four pairs, 4 * 2 * 31 * 127 = 31496; 6 bits: two, 2 * 2 * 63 * 127 = 32004.
 * 8 bits: |w| times x, where x gets the sign of w; one pair is at most 2 * 128 * 127 = 32512, which fits. */
#include "matrix_256.h"

enum { OFFSET8 = 128, MAX_T = 4, STEP = 4, FLOAT_T = 4, WIDE_T = 1 };

INLINE i32x add_pairs(i32x pairs, i32x w, __m256i x) {
    return (i32x){_mm256_add_epi16(pairs.a, _mm256_maddubs_epi16(w.a, x)),
                  _mm256_add_epi16(pairs.b, _mm256_maddubs_epi16(w.b, x))};
}

INLINE i32x add_fours(i32x acc, i32x pairs) {
    const __m256i ones = _mm256_set1_epi16(1);
    return (i32x){_mm256_add_epi32(acc.a, _mm256_madd_epi16(pairs.a, ones)),
                  _mm256_add_epi32(acc.b, _mm256_madd_epi16(pairs.b, ones))};
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

/* 16-bit products of four rows' columns 4j .. 4j + 3, two in each sum. They take half the time of two 8-bit terms. */
#define WORDS 3

INLINE void i_words(uint8_t *to, i32x x) {
    _mm256_storeu_si256((__m256i *)to, _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8));
}

/* Add the two sums of each row, rows 0 .. 3 and 4 .. 7, and return one sum per row in order. */
INLINE __m256i add_twos(__m256i low, __m256i high) {
    return _mm256_permute4x64_epi64(_mm256_hadd_epi32(low, high), 0xd8);
}

INLINE void dots_words(i32x *acc, const uint8_t *p, const uint8_t *q, size_t m) {
    __m256i sum[WORDS][4];
    UNROLL for (size_t r = 0; r < m; r++) UNROLL for (size_t i = 0; i < 4; i++) sum[r][i] = _mm256_setzero_si256();
    UNROLL for (size_t j = 0; j < 8; j++) {
        UNROLL for (size_t i = 0; i < 4; i++) {
            const __m256i w = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(p + 64 * j + 16 * i)));
            UNROLL for (size_t r = 0; r < m; r++) {
                int64_t x;
                memcpy(&x, q + 64 * r + 8 * j, 8);
                sum[r][i] = _mm256_add_epi32(sum[r][i], _mm256_madd_epi16(w, _mm256_set1_epi64x(x)));
            }
        }
    }
    UNROLL for (size_t r = 0; r < m; r++)
        acc[r] = i_add(acc[r], (i32x){add_twos(sum[r][0], sum[r][1]), add_twos(sum[r][2], sum[r][3])});
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
