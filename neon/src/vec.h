/* Loops over float arrays that gcc and clang turn into vector code.
 *
 * This file and kernels.c are compiled once per instruction set. `omp simd` (no OpenMP at run time)
 * is what permits a reduction to run in lanes; the scalar build ignores it, and is the twin that
 * the tests compare against. -ffast-math stays off: masks need exp(-inf) = 0, and NaN must survive
 * to be reported.
 */
#ifndef RVM_VEC_H
#define RVM_VEC_H

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define SIMD(clauses) PRAGMA(omp simd clauses)
#define PRAGMA(x) _Pragma(#x)

/* Vocabulary rows are walked in blocks whose temporaries stay in the L1 cache. */
enum { BLOCK = 1024 };

static inline size_t min_size(size_t a, size_t b) { return a < b ? a : b; }

/* e^x = 2^k e^r,  k = round(x / ln 2),  |r| <= ln(2)/2,  e^r = 1 + r + r^2 q(r).
 * q is a degree-4 minimax fit (relative error 4e-9), so rounding sets the error: see rvm.h.
 * Adding 1.5 * 2^23 leaves k in the low mantissa bits. ln 2 is split so that k * LN2_HI is exact. */
static inline float exp_f32(float x) {
    const float magic = 12582912.0f, ln2_hi = 0.693359375f, ln2_lo = -2.1219444170128554e-4f;
    float shifted = x * 1.4426950216293335f + magic;
    float k = shifted - magic;
    float r = (x - k * ln2_hi) - k * ln2_lo;
    float q = 1.3814540579915047e-3f;
    q = q * r + 8.36874544620514e-3f;
    q = q * r + 4.166838899254799e-2f;
    q = q * r + 0.1666652113199234f;
    q = q * r + 0.4999999403953552f;
    float e = 1.0f + (r + r * r * q);
    uint32_t bits;
    float two_k;
    memcpy(&bits, &shifted, 4);
    bits = (bits + 127) << 23;
    memcpy(&two_k, &bits, 4);
    e *= two_k;
    e = x < -87.0f ? 0.0f : e;
    return x > 88.37f ? INFINITY : e;
}

static inline float max_of(const float *x, size_t n, float m) {
    SIMD(reduction(max : m))
    for (size_t i = 0; i < n; i++) m = x[i] > m ? x[i] : m;
    return m;
}

static inline float dot_of(const float *x, const float *y, size_t n) {
    float s = 0;
    SIMD(reduction(+ : s))
    for (size_t i = 0; i < n; i++) s += x[i] * y[i];
    return s;
}

/* y[i] = e^(x[i] - shift); returns sum_i y[i].  y may be x. */
static inline float exp_sum(const float *x, float shift, size_t n, float *y) {
    float s = 0;
    SIMD(reduction(+ : s))
    for (size_t i = 0; i < n; i++) {
        y[i] = exp_f32(x[i] - shift);
        s += y[i];
    }
    return s;
}

/* y[v] += sum_k c[k] * rows[k][v]      rows: [r, ld], the first n columns of it */
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

/* u[k] = s * sum_i x[i] * m[i][k]      m: [n, r] */
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

/* m[i][k] += x[i] * c[k]      m: [n, r] */
static inline void add_outer(float *restrict m, const float *restrict x, const float *restrict c, size_t n,
                             size_t r) {
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

/* Running sum of e^x over blocks, as sum * e^max.  Begins at {-FLT_MAX, 0}: with -INFINITY a block of
 * -inf logits would compute inf - inf. */
typedef struct {
    float max;
    double sum;
} expsum;

#define EXPSUM_EMPTY ((expsum){-FLT_MAX, 0})

/* Raise the running maximum to cover the block; returns what older sums must be multiplied by. */
static inline float expsum_raise(expsum *s, const float *x, size_t n) {
    float m = max_of(x, n, s->max), keep = 1;
    if (m > s->max) {
        keep = exp_f32(s->max - m);
        s->max = m;
        s->sum *= keep;
    }
    return keep;
}

/* x, tmp: [n <= BLOCK]; tmp may be x. */
static inline void expsum_add(expsum *s, const float *x, size_t n, float *tmp) {
    expsum_raise(s, x, n);
    s->sum += exp_sum(x, s->max, n, tmp);
}

static inline double expsum_log(const expsum *s) { return s->max + log(s->sum); }

#endif
