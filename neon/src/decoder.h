/* This header is for the source files of the decoder. decoder_create.c makes a decoder, decoder.c runs a call, and
 * decoder_linear.c and decoder_attend.c have the phases of a call. */
#ifndef RVM_DECODER_H
#define RVM_DECODER_H

#include "bits.h"
#include "pool.h"
#include "rvm.h"

#include <stdatomic.h>

enum {
    PAGE = RVM_PAGE_TOKENS,
    FEW = 8,          /* FEW: up to this number of tokens, attention splits the KV pages into key ranges and merges the results */
    MOST_PARTS = 16,  /* MOST_PARTS: the maximum number of key ranges (parts) of one head */
    PART_PAGES = 2,   /* PART_PAGES: the number of pages in the shortest key range */
    QUERY_ROWS = 48,  /* QUERY_ROWS: the number of queries x heads in one block of attention */
    TOKEN_BLOCK = 16, /* TOKEN_BLOCK: the number of tokens that a thread takes at a time in a phase over tokens */
    CHUNKS = 3,       /* CHUNKS: the number of pieces of work per thread in a matrix phase of one token (twice as many for more tokens) */
    MOST_GROUPED = 16 /* MOST_GROUPED: with more rows than this in a call, each row reads its pages separately */
};

typedef struct {
    float *a, *b; /* a: [in, rank], b: [rank, out], in one block of memory that begins at a; packed if bits is 4 */
    int bits;
    size_t rank;
    float scale;
} lora;

/* The forms in which activations are stored: for float weights, for weights in groups of 32 or more columns, and for
 * weights in super-blocks (rvm_matrix.h). */
typedef enum { FORM_FLOAT, FORM_GROUPS, FORM_SUPER, FORMS } form;

/* One linear layer of the model: y = x @ W^T + bias + LoRA. */
typedef struct {
    const rvm_matrix *matrix;
    const float *bias;
    lora lora;
    size_t in, out, tiles;
    form form; /* form: the form of the activations by which this layer's weights are multiplied */
} linear;

typedef struct {
    linear linear[RVM_N_PROJ];
    const float *input_norm, *post_norm, *q_norm, *k_norm;
    const float *input_norm_bias, *post_norm_bias;
    int no_rope;
} layer;

/* A role is a set of linear layers that read the same input, for example q, k and v. */
typedef enum { ROLE_QKV, ROLE_O, ROLE_GATE_UP, ROLE_DOWN, ROLE_HEAD } role;

/* The input of a role, in each form that a linear layer of the role needs. */
typedef struct {
    float *x;          /* [T, in], as float */
    void *acts[FORMS]; /* acts: the input in each form; NULL for a form that no layer needs */
    float *u;          /* u: [3][T][RVM_MAX_RANK], the products s x A of up to three LoRAs */
} input;

struct rvm_decoder {
    rvm_decoder_config config;
    const rvm_matmul *matmul;
    const rvm_layers *kernels;
    pool *pool;
    layer *layers;
    linear head;
    const rvm_matrix *embedding;
    lora embedding_lora; /* embedding_lora: a: [vocab_size, rank], b: [rank, hidden_size] */
    const float *norm, *norm_bias;
    double *frequencies;
    float *slopes; /* slopes: [n_heads], ALiBi's slopes, or NULL */
    int gated;
    size_t q_width, kv_width, qkv_width, group, query_block, most_in;
    /* The kind of the activations in each form. With activations of 8 bits, a decoded token is faster, but on the
     * starter model the KL divergence from float activations is 0.003 nats, and greedy replies differ. With 16 bits the
     * KL divergence is 1e-6 nats. The decoder reads the weights as often with 16 bits as with 8 bits. */
    rvm_acts_kind acts[FORMS];
    int wanted[FORMS]; /* wanted: 1 if any linear layer needs the form */
    uint8_t *arena;
    size_t arena_bytes;
    /* These arrays lie in the arena. T = max_tokens. still: rope angles of 0, for queries and keys that rope does
     * not turn, or that heads_phase has turned already; NULL if there are none. */
    float *x, *turn, *still, *qkv, *attended, *gate, *up, *tmp, *partial;
    input shared, *own; /* shared: the input that all threads read; own: for each thread, the input of one token */
    float **scratch;    /* scratch: the scratch memory of each thread */
    float **parts;      /* parts: for each thread, the partial attention of one row and head, [MOST_PARTS][group][RVM_PARTIAL] */
    double seconds[RVM_N_PARTS], tick;
    _Atomic int status; /* status: the return code of the call that runs now */
    atomic_flag busy;
};

