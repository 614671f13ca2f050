/* This header has the parts that all implementations of attention over code pages share (page_kernel.h). */
#ifndef RVM_PAGE_TERMS_H
#define RVM_PAGE_TERMS_H

#include "pages.h"

/* 4-bit values are s u + b with u of 0..15. The rounding error of a weight is multiplied by u, whose mean is far from
 * zero; so the product of the error and the middle of u is added together with the biases. */
#define MIDDLE 7.5f

/* The largest integer of one term, and of two terms: 254 * 127 + 126, because 254 * 127 + 127 would round to hi = 128. */
#define ONE_TERM 127.0f
#define TWO_TERMS 32384.0f

static inline size_t page_terms(rvm_tier tier) { return TIERS[tier].terms; }

/* Return the bytes of one row's codes. */
static inline size_t row_codes(rvm_tier tier, size_t head_dim) {
    return 8 + page_terms(tier) * (4 + key_columns(head_dim));
}

/* A row keeps the sum of its weights in ROW_SUMS parts. */
enum { ROW_SUMS = 16 };

/* Return the minimum number of floats in a row of sums. */
static inline size_t sum_width(size_t head_dim) { return value_rows(head_dim) + PAGE_TILE; }

static inline int page_refuses(int tier, const void *a, size_t rows, size_t head_dim, const void *b) {
    return !is_code_tier(tier) || !a || !b || rows == 0 || !good_head_dim(head_dim);
}

#endif
