/* This header is for the decoder's files: decoder_create.c makes a decoder, decoder.c runs a call, and decoder_linear.c
 * and decoder_attend.c have the phases of a call. */
#ifndef RVM_DECODER_H
#define RVM_DECODER_H

#include "bits.h"
#include "pool.h"
#include "rvm.h"

#include <stdatomic.h>

enum {
    PAGE = RVM_PAGE_TOKENS,
    FEW = 8,          /* up to this number of tokens, attention splits the cache into key ranges and merges them */
    MOST_PARTS = 16,  /* the maximum number of key ranges of one head */
    PART_PAGES = 2,   /* pages in the shortest key range */
    QUERY_ROWS = 48,  /* queries x heads in one block of attention */
    TOKEN_BLOCK = 16, /* tokens in one chunk of a phase over tokens */
    CHUNKS = 3,       /* chunks of a matrix phase for each thread */
    MOST_GROUPED = 16 /* with more rows, each row reads its pages separately */
};

typedef struct {
    float *a, *b; /* [in, rank], [rank, out], in one block of memory that begins at a */
    size_t rank;
    float scale;
} lora;

/* Forms of activations: for float weights, for groups of 32 columns and more, and for super-blocks. */
typedef enum { FORM_FLOAT, FORM_GROUPS, FORM_SUPER, FORMS } form;

/* One linear layer: y = x @ W^T + bias + LoRA. */
typedef struct {
    const rvm_matrix *matrix;
    const float *bias;
    lora lora;
    size_t in, out, tiles;
    form form; /* form of the activations that the layer multiplies */
} linear;

typedef struct {
    linear linear[RVM_N_PROJ];
    const float *input_norm, *post_norm, *q_norm, *k_norm;
    const float *input_norm_bias, *post_norm_bias;
    int no_rope;
} layer;

/* A role is a set of linear layers that read the same input. */
typedef enum { ROLE_QKV, ROLE_O, ROLE_GATE_UP, ROLE_DOWN, ROLE_HEAD } role;

/* The input of a role, in the forms that its layers need. */
typedef struct {
    float *x;          /* [T, in] */
    void *acts[FORMS]; /* NULL for forms that no layer needs */
    float *u;          /* [3][T][RVM_MAX_RANK]: s x A for up to three LoRAs */
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
    /* The kind of activations of each form. 8 bits are precise enough only if speed matters most: on the starter model
     * the KL is 0.003 nats and greedy replies differ; with 16 bits the KL is 1e-6 nats. Both read the weights once. */
    rvm_acts_kind acts[FORMS];
    int wanted[FORMS]; /* 1 if any layer needs the form */
    uint8_t *arena;
    size_t arena_bytes;
    /* These arrays lie in the arena; T = max_tokens. still: the rope angles 0, for keys and queries that rope does not
     * turn or that heads_phase has turned; NULL if there are no such heads */
    float *x, *turn, *still, *qkv, *attended, *gate, *up, *tmp, *partial;
    input shared, *own; /* own: for each thread, the input of one token */
    float **scratch;    /* one for each thread */
    float **parts;      /* for each thread: key ranges of one row and head, [MOST_PARTS][group][RVM_PARTIAL] */
    double seconds[RVM_N_PARTS], tick;
    _Atomic int status; /* status of the running call */
    atomic_flag busy;
};

/* One call: consecutive tokens of one sequence, or rows (one token of each of several sequences). Every thread has a
 * copy. The copy holds everything that decides the order of the phases, because the arrays may no longer exist when a
 * slow thread gets there. */
typedef struct {
    rvm_decoder *d;
    const rvm_row *rows; /* NULL: one sequence, given by pages, position and tokens */
    /* Neighbouring rows with the same first pages form a group, which reads a shared page once. */
    size_t groups, group_chunks; /* number of groups, 0 for none; chunks of the attention of all groups */
    uint8_t group_end[MOST_GROUPED];
    const rvm_page *pages;
    size_t position; /* position of the chunk's first token */
    const int32_t *tokens;
    size_t window;
    size_t n, outputs; /* tokens of the chunk; tokens at its end whose outputs are read */
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

/* Return 1 after an error or a cancel. The threads then claim chunks without work, so that all threads leave soon. */
static inline int stopped(call *c) {
    if (c->cancel && __atomic_load_n(c->cancel, __ATOMIC_RELAXED)) fail(c, RVM_CANCELLED);
    return atomic_load_explicit(&c->d->status, memory_order_relaxed) != RVM_OK;
}

static inline void checked(call *c, int rc) {
    if (rc != RVM_OK) fail(c, rc);
}

static inline size_t position_of(const call *c, size_t t) { return c->rows ? c->rows[t].offset : c->position + t; }

/* Return the first page that holds a token which a query at `position` sees. */
static inline size_t first_page_seen(size_t position, size_t window) {
    return window && position + 1 > window ? (position + 1 - window) / PAGE : 0;
}

/* Run a matrix phase: compute y of all layers of a role and the operation after it (residual, swiglu). */
void linear_phase(const stage *s, role r);

/* Write the input of a role, for all tokens of the stage, to d->shared. */
void prepare_phase(const stage *s, role r);

/* Run only the output head over the call's `hidden`, which is already normed. */
void head_phases(const stage *s);

/* Norm q and k of each head, turn a part of each head by rope, and scale queries by position. Most model families need
 * none of these steps; then there is no such phase. */
void heads_phase(const stage *s);

void append_phase(const stage *s);
void attend_phase(const stage *s);

/* Return the number of ranges into which the attention of a stage splits its keys. */
size_t parts_of(const stage *s);

/* Return the attention of the stage's tokens [begin, end), rows of [q_width]: several key ranges are merged into `made`;
 * one range is returned in place. */
const float *merged(const stage *s, size_t begin, size_t end, float *made);

/* Find the groups of neighbouring rows of a call. */
void group_rows(call *c);

#endif