/* The bits of the activations for quantised weights in one call.
 *   BITS_CONFIGURED: those of the decoder's configuration
 *   BITS_8_TO_LAST_VALUES: 8 as far as the attention of the last layer, for a prompt. A prompt needs less precision than
 *       the tokens of a reply (tests/research/prompt_bits.py).
 *   BITS_8: 8 in the whole call */
typedef enum { BITS_CONFIGURED, BITS_8_TO_LAST_VALUES, BITS_8 } activation_bits;

/* One call: consecutive tokens of one sequence, or rows (one token of each of several sequences). Every thread except
 * the caller's has its own copy of this struct. The copy has all values that decide the order of the phases, because
 * the caller can have freed its arrays when a slow thread needs these values. */
typedef struct {
    rvm_decoder *d;
    const rvm_row *rows; /* rows: NULL: the call is for one sequence, given by pages, position and tokens */
    /* Neighbouring rows whose first pages are the same memory form a group. The rows of a group read a shared page
       once. */
    size_t groups, group_chunks; /* groups: the number of groups; 0: no groups; group_chunks: the number of pieces of work in their attention */
    uint8_t group_end[MOST_GROUPED];
    const rvm_page *pages;
    size_t position; /* position: the position of the first token of the chunk */
    const int32_t *tokens;
    size_t window;
    size_t n, outputs; /* n: the number of tokens in the chunk; outputs: the last `outputs` tokens have outputs */
    float *hidden, *logits;
    float *raw; /* raw: [n, hidden_size], receives the output of the last layer before the final norm; or NULL */
    const int *cancel;
    activation_bits bits;
    int with_head_lora;
} call;

_Static_assert(sizeof(call) <= POOL_CONTEXT, "threads copy it");

/* The tokens of a phase: the tokens [first, first + n) of the chunk. coarse: 1 if the activations for quantised weights
 * have 8 bits in this phase. */
typedef struct {
    call *c;
    pool_worker *w;
    size_t layer, first, n;
    int coarse;
} stage;

static inline void fail(call *c, int status) {
    int ok = RVM_OK;
    atomic_compare_exchange_strong(&c->d->status, &ok, status);
}

/* Return 1 if the call has an error or the caller has cancelled it. After an error or a cancellation, the threads take
 * pieces of work without doing the work, so that all threads leave the call soon. */
static inline int stopped(call *c) {
    if (c->cancel && __atomic_load_n(c->cancel, __ATOMIC_RELAXED)) fail(c, RVM_CANCELLED);
    return atomic_load_explicit(&c->d->status, memory_order_relaxed) != RVM_OK;
}

static inline void checked(call *c, int rc) {
    if (rc != RVM_OK) fail(c, rc);
}

static inline size_t position_of(const call *c, size_t t) { return c->rows ? c->rows[t].offset : c->position + t; }

/* Return the first page that has a token which a query at `position` sees. */
static inline size_t first_page_seen(size_t position, size_t window) {
    return window && position + 1 > window ? (position + 1 - window) / PAGE : 0;
}

/* Run a matrix phase: compute the outputs y of all linear layers of a role, and the operation after these layers
   (residual, swiglu). */
void linear_phase(const stage *s, role r);

/* Compute the input of a role for all tokens of the stage, and store it in d->shared. */
void prepare_phase(const stage *s, role r);

/* Compute only the output head from the hidden states in call.hidden, which have gone through the final norm already.
   */
void head_phases(const stage *s);

/* Apply the norms to q and k of each head, turn a part of each head by rope, and scale queries by their positions. If
   the model needs none of these three steps, the function does nothing. */
void heads_phase(const stage *s);

void append_phase(const stage *s);
void attend_phase(const stage *s);

/* Return the number of key ranges (parts) into which the attention of the stage is split; 1 for rows, which split their
 * own pages. */
size_t parts_of(const stage *s);

/* Return the attention of the stage's tokens [begin, end), in rows of q_width floats. If there are several key ranges,
 * merge their results into `made` and return `made`. If there is one range, return the address of its result; the
 * ranges of grouped rows are merged there. */
const float *merged(const stage *s, size_t begin, size_t end, float *made);

/* Find the groups of neighbouring rows of a call that share pages. */
void group_rows(call *c);

#endif
