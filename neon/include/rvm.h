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
 *   RVM_NOT_FINITE    NaN or Inf came in or would have come out. Weights and accumulators are
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

#define RVM_ABI_VERSION 1 /* changes with any signature or field below */
#define RVM_MAX_RANK 64

enum { RVM_OK = 0, RVM_BAD_ARGUMENT = 1, RVM_NOT_FINITE = 2 };

/* One weight array with its gradient.  w, g: [n].  velocity: [n], or NULL for no momentum. */
typedef struct {
    float *w;
    float *velocity;
    const float *g;
    size_t n;
} rvm_param;

/* One implementation of every kernel.  T tokens, D hidden, V vocabulary, R rank.
 * lora_a: [D, R]   lora_b: [R, V]   scale s */
typedef struct {
    const char *name; /* "scalar", "avx2", "avx512", "neon" */

    /* y[i] = e^x[i], within 2 ulp for x in [-87, 88.37]; 0 below, +inf above. */
    int (*exp)(const float *x, size_t n, float *y);

    /* *out = sum_i x[i] * y[i] */
    int (*dot)(const float *x, const float *y, size_t n, double *out);

    /* x[i] *= c, unless a product is not finite: then nothing changes. */
    int (*scale)(float *x, size_t n, float c);

    /* RVM_OK when every x[i] is finite, else RVM_NOT_FINITE. */
    int (*all_finite)(const float *x, size_t n);

    /* velocity = mu * velocity + eta * g;  w += velocity      (w += eta * g without velocity)
     * For several arrays as one step: all of them, or none if any new weight is not finite. */
    int (*micro_update)(const rvm_param *params, size_t n_params, float eta, float mu);

    /* logits += s * (hidden @ lora_a) @ lora_b      hidden: [T, D]   logits: [T, V], in place
     * The one kernel that passes NaN on instead of reporting it. */
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

    /* How far a step along (g_a, g_b) moves the logits of T tokens:
     *   *out = mean_t Var_{v ~ softmax(logits_t)} dz_t[v]
     *   dz_t = s * (lora_a^T h_t) @ g_b + s * (g_a^T h_t) @ lora_b
     * g_a: [D, R]   g_b: [R, V]   hidden: [T, D]   logits: [T, V] */
    int (*direction_variance)(const float *hidden, const float *logits, const float *lora_a,
                              const float *lora_b, const float *g_a, const float *g_b, float s, size_t tokens,
                              size_t dim, size_t vocab, size_t rank, double *out);

    /* *out = mean_m KL(new || frozen),  new_m ~ p0_m * e^d_m,  d_m = s * u_m @ lora_b
     * p0: [M, V] frozen probabilities; a row need not sum to exactly 1   u: [M, R] = hidden @ lora_a */
    int (*kl_to_frozen)(const float *p0, const float *u, const float *lora_b, float s, size_t contexts,
                        size_t vocab, size_t rank, double *out);

    /* logprob[t] = logits[t][y[t]] - logsumexp(logits[t])      logits: [T, V]   y, logprob: [T] */
    int (*logprobs)(const float *logits, const int32_t *y, size_t tokens, size_t vocab, double *logprob);
} rvm_kernels;

/* The implementation called `name`, the fastest one for NULL, or NULL if this machine has no such. */
RVM_API const rvm_kernels *rvm_impl(const char *name);

/* Names of the implementations that run here, fastest first; NULL past the last. */
RVM_API const char *rvm_impl_name(size_t index);

RVM_API int rvm_abi_version(void);

