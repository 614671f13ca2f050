/* Part of rvm.h, which includes it. */
#ifndef RVM_PUBLIC_DECODER_H
#define RVM_PUBLIC_DECODER_H

/* The decoder: a Llama or Mistral model, one call per chunk of a prompt or per token
 *
 *   rvm_decoder *d;
 *   int rc = rvm_decoder_create(&config, &weights, &d);     // the weights stay the caller's
 *   rvm_page pages[2] = {{memory, RVM_HOT, 0}, {more, RVM_HOT, 0}};     // rvm_decoder_page_bytes(d, RVM_HOT) each
 *   rc = rvm_decoder_forward(d, pages, 0, tokens, n, 1, hidden, logits, NULL);
 *
 * One call at a time for a decoder (RVM_BUSY otherwise), from any thread. Nothing is allocated after create.
 * Results do not depend on the number of threads. */

enum { RVM_CANCELLED = 3, RVM_NO_MEMORY = 4, RVM_BUSY = 5 };

typedef enum {
    RVM_Q_PROJ,
    RVM_K_PROJ,
    RVM_V_PROJ,
    RVM_O_PROJ,
    RVM_GATE_PROJ,
    RVM_UP_PROJ,
    RVM_DOWN_PROJ,
    RVM_N_PROJ,
    RVM_LM_HEAD = RVM_N_PROJ
} rvm_module;

typedef struct {
    uint32_t n_layers, n_heads, n_kv_heads, head_dim; /* head_dim even, at most RVM_MAX_HEAD_DIM */
    uint32_t hidden_size, intermediate_size, vocab_size;
    uint32_t sliding_window; /* 0: none */
    uint32_t max_tokens;     /* longest chunk */
    uint32_t threads;        /* the caller's included */
    uint32_t precise;        /* in front of quantised matrices: 0: 8-bit activations, 1: 16 bits */
    float rms_norm_eps;
    const double *rope_frequencies; /* [head_dim / 2] radians per position, scaling included */
    double rope_factor;             /* multiplies turned queries and keys; 1: no change */
    double query_beta, query_span;  /* queries at position p times 1 + beta ln(1 + floor(p / span)); beta 0: not */
    const char *impl;               /* of matrices and layers; NULL: the fastest */
} rvm_decoder_config;

typedef struct {
    const rvm_matrix *matrix[RVM_N_PROJ];
    const float *bias[RVM_N_PROJ];          /* [out] or NULL */
    const float *input_norm, *post_norm;    /* [hidden_size] */
    const float *q_norm, *k_norm;           /* [head_dim], of each head before rope; or both NULL */
    uint32_t no_rope;                       /* not 0: rope turns nothing in this layer */
} rvm_decoder_layer;

typedef struct {
    const rvm_matrix *embedding, *lm_head; /* may be the same */
    const float *norm;
    const rvm_decoder_layer *layers; /* [n_layers] */
} rvm_decoder_weights;

typedef struct rvm_decoder rvm_decoder;

RVM_API int rvm_decoder_create(const rvm_decoder_config *config, const rvm_decoder_weights *weights,
                               rvm_decoder **out);
RVM_API void rvm_decoder_destroy(rvm_decoder *d);

/* Name of the implementation of the matrices in use. */
RVM_API const char *rvm_decoder_matmul_name(const rvm_decoder *d);
RVM_API size_t rvm_decoder_bytes(const rvm_decoder *d); /* activations and scratch */

/* Use n of the threads from the next call on; the others sleep. */
RVM_API int rvm_decoder_use_threads(rvm_decoder *d, uint32_t n);

/* Append n tokens, 1 to max_tokens, behind `offset` others. pages[i] holds the positions 64 i to 64 i + 63 of
 * this sequence: those that receive one of the n tokens must be hot; a page that the sliding window has left
 * behind may have data NULL. A call that fails leaves what is before `offset` as it was.
 * The last `outputs` tokens are read: hidden [outputs, hidden_size] is the input of the output head, logits
 * [outputs, vocab_size]; either may be NULL.
 * cancel: looked at all the time; once it is not 0 the call soon ends with RVM_CANCELLED.
 * RVM_NOT_FINITE: a logit is NaN or infinite. */
RVM_API int rvm_decoder_forward(rvm_decoder *d, const rvm_page *pages, size_t offset, const int32_t *tokens,
                                size_t n, size_t outputs, float *hidden, float *logits, const int *cancel);

/* n rows, 1 to max_tokens, each of a sequence of its own: hidden [n, hidden_size], logits [n, vocab_size]. One
 * pass over the weights serves them all. With quantised weights every row gets the same bits as if it were alone.
 * A call that fails leaves all sequences as they were. */
RVM_API int rvm_decoder_step(rvm_decoder *d, const rvm_row *rows, size_t n, float *hidden, float *logits,
                             const int *cancel);

/* Bytes of a page, all layers and heads; a multiple of 64. */
RVM_API size_t rvm_decoder_page_bytes(const rvm_decoder *d, rvm_tier tier);

/* Copy a full page into one of a lower tier. May run beside a call that reads `from`. */
RVM_API int rvm_decoder_demote(const rvm_decoder *d, const rvm_page *from, const rvm_page *to);

/* The output head by itself: hidden [n, hidden_size] -> logits [n, vocab_size], for any n; with the LoRA of
 * RVM_LM_HEAD only if asked for. */
RVM_API int rvm_decoder_head(rvm_decoder *d, const float *hidden, size_t n, int with_lora, float *logits);

/* One call of `draw` or `trace_accumulate` (rvm_kernels) for one token of a reply; the fields are its arguments. */
typedef enum { RVM_REPLY_DRAW, RVM_REPLY_TRACE } rvm_reply_work;
typedef struct {
    int what, status; /* an rvm_reply_work; the kernel's return code */
    int32_t token;    /* output of DRAW, input of TRACE */
    float scale;
    const float *hidden, *logits, *lora_a, *lora_b;
    float *e_a, *e_b;
    uint64_t *scratch;
    size_t dim, vocab, rank;
    rvm_drawing drawing;
    double logprob[2];
} rvm_reply;

/* Run n such calls on the decoder's threads. No two may write to the same array. RVM_BUSY during another call. */
RVM_API int rvm_decoder_replies(rvm_decoder *d, rvm_reply *replies, size_t n);

/* y += scale * (x A) B at one linear layer from the next call on; both are copied. rank 0 takes it off.
 * A: [in, rank]   B: [rank, out]   layer: ignored for RVM_LM_HEAD */
RVM_API int rvm_decoder_set_lora(rvm_decoder *d, size_t layer, rvm_module module, const float *lora_a,
                                 const float *lora_b, size_t rank, float scale);

/* Seconds that the parts of all calls since the last reading took, as the calling thread saw them. */
enum { RVM_PART_EMBED, RVM_PART_QKV, RVM_PART_ATTEND, RVM_PART_O, RVM_PART_GATE_UP, RVM_PART_DOWN, RVM_PART_HEAD, RVM_N_PARTS };
RVM_API void rvm_decoder_profile(rvm_decoder *d, double seconds[RVM_N_PARTS]);

#endif
