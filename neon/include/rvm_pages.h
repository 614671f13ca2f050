/* This header is a part of rvm.h, which includes it. */
#ifndef RVM_PUBLIC_PAGES_H
#define RVM_PUBLIC_PAGES_H

/* A KV page holds the keys and values of RVM_PAGE_TOKENS consecutive tokens.
 *
 * A tier is a storage precision: hot, warm or cold. New tokens go into a hot page. When newer tokens follow, the
 * runtime can convert the page to a lower tier (warm, later cold). A page holds all layers and key-value
 * heads, [layer][kv head]. Each pair of a layer and a key-value head has a head-page of rvm_head_page_bytes(tier,
 * head_dim) bytes. A hot head-page has IEEE half floats:
 *   keys   [head_dim][RVM_PAGE_TOKENS]      turned by rope; one row for each dimension
 *   values [RVM_PAGE_TOKENS][width]         width = head_dim rounded up to 16
 * A head-page of another tier has codes (small integers) in the order that is fastest for the kernels.
 * rvm_page_canonical converts this order to the order that other implementations share (metal_kernels/README.md). */

enum { RVM_PAGE_TOKENS = 64, RVM_MAX_HEAD_DIM = 512 };

/* This table has one row for each tier with codes, from the oldest tokens to newer ones. A hot page has half floats, so
 * the hot tier has no row. Warm pages have codes of 8 bits, and cold pages have codes of 4 bits
 * (metal_kernels/README.md).
 *   rotated  1 if keys are rotated before they become codes; the queries for these keys are rotated, too
 *   terms    the number of int8 numbers that stand for one number of a query or one softmax weight. With one term the
 *            error is about 0.6% of the numbers' standard deviation: the same as with codes of 8 bits, far less than
 *            with codes of 4 bits (10%).
 * ruvmlx/tiers.py and metal_kernels/pages.h have the same rows; tests/kv/test_tiers.py compares them.
 *
 *       name  bits  rotated  terms */
#define RVM_CODE_TIERS(TIER) \
    TIER(COLD, 4, 1, 1) \
    TIER(WARM, 8, 0, 2)

#define RVM_TIER_NUMBER(name, bits, rotated, terms) RVM_##name,
typedef enum { RVM_CODE_TIERS(RVM_TIER_NUMBER) RVM_HOT } rvm_tier;

/* Return the name of a tier: "COLD", "WARM" or "HOT". Return NULL after the last tier. */
RVM_API const char *rvm_tier_name(size_t tier);

typedef struct {
    uint8_t *data; /* data: begins at a multiple of 64 bytes */
    uint32_t tier; /* an rvm_tier */
    uint32_t unused;
} rvm_page;

/* Return the number of bytes of a head-page (one KV page of one head). The number is a multiple of 64. Return 0 for an
 * invalid tier or head_dim. */
RVM_API size_t rvm_head_page_bytes(rvm_tier tier, size_t head_dim);

/* Convert n consecutive head-pages from one tier to a lower tier. A conversion that skips tiers gives the same bytes as
   conversions from each tier to the next. */
RVM_API int rvm_pages_demote(rvm_tier from, const uint8_t *src, rvm_tier to, uint8_t *dst, size_t n,
                             size_t head_dim);

/* rvm_page_make gets zeroed memory for a page directly from the operating system. The function returns NULL if no
 * memory is free. rvm_page_free gives the memory back. */
RVM_API uint8_t *rvm_page_make(size_t bytes);
RVM_API void rvm_page_free(uint8_t *page, size_t bytes);

/* rvm_page_canonical converts a head-page to the byte order of metal_kernels/README.md, and rvm_page_from_canonical
 * converts it back. In that order, a hot head-page is the keys, f16 [64][head_dim], then the values, f16
 * [64][head_dim]. */
RVM_API int rvm_page_canonical(rvm_tier tier, const uint8_t *page, size_t head_dim, uint8_t *out);
RVM_API int rvm_page_from_canonical(rvm_tier tier, const uint8_t *in, size_t head_dim, uint8_t *page);

#endif
