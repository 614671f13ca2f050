/* This file has the matrix kernels for NEON with dotprod (every Apple chip since M1). The instruction sdot by lane
   multiplies four columns of four rows at a time. */
#include "matrix_arm.h"

enum { OFFSET8 = 128, MAX_T = 16, STEP = 4, FLOAT_T = 4, WIDE_T = 1 };

INLINE void unpack(const uint8_t *p, uint32_t kind, size_t m, weights *w) {
    (void)m;
    unpack_neon(p, kind, OFFSET8, w);
}

/* Add the products of columns 4j .. 4j + 3 to acc[t]. x[t] holds 16 columns of activations; these four columns are its
   lane j % 4. */
#define DOT(j, lane)                               \
    UNROLL for (size_t t = 0; t < m; t++)                 \
        EACH4 acc[t].v[i] = vdotq_laneq_s32(acc[t].v[i], w->v[j][i], x[t], lane);

INLINE void dots_part(i32x *acc, const weights *w, const uint8_t *q, size_t apart, size_t m, uint32_t kind, size_t from,
                      size_t n) {
    int8x16_t x[STEP];
    (void)kind;
    UNROLL for (size_t j = from; j < from + n; j += 4) {
        UNROLL for (size_t t = 0; t < m; t++) x[t] = vld1q_s8((const int8_t *)q + apart * t + 4 * j);
        DOT(j, 0)
        DOT(j + 1, 1)
        DOT(j + 2, 2)
        DOT(j + 3, 3)
    }
}

INLINE void dots(i32x *acc, const weights *w, const uint8_t *q, size_t apart, size_t m, uint32_t kind) {
    dots_part(acc, w, q, apart, m, kind, 0, 8);
}

#include "matrix_kernel.h"
#include "page_kernel.h"

const rvm_matmul rvm_matmul_neon_dotprod = {
    .name = "neon_dotprod",
    .acts = acts,
    .matmul = matmul,
    .page_queries = page_queries,
    .page_scores = page_scores,
    .page_values = page_values,
    .peak = peak,
};
