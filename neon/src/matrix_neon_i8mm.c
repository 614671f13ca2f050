/* This file has the matrix kernels for NEON with i8mm (Apple M2 and later). The instruction usdot multiplies one token
 * with activations of 8 bits. For more tokens or two planes, usmmla multiplies two rows by two tokens, or by the two
 * planes of activations of 16 bits, eight columns at a time. Weights stay unsigned. */
#include "matrix_arm.h"

enum { OFFSET8 = 0, MAX_T = 16, STEP = 4, FLOAT_T = 4, WIDE_T = 1 };

/* For more than one plane, the function changes each pair of registers so that a register has two rows of eight columns
 * each:
 *   v[2o][i]: columns 8o .. 8o + 7 of rows 4i, 4i + 1      v[2o + 1][i]: of rows 4i + 2, 4i + 3 */
INLINE void unpack(const uint8_t *p, uint32_t kind, size_t m, weights *w) {
    unpack_neon(p, kind, OFFSET8, w);
    if (m == 1) return;
    UNROLL for (size_t o = 0; o < 4; o++) EACH4 {
        const int32x4_t a = vreinterpretq_s32_s8(w->v[2 * o][i]), b = vreinterpretq_s32_s8(w->v[2 * o + 1][i]);
        w->v[2 * o][i] = vreinterpretq_s8_s32(vzip1q_s32(a, b));
        w->v[2 * o + 1][i] = vreinterpretq_s8_s32(vzip2q_s32(a, b));
    }
}

#define DOT(j, lane) \
    EACH4 acc->v[i] = vusdotq_laneq_s32(acc->v[i], vreinterpretq_u8_s8(w->v[j][i]), x, lane);

INLINE void dot_one(i32x *acc, const weights *w, const int8_t *q, size_t from, size_t n) {
    UNROLL for (size_t j = from; j < from + n; j += 4) {
        const int8x16_t x = vld1q_s8(q + 4 * j);
        DOT(j, 0)
        DOT(j + 1, 1)
        DOT(j + 2, 2)
        DOT(j + 3, 3)
    }
}

/* Multiply m planes, 2 or 4, in pairs. sum[p][2i + h] has the products of the rows 4i + 2h and 4i + 2h + 1 with the
   planes 2p and 2p + 1 */
INLINE void dots_part(i32x *acc, const weights *w, const uint8_t *q, size_t apart, size_t m, uint32_t kind, size_t from,
                      size_t n) {
    int32x4_t sum[STEP / 2][8];
    (void)kind;
    if (m == 1) {
        dot_one(acc, w, (const int8_t *)q, from, n);
        return;
    }
    UNROLL for (size_t p = 0; p < m / 2; p++) EACH4 {
        sum[p][2 * i] = vzip1q_s32(acc[2 * p].v[i], acc[2 * p + 1].v[i]);
        sum[p][2 * i + 1] = vzip2q_s32(acc[2 * p].v[i], acc[2 * p + 1].v[i]);
    }
    UNROLL for (size_t o = from / 2; o < (from + n) / 2; o++) {
        int8x16_t x[STEP / 2];
        UNROLL for (size_t p = 0; p < m / 2; p++) {
            const int8_t *two = (const int8_t *)q + 2 * apart * p + 8 * o;
            x[p] = vcombine_s8(vld1_s8(two), vld1_s8(two + apart));
        }
        EACH4 UNROLL for (size_t h = 0; h < 2; h++) UNROLL for (size_t p = 0; p < m / 2; p++)
            sum[p][2 * i + h] = vusmmlaq_s32(sum[p][2 * i + h], vreinterpretq_u8_s8(w->v[2 * o + h][i]), x[p]);
    }
    UNROLL for (size_t p = 0; p < m / 2; p++) EACH4 {
        acc[2 * p].v[i] = vuzp1q_s32(sum[p][2 * i], sum[p][2 * i + 1]);
        acc[2 * p + 1].v[i] = vuzp2q_s32(sum[p][2 * i], sum[p][2 * i + 1]);
    }
}

INLINE void dots(i32x *acc, const weights *w, const uint8_t *q, size_t apart, size_t m, uint32_t kind) {
    dots_part(acc, w, q, apart, m, kind, 0, 8);
}

#define ODD_TOKENS 0
#include "matrix_kernel.h"
#include "page_kernel.h"

const rvm_matmul rvm_matmul_neon_i8mm = {
    .name = "neon_i8mm",
    .acts = acts,
    .matmul = matmul,
    .page_queries = page_queries,
    .page_scores = page_scores,
    .page_values = page_values,
    .peak = peak,
};
