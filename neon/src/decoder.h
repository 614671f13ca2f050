/* What the decoder's files share: decoder_create.c (making one), decoder.c (a call), and the phases of a call in
 * decoder_linear.c and decoder_attend.c. */
#ifndef RVM_DECODER_H
#define RVM_DECODER_H

#include "bits.h"
#include "pool.h"
#include "rvm.h"

#include <stdatomic.h>

enum {
    PAGE = RVM_PAGE_TOKENS,
    FEW = 8,          /* so few tokens read the cache in key ranges, merged afterwards */
    MOST_PARTS = 16,  /* key ranges of one head */
    PART_PAGES = 2,   /* shortest key range */
    QUERY_ROWS = 48,  /* queries x heads of one block of attention */
    TOKEN_BLOCK = 16, /* tokens of one chunk of a token phase */
    CHUNKS = 3,       /* chunks of a matrix phase per thread */
    MOST_GROUPED = 16 /* with more rows each reads its pages by itself */
};

typedef struct {
    float *a, *b; /* [in, rank], [rank, out]; one block of memory, at a */
    size_t rank;
    float scale;
} lora;

/* Activations before float weights, groups of 32 columns and more, and super-blocks. */
typedef enum { FORM_FLOAT, FORM_GROUPS, FORM_SUPER, FORMS } form;

/* One linear layer: y = x @ W^T + bias + LoRA. */
typedef struct {
    const rvm_matrix *matrix;
    const float *bias;
    lora lora;
    size_t in, out, tiles;
    form form; /* of the activations it multiplies */
} linear;

typedef struct {
    linear linear[RVM_N_PROJ];
    const float *input_norm, *post_norm, *q_norm, *k_norm;
    const float *input_norm_bias, *post_norm_bias;
    int no_rope;
} layer;

/* Linear layers that read the same input. */
typedef enum { ROLE_QKV, ROLE_O, ROLE_GATE_UP, ROLE_DOWN, ROLE_HEAD } role;

/* The input of a role, in the forms that its layers want. */
typedef struct {
    float *x;          /* [T, in] */
    void *acts[FORMS]; /* only of forms that some layer wants */
    float *u;          /* [3][T][RVM_MAX_RANK]: s x A of up to three LoRAs */
} input;

struct rvm_decoder {
    rvm_decoder_config config;
    const rvm_matmul *matmul;
    const rvm_layers *kernels;
    pool *pool;
    layer *layers;
    linear head;
    const rvm_matrix *embedding;
    const float *norm, *norm_bias;
    double *frequencies;
    float *slopes; /* [n_heads] or NULL */
    int gated;
    size_t q_width, kv_width, qkv_width, group, query_block, most_in;
    /* Of each form. 8 bits are too few unless speed is all: on the starter model they cost 0.003
     * nats of KL, and greedy replies differ; 16 cost 1e-6 nats. Weights are read and unpacked once all the same. */
    rvm_acts_kind acts[FORMS];
    int wanted[FORMS]; /* by any layer */
    uint8_t *arena;
    size_t arena_bytes;
    /* in the arena; T = max_tokens. still: a turn by no angle, for keys and queries that rope does not turn, or that
     * heads_phase has turned; NULL where there are none */
    float *x, *turn, *still, *qkv, *attended, *gate, *up, *tmp, *partial;
    input shared, *own; /* own: one token, per thread */
    float **scratch;    /* per thread */
    float **parts;      /* per thread: key ranges of one row and head, [MOST_PARTS][group][RVM_PARTIAL] */
    double seconds[RVM_N_PARTS], tick;
    _Atomic int status; /* of the call that runs */
    atomic_flag busy;
};

/* One call: consecutive tokens of one sequence, or rows (one token of each of several sequences). Every thread has a
 * copy. The copy holds everything that decides the order of the phases, because the arrays may no longer exist when a
 * slow thread gets there. */
typedef struct {
    rvm_decoder *d;
    const rvm_row *rows; /* NULL: one sequence, as the next three say */
    /* Neighbouring rows whose first pages are the same form a group. A page that they share is read once. */
    size_t groups, group_chunks; /* 0: no groups; chunks of the attention of all */
    uint8_t group_end[MOST_GROUPED];
    const rvm_page *pages;
    size_t position; /* of the chunk's first token */
    const int32_t *tokens;
    size_t window;
    size_t n, outputs; /* tokens of the chunk; of them, read at the end */
    float *hidden, *logits;
    const int *cancel;
    int with_head_lora;
} call;

_Static_assert(sizeof(call) <= POOL_CONTEXT, "threads copy it");

/* The tokens of a phase: [first, first + n) of the chunk. */
typedef struct {
    call *c;
    pool_worker *w;
    size_t layer, first, n;
} stage;

static inline void fail(call *c, int status) {
    int ok = RVM_OK;
    atomic_compare_exchange_strong(&c->d->status, &ok, status);
}

/* Is there no more work to do?  Chunks are then claimed and dropped, so that all threads leave soon. */
static inline int stopped(call *c) {
    if (c->cancel && __atomic_load_n(c->cancel, __ATOMIC_RELAXED)) fail(c, RVM_CANCELLED);
    return atomic_load_explicit(&c->d->status, memory_order_relaxed) != RVM_OK;
}

static inline void checked(call *c, int rc) {
    if (rc != RVM_OK) fail(c, rc);
}

static inline size_t position_of(const call *c, size_t t) { return c->rows ? c->rows[t].offset : c->position + t; }

/* The first page that holds a token which a query at `position` sees. */
static inline size_t first_page_seen(size_t position, size_t window) {
    return window && position + 1 > window ? (position + 1 - window) / PAGE : 0;
}

/* A matrix phase: y of all layers of a role, and the operation directly after it (residual, swiglu). */
void linear_phase(const stage *s, role r);

/* The input of a role for all tokens of the stage, into d->shared. */
void prepare_phase(const stage *s, role r);

/* The head alone, over the call's `hidden`, already normed. */
void head_phases(const stage *s);

/* Between the products and attention: q and k of each head normed, a part of each head turned, queries scaled by
 * position. Nothing in most families: then it is no phase. */
void heads_phase(const stage *s);

void append_phase(const stage *s);
void attend_phase(const stage *s);

/* The number of key ranges in the stage's attention. */
size_t parts_of(const stage *s);

/* Attention of the stage's tokens [begin, end) from their key ranges, if they have several: rows of [q_width], in
 * `made` or where they lie already. */
const float *merged(const stage *s, size_t begin, size_t end, float *made);

/* Fills in the groups of a call with rows. */
void group_rows(call *c);

#endif
