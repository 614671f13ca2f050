/* Part of rvm.h, which includes it. */
#ifndef RVM_PUBLIC_KERNELS_H
#define RVM_PUBLIC_KERNELS_H

/* These kernels learn at the output head. MicroLoRA is the LoRA of the output head that ratings change. A trace is the
 * gradient of a reply's log-probability. The evidence is a set of sums over the rated traces. */

/* A weight array with its gradient.  w, g: [n].  velocity: [n], or NULL for no momentum. */
typedef struct {
    float *w;
    float *velocity;
    const float *g;
    size_t n;
} rvm_param;

/* How a token is drawn (ruvmlx/sampling.py). The filters see the distribution p at temperature 1.
 *   temperature: > 0
 *   top_p: keep the fewest most likely ids whose p sum to top_p; 1 is off
 *   min_p: keep ids with p >= min_p * max(p); 0 is off
 *   top_k: keep the k most likely ids; 0 is off
 *   u: a uniform random number, 0 <= u < 1 */
typedef struct {
    double temperature, top_p, min_p, u;
    size_t top_k;
} rvm_drawing;

typedef struct rvm_layers rvm_layers;

/* An implementation of all kernels.  T: tokens, D: hidden size, V: vocabulary, R: rank.
 * lora_a: [D, R]   lora_b: [R, V]   scale s */
typedef struct {
    const char *name; /* "scalar", "avx2" .. */

    /* *out = sum_i x[i] * y[i] */
    int (*dot)(const float *x, const float *y, size_t n, double *out);

    /* Return RVM_OK if every |x[i]| <= most, a finite number; return RVM_NOT_FINITE if not, or for NaN. */
    int (*all_within)(const float *x, size_t n, float most);

    /* velocity = mu * velocity + eta * g;  w += velocity      (w += eta * g without velocity)
     * One call updates several arrays. It changes no array if any new weight is not finite. */
    int (*micro_update)(const rvm_param *params, size_t n_params, float eta, float mu);

    /* logits += s * (hidden @ lora_a) @ lora_b      hidden: [T, D]   logits: [T, V], in place
     * Passes NaN on. */
    int (*head_add)(const float *hidden, const float *lora_a, const float *lora_b, float s, size_t tokens,
                    size_t dim, size_t vocab, size_t rank, float *logits);

    /* Add the exact eligibility trace of one generated token y to e_a and e_b.
     * h: [D]   logits: [V] with the adapter applied   e_a: [D, R]   e_b: [R, V]
     *   u = lora_a^T h    delta = onehot(y) - softmax(logits)
     *   e_b += s * u delta^T        e_a += s * h (lora_b delta)^T
     *   logprob[0] = log p(y)       logprob[1] = log p(y) under logits - s * lora_b^T u, the frozen model */
    int (*trace_accumulate)(const float *h, const float *logits, const float *lora_a, const float *lora_b,
                            float s, size_t dim, size_t vocab, size_t rank, size_t y, float *e_a, float *e_b,
                            double *logprob);

    /* out[0] = mean_m KL(new || frozen),  new_m ~ p0_m * e^d_m,  d_m = s * u_m @ lora_b
     * out[1] = mean_m log sum_v p0_m[v] e^d_m[v] / sum_v p0_m[v]
     * p0: [M, V] probabilities of M contexts without d; a row's sum may differ from 1   u: [M, R] = hidden @ lora_a
     * log_ratio: [M, V] = log(p0 / frozen), or NULL if p0 is the frozen model's */
    int (*kl_to_frozen)(const float *p0, const float *log_ratio, const float *u, const float *lora_b, float s,
                        size_t contexts, size_t vocab, size_t rank, double *out);

    /* Add one rating of weight w to the evidence for n coordinates, which are learned numbers (ruvmlx/sona/instant.py).
     * held, out: [3, n], the sums G, S and L   gradient, information: [n]
     *   out = kept * held + (w g, (w g)^2, |w| f)
     * Passes NaN on. */
    int (*evidence_add)(const float *held, const float *gradient, const float *information, float w,
                        float kept, size_t n, float *out);

    /* Compute the learned numbers (theta) from the sums that evidence_add keeps (the evidence), for the coordinates
     * [first, last) of n and for each of the R ranks of the LoRA.
     * evidence: [3, R, n]   precision: [n]   theta: [R, n], only the coordinates [first, last) are written
     *   theta = step * G / (precision + L) * G^2 / (G^2 + agree * S + 1e-12)
     * times, for each rank, max(0, 1 - noise * sum S / max(sum G^2, 1e-12)) over [first, last).
     * Passes NaN on. */
    int (*evidence_push)(const float *evidence, const float *precision, float step, float agree, float noise,
                         size_t rank, size_t n, size_t first, size_t last, float *theta);

    /* Compute lora_b after a rating: out = c * lora_b, except for the columns at[i], which become s * block[.][i]. If c
     * is 0, lora_b is not read and may be NULL.
     * block: [R, width], of which the first n columns are used   at: [n]   out: [R, V]
     * RVM_NOT_FINITE if a number of c * lora_b or s * block is not within +-most; out is undefined then. */
    int (*micro_place)(const float *lora_b, float c, const float *block, const int32_t *at, float s,
                       size_t rank, size_t vocab, size_t n, size_t width, float most, float *out);

    /* logprob[t] = logits[t][y[t]] - logsumexp(logits[t])      logits: [T, V]   y, logprob: [T] */
    int (*logprobs)(const float *logits, const int32_t *y, size_t tokens, size_t vocab, double *logprob);

    /* Draw a token: *token = the first id that the filters keep at which the running sum of p^(1 / temperature) exceeds
     * u times the whole sum. With top_p or top_k the most likely ids come first, ties by id; without them ids rise.
     * logits: [V]   scratch: [2 V] */
    int (*draw)(const float *logits, size_t vocab, const rvm_drawing *how, uint64_t *scratch, int32_t *token);

    const rvm_layers *layers; /* layers for the same instruction set (rvm_layers.h) */
} rvm_kernels;

/* Return the implementation called `name`; for NULL, the fastest; NULL if this machine cannot run it. */
RVM_API const rvm_kernels *rvm_impl(const char *name);

/* Return the name of the index-th implementation that this machine can run, fastest first; NULL past the last. */
RVM_API const char *rvm_impl_name(size_t index);

RVM_API int rvm_abi_version(void);

#endif
