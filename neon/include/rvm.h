/* librvm: the C kernels of ruvmlx.
 *
 * float32, row-major, no allocation, no threads, no dependencies. Pointers need no alignment and
 * sizes no padding. Buffers must not overlap.
 *
 *   const rvm_kernels *k = rvm_impl(NULL);          // the fastest this machine runs
 *   int rc = k->head_add(hidden, a, b, scale, tokens, dim, vocab, rank, logits);
 *
 * Every kernel returns RVM_OK, or says why it did nothing:
 *   RVM_BAD_ARGUMENT  a null pointer, a size of 0, a rank over RVM_MAX_RANK, a token id out of range
 *   RVM_NOT_FINITE    NaN or Inf came in or would have come out, unless a kernel passes them on. Weights and accumulators are
 *                     untouched then; the contents of other outputs are undefined.
 * A logit of -inf is no error: it means probability 0.
 */
#ifndef RVM_H
#define RVM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define RVM_API __attribute__((visibility("default")))
#else
#define RVM_API
#endif

#define RVM_ABI_VERSION 14 /* changes with any signature or field below */
#define RVM_MAX_RANK 64

enum { RVM_OK = 0, RVM_BAD_ARGUMENT = 1, RVM_NOT_FINITE = 2 };

/* One weight array with its gradient.  w, g: [n].  velocity: [n], or NULL for no momentum. */
typedef struct {
    float *w;
    float *velocity;
    const float *g;
    size_t n;
} rvm_param;

typedef struct rvm_layers rvm_layers;

/* One implementation of every kernel.  T tokens, D hidden, V vocabulary, R rank.
 * lora_a: [D, R]   lora_b: [R, V]   scale s */
typedef struct {
    const char *name; /* "scalar", "avx2", "avx512", "neon" */

    /* *out = sum_i x[i] * y[i] */
    int (*dot)(const float *x, const float *y, size_t n, double *out);

    /* RVM_OK when every |x[i]| <= most, which is finite; else, and for NaN, RVM_NOT_FINITE. */
    int (*all_within)(const float *x, size_t n, float most);

    /* velocity = mu * velocity + eta * g;  w += velocity      (w += eta * g without velocity)
     * For several arrays as one step: all of them, or none if any new weight is not finite. */
    int (*micro_update)(const rvm_param *params, size_t n_params, float eta, float mu);

    /* logits += s * (hidden @ lora_a) @ lora_b      hidden: [T, D]   logits: [T, V], in place
     * Passes NaN on. */
    int (*head_add)(const float *hidden, const float *lora_a, const float *lora_b, float s, size_t tokens,
                    size_t dim, size_t vocab, size_t rank, float *logits);

    /* The exact eligibility trace of one generated token y (DESIGN 4).
     * h: [D]   logits: [V] with the adapter in   e_a: [D, R]   e_b: [R, V]
     *   u = lora_a^T h    delta = onehot(y) - softmax(logits)
     *   e_b += s * u delta^T        e_a += s * h (lora_b delta)^T
     *   logprob[0] = log p(y)       logprob[1] = log p(y) under logits - s * lora_b^T u  (frozen) */
    int (*trace_accumulate)(const float *h, const float *logits, const float *lora_a, const float *lora_b,
                            float s, size_t dim, size_t vocab, size_t rank, size_t y, float *e_a, float *e_b,
                            double *logprob);

    /* out[0] = mean_m KL(new || frozen),  new_m ~ p0_m * e^d_m,  d_m = s * u_m @ lora_b
     * out[1] = mean_m log sum_v p0_m[v] e^d_m[v] / sum_v p0_m[v]
     * p0: [M, V] probabilities without d; a row need not sum to exactly 1   u: [M, R] = hidden @ lora_a
     * log_ratio: [M, V] = log(p0 / frozen), or NULL where p0 is the frozen one itself */
    int (*kl_to_frozen)(const float *p0, const float *log_ratio, const float *u, const float *lora_b, float s,
                        size_t contexts, size_t vocab, size_t rank, double *out);

    /* One more rating of weight w: what all say of n coordinates (ruvmlx/sona/instant.py).
     * held, out: [3, n] G, S and L   gradient, information: [n]
     *   out = kept * held + (w g, (w g)^2, |w| f)
     * Passes NaN on. */
    int (*evidence_add)(const float *held, const float *gradient, const float *information, float w,
                        float kept, size_t n, float *out);

    /* The weights that ratings ask for, of the coordinates [first, last) of n in each of R readings.
     * evidence: [3, R, n]   precision: [n]   theta: [R, n], only those coordinates are written
     *   theta = step * G / (precision + L) * G^2 / (G^2 + agree * S + 1e-12)
     * times, for each reading, max(0, 1 - noise * sum S / max(sum G^2, 1e-12)) over these coordinates.
     * Passes NaN on. */
    int (*evidence_push)(const float *evidence, const float *precision, float step, float agree, float noise,
                         size_t rank, size_t n, size_t first, size_t last, float *theta);

    /* lora_b after a rating: out = c * lora_b, but of its columns at[i] out is s * block[.][i]. For a c
     * of 0 lora_b is not read, and may be NULL.
     * block: [R, width], of which the first n count   at: [n]   out: [R, V]
     * RVM_NOT_FINITE unless all of c * lora_b and of s * block is within `most`; out is undefined then. */
    int (*micro_place)(const float *lora_b, float c, const float *block, const int32_t *at, float s,
                       size_t rank, size_t vocab, size_t n, size_t width, float most, float *out);

    /* logprob[t] = logits[t][y[t]] - logsumexp(logits[t])      logits: [T, V]   y, logprob: [T] */
    int (*logprobs)(const float *logits, const int32_t *y, size_t tokens, size_t vocab, double *logprob);

    const rvm_layers *layers; /* of the same instruction set: "Layers", below */
} rvm_kernels;

