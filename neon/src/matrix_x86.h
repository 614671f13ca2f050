/* This header has the functions that the matrix kernels of all x86 instruction sets share. */
#include "matrix.h"

#include <immintrin.h>

/* Prefetch into the L2 cache. The L1 cache has too few buffers for cache lines that are being read, so a prefetch into
 * the L1 cache (T0, NTA) can halve the rate at which weights are read. */
INLINE void prefetch_line(const uint8_t *p) { _mm_prefetch((const char *)p, _MM_HINT_T1); }

/* Prefetch from the L2 cache into the L1 cache: with several tokens the core itself prefetches only one or two blocks. */
INLINE void prefetch_close(const uint8_t *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }

INLINE void prefetch_block(const uint8_t *p, uint32_t kind) {
    for (size_t i = 0; i < block_bytes(kind); i += 64) prefetch_line(p + i);
}
