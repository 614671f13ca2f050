/* Pages of keys and values: their sizes, and how one becomes another of fewer bits.  See rvm.h, "pages". */
#include "rvm.h"

static size_t rounded(size_t n, size_t to) { return (n + to - 1) / to * to; }

/* Quantised keys are rows of 32 numbers times something, as in rvm_matrix; values are in tiles of 16
 * dimensions. Scales follow: f16 per token for K and for V; cold pages have biases too. */
size_t rvm_head_page_bytes(rvm_tier tier, size_t head_dim) {
    const size_t hot = head_dim + rounded(head_dim, 16), small = rounded(head_dim, 32) + rounded(head_dim, 16);
    if (head_dim == 0 || head_dim % 2 || head_dim > RVM_MAX_HEAD_DIM) return 0;
    switch (tier) {
    case RVM_HOT: return 2 * RVM_PAGE_TOKENS * hot;
    case RVM_WARM: return RVM_PAGE_TOKENS * (small + 2 * 2);
    case RVM_COLD: return RVM_PAGE_TOKENS * (small / 2 + 2 * 4);
    default: return 0;
    }
}