/* The implementation called `name`, the fastest one for NULL, or NULL if this machine has no such. */
RVM_API const rvm_kernels *rvm_impl(const char *name);

/* Names of the implementations that run here, fastest first; NULL past the last. */
RVM_API const char *rvm_impl_name(size_t index);

RVM_API int rvm_abi_version(void);

/* ---- Matrices: y = x @ W^T with W 4-bit, 8-bit or float ----
 *
 * W [rows = out, cols = in] is packed once into an interleaved form that every implementation reads and
 * that may be written to a file and mapped back: it holds no pointers. Memory for a packed matrix and for
 * activations is the caller's and starts at a multiple of 64 bytes (huge pages are worth 3-8%); x, y, and
 * what is packed may lie anywhere.
 *
 *   rvm_matrix_spec spec;
 *   rvm_matrix_plan(RVM_Q4, rows, cols, 64, scales, biases, RVM_BF16, &spec);
 *   void *w = aligned_alloc(64, rvm_matrix_bytes(&spec));
 *   rvm_matrix_pack(&spec, weights, scales, biases, RVM_BF16, 0, rows, w);
 *
 *   const rvm_matmul *m = rvm_matmul_impl(NULL);
 *   void *acts = aligned_alloc(64, rvm_acts_bytes(RVM_ACTS_16, tokens, cols));
 *   m->acts(RVM_ACTS_16, x, cols, tokens, cols, 0, tokens, acts);
 *   m->matmul(w, RVM_ACTS_16, acts, tokens, 0, rvm_matrix_tiles(w), y, rows);
 *
 * Quantised weights (MLX's affine form): W[n][k] = s[n][g] * q[n][k] + b[n][g], g = k / group. Activations
 * become integers with one scale d per token and 32 columns, of -127..127 (8 bits) or -32385..32385 (16); then
 *   y[n] = sum_j d_j * (s[n][g] * (q . xhat)_j + b[n][g] * sum(xhat)_j)      j over blocks of 32 columns
 * summed in this order by every implementation: all agree bit for bit, at any number of tokens and
 * any split. Q4_K and Q5_K are the same with groups of 32, s = d * scale and b = -dmin * low; Q6_K has groups of 16,
 *   y[n] = sum_j d_j * (s[n][2j] * ((q - 32) . xhat)_j,first 16 + s[n][2j + 1] * ((q - 32) . xhat)_j,last 16)
 * A NaN or an infinity in x makes the whole row of y NaN; |x| < 1e-30 counts as 0. */

