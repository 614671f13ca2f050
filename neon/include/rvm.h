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

#ifdef __cplusplus
}
#endif
#endif
