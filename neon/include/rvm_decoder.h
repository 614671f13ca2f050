/* This header is a part of rvm.h, which includes it. */
#ifndef RVM_PUBLIC_DECODER_H
#define RVM_PUBLIC_DECODER_H

/* The decoder runs a model with Llama's architecture or a variant of it. One call of rvm_decoder_forward computes one
 * token, or a chunk of a prompt (several tokens that follow each other). Any thread can call the decoder, but
 * rvm_decoder_forward, _prefill, _step, _head, _replies and _set_lora return RVM_BUSY during another such call of the
 * same decoder. Only rvm_decoder_create and rvm_decoder_set_lora allocate memory; the first call that computes also starts
 * the threads. The results do not depend on the number of threads.
 *
 * Example:
 *   rvm_decoder *d;
 *   int rc = rvm_decoder_create(&config, &weights, &d);     // the caller owns the weights
 *   // each page has rvm_decoder_page_bytes(d, RVM_HOT) bytes
 *   rvm_page pages[2] = {{memory, RVM_HOT, 0}, {more, RVM_HOT, 0}};
 *   rc = rvm_decoder_forward(d, pages, 0, tokens, n, 1, hidden, logits, NULL); */

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
    RVM_LM_HEAD = RVM_N_PROJ,
    RVM_EMBEDDING
} rvm_module;

typedef struct {
    uint32_t n_layers, n_heads, n_kv_heads, head_dim; /* head_dim is even and at most RVM_MAX_HEAD_DIM */
    uint32_t hidden_size, intermediate_size, vocab_size;
    uint32_t sliding_window; /* sliding_window: the number of newest tokens that a query sees; 0: all tokens */
    uint32_t max_tokens;     /* max_tokens: the maximum number of tokens in a chunk */
    uint32_t threads;        /* threads: the number of threads, including the caller's thread */
    uint32_t precise;        /* precise: 0: activations for quantised matrices have 8 bits; 1: they have 16 bits (but see rvm_decoder_prefill) */
    uint32_t layer_norm;     /* layer_norm: not 0: input_norm, post_norm and norm are LayerNorms, with optional biases; 0: RMS norms */
    uint32_t rope_dims;      /* rope_dims: rope turns the first rope_dims numbers of each head; an even number; 0: no rope */
    float norm_eps;
    const float *alibi_slopes;      /* alibi_slopes: [n_heads]; slope * (key's position - query's position) is added to a score; or NULL */
    const double *rope_frequencies; /* rope_frequencies: [rope_dims / 2], in radians per position, after rope scaling; NULL without rope */
    double rope_factor;             /* rope_factor: rope multiplies the queries and keys that it turns by this factor; 1: no change */
    double query_beta, query_span;  /* query_beta, query_span: a query at position p is multiplied by 1 + beta ln(1 + floor(p / span)) */
    const char *impl;               /* impl: the name of the implementation of matrices and layers; NULL: the fastest */
} rvm_decoder_config;

typedef struct {
    const rvm_matrix *matrix[RVM_N_PROJ];   /* matrix: the linear layers. If no layer has a gate matrix, the MLP is down(gelu(up(x))) */
    const float *bias[RVM_N_PROJ];          /* bias: the biases of the linear layers, [out] each, or NULL */
    const float *input_norm, *post_norm;    /* input_norm, post_norm: [hidden_size], weights of the norms before attention and before the MLP */
    const float *input_norm_bias, *post_norm_bias; /* input_norm_bias, post_norm_bias: [hidden_size], biases of these norms if they are LayerNorms; or NULL */
    const float *q_norm, *k_norm;           /* q_norm, k_norm: [head_dim], weights of each head's RMS norms before rope; or both NULL */
    uint32_t no_rope;                       /* no_rope: not 0: rope does not turn the queries and keys of this layer */
} rvm_decoder_layer;

typedef struct {
    const rvm_matrix *embedding, *lm_head; /* embedding and lm_head are equal if the model has one matrix for both */
    const float *norm;
    const rvm_decoder_layer *layers; /* [n_layers] */
    const float *norm_bias;          /* norm_bias: the bias of the final norm if it is a LayerNorm, or NULL */
} rvm_decoder_weights;

typedef struct rvm_decoder rvm_decoder;

RVM_API int rvm_decoder_create(const rvm_decoder_config *config, const rvm_decoder_weights *weights,
                               rvm_decoder **out);
RVM_API void rvm_decoder_destroy(rvm_decoder *d);

/* Return the name of the implementation of the matrix kernels that the decoder uses. */
RVM_API const char *rvm_decoder_matmul_name(const rvm_decoder *d);
RVM_API size_t rvm_decoder_bytes(const rvm_decoder *d); /* rvm_decoder_bytes returns the number of bytes of the decoder's activations and scratch memory */

/* Use n of the decoder's threads from the next call on. The decoder's other threads compute nothing. */
RVM_API int rvm_decoder_use_threads(rvm_decoder *d, uint32_t n);

/* Append n tokens (1 to max_tokens) to a sequence that has `offset` tokens. pages[i] holds the positions 64 i to 64 i +
 * 63 of the sequence. A page that receives one of the n tokens must be hot (rvm_pages.h). The field `data` of a page
 * can be NULL if none of the n tokens sees a token of the page, because of the sliding window. A call that fails does
 * not change the first `offset` tokens. The call writes outputs for the last `outputs` tokens: hidden [outputs,
 * hidden_size], the input of the output head, and logits [outputs, vocab_size]. Each of the two pointers can be NULL.
 * cancel: the threads read this flag before each chunk of their work, or NULL. Soon after the flag becomes not 0, the
 * call returns RVM_CANCELLED. The call returns RVM_NOT_FINITE if a logit is NaN or infinite. */