typedef enum {
    RVM_Q4 = 0,
    RVM_Q8 = 1,
    RVM_F16 = 2,
    RVM_BF16 = 3,
    RVM_F32 = 4,
    RVM_Q4_K = 5, /* GGUF's super-blocks of 256 columns, in as many bytes */
    RVM_Q5_K = 6,
    RVM_Q6_K = 7
} rvm_kind;

/* What becomes of x: float before float kinds, 8 or 16 bits before quantised ones. The error of a product, as
 * part of its spread: 0.6% with 8 bits, 2e-5 with 16. */
typedef enum { RVM_ACTS_8 = 8, RVM_ACTS_16 = 16, RVM_ACTS_FLOAT = 32 } rvm_acts_kind;

enum { RVM_TILE_ROWS = 16, RVM_ALIGNMENT = 64 };

/* How a matrix is stored. To pack several with equal cols and group below each other as one, plan each,
 * then: rows = the sum, affine = any of them, scale_kind = theirs if equal, else RVM_F32. */
typedef struct {
    uint32_t kind;       /* rvm_kind */
    uint32_t scale_kind; /* RVM_F16, RVM_BF16 or RVM_F32; quantised kinds only */
    uint32_t affine;     /* 0: no biases are stored, for each is -8 * s (4 bits) or -128 * s (8 bits) */
    uint32_t group;      /* columns to a scale: 32, 64 or 128; 0 for float kinds; 256 for super-blocks */
    uint64_t rows, cols; /* cols: a multiple of group; any for float kinds */
} rvm_matrix_spec;

typedef struct rvm_matrix rvm_matrix; /* starts a packed matrix */

/* The smallest lossless form for these scales and biases [rows, cols / group] of type scale_kind.
 * biases may be NULL: symmetric. For float kinds and super-blocks group, scales and biases are ignored. */
RVM_API int rvm_matrix_plan(rvm_kind kind, size_t rows, size_t cols, size_t group, const void *scales,
                            const void *biases, rvm_kind scale_kind, rvm_matrix_spec *spec);

/* Bytes that a packed matrix takes, a multiple of 64; 0 for a spec that is refused. */
RVM_API size_t rvm_matrix_bytes(const rvm_matrix_spec *spec);

/* Pack rows [row_begin, row_end) of the matrix. The pointers are to row row_begin's data:
 *   weights: Q4, Q8: uint32 [n, cols * bits / 32], lowest bits first      F16, BF16, F32: [n, cols]
 *            Q4_K, Q5_K, Q6_K: GGUF blocks [n, cols / 256] of 144, 176 or 210 bytes
 *   scales, biases: [n, cols / group] of type scale_kind; biases may be NULL if spec->affine is 0
 * row_begin is a multiple of 16, row_end too unless it is the last row. Ranges may be packed by several
 * threads; the one that begins at 0 also writes the head, without which accessors return 0. */
RVM_API int rvm_matrix_pack(const rvm_matrix_spec *spec, const void *weights, const void *scales,
                            const void *biases, rvm_kind scale_kind, size_t row_begin, size_t row_end,
                            void *memory);

/* Is this a packed matrix, and do its claims about itself fit into `bytes`? For mapped files. */
RVM_API int rvm_matrix_check(const void *memory, size_t bytes);

RVM_API rvm_kind rvm_matrix_kind(const rvm_matrix *w);
RVM_API size_t rvm_matrix_rows(const rvm_matrix *w);
RVM_API size_t rvm_matrix_cols(const rvm_matrix *w);
RVM_API size_t rvm_matrix_tiles(const rvm_matrix *w); /* ceil(rows / 16) */

/* out[cols] = row `row` of W, as MLX dequantises it: embedding lookup. */
RVM_API int rvm_matrix_row(const rvm_matrix *w, size_t row, float *out);

