/* What the x86 files share: prefetching, and vectors of 16 lanes as two halves of 256 bits. */
#include "matrix.h"

#include <immintrin.h>

INLINE void prefetch_block(const uint8_t *p, uint32_t kind) {
    for (size_t i = 0; i < (kind == RVM_Q4 ? 256u : 512u); i += 64) _mm_prefetch((const char *)p + i, _MM_HINT_T0);
}
