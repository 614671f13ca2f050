/* What decoder.c and decoder_cache.c share. */
#ifndef RVM_DECODER_H
#define RVM_DECODER_H

#include "rvm.h"

/* A page holds 64 tokens of all layers:  [layer][kv head]{ keys, values }.  The pages in use are
 * [first, end): a page before `first` has been dropped by the sliding window. Another kind of page (8 bits,
 * 4 bits) would be told apart here and in rvm_attention. */
struct rvm_cache {
    uint8_t **pages;
    size_t first, end, room; /* page numbers; room: entries of `pages` */
    uint8_t *spare;
    size_t page_bytes, head_bytes, values_at;
    size_t offset, window;
    uint32_t n_kv_heads;
};

size_t cache_head_bytes(size_t head_dim);

/* Have pages for n more tokens, and let go those that the window has left. RVM_OK or RVM_NO_MEMORY. */
int cache_reserve(rvm_cache *c, size_t n);

/* Bytes from the start of a page to the keys of one layer and head. */
static inline size_t cache_keys_at(const rvm_cache *c, size_t layer, size_t head) {
    return (layer * c->n_kv_heads + head) * c->head_bytes;
}

/* The shape that caches of d need. */
const rvm_decoder_config *decoder_config(const rvm_decoder *d);

#endif