/* Bytes for the activations of `tokens` tokens; 0 for sizes that are refused. */
RVM_API size_t rvm_acts_bytes(rvm_acts_kind kind, size_t tokens, size_t cols);

typedef struct {
    const char *name; /* "scalar", "avx2", "avxvnni", "avx512", "avx512vnni", "neon", "neon_dotprod", "neon_i8mm" */

    /* Activations of tokens [token_begin, token_end) out of `tokens`, into their place in acts, which is
     * one for all: threads may share the work. x: [tokens, x_stride], the first cols of each row. */
    int (*acts)(rvm_acts_kind kind, const float *x, size_t x_stride, size_t tokens, size_t cols,
                size_t token_begin, size_t token_end, void *acts);

    /* y[t][n] = sum_k x[t][k] * W[n][k] for rows n of the tiles [tile_begin, tile_end): threads share the
     * tiles. kind: what acts were made as. y: [tokens, y_stride]; only real rows are written. */
    int (*matmul)(const rvm_matrix *w, rvm_acts_kind kind, const void *acts, size_t tokens, size_t tile_begin,
                  size_t tile_end, float *y, size_t y_stride);

    /* Attention over one head-page of codes, in integers ("Pages", below; tier: rvm_tier). Queries and weights
     * become integers of 7 bits (one term) or 15 bits (two terms), with one scale a row; all implementations agree
     * bit for bit. A NaN or an infinity makes its whole row NaN.
     *   page_queries  q [rows][head_dim], rotated if the tier's keys are -> codes [rvm_page_codes_bytes]
     *   page_scores   scores[r][t] = q_r . k_t                    [rows][RVM_PAGE_TOKENS], all 64 tokens
     *   page_values   sum[r][d] += sum_t p[r][t] v_t[d]           p as scores; p >= 0
     * sum: rows of `stride` floats: head_dim rounded up to 16, then 16 more, whose sum is to be added to every
     * dimension. soon: a head-page of the same size to be prefetched, or NULL. */
    int (*page_queries)(int tier, const float *q, size_t rows, size_t head_dim, void *codes);
    int (*page_scores)(int tier, const uint8_t *page, const void *codes, size_t rows, size_t head_dim,
                       const uint8_t *soon, float *scores);
    int (*page_values)(int tier, const uint8_t *page, const float *p, size_t rows, size_t head_dim,
                       const uint8_t *soon, float *sum, size_t stride);

    /* So many rounds of the loop inside matmul, over one block that never leaves the L1 cache: the most that a
     * product of 4-bit weights can do here. Returns how many products of two numbers that were. */
    uint64_t (*peak)(uint64_t rounds, int32_t *sum);
} rvm_matmul;

/* Bytes of page_queries' result, for its own implementation only; 0 for sizes that are refused. */
RVM_API size_t rvm_page_codes_bytes(int tier, size_t rows, size_t head_dim);

/* As rvm_impl and rvm_impl_name; there are more implementations of these. */
RVM_API const rvm_matmul *rvm_matmul_impl(const char *name);
RVM_API const char *rvm_matmul_impl_name(size_t index);

/* Name of the rvm_kernels whose layers run beside these matrices: "avx2" for "avxvnni". NULL for an unknown one. */
RVM_API const char *rvm_matmul_layers(const rvm_matmul *matmul);

/* ---- A rating (ruvmlx/sona/instant.py): kernels in a row, for what lies between them costs more ----
 *
 * After a reply no cache holds any of this. k, m: the implementations to use. */

enum { RVM_GROUPS = 3 };

/* Contexts of neutral text, by group: the first in answers, the others in prose.
 * M contexts, V columns: tokens; R readings. */
typedef struct {
    const float *p0, *log_ratio, *u; /* [M, V], [M, V] or NULL, [M, R] (rvm_kernels.kl_to_frozen) */
    const int32_t *following;        /* [M]: the column of the token that follows */
    const float *rest, *slope;       /* [R, V] or NULL: by them the rise grows beside what contexts say */
    uint64_t ends[RVM_GROUPS];       /* where each group ends, rising; a group may be empty */
    double share[RVM_GROUPS];        /* of the prose that a group stands for; 0 in answers */
    uint64_t vocab, rank;
} rvm_text;

