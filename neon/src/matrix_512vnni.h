/* The kernels for AVX-512 with VNNI: vpdpbusd multiplies unsigned weights by signed activations, four columns at a
 * time. */
#include "matrix_512.h"

enum { OFFSET8 = 0, MAX_T = 16, STEP = 8, FLOAT_T = 16, WIDE_T = 4 };

INLINE void unpack(const uint8_t *p, uint32_t kind, size_t m, weights *w) {
    (void)m;
    unpack_512(p, kind, OFFSET8, w);
}

INLINE void dots_part(i32x *acc, const weights *w, const uint8_t *q, size_t apart, size_t m, uint32_t kind, size_t from,
                      size_t n) {
    (void)kind;
    UNROLL for (size_t j = from; j < from + n; j++)
        UNROLL for (size_t t = 0; t < m; t++)
            acc[t] = _mm512_dpbusd_epi32(acc[t], w->v[j], _mm512_set1_epi32(act_i32(q + apart * t + 4 * j)));
}

INLINE void dots(i32x *acc, const weights *w, const uint8_t *q, size_t apart, size_t m, uint32_t kind) {
    dots_part(acc, w, q, apart, m, kind, 0, 8);
}

#include "matrix_kernel.h"
#include "page_kernel.h"
