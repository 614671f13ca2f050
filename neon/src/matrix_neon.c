/* This file has the matrix kernels for NEON of every 64-bit ARM. The instructions smull and smlal add products in four
 * 16-bit sums for each row. The sums fit into 16 bits: with weights of 4 bits, eight products are at most 8 * 15 * 127
 * = 15240; with 5 bits, eight are at most 8 * 31 * 127 = 31496; with 6 bits, four are at most 4 * 63 * 127 = 32004;
 * with 8 bits, two are at most 2 * 128 * 127 = 32512. */
#include "matrix_arm.h"

enum { OFFSET8 = 128, MAX_T = 16, STEP = 1, FLOAT_T = 4, WIDE_T = 1 };

INLINE void unpack(const uint8_t *p, uint32_t kind, size_t m, weights *w) {
    (void)m;
    unpack_neon(p, kind, OFFSET8, w);
}

INLINE int8x16_t four(const uint8_t *q) { return vreinterpretq_s8_s32(vdupq_n_s32(act_i32(q))); }

/* Add the products of four rows and the columns 4j .. 4(j + n) - 1 in 16-bit sums: one vector for rows 0 and 1, and one
   vector for rows 2 and 3. */
INLINE int32x4_t rows4(int32x4_t acc, const weights *w, const uint8_t *q, size_t i, size_t j, size_t n) {
    int16x8_t a = vmull_s8(vget_low_s8(w->v[j][i]), vget_low_s8(four(q + 4 * j)));
    int16x8_t b = vmull_high_s8(w->v[j][i], four(q + 4 * j));
    UNROLL for (size_t k = j + 1; k < j + n; k++) {
        a = vmlal_s8(a, vget_low_s8(w->v[k][i]), vget_low_s8(four(q + 4 * k)));
        b = vmlal_high_s8(b, w->v[k][i], four(q + 4 * k));
    }
    return vaddq_s32(acc, vpaddq_s32(vpaddlq_s16(a), vpaddlq_s16(b)));
}

INLINE void dots_part(i32x *acc, const weights *w, const uint8_t *q, size_t apart, size_t m, uint32_t kind, size_t from,
                      size_t n) {
    const size_t fit = kind == RVM_Q8 ? 2 : kind == RVM_Q6_K ? 4 : 8;
    UNROLL for (size_t t = 0; t < m; t++) EACH4 UNROLL for (size_t j = from; j < from + n; j += fit)
        acc[t].v[i] = rows4(acc[t].v[i], w, q + apart * t, i, j, fit);
}

INLINE void dots(i32x *acc, const weights *w, const uint8_t *q, size_t apart, size_t m, uint32_t kind) {
    dots_part(acc, w, q, apart, m, kind, 0, 8);
}

#include "matrix_kernel.h"
#include "page_kernel.h"

const rvm_matmul rvm_matmul_neon = {
    .name = "neon",
    .acts = acts,
    .matmul = matmul,
    .page_queries = page_queries,
    .page_scores = page_scores,
    .page_values = page_values,
    .peak = peak,
};
