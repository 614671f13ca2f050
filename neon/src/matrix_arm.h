/* This header has the vectors of matrix_kernel.h for NEON: four registers hold 16 rows. The file that includes this
   header defines how bytes are multiplied (dots, OFFSET8). */
#include "matrix.h"

#include <arm_neon.h>
#include <math.h>

typedef struct {
    float32x4_t v[4];
} f32x;
typedef struct {
    int32x4_t v[4];
} i32x;
typedef struct {
    int8x16_t v[8][4]; /* weights: v[j][i] has the columns 4j .. 4j + 3 of the rows 4i .. 4i + 3 */
} weights;

/* Apple's cache lines are 128 bytes long. */
#ifdef __APPLE__
enum { LINE = 128 };
#else
enum { LINE = 64 };
#endif

INLINE void prefetch_line(const uint8_t *p) { __builtin_prefetch(p); }

INLINE void prefetch_close(const uint8_t *p) { (void)p; } /* prefetch_close is empty, because prefetch_line already prefetches into the L1 cache */

INLINE void prefetch_block(const uint8_t *p, uint32_t kind) {
    for (size_t i = 0; i < block_bytes(kind); i += LINE) __builtin_prefetch(p + i);
}

#define EACH4 UNROLL for (size_t i = 0; i < 4; i++)

INLINE f32x f_all(float x) {
    f32x y;
    EACH4 y.v[i] = vdupq_n_f32(x);
    return y;
}

INLINE f32x f_zero(void) { return f_all(0); }

INLINE f32x f_mul(f32x a, f32x b) {
    EACH4 a.v[i] = vmulq_f32(a.v[i], b.v[i]);
    return a;
}

INLINE f32x f_fma(f32x a, f32x b, f32x c) {
    EACH4 c.v[i] = vfmaq_f32(c.v[i], a.v[i], b.v[i]);
    return c;
}

INLINE f32x f_of(i32x a) {
    f32x y;
    EACH4 y.v[i] = vcvtq_f32_s32(a.v[i]);
    return y;
}

INLINE i32x i_all(int32_t x) {
    i32x y;
    EACH4 y.v[i] = vdupq_n_s32(x);
    return y;
}

INLINE i32x i_join(i32x high, i32x low) {
    EACH4 low.v[i] = vmlaq_s32(low.v[i], high.v[i], vdupq_n_s32(HIGH));
    return low;
}

INLINE f32x f_load(const uint8_t *p, uint32_t kind) {
    f32x y;
    if (kind == RVM_F32) {
        EACH4 y.v[i] = vreinterpretq_f32_u8(vld1q_u8(p + 16 * i));
    } else if (kind == RVM_F16) {
        EACH4 y.v[i] = vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i)));
    } else {
        EACH4 y.v[i] = vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p + 8 * i)), 16));
    }
    return y;
}

INLINE i32x i_load8(const uint8_t *p) {
    const int8x16_t x = vld1q_s8((const int8_t *)p);
    const int16x8_t a = vmovl_s8(vget_low_s8(x)), b = vmovl_s8(vget_high_s8(x));
    return (i32x){{vmovl_s16(vget_low_s16(a)), vmovl_s16(vget_high_s16(a)), vmovl_s16(vget_low_s16(b)),
                   vmovl_s16(vget_high_s16(b))}};
}

INLINE void f_store(float *y, f32x a, size_t n) {
    float all[TILE];
    if (n >= TILE) {
        EACH4 vst1q_f32(y + 4 * i, a.v[i]);
    } else {
        EACH4 vst1q_f32(all + 4 * i, a.v[i]);
        memcpy(y, all, n * sizeof *y);
    }
}

/* Return v | (x & mask). */
INLINE int8x16_t with(int8x16_t v, uint8x16_t x, int mask) {
    return vorrq_s8(v, vreinterpretq_s8_u8(vandq_u8(x, vdupq_n_u8((uint8_t)mask))));
}

