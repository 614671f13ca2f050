/* What the x86 files share. */
#include "matrix.h"

#include <immintrin.h>

/* Into the L2 cache. The L1 cache has too few buffers for lines under way: prefetching into it (T0, NTA) can halve
 * the rate at which weights are read. */
INLINE void prefetch_line(const uint8_t *p) { _mm_prefetch((const char *)p, _MM_HINT_T1); }

/* From the L2 cache into the L1 cache: with several tokens the core itself looks only a block or two ahead. */
INLINE void prefetch_close(const uint8_t *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }

INLINE void prefetch_block(const uint8_t *p, uint32_t kind) {
    for (size_t i = 0; i < block_bytes(kind); i += 64) prefetch_line(p + i);
}
