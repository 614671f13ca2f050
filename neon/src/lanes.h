/* This header defines a vector of LANES floats, and the vector operations that compilers do not make from loops by
 * themselves. To support a new instruction set, add a block with these definitions for it.
 *
 *   LANES   16 AVX-512   8 AVX2 with F16C   4 NEON   1 the scalar build
 *
 * A half is an IEEE binary16 number, kept as uint16_t. The scalar build converts halves with ordinary C code, and the
 * tests compare the conversions of the hardware with these conversions. */
#ifndef RVM_LANES_H
#define RVM_LANES_H

#include "vec.h"

#define RVM_IS_scalar 1
#define LANES_JOIN_(a, b) a##b
#define LANES_JOIN(a, b) LANES_JOIN_(a, b)
#define RVM_PLAIN LANES_JOIN(RVM_IS_, RVM_IMPL)

/* Convert a float to the nearest half, ties to even. A result of at least 2^-14 (a normal half) is rounded in integer
 * arithmetic. For a smaller result, the code adds 0.5, which is 2^13 * 2^-14: the low bits of the sum are then the
 * rounded mantissa of the half. */
static inline uint16_t float_to_half(float x) {
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u, mag = bits & 0x7fffffffu;
    if (mag > 0x7f800000u) return (uint16_t)(sign | 0x7e00u); /* x is NaN, so return a NaN */
    if (mag >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* x rounds to 65536 or is infinite: return infinity */
    if (mag >= 0x38800000u)
        return (uint16_t)(sign | ((mag + 0xfffu + (mag >> 13 & 1)) - 0x38000000u) >> 13);
    return (uint16_t)(sign | (bits_of(float_of(mag) + 0.5f) - 0x3f000000u));
}

#if RVM_PLAIN

enum { LANES = 1, N_VECTORS = 4 };
typedef float lanes;
static inline lanes l_load(const float *x) { return *x; }
static inline lanes l_load_half(const uint16_t *x) { return half_to_float(*x); }
static inline lanes l_set(float x) { return x; }
static inline void l_store(float *y, lanes x) { *y = x; }
static inline void l_store_half(uint16_t *y, lanes x) { *y = float_to_half(x); }
static inline lanes l_fma(lanes a, lanes b, lanes c) { return a * b + c; }

#elif defined(__AVX512F__)
#include <immintrin.h>

enum { LANES = 16, N_VECTORS = 4 };
typedef __m512 lanes;
static inline lanes l_load(const float *x) { return _mm512_loadu_ps(x); }
static inline lanes l_load_half(const uint16_t *x) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x));
}
static inline lanes l_set(float x) { return _mm512_set1_ps(x); }
static inline void l_store(float *y, lanes x) { _mm512_storeu_ps(y, x); }
static inline void l_store_half(uint16_t *y, lanes x) {
    _mm256_storeu_si256((__m256i *)y, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline lanes l_fma(lanes a, lanes b, lanes c) { return _mm512_fmadd_ps(a, b, c); }

#elif defined(__AVX2__)
#include <immintrin.h>

enum { LANES = 8, N_VECTORS = 2 };
typedef __m256 lanes;
static inline lanes l_load(const float *x) { return _mm256_loadu_ps(x); }
static inline lanes l_load_half(const uint16_t *x) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x));
}
static inline lanes l_set(float x) { return _mm256_set1_ps(x); }
static inline void l_store(float *y, lanes x) { _mm256_storeu_ps(y, x); }
static inline void l_store_half(uint16_t *y, lanes x) {
    _mm_storeu_si128((__m128i *)y, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
static inline lanes l_fma(lanes a, lanes b, lanes c) { return _mm256_fmadd_ps(a, b, c); }

#elif defined(__ARM_NEON)
#include <arm_neon.h>

enum { LANES = 4, N_VECTORS = 4 };
typedef float32x4_t lanes;
static inline lanes l_load(const float *x) { return vld1q_f32(x); }
static inline lanes l_load_half(const uint16_t *x) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x)));
}
static inline lanes l_set(float x) { return vdupq_n_f32(x); }
static inline void l_store(float *y, lanes x) { vst1q_f32(y, x); }
static inline void l_store_half(uint16_t *y, lanes x) { vst1_u16(y, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
static inline lanes l_fma(lanes a, lanes b, lanes c) { return vfmaq_f32(c, a, b); }

#else
#error "no vector code for this target: compile with RVM_IMPL=scalar"
#endif

#endif
