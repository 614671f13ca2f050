/* This header has the definitions that all implementations of attention over pages of codes share (page_kernel.h). */
#ifndef RVM_PAGE_TERMS_H
#define RVM_PAGE_TERMS_H

#include "pages.h"

/* A 4-bit value is s u + b, with a scale s, a bias b and a code u in 0..15. The rounding error of a softmax weight is
 * multiplied by u, whose mean is far from zero. So the kernels correct the result: they add the product of the error
 * and MIDDLE, the middle of the range of u, together with the biases. */
#define MIDDLE 7.5f

/* The largest integer that one int8 term (ONE_TERM), or two terms, can hold. For two terms it is 254 * 127 + 126,
 * because 254 * 127 + 127 would round to hi = 128. */
#define ONE_TERM 127.0f
#define TWO_TERMS 32384.0f

static inline size_t page_terms(rvm_tier tier) { return TIERS[tier].terms; }

/* Return the number of bytes of the codes of one row of queries. */
static inline size_t row_codes(rvm_tier tier, size_t head_dim) {
    return 8 + page_terms(tier) * (4 + key_columns(head_dim));
}

/* The attention kernels keep the sum of the softmax weights of a row in ROW_SUMS parts. */
enum { ROW_SUMS = 16 };

/* Return the minimum number of floats in a row of the array `sum` of page_values. */
static inline size_t sum_width(size_t head_dim) { return value_rows(head_dim) + PAGE_TILE; }

static inline int page_refuses(int tier, const void *a, size_t rows, size_t head_dim, const void *b) {
    return !is_code_tier(tier) || !a || !b || rows == 0 || !good_head_dim(head_dim);
}

#endif
