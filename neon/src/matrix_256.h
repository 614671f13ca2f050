/* This header has the vectors of matrix_kernel.h for AVX2: two registers hold 16 rows. The file that includes this
 * header defines how bytes are multiplied (dots, OFFSET8). */
#include "matrix_x86.h"

#include <math.h>

typedef struct {
    __m256 a, b;
} f32x;
typedef struct {
    __m256i a, b;
} i32x;
typedef struct {
    const uint8_t *p; /* weights: AVX2 has too few registers for a whole block, so each step of `dots` unpacks its own codes */
} weights;

INLINE f32x f_zero(void) { return (f32x){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE f32x f_all(float x) { return (f32x){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE f32x f_mul(f32x x, f32x y) { return (f32x){_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE f32x f_of(i32x x) { return (f32x){_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE i32x i_all(int32_t x) { return (i32x){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE i32x i_join(i32x high, i32x low) {
    const __m256i times = _mm256_set1_epi32(HIGH);
    return (i32x){_mm256_add_epi32(_mm256_mullo_epi32(high.a, times), low.a),
                  _mm256_add_epi32(_mm256_mullo_epi32(high.b, times), low.b)};
}

INLINE f32x f_fma(f32x x, f32x y, f32x z) {
    return (f32x){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}

INLINE __m256 load8(const uint8_t *p, uint32_t kind) {
    if (kind == RVM_F32) return _mm256_loadu_ps((const float *)(const void *)p);
    const __m128i h = _mm_loadu_si128((const __m128i *)p);
    if (kind == RVM_F16) return _mm256_cvtph_ps(h);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

INLINE f32x f_load(const uint8_t *p, uint32_t kind) {
    return (f32x){load8(p, kind), load8(p + 8 * float_size(kind), kind)};
}

INLINE i32x i_load8(const uint8_t *p) {
    const __m128i x = _mm_loadu_si128((const __m128i *)p);
    return (i32x){_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))};
}

INLINE void f_store(float *y, f32x x, size_t n) {
    float all[TILE];
    if (n >= TILE) {
        _mm256_storeu_ps(y, x.a);
        _mm256_storeu_ps(y + 8, x.b);
    } else {
        _mm256_storeu_ps(all, x.a);
        _mm256_storeu_ps(all + 8, x.b);
        memcpy(y, all, n * sizeof *y);
    }
}

INLINE __m256i bytes_at(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }

INLINE void unpack(const uint8_t *p, uint32_t kind, size_t m, weights *w) {
    (void)kind, (void)m;
    w->p = p;
}

/* Return the columns 4j .. 4j + 3 of 8-bit weights. flip: 0, or 128 to make the stored unsigned weights signed */
INLINE i32x bytes_q8(const weights *w, size_t j, int flip) {
    const __m256i top = _mm256_set1_epi8((char)flip);
    return (i32x){_mm256_xor_si256(bytes_at(w->p + 64 * j), top),
                  _mm256_xor_si256(bytes_at(w->p + 64 * j + 32), top)};
}

/* Return the columns 4j .. 4j + 3 of 4-bit weights, j < 4, and in *high the columns 16 + 4j .. 19 + 4j. */
INLINE i32x bytes_q4(const weights *w, size_t j, i32x *high) {
    const __m256i low = _mm256_set1_epi8(15);
    const __m256i a = bytes_at(w->p + 64 * j), b = bytes_at(w->p + 64 * j + 32);
    *high = (i32x){_mm256_and_si256(_mm256_srli_epi16(a, 4), low),
                   _mm256_and_si256(_mm256_srli_epi16(b, 4), low)};
    return (i32x){_mm256_and_si256(a, low), _mm256_and_si256(b, low)};
}

/* Return every byte at p with its bits from `shift` on moved to the bits from 4 on, and then masked with `mask`. */
INLINE __m256i high_bits(const uint8_t *p, int shift, int mask) {
    const __m256i x = bytes_at(p);
    const __m256i moved = shift < 4 ? _mm256_slli_epi16(x, 4 - shift) : _mm256_srli_epi16(x, shift - 4);
    return _mm256_and_si256(moved, _mm256_set1_epi8((char)mask));
}

/* Return the columns 4j .. 4j + 3 of super-blocks, j < 8. */
INLINE i32x bytes_super(const weights *w, size_t j, uint32_t kind) {
    i32x high, low = bytes_q4(w, j % 4, &high);
    const i32x v = j < 4 ? low : high;
    const uint8_t *p = w->p + 256 + (kind == RVM_Q6_K ? 64 * (j / 4) : 0);
    const int shift = kind == RVM_Q6_K ? 2 * (int)(j % 4) : (int)j, mask = kind == RVM_Q6_K ? 48 : 16;
    return (i32x){_mm256_or_si256(v.a, high_bits(p, shift, mask)), _mm256_or_si256(v.b, high_bits(p + 32, shift, mask))};
}

INLINE __m256i four(const uint8_t *q) { return _mm256_set1_epi32(act_i32(q)); }

INLINE int32_t reduce_max(__m256i x) {
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    return _mm_cvtsi128_si32(m);
}

INLINE int32_t reduce_add(__m256i x) {
    __m128i m = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    m = _mm_add_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_add_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    return _mm_cvtsi128_si32(m);
}

/* These functions round to nearest (ties to even), store integers as bytes, and return the sum or the largest magnitude
   of all lanes (matrix_kernel.h). */
INLINE i32x i_round(f32x x) { return (i32x){_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
INLINE i32x i_add(i32x x, i32x y) { return (i32x){_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
INLINE i32x i_mla(i32x x, i32x y, i32x z) {
    return (i32x){_mm256_add_epi32(x.a, _mm256_mullo_epi32(y.a, z.a)),
                  _mm256_add_epi32(x.b, _mm256_mullo_epi32(y.b, z.b))};
}
INLINE int32_t i_sum(i32x x) { return reduce_add(_mm256_add_epi32(x.a, x.b)); }
INLINE int32_t i_most(i32x x) { return reduce_max(_mm256_max_epi32(x.a, x.b)); }

INLINE i32x i_larger(i32x top, f32x x) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    return (i32x){_mm256_max_epi32(top.a, _mm256_and_si256(_mm256_castps_si256(x.a), magnitude)),
                  _mm256_max_epi32(top.b, _mm256_and_si256(_mm256_castps_si256(x.b), magnitude))};
}

INLINE void i_bytes(uint8_t *to, i32x x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    const __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
    _mm_storeu_si128((__m128i *)to, _mm_packs_epi16(low, high));
}

