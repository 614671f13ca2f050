/* This header describes the layout of a head-page: the keys and values of 64 tokens of one layer and one key-value
 * head, with D numbers for each key and each value.
 *
 *   hot      K f16 [D][64] | V f16 [64][W]                                        W: D rounded up to 16
 *   8 bits   K scale, V scale f16 [64] each | keys | values
 *   4 bits   K scale, K bias, V scale, V bias f16 [64] each | keys | values
 *
 * The keys and values of pages with codes are tiles of 16 rows, with the blocks of 32 columns of matrix.h. A row of
 * keys is a token, and its columns are dimensions, rounded up to 32. A row of values is a dimension (the number of
 * dimensions is rounded up to 16), and its columns are the 64 tokens. The page stores an 8-bit code plus 128. Padding
 * has codes of 0.
 *
 * The functions of this header take all facts about a tier from the tier's row in RVM_CODE_TIERS. In the kernels the
 * tier is a constant, so the results are constants, too. */
#ifndef RVM_PAGES_H
#define RVM_PAGES_H

#include "rvm.h"

#include <string.h>

enum { PAGE_TOKENS = RVM_PAGE_TOKENS, PAGE_TILE = 16, PAGE_BLOCK = 32, PAGE_ROW = 2 * PAGE_TOKENS };

typedef struct {
    uint8_t bits, rotated, terms;
} tier_traits;

#define RVM_TIER_TRAITS(name, bits, rotated, terms) {bits, rotated, terms},
static const tier_traits TIERS[] = {RVM_CODE_TIERS(RVM_TIER_TRAITS){16, 0, 0}};

static inline int is_code_tier(int tier) { return tier >= 0 && tier < RVM_HOT; }

/* Return 1 if a number of the tier has a bias. A number in a 4-bit tier is a code 0..15 times a scale plus a bias. A
 * number in an 8-bit tier is a code -127..127 times a scale, without a bias. */
static inline int has_bias(rvm_tier tier) { return TIERS[tier].bits == 4; }
static inline int least_code(rvm_tier tier) { return has_bias(tier) ? 0 : -127; }
static inline int most_code(rvm_tier tier) { return has_bias(tier) ? 15 : 127; }

/* Return the number that is added to a code of the tier before the page stores the code. */
static inline int page_zero(rvm_tier tier) { return has_bias(tier) ? 0 : 128; }

static inline size_t page_round(size_t n, size_t to) { return (n + to - 1) / to * to; }
static inline size_t key_columns(size_t head_dim) { return page_round(head_dim, PAGE_BLOCK); }
static inline size_t value_rows(size_t head_dim) { return page_round(head_dim, PAGE_TILE); }

/* Return the number of bytes of a block of 16 rows x 32 columns of codes. */
static inline size_t page_block(rvm_tier tier) { return PAGE_TILE * PAGE_BLOCK / 8 * (size_t)TIERS[tier].bits; }

/* These functions return byte offsets, from the start of a head-page, of the scales and biases of keys (k_) and values
   (v_). */
static inline size_t k_scales_at(void) { return 0; }
static inline size_t k_biases_at(void) { return PAGE_ROW; }
static inline size_t v_scales_at(rvm_tier tier) { return has_bias(tier) ? 2 * PAGE_ROW : PAGE_ROW; }
static inline size_t v_biases_at(void) { return 3 * PAGE_ROW; }
static inline size_t keys_at(rvm_tier tier) { return 2 * v_scales_at(tier); }

/* key_tile returns the number of bytes of a tile with the keys of 16 tokens. value_tile returns the number of bytes of
 * a tile with 16 dimensions of the values. */
static inline size_t key_tile(rvm_tier tier, size_t head_dim) {
    return key_columns(head_dim) / PAGE_BLOCK * page_block(tier);
}
static inline size_t value_tile(rvm_tier tier) { return PAGE_TOKENS / PAGE_BLOCK * page_block(tier); }

static inline size_t values_at(rvm_tier tier, size_t head_dim) {
    return keys_at(tier) + PAGE_TOKENS / PAGE_TILE * key_tile(tier, head_dim);
}

static inline size_t head_page_bytes(rvm_tier tier, size_t head_dim) {
    if (tier == RVM_HOT) return PAGE_ROW * (head_dim + value_rows(head_dim));
    return values_at(tier, head_dim) + value_rows(head_dim) / PAGE_TILE * value_tile(tier);
}

static inline int good_head_dim(size_t head_dim) {
    return head_dim && head_dim % 2 == 0 && head_dim <= RVM_MAX_HEAD_DIM;
}

/* Return the number of dimensions in a block of the rotation, a block-diagonal matrix by which keys and their queries
   are multiplied. */
static inline size_t hadamard_block(size_t head_dim) {
    const size_t power = head_dim & -head_dim;
    return power < 128 ? power : 128;
}

#endif
