/* This header has loops over float arrays that gcc and clang turn into vector code.
 *
 * The build compiles the files that include this header once for each instruction set. `omp simd` (which needs no
 * OpenMP at run time) lets the compiler compute a sum in several vector lanes. The scalar build ignores `omp simd`, and
 * the tests compare all other builds with the scalar build. The build does not use -ffast-math, because a logit of -inf
 * must give exp(-inf) = 0, and because the kernels must report NaN.
 */
#ifndef RVM_VEC_H
#define RVM_VEC_H

#include "bits.h"

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define SIMD(clauses) PRAGMA(omp simd clauses)
#define PRAGMA(x) _Pragma(#x)

/* The kernels compute a row of the vocabulary in blocks of BLOCK floats, so that the temporary arrays stay in the L1
 * cache. */
enum { BLOCK = 1024 };

/* Prefetch memory into the L2 cache during other computation. kl_to_frozen prefetches the probabilities that it reads
 * next in this way. A prefetch into the L1 cache would make the processor wait. */
static inline void prefetch_l2(const void *memory, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)memory + i, 0, 2);
}

static const double LN2 = 0.693147180559945309, LOG2_E = 1.44269504088896341;

/* x + ROUNDING, for |x| < 2^22, has round(x) in the low bits of its mantissa. */
static const float ROUNDING = 12582912.0f; /* 1.5 * 2^23 */

/* Compute e^x = 2^k e^r,  k = round(x / ln 2),  |r| <= ln(2)/2;  e^r = 1 + r + r^2 q(r).
 * ln 2 is split so that k * LN2_HI is exact; q is a minimax fit of degree 4 (relative error 4e-9). So most of the error
 * comes from rounding; the error is less than 2 ulp for x from -87 to 88.37. For x < -87 the result is 0; for x > 88.37
 * the result is undefined. */
static inline float exp_up_to_88(float x) {
    const float ln2_hi = 0.693359375f, ln2_lo = -2.1219444170128554e-4f;
    const float shifted = x * 1.4426950216293335f + ROUNDING, k = shifted - ROUNDING;
    const float r = (x - k * ln2_hi) - k * ln2_lo;
    float q = 1.3814540579915047e-3f;
    q = q * r + 8.36874544620514e-3f;
    q = q * r + 4.166838899254799e-2f;
    q = q * r + 0.1666652113199234f;
    q = q * r + 0.4999999403953552f;
    float e = 1.0f + (r + r * r * q);
    e *= float_of((bits_of(shifted) + 127) << 23);
    return x < -87.0f ? 0.0f : e;
}

/* Return 2^x for |x| < 120. The function is faster than exp_up_to_88; for the fraction r of x it computes 2^r by a
 * minimax fit of degree 5 (relative error with rounding 1.6e-7). */
static inline float exp2_near(float x) {
    const float shifted = x + ROUNDING, r = x - (shifted - ROUNDING);
    float e = 1.326472731307149e-3f;
    e = e * r + 9.671512991189957e-3f;
    e = e * r + 5.550733581185341e-2f;
    e = e * r + 0.24022242426872253f;
    e = e * r + 0.6931470036506653f;
    e = e * r + 1.0f;
    return float_of(bits_of(e) + (bits_of(shifted) << 23));
}

/* Return 2^x for x <= 0. The result is 0 for x below -126. */
static inline float exp2_down(float x) {
    const float e = exp2_near(x);
    return x < -126.0f ? 0.0f : e;
}

static inline float exp_f32(float x) { return x > 88.37f ? INFINITY : exp_up_to_88(x); }

/* Return the largest of x[0..n) and m. The function compares the floats as integers that have the same order, because
 * compilers do not vectorise a float maximum that must respect NaN, and because an integer maximum has a shorter
 * latency. If a number is NaN, the result is undefined. */
static inline float max_of(const float *x, size_t n, float m) {
    int32_t top = INT32_MIN;
    SIMD(reduction(max : top))
    for (size_t i = 0; i < n; i++) {
        int32_t b = (int32_t)bits_of(x[i]);
        b ^= (int32_t)((uint32_t)(b >> 31) >> 1);
        top = b > top ? b : top;
    }
    float most = float_of((uint32_t)(top ^ (int32_t)((uint32_t)(top >> 31) >> 1)));
    return most > m ? most : m;
}

/* Return the bits of |x|. These bits, as an integer, are below 0x7f800000 if and only if x is finite. */
static inline uint32_t magnitude(float x) { return bits_of(x) & 0x7fffffffu; }

static inline int is_finite_magnitude(uint32_t m) { return m < 0x7f800000u; }

/* Return the dot product of x and y, computed in four partial sums. With one sum, gcc would use one vector register for
   it, and each addition would wait for the previous addition. */
static inline float dot_of(const float *x, const float *y, size_t n) {
    float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
    size_t q = n / 4;
    SIMD(reduction(+ : s0, s1, s2, s3))
    for (size_t i = 0; i < q; i++) {
        s0 += x[i] * y[i];
        s1 += x[i + q] * y[i + q];
        s2 += x[i + 2 * q] * y[i + 2 * q];
        s3 += x[i + 3 * q] * y[i + 3 * q];
    }
    for (size_t i = 4 * q; i < n; i++) s0 += x[i] * y[i];
    return (s0 + s1) + (s2 + s3);
}

/* Compilers add the numbers of one float sum in order, so each addition waits for the previous one. So the kernels
   divide a sum into SUMS independent parts. */
enum { SUMS = 16 };

/* Add the n numbers of x to the SUMS parts of a sum. n: a multiple of SUMS */
static inline void sums_add(float *restrict sums, const float *restrict x, size_t n) {
    for (size_t i = 0; i < n; i += SUMS) {
        SIMD()
        for (size_t j = 0; j < SUMS; j++) sums[j] += x[i + j];
    }
}

