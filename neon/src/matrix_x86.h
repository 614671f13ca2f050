/* What the x86 files share. */
#include "matrix.h"

#include <immintrin.h>

INLINE void prefetch_line(const uint8_t *p) { _mm_prefetch((const char *)p, _MM_HINT_NTA); }

INLINE void prefetch_block(const uint8_t *p, uint32_t kind) {
    for (size_t i = 0; i < block_bytes(kind); i += 64)
        _mm_prefetch((const char *)p + i, _MM_HINT_NTA);
}