/* Add the fifth bits of the codes of Q5_K at p, which are stored after the low nibbles, to w. */
INLINE void unpack_fifth(const uint8_t *p, weights *w) {
    EACH4 {
        const uint8x16_t x = vld1q_u8(p + 16 * i);
        w->v[0][i] = with(w->v[0][i], vshlq_n_u8(x, 4), 16);
        w->v[1][i] = with(w->v[1][i], vshlq_n_u8(x, 3), 16);
        w->v[2][i] = with(w->v[2][i], vshlq_n_u8(x, 2), 16);
        w->v[3][i] = with(w->v[3][i], vshlq_n_u8(x, 1), 16);
        w->v[4][i] = with(w->v[4][i], x, 16);
        w->v[5][i] = with(w->v[5][i], vshrq_n_u8(x, 1), 16);
        w->v[6][i] = with(w->v[6][i], vshrq_n_u8(x, 2), 16);
        w->v[7][i] = with(w->v[7][i], vshrq_n_u8(x, 3), 16);
    }
}

/* Add the fifth and sixth bits of the codes of Q6_K at p to w. */
INLINE void unpack_two(const uint8_t *p, weights *w) {
    UNROLL for (size_t h = 0; h < 2; h++) EACH4 {
        const uint8x16_t x = vld1q_u8(p + 64 * h + 16 * i);
        w->v[4 * h][i] = with(w->v[4 * h][i], vshlq_n_u8(x, 4), 48);
        w->v[4 * h + 1][i] = with(w->v[4 * h + 1][i], vshlq_n_u8(x, 2), 48);
        w->v[4 * h + 2][i] = with(w->v[4 * h + 2][i], x, 48);
        w->v[4 * h + 3][i] = with(w->v[4 * h + 3][i], vshrq_n_u8(x, 2), 48);
    }
}

/* Unpack the codes of a block into bytes. flip: 0, or 128 to make the stored unsigned 8-bit weights signed */
INLINE void unpack_neon(const uint8_t *p, uint32_t kind, int flip, weights *w) {
    const uint8x16_t low = vdupq_n_u8(15), top = vdupq_n_u8((uint8_t)flip);
    UNROLL for (size_t j = 0; j < 8; j++) {
        if (kind == RVM_Q8) {
            EACH4 w->v[j][i] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p + 64 * j + 16 * i), top));
        } else if (j < 4) {
            EACH4 {
                const uint8x16_t both = vld1q_u8(p + 64 * j + 16 * i);
                w->v[j][i] = vreinterpretq_s8_u8(vandq_u8(both, low));
                w->v[4 + j][i] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
            }
        }
    }
    if (kind == RVM_Q5_K) unpack_fifth(p + 256, w);
    if (kind == RVM_Q6_K) unpack_two(p + 256, w);
}

/* These functions round to nearest (ties to even), store integers as bytes, and return the sum or the largest magnitude
   of all lanes (matrix_kernel.h). */
INLINE i32x i_round(f32x a) {
    i32x y;
    EACH4 y.v[i] = vcvtnq_s32_f32(a.v[i]);
    return y;
}

INLINE i32x i_add(i32x a, i32x b) {
    EACH4 a.v[i] = vaddq_s32(a.v[i], b.v[i]);
    return a;
}

INLINE i32x i_mla(i32x a, i32x b, i32x c) {
    EACH4 a.v[i] = vmlaq_s32(a.v[i], b.v[i], c.v[i]);
    return a;
}

INLINE i32x i_larger(i32x top, f32x a) {
    EACH4 top.v[i] = vmaxq_s32(top.v[i], vreinterpretq_s32_f32(vabsq_f32(a.v[i])));
    return top;
}

INLINE void i_bytes(uint8_t *to, i32x a) {
    const int16x8_t low = vcombine_s16(vmovn_s32(a.v[0]), vmovn_s32(a.v[1])),
                    high = vcombine_s16(vmovn_s32(a.v[2]), vmovn_s32(a.v[3]));
    vst1q_u8(to, vreinterpretq_u8_s8(vcombine_s8(vmovn_s16(low), vmovn_s16(high))));
}

INLINE int32_t i_sum(i32x a) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3])));
}

INLINE int32_t i_most(i32x a) {
    return vmaxvq_s32(vmaxq_s32(vmaxq_s32(a.v[0], a.v[1]), vmaxq_s32(a.v[2], a.v[3])));
}