RVM_API int rvm_decoder_forward(rvm_decoder *d, const rvm_page *pages, size_t offset, const int32_t *tokens,
                                size_t n, size_t outputs, float *hidden, float *logits, const int *cancel);

/* Append n tokens (1 to max_tokens) of a prompt. The call writes outputs for the last token: hidden [hidden_size] and
 * logits [vocab_size]. Each of the two pointers can be NULL. For quantised matrices, the activations have 8 bits as far as
 * the queries, keys and values of the last layer, and 16 bits after that. So the call takes less time. With quantised
 * matrices, the bits of the results do not depend on how the caller divides a prompt. The other arguments are those of
 * rvm_decoder_forward. */
RVM_API int rvm_decoder_prefill(rvm_decoder *d, const rvm_page *pages, size_t offset, const int32_t *tokens, size_t n,
                                float *hidden, float *logits, const int *cancel);

/* Compute the first layers of a model for n tokens, and append the tokens to the sequence. The decoder was created
 * with only these layers. raw: [n, hidden_size]; the function writes the output of the last of these layers into raw,
 * without the final norm. The other arguments are those of rvm_decoder_forward. */
RVM_API int rvm_decoder_layers(rvm_decoder *d, const rvm_page *pages, size_t offset, const int32_t *tokens, size_t n,
                               float *raw, const int *cancel);

/* Append one token to each of n different sequences (1 to max_tokens). Row i of hidden [n, hidden_size] and of logits
 * [n, vocab_size] belongs to sequence i. The call reads the weights once for all n sequences. With quantised weights,
 * the bits of a row of the results do not depend on the other sequences. A call that fails does not change the first
 * `offset` tokens of any sequence. If coarse is 1, the activations for quantised matrices have 8 bits,
 * and a call with many sequences takes about two thirds of the time. */
RVM_API int rvm_decoder_step(rvm_decoder *d, const rvm_row *rows, size_t n, int coarse, float *hidden, float *logits,
                             const int *cancel);

/* Return the number of bytes of a KV page of this tier, with all layers and heads. The number is a multiple of 64. */
RVM_API size_t rvm_decoder_page_bytes(const rvm_decoder *d, rvm_tier tier);

/* Convert a full page to a page of a lower tier. This call can run during another call that reads the page `from`. */
RVM_API int rvm_decoder_demote(const rvm_decoder *d, const rvm_page *from, const rvm_page *to);

/* Compute only the output head: hidden [n, hidden_size] -> logits [n, vocab_size], for any n. The call adds the LoRA of
 * RVM_LM_HEAD only if with_lora is not 0. */
RVM_API int rvm_decoder_head(rvm_decoder *d, const float *hidden, size_t n, int with_lora, float *logits);

/* An rvm_reply is one call of the kernel `draw` or `trace_accumulate` (rvm_kernels) for one token of a reply. The
 * fields after `status` are the arguments and the results of the kernel. */
typedef enum { RVM_REPLY_DRAW, RVM_REPLY_TRACE } rvm_reply_work;
typedef struct {
    int what, status; /* what: which kernel runs (rvm_reply_work); status: the return code of the kernel */
    int32_t token;    /* token: an output of RVM_REPLY_DRAW, an input of RVM_REPLY_TRACE */
    float scale;
    const float *hidden, *logits, *lora_a, *lora_b;
    float *e_a, *e_b;
    uint64_t *scratch;
    size_t dim, vocab, rank;
    rvm_drawing drawing;
    double logprob[2];
} rvm_reply;

/* Run the n kernel calls that `replies` describes on the threads of the decoder. Two of these kernel calls must not
 * write to the same array. Return RVM_BUSY if another call of the decoder runs. */
RVM_API int rvm_decoder_replies(rvm_decoder *d, rvm_reply *replies, size_t n);

/* Add a LoRA to one linear layer from the next call on: y += scale * (x A) B. The decoder copies A and B. A call with
 * rank 0 removes the LoRA of the linear layer.
 * A: [in, rank]   B: [rank, out]   layer: the index of the layer; ignored for RVM_LM_HEAD and RVM_EMBEDDING
 * The embedding has the matrices A [vocab_size, rank] and B [rank, hidden_size]. Its LoRA adds scale * A[t] B to the row
 * of token t. The output head does not change, even if it is the same matrix as the embedding.
 * bits: 32, or 4 for factors that are packed as lora_project of rvm_layers.h describes */
RVM_API int rvm_decoder_set_lora(rvm_decoder *d, size_t layer, rvm_module module, const float *lora_a,
                                 const float *lora_b, int bits, size_t rank, float scale);

/* rvm_decoder_profile writes how many seconds each part RVM_PART_* of the decoder took, in all calls of
 * rvm_decoder_forward and rvm_decoder_step since the last call of rvm_decoder_profile. The thread that calls the
 * decoder measures these times. */
enum { RVM_PART_EMBED, RVM_PART_QKV, RVM_PART_ATTEND, RVM_PART_O, RVM_PART_GATE_UP, RVM_PART_DOWN, RVM_PART_HEAD, RVM_N_PARTS };
RVM_API void rvm_decoder_profile(rvm_decoder *d, double seconds[RVM_N_PARTS]);

#endif