/* Of an adapter that moves by s * lora_b [R, V]: out[0] mean KL to the frozen model in answers, nats;
 * out[1] rise of the mean negative log-likelihood of prose; out[2] dot(slope, lora_b), or 0. */
RVM_API int rvm_distance(const rvm_kernels *k, const rvm_text *text, const float *lora_b, float s, double *out);

/* How evidence becomes the weights of tokens, or of features (rvm_kernels.evidence_push). */
typedef struct {
    float step, agree, noise;
} rvm_push;

/* cap: of what tokens say, but for those that end a reply, nats of KL in answers. */
typedef struct {
    rvm_push tokens, features;
    double cap;
} rvm_rule;

/* Who is asked: A tokens, k features of them, and which of the tokens end a reply. */
typedef struct {
    const float *precision;     /* [A + k] */
    const rvm_matrix *features; /* [A, k] */
    const int32_t *ends;        /* [n_ends], below A */
    uint64_t n_ends;
} rvm_asking;

/* Bytes of scratch that asking needs, anywhere; 0 for what is refused. */
RVM_API size_t rvm_asking_scratch(const rvm_asking *asking, size_t rank);

/* What evidence [3, R, A + k] asks for: block [R, A + 1] = theta_tokens + theta_features @ features^T, and 0
 * for all other tokens. With answers, which read block by `scale`, all but `ends` is scaled down until its KL
 * there is about rule->cap, if it is above. */
RVM_API int rvm_asked(const rvm_kernels *k, const rvm_matmul *m, const rvm_asking *asking, const rvm_rule *rule,
                      const rvm_text *answers, float scale, const float *evidence, size_t rank, void *scratch,
                      float *block);

/* One rating: what its reply says at weight 1 (rvm_kernels.evidence_add); kept: of older evidence. */
typedef struct {
    const float *gradient, *information; /* [R, A + k] */
    const float *rest;                   /* [R, A + 1]: what there is beside all that evidence asks for */
    float weight, kept;
} rvm_rating;

/* evidence = held and one rating more; block = what that asks for + rest; answers as in rvm_asked.
 * RVM_NOT_FINITE unless all of block is within `most`, and all of evidence within its square, a finite number. */
RVM_API int rvm_rated(const rvm_kernels *k, const rvm_matmul *m, const rvm_asking *asking, const rvm_rule *rule,
                      const rvm_text *answers, float scale, const float *held, const rvm_rating *rating,
                      float most, size_t rank, void *scratch, float *evidence, float *block);

/* ---- Pages: keys and values of RVM_PAGE_TOKENS consecutive tokens ----
 *
 * New tokens go into a hot page. As its tokens grow older, a page is copied to the next lower tier. A page holds all
 * layers and key-value heads, [layer][kv head], each as one head-page of rvm_head_page_bytes(tier, head_dim) bytes. A hot head-page, in IEEE half floats:
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

/* ---- Layers: what lies between a decoder's matrix products ---- */

#define RVM_PARTIAL(head_dim) ((head_dim) + 2) /* floats of one row of unfinished attention: O, m, l */

/* Attention of consecutive queries of one key-value head, with all `group` query heads that share it. */
typedef struct {
    const rvm_page *pages;    /* [.. end_page]; those before first_page are not looked at */
    size_t head;              /* which head-page of each page: layer * n_kv_heads + key-value head */
    const rvm_matmul *matmul; /* whose kernels score pages of codes; NULL when all are hot */
    size_t head_dim, group;
    const float *q; /* query t, head g: q + t * q_stride + g * head_dim; not yet turned */
    size_t q_stride;
    const float *turn; /* [queries][head_dim]: cos, then sin, of each query's position */
    size_t queries, position; /* position: of the first query; it sees itself and what is before it */
    size_t window;            /* tokens that a query sees at most, itself included; 0: all */
    size_t first_page, end_page;
    float *out; /* query t, head g: out + t * out_stride + g * head_dim */
    size_t out_stride;
    float *partial; /* not NULL: [queries * group][RVM_PARTIAL(head_dim)] instead of out, for merge */
    float *scratch; /* [rvm_attention_scratch(queries * group, head_dim)] */
} rvm_attention;

