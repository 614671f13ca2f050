/* This header has the vectors of matrix_kernel.h for AVX-512: one register holds 16 rows. The file that includes this
 * header defines how bytes are multiplied (dots, OFFSET8). */
#include "matrix_x86.h"

#include <math.h>

typedef __m512 f32x;
typedef __m512i i32x;
typedef struct {
    __m512i v[8]; /* weights: v[j] has the columns 4j .. 4j + 3 of 16 rows */
} weights;

INLINE f32x f_zero(void) { return _mm512_setzero_ps(); }
INLINE f32x f_all(float x) { return _mm512_set1_ps(x); }
INLINE f32x f_mul(f32x a, f32x b) { return _mm512_mul_ps(a, b); }
INLINE f32x f_fma(f32x a, f32x b, f32x c) { return _mm512_fmadd_ps(a, b, c); }
INLINE f32x f_of(i32x a) { return _mm512_cvtepi32_ps(a); }
INLINE i32x i_all(int32_t x) { return _mm512_set1_epi32(x); }
INLINE i32x i_join(i32x high, i32x low) {
    return _mm512_add_epi32(_mm512_mullo_epi32(high, _mm512_set1_epi32(HIGH)), low);
}

INLINE f32x f_load(const uint8_t *p, uint32_t kind) {
    if (kind == RVM_F32) return _mm512_loadu_ps(p);
    const __m256i h = _mm256_loadu_si256((const __m256i *)p);
    if (kind == RVM_F16) return _mm512_cvtph_ps(h);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

INLINE i32x i_load8(const uint8_t *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }

INLINE void f_store(float *y, f32x a, size_t n) {
    if (n >= TILE) _mm512_storeu_ps(y, a);
    else _mm512_mask_storeu_ps(y, (__mmask16)((1u << n) - 1), a);
}

/* These functions round to nearest (ties to even), store integers as bytes, and return the sum or the largest magnitude
   of all lanes (matrix_kernel.h). */
INLINE i32x i_round(f32x a) { return _mm512_cvtps_epi32(a); }
INLINE i32x i_add(i32x a, i32x b) { return _mm512_add_epi32(a, b); }
INLINE i32x i_mla(i32x a, i32x b, i32x c) { return _mm512_add_epi32(a, _mm512_mullo_epi32(b, c)); }
INLINE i32x i_larger(i32x top, f32x a) {
    return _mm512_max_epi32(top, _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)));
}
INLINE void i_bytes(uint8_t *to, i32x a) { _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(a)); }
INLINE int32_t i_sum(i32x a) { return _mm512_reduce_add_epi32(a); }
INLINE int32_t i_most(i32x a) { return _mm512_reduce_max_epi32(a); }

/* Return v | (x & mask). */
INLINE __m512i with(__m512i v, __m512i x, __m512i mask) { return _mm512_or_si512(v, _mm512_and_si512(x, mask)); }

/* Add the fifth bits of the codes of Q5_K at p, which are stored after the low nibbles, to w. */
INLINE void unpack_fifth(const uint8_t *p, weights *w) {
    const __m512i x = _mm512_loadu_si512(p), bit = _mm512_set1_epi8(16);
    w->v[0] = with(w->v[0], _mm512_slli_epi16(x, 4), bit);
    w->v[1] = with(w->v[1], _mm512_slli_epi16(x, 3), bit);
    w->v[2] = with(w->v[2], _mm512_slli_epi16(x, 2), bit);
    w->v[3] = with(w->v[3], _mm512_slli_epi16(x, 1), bit);
    w->v[4] = with(w->v[4], x, bit);
    w->v[5] = with(w->v[5], _mm512_srli_epi16(x, 1), bit);
    w->v[6] = with(w->v[6], _mm512_srli_epi16(x, 2), bit);
    w->v[7] = with(w->v[7], _mm512_srli_epi16(x, 3), bit);
}

/* Add the fifth and sixth bits of the codes of Q6_K at p to w. */
INLINE void unpack_two(const uint8_t *p, weights *w) {
    const __m512i bits = _mm512_set1_epi8(48);
    UNROLL for (size_t h = 0; h < 2; h++) {
        const __m512i x = _mm512_loadu_si512(p + 64 * h);
        __m512i *v = w->v + 4 * h;
        v[0] = with(v[0], _mm512_slli_epi16(x, 4), bits);
        v[1] = with(v[1], _mm512_slli_epi16(x, 2), bits);
        v[2] = with(v[2], x, bits);
        v[3] = with(v[3], _mm512_srli_epi16(x, 2), bits);
    }
}

/* Unpack the codes of a block into bytes. flip: 0, or 128 to make the stored unsigned 8-bit weights signed */
INLINE void unpack_512(const uint8_t *p, uint32_t kind, int flip, weights *w) {
    const __m512i low = _mm512_set1_epi8(15), top = _mm512_set1_epi8((char)flip);
    UNROLL for (size_t j = 0; j < 8; j++) {
        if (kind == RVM_Q8) {
            w->v[j] = _mm512_xor_si512(_mm512_loadu_si512(p + 64 * j), top);
        } else if (j < 4) {
            __m512i both = _mm512_loadu_si512(p + 64 * j);
            w->v[j] = _mm512_and_si512(both, low);
            w->v[4 + j] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        }
    }
    if (kind == RVM_Q5_K) unpack_fifth(p + 256, w);
    if (kind == RVM_Q6_K) unpack_two(p + 256, w);
}
