/* Part of rvm.h, which includes it. */
#ifndef RVM_PUBLIC_PAGES_H
#define RVM_PUBLIC_PAGES_H

/* Pages: keys and values of RVM_PAGE_TOKENS consecutive tokens.
 *
 * New tokens go into a hot page. As its tokens grow older, a page is copied to the next lower tier. A page holds all
 * layers and key-value heads, [layer][kv head], each as one head-page of rvm_head_page_bytes(tier, head_dim) bytes.
 * A hot head-page, in IEEE half floats:
 *   keys   [head_dim][RVM_PAGE_TOKENS]      turned by rope; one row per dimension
 *   values [RVM_PAGE_TOKENS][width]         width = head_dim rounded up to 16
 * A head-page of codes is in the order that the kernels like; rvm_page_canonical has the one that other
 * implementations share (metal_kernels/README.md). */

enum { RVM_PAGE_TOKENS = 64, RVM_MAX_HEAD_DIM = 512 };

/* The tiers, a row each, from the oldest tokens to the newest. Numbers of a hot page are half floats; those of the
 * others are codes of 4 or 8 bits (metal_kernels/README.md).
 *   rotated  keys are rotated before they become codes, and queries before they score them
 *   terms    int8 numbers for each number of a query or a weight. One term is wrong by 0.6% of the largest number, as
 *            much as codes of 8 bits are, but far less than codes of 4 bits (10%).
 * ruvmlx/tiers.py and metal_kernels/pages.h have the same rows; tests/kv/test_tiers.py compares them.
 *
 *       name  bits  rotated  terms */
#define RVM_CODE_TIERS(TIER) \
    TIER(COLD, 4, 1, 1) \
    TIER(WARM, 8, 0, 2)

#define RVM_TIER_NUMBER(name, bits, rotated, terms) RVM_##name,
typedef enum { RVM_CODE_TIERS(RVM_TIER_NUMBER) RVM_HOT } rvm_tier;

/* "COLD", "WARM" .. "HOT"; NULL past the last. */
RVM_API const char *rvm_tier_name(size_t tier);

typedef struct {
    uint8_t *data; /* starts at a multiple of 64 bytes */
    uint32_t tier; /* rvm_tier */
    uint32_t unused;
} rvm_page;

/* A multiple of 64; 0 for a tier or head_dim that is refused. */
RVM_API size_t rvm_head_page_bytes(rvm_tier tier, size_t head_dim);

/* n head-pages in a row from one tier to a lower one; the bytes are those of all single steps between the two. */
RVM_API int rvm_pages_demote(rvm_tier from, const uint8_t *src, rvm_tier to, uint8_t *dst, size_t n,
                             size_t head_dim);

/* Memory for a page, zero at first, from the system itself and back to it. NULL: there is none. */
RVM_API uint8_t *rvm_page_make(size_t bytes);
RVM_API void rvm_page_free(uint8_t *page, size_t bytes);

/* A head-page in the byte order of metal_kernels/README.md, and back. Hot: K f16 [64][head_dim], V the same. */
RVM_API int rvm_page_canonical(rvm_tier tier, const uint8_t *page, size_t head_dim, uint8_t *out);
RVM_API int rvm_page_from_canonical(rvm_tier tier, const uint8_t *in, size_t head_dim, uint8_t *page);

#endif
