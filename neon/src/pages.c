/* This file computes the sizes of KV pages, converts pages to the byte order that all implementations share
 * (metal_kernels/README.md), and demotes pages with the fastest implementation. rvm_pages.h and pages.h describe the
 * pages. */
#include "page_terms.h"

#define RVM_TIER_NAME(name, bits, rotated, terms) #name,
const char *rvm_tier_name(size_t tier) {
    static const char *const names[] = {RVM_CODE_TIERS(RVM_TIER_NAME) "HOT"};
    return tier <= RVM_HOT ? names[tier] : NULL;
}

size_t rvm_head_page_bytes(rvm_tier tier, size_t head_dim) {
    if (!good_head_dim(head_dim) || (uint32_t)tier > RVM_HOT) return 0;
    return head_page_bytes(tier, head_dim);
}

int rvm_pages_demote(rvm_tier from, const uint8_t *src, rvm_tier to, uint8_t *dst, size_t n, size_t head_dim) {
    static const rvm_layers *fastest;
    const rvm_layers *k = __atomic_load_n(&fastest, __ATOMIC_RELAXED);
    if (!k) __atomic_store_n(&fastest, k = rvm_layers_impl(NULL), __ATOMIC_RELAXED);
    return k->demote(from, src, to, dst, n, head_dim);
}

size_t rvm_attention_scratch(size_t rows, size_t head_dim) {
    const size_t width = value_rows(head_dim), page = RVM_PAGE_TOKENS;
    size_t codes = 0;
    for (int tier = 0; tier < RVM_HOT; tier++) codes += row_codes((rvm_tier)tier, head_dim);
    return rows * (2 * width + page + sum_width(head_dim) + 1 + ROW_SUMS) + 2 * page * width + 2 * rows * codes / sizeof(float);
}

/* ---- the byte order that all implementations share ---- */

/* Return the offset of the byte that has the code of row r and column c, in tiles of `columns` columns. Set *high to 1
 * if the code is in the upper half of the byte, else to 0. */
static size_t place(rvm_tier tier, size_t r, size_t c, size_t columns, int *high) {
    const size_t block = r / PAGE_TILE * (columns / PAGE_BLOCK) + c / PAGE_BLOCK;
    const size_t k = c % PAGE_BLOCK, quad = TIERS[tier].bits == 4 ? k % 16 / 4 : k / 4;
    *high = TIERS[tier].bits == 4 && k >= 16;
    return block * page_block(tier) + 64 * quad + 4 * (r % PAGE_TILE) + k % 4;
}

static size_t code_at(rvm_tier tier, size_t head_dim, int value, size_t token, size_t d, int *high) {
    if (value) return values_at(tier, head_dim) + place(tier, d, token, PAGE_TOKENS, high);
    return keys_at(tier) + place(tier, token, d, key_columns(head_dim), high);
}

/* Copy the codes of one head-page between the page's order and the shared order, one code at a time.  to_page: 1 to
 * copy from the shared order to the page. */
static void copy_codes(rvm_tier tier, uint8_t *page, size_t head_dim, uint8_t *shared, int to_page) {
    for (size_t i = 0; i < 2 * PAGE_TOKENS * head_dim; i++) {
        int high;
        const int value = i >= PAGE_TOKENS * head_dim;
        const size_t token = i / head_dim % PAGE_TOKENS, d = i % head_dim;
        uint8_t *mine = page + code_at(tier, head_dim, value, token, d, &high);
        if (TIERS[tier].bits == 8) {
            if (to_page) *mine = shared[i] ^ 128;
            else shared[i] = *mine ^ 128;
            continue;
        }
        const int there = i % 2 ? 4 : 0, here = high ? 4 : 0;
        if (to_page) *mine |= (uint8_t)((shared[i / 2] >> there & 15) << here);
        else shared[i / 2] = (uint8_t)((there ? shared[i / 2] : 0) | (*mine >> here & 15) << there);
    }
}

static void copy_hot(uint8_t *page, size_t head_dim, uint8_t *shared, int to_page) {
    const size_t width = value_rows(head_dim);
    for (size_t t = 0; t < PAGE_TOKENS; t++)
        for (size_t d = 0; d < head_dim; d++) {
            uint8_t *mine[2] = {page + 2 * (d * PAGE_TOKENS + t),
                                page + PAGE_ROW * head_dim + 2 * (t * width + d)};
            for (size_t v = 0; v < 2; v++) {
                uint8_t *there = shared + 2 * ((v * PAGE_TOKENS + t) * head_dim + d);
                memcpy(to_page ? mine[v] : there, to_page ? there : mine[v], 2);
            }
        }
}

/* Copy a head-page between the page's order and the shared order. The scales and biases are the same in the two orders.
   The page has the scales and biases before the codes, and the shared order has them after the codes. */
static void copy_page(rvm_tier tier, uint8_t *page, size_t head_dim, uint8_t *shared, int to_page) {
    if (tier == RVM_HOT) {
        copy_hot(page, head_dim, shared, to_page);
        return;
    }
    uint8_t *scales = shared + 2 * PAGE_TOKENS * head_dim / 8 * TIERS[tier].bits;
    memcpy(to_page ? page : scales, to_page ? scales : page, keys_at(tier));
    copy_codes(tier, page, head_dim, shared, to_page);
}

int rvm_page_canonical(rvm_tier tier, const uint8_t *page, size_t head_dim, uint8_t *out) {
    if (!page || !out || !rvm_head_page_bytes(tier, head_dim)) return RVM_BAD_ARGUMENT;
    copy_page(tier, (uint8_t *)page, head_dim, out, 0); /* with to_page = 0, the function `copy_page` only reads the page */
    return RVM_OK;
}

int rvm_page_from_canonical(rvm_tier tier, const uint8_t *in, size_t head_dim, uint8_t *page) {
    if (!in || !page || !rvm_head_page_bytes(tier, head_dim)) return RVM_BAD_ARGUMENT;
    memset(page, tier == RVM_HOT ? 0 : page_zero(tier), head_page_bytes(tier, head_dim));
    copy_page(tier, page, head_dim, (uint8_t *)in, 1);
    return RVM_OK;
}