RVM_API size_t rvm_attention_scratch(size_t rows, size_t head_dim);

/* float32 unless said otherwise.  T tokens, D width. */
struct rvm_layers {
    const char *name; /* as in rvm_kernels */

    /* y = x / sqrt(mean(x^2) + eps) * weight      x, y: [T, D]   weight: [D] */
    int (*rms_norm)(const float *x, const float *weight, float eps, size_t tokens, size_t dim, float *y);

    /* Pairs (x_i, x_{i + d/2}) turned by the token's angles; traditional: (x_2i, x_2i+1).
     * x, y: [T, heads, d]   turn: [T, d], the cosines of d/2 angles, then their sines */
    int (*rope)(const float *x, const float *turn, size_t tokens, size_t heads, size_t head_dim,
                int traditional, float *y);

    /* y = gate / (1 + e^-gate) * up      y may be gate */
    int (*swiglu)(const float *gate, const float *up, size_t n, float *y);

    /* To nearest, ties to even; overflow becomes infinity.   Exact. */
    int (*to_half)(const float *x, size_t n, uint16_t *y);
    int (*from_half)(const uint16_t *x, size_t n, float *y);

    /* y += s (x A) B in two steps, so that threads can share the columns of B.
     * u = s x A      x: [T, in]   A: [in, R]   u: [T, R] */
    int (*lora_project)(const float *x, const float *lora_a, float s, size_t tokens, size_t in, size_t rank,
                        float *u);
    /* y[t][i] += (u B)[t][first + i], i < n      B: [R, out]   y: rows of `stride` floats */
    int (*lora_add)(const float *u, const float *lora_b, size_t tokens, size_t rank, size_t out, size_t first,
                    size_t n, float *y, size_t stride);

    /* Store T tokens of one head behind the first `at` of a page.  k, v: rows of `stride` floats; k is turned. */
    int (*append)(const float *k, const float *v, size_t stride, const float *turn, size_t tokens,
                  size_t head_dim, size_t at, uint16_t *keys, uint16_t *values);

    /* softmax(q . k / sqrt(head_dim)) v over the pages [first_page, end_page) */
    int (*attend)(const rvm_attention *a);

    /* out[rows][head_dim] from `parts` key ranges: part i begins at partial + i * stride. */
    int (*merge)(const float *partial, size_t parts, size_t stride, size_t rows, size_t head_dim, float *out);

    /* rvm_pages_demote by this implementation; all give the same bytes. */
    int (*demote)(rvm_tier from, const uint8_t *src, rvm_tier to, uint8_t *dst, size_t n, size_t head_dim);
};

/* The layers of rvm_impl(name). */
RVM_API const rvm_layers *rvm_layers_impl(const char *name);

/* ---- The decoder: a Llama or Mistral model, one call per chunk of a prompt or per token ----
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

/* The next token of a sequence that holds `offset` others; pages as above. */
typedef struct {
    const rvm_page *pages;
    size_t offset;
    int32_t token;
} rvm_row;

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

/* y += scale * (x A) B at one linear layer from the next call on; both are copied. rank 0 takes it off.
 * A: [in, rank]   B: [rank, out]   layer: ignored for RVM_LM_HEAD */
RVM_API int rvm_decoder_set_lora(rvm_decoder *d, size_t layer, rvm_module module, const float *lora_a,
                                 const float *lora_b, size_t rank, float scale);

/* Seconds that the parts of all calls since the last reading took, as the calling thread saw them. */
enum { RVM_PART_EMBED, RVM_PART_QKV, RVM_PART_ATTEND, RVM_PART_O, RVM_PART_GATE_UP, RVM_PART_DOWN, RVM_PART_HEAD, RVM_N_PARTS };
RVM_API void rvm_decoder_profile(rvm_decoder *d, double seconds[RVM_N_PARTS]);

#ifdef __cplusplus
}
#endif
#endif