/* ---- Matrices: y = x @ W^T with W 4-bit, 8-bit or float ----
 *
 * W [rows = out, cols = in] is packed once into an interleaved form that every implementation reads
 * and that may be written to a file and mapped back: it holds no pointers. Memory for a packed matrix and for activations
 * is the caller's and starts at a multiple of 64 bytes; x, y, and what is packed may lie anywhere.
 *
 *   rvm_matrix_spec spec;
 *   rvm_matrix_plan(RVM_Q4, rows, cols, 64, scales, biases, RVM_BF16, &spec);
 *   void *w = aligned_alloc(64, rvm_matrix_bytes(&spec));
 *   rvm_matrix_pack(&spec, weights, scales, biases, RVM_BF16, 0, rows, w);
 *
 *   const rvm_matmul *m = rvm_matmul_impl(NULL);
 *   void *acts = aligned_alloc(64, rvm_acts_bytes(RVM_Q4, tokens, cols));
 *   m->acts(RVM_Q4, x, cols, tokens, cols, 0, tokens, acts);
 *   m->matmul(w, acts, tokens, 0, rvm_matrix_tiles(w), y, rows);
 *
 * Quantised weights (MLX's affine form): W[n][k] = s[n][g] * q[n][k] + b[n][g], g = k / group. Activations
 * become integers of -127..127 with one scale d per token and 32 columns; then
 *   y[n] = sum_j d_j * (s[n][g] * (q . xhat)_j + b[n][g] * sum(xhat)_j)      j over blocks of 32 columns
 * summed in this order by every implementation: all agree bit for bit, at any number of tokens and
 * any split. A NaN or an infinity in x makes the whole row of y NaN; |x| < 1e-30 counts as 0. */

typedef enum { RVM_Q4 = 0, RVM_Q8 = 1, RVM_F16 = 2, RVM_BF16 = 3, RVM_F32 = 4 } rvm_kind;

enum { RVM_TILE_ROWS = 16, RVM_ALIGNMENT = 64 };

/* How a matrix is stored. To pack several with equal cols and group below each other as one, plan each,
 * then: rows = the sum, affine = any of them, scale_kind = theirs if equal, else RVM_F32. */
typedef struct {
    uint32_t kind;       /* rvm_kind */
    uint32_t scale_kind; /* RVM_F16, RVM_BF16 or RVM_F32; quantised kinds only */
    uint32_t affine;     /* 0: no biases are stored, for each is -8 * s (4 bits) or -128 * s (8 bits) */
    uint32_t group;      /* columns to a scale: 32, 64 or 128; 0 for float kinds */
    uint64_t rows, cols; /* cols: a multiple of group; any for float kinds */
} rvm_matrix_spec;

typedef struct rvm_matrix rvm_matrix; /* starts a packed matrix */

/* The smallest lossless form for these scales and biases [rows, cols / group] of type scale_kind.
 * biases may be NULL: symmetric. For float kinds group, scales and biases are ignored. */
RVM_API int rvm_matrix_plan(rvm_kind kind, size_t rows, size_t cols, size_t group, const void *scales,
                            const void *biases, rvm_kind scale_kind, rvm_matrix_spec *spec);

/* Bytes that a packed matrix takes, a multiple of 64; 0 for a spec that is refused. */
RVM_API size_t rvm_matrix_bytes(const rvm_matrix_spec *spec);

/* Pack rows [row_begin, row_end) of the matrix. The pointers are to row row_begin's data:
 *   weights: Q4, Q8: uint32 [n, cols * bits / 32], lowest bits first      F16, BF16, F32: [n, cols]
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

/* Bytes for the activations of `tokens` tokens as a matrix of this kind wants them. All quantised
 * kinds share one form, all float kinds another. 0 for sizes that are refused. */
RVM_API size_t rvm_acts_bytes(rvm_kind kind, size_t tokens, size_t cols);

typedef struct {
    const char *name; /* "scalar", "avx2", "avxvnni", "avx512", "avx512vnni", "neon", "neon_dotprod", "neon_i8mm" */

    /* Activations of tokens [token_begin, token_end) out of `tokens`, into their place in acts, which is
     * one for all: threads may share the work. x: [tokens, x_stride], the first cols of each row. */
    int (*acts)(rvm_kind kind, const float *x, size_t x_stride, size_t tokens, size_t cols,
                size_t token_begin, size_t token_end, void *acts);

    /* y[t][n] = sum_k x[t][k] * W[n][k] for rows n of the tiles [tile_begin, tile_end): threads share the
     * tiles. y: [tokens, y_stride]; only real rows are written. */
    int (*matmul)(const rvm_matrix *w, const void *acts, size_t tokens, size_t tile_begin, size_t tile_end,
                  float *y, size_t y_stride);
} rvm_matmul;

/* As rvm_impl and rvm_impl_name; there are more implementations of these. */
RVM_API const rvm_matmul *rvm_matmul_impl(const char *name);
RVM_API const char *rvm_matmul_impl_name(size_t index);

#ifdef __cplusplus
}
#endif
#endif
