/* What decoder.c (running one), decoder_create.c (making one) and decoder_cache.c share. */
#ifndef RVM_DECODER_H
#define RVM_DECODER_H

#include "pool.h"
#include "rvm.h"

#include <stdatomic.h>

enum {
    PAGE = RVM_PAGE_TOKENS,
    FEW = 8,          /* so few tokens read the cache in key ranges, merged afterwards */
    MOST_PARTS = 16,  /* key ranges of one head */
    PART_PAGES = 2,   /* shortest key range */
    QUERY_ROWS = 48,  /* queries x heads of one block of attention */
    PANEL = 16,       /* tokens that rvm_acts keeps together */
    TOKEN_BLOCK = 16, /* tokens of one chunk of a token phase */
    CHUNKS = 3,       /* chunks of a matrix phase per thread */
    L2_BYTES = 1 << 19 /* counting a byte per weight */
};

/* A page holds 64 tokens of all layers:  [layer][kv head]{ keys, values }.  The pages in use are
 * [first, end): a page before `first` has been dropped by the sliding window. Another kind of page (8 bits,
 * 4 bits) would be told apart here and in rvm_attention. */
struct rvm_cache {
    rvm_page *pages;
    size_t first, end, room; /* page numbers; room: entries of `pages` */
    uint8_t *spare;
    size_t page_bytes, head_bytes;
    size_t offset, window;
    uint32_t n_kv_heads;
};

/* Have pages for n more tokens, and let go those that the window has left. RVM_OK or RVM_NO_MEMORY. */
int cache_reserve(rvm_cache *c, size_t n);

/* Bytes from the start of a page to the keys of one layer and head. */
static inline size_t cache_keys_at(const rvm_cache *c, size_t layer, size_t head) {
    return (layer * c->n_kv_heads + head) * c->head_bytes;
}

typedef struct {
    float *a, *b; /* [in, rank], [rank, out]; one block of memory, at a */
    size_t rank;
    float scale;
} lora;

/* One linear layer: y = x @ W^T + bias + LoRA. */
typedef struct {
    const rvm_matrix *matrix;
    const float *bias;
    lora lora;
    size_t in, out, tiles;
} linear;

typedef struct {
    linear linear[RVM_N_PROJ];
    const float *input_norm, *post_norm;
} layer;

/* Linear layers that read the same input. */
typedef enum { ROLE_QKV, ROLE_O, ROLE_GATE_UP, ROLE_DOWN, ROLE_HEAD } role;

/* The input of a role, in the forms that its layers want. */
typedef struct {
    float *x;     /* [T, in] */
    float *pairs; /* [2 T, in]: each row, then what its 8 bits leave over */
    void *acts_q; /* for quantised matrices: of the pairs if config.precise */
    void *acts_f; /* for float matrices */
    float *u;     /* [3][T][RVM_MAX_RANK]: s x A of up to three LoRAs */
} input;

struct rvm_decoder {
    rvm_decoder_config config;
    const rvm_matmul *matmul;
    const rvm_layers *kernels;
    pool *pool;
    layer *layers;
    linear head;
    const rvm_matrix *embedding;
    const float *norm;
    double *frequencies;
    size_t q_width, kv_width, qkv_width, group, query_block, most_in, most_out;
    uint8_t *arena;
    size_t arena_bytes;
    /* in the arena; T = max_tokens */
    float *x, *turn, *qkv, *attended, *gate, *up, *tmp, *partial;
    input shared, *own; /* own: one token, per thread */
    float **scratch;    /* per thread */
    float **product;    /* per thread: [PANEL][most_out] */
    double seconds[RVM_N_PARTS], tick;
    _Atomic int status; /* of the call that runs */
    atomic_flag busy;
};

static inline int is_quantised(const rvm_matrix *m) {
    const rvm_kind kind = rvm_matrix_kind(m);
    return kind == RVM_Q4 || kind == RVM_Q8;
}

#endif
