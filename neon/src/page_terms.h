/* What all implementations of attention over warm and cold pages share: see page_kernel.h. */
#ifndef RVM_PAGE_TERMS_H
#define RVM_PAGE_TERMS_H

#include "pages.h"

/* Cold values are s u + b with u of 0..15. What a weight loses when it becomes an integer would be multiplied by
 * u, which is far from zero: its product with the middle of u is added where the biases go. */
#define MIDDLE 7.5f

/* int8 terms of a query or a weight. One costs 0.6% of a number's size, as much as the 8 bits of a warm page
 * themselves, but far less than the 4 bits of a cold one (10%). */
enum { WARM_TERMS = 2, COLD_TERMS = 1 };

/* The largest integer of one term, and of two: 254 * 127 + 126, for half of 254 more would round to hi = 128. */
#define ONE_TERM 127.0f
#define TWO_TERMS 32384.0f

static inline size_t page_terms(rvm_tier tier) { return tier == RVM_WARM ? WARM_TERMS : COLD_TERMS; }

/* Bytes of one row's codes. */
static inline size_t row_codes(rvm_tier tier, size_t head_dim) {
    return 8 + page_terms(tier) * (4 + key_columns(head_dim));
}

/* Floats of a row of sums, at least. */
static inline size_t sum_width(size_t head_dim) { return value_rows(head_dim) + PAGE_TILE; }

static inline int page_refuses(int tier, const void *a, size_t rows, size_t head_dim, const void *b) {
    return (tier != RVM_WARM && tier != RVM_COLD) || !a || !b || rows == 0 || !good_head_dim(head_dim);
}

#endif