static inline float sums_total(const float *sums) {
    float part[SUMS / 2];
    SIMD()
    for (size_t j = 0; j < SUMS / 2; j++) part[j] = sums[j] + sums[j + SUMS / 2];
    return (part[0] + part[4]) + (part[1] + part[5]) + ((part[2] + part[6]) + (part[3] + part[7]));
}

static inline float sum_of(const float *x, size_t n) {
    float sums[SUMS] = {0}, rest = 0;
    const size_t whole = n / SUMS * SUMS;
    sums_add(sums, x, whole);
    for (size_t i = whole; i < n; i++) rest += x[i];
    return sums_total(sums) + rest;
}

/* Compute y[i] = e^(x[i] - shift), and return sum_i y[i]. y and x can be the same array. */
static inline float exp_sum(const float *x, float shift, size_t n, float *y) {
    float sums[SUMS] = {0}, rest = 0;
    const size_t whole = n / SUMS * SUMS;
    SIMD()
    for (size_t i = 0; i < n; i++) y[i] = exp_f32(x[i] - shift);
    sums_add(sums, y, whole);
    for (size_t i = whole; i < n; i++) rest += y[i];
    return sums_total(sums) + rest;
}

/* Add rows: y[v] += sum_k c[k] * rows[k][v]      rows: [r, ld], of which the first n columns are used */
static inline void add_rows(float *restrict y, const float *restrict rows, size_t ld,
                            const float *restrict c, size_t r, size_t n) {
    for (; r >= 4; r -= 4, c += 4, rows += 4 * ld) {
        const float *p = rows, *q = p + ld, *s = q + ld, *t = s + ld;
        SIMD()
        for (size_t v = 0; v < n; v++) y[v] += (c[0] * p[v] + c[1] * q[v]) + (c[2] * s[v] + c[3] * t[v]);
    }
    if (r >= 2) {
        const float *p = rows, *q = p + ld;
        SIMD()
        for (size_t v = 0; v < n; v++) y[v] += c[0] * p[v] + c[1] * q[v];
        r -= 2, c += 2, rows += 2 * ld;
    }
    if (r) {
        SIMD()
        for (size_t v = 0; v < n; v++) y[v] += c[0] * rows[v];
    }
}

/* Set y to a sum of rows: y[v] = sum_k c[k] * rows[k][v] */
static inline void set_rows(float *restrict y, const float *restrict rows, size_t ld,
                            const float *restrict c, size_t r, size_t n) {
    const float *q = rows + ld;
    if (r == 1) {
        SIMD()
        for (size_t v = 0; v < n; v++) y[v] = c[0] * rows[v];
        return;
    }
    SIMD()
    for (size_t v = 0; v < n; v++) y[v] = c[0] * rows[v] + c[1] * q[v];
    add_rows(y, rows + 2 * ld, ld, c + 2, r - 2, n);
}

/* Compute u[k] = s * sum_i x[i] * m[i][k]      m: [n, r] */
static inline void project(float *restrict u, const float *restrict x, const float *restrict m, float s,
                           size_t n, size_t r) {
    if (r == 1) {
        u[0] = s * dot_of(x, m, n);
    } else if (r == 2) {
        float u0 = 0, u1 = 0;
        SIMD(reduction(+ : u0, u1))
        for (size_t i = 0; i < n; i++) {
            u0 += x[i] * m[2 * i];
            u1 += x[i] * m[2 * i + 1];
        }
        u[0] = s * u0, u[1] = s * u1;
    } else {
        memset(u, 0, r * sizeof *u);
        for (size_t i = 0; i < n; i++) {
            SIMD()
            for (size_t k = 0; k < r; k++) u[k] += s * x[i] * m[i * r + k];
        }
    }
}

/* Add an outer product: m[i][k] += x[i] * c[k]      m: [n, r] */
static inline void add_outer(float *restrict m, const float *restrict x, const float *restrict c, size_t n,
                             size_t r) {
    if (r == 1) {
        add_rows(m, x, n, c, 1, n);
        return;
    }
    if (r == 2) {
        SIMD()
        for (size_t i = 0; i < n; i++) {
            m[2 * i] += x[i] * c[0];
            m[2 * i + 1] += x[i] * c[1];
        }
        return;
    }
    for (size_t i = 0; i < n; i++) {
        SIMD()
        for (size_t k = 0; k < r; k++) m[i * r + k] += x[i] * c[k];
    }
}

/* A running sum of e^x over blocks, kept as sum * e^max so that it cannot overflow. The struct begins as {-FLT_MAX, 0},
 * because with a maximum of -INFINITY a block of -inf logits would compute -inf - -inf, which is NaN. */
typedef struct {
    float max;
    double sum;
} expsum;

#define EXPSUM_EMPTY ((expsum){-FLT_MAX, 0})

/* Raise the running maximum to the maximum of a block if that is larger. Return the factor by which the sum so far must
   be multiplied. */
static inline float expsum_raise(expsum *s, const float *x, size_t n) {
    float m = max_of(x, n, s->max), keep = 1;
    if (m > s->max) {
        keep = exp_f32(s->max - m);
        s->max = m;
        s->sum *= keep;
    }
    return keep;
}

/* Add a block to the running sum.  x, tmp: [n <= BLOCK]; tmp and x can be the same array. */
static inline void expsum_add(expsum *s, const float *x, size_t n, float *tmp) {
    expsum_raise(s, x, n);
    s->sum += exp_sum(x, s->max, n, tmp);
}

static inline double expsum_log(const expsum *s) { return s->max + log(s->sum); }

#endif
