/* This header is a part of rvm.h, which includes it. */
#ifndef RVM_PUBLIC_KERNELS_H
#define RVM_PUBLIC_KERNELS_H

/* These kernels learn at the output head of the model. MicroLoRA is the LoRA of the output head, which ratings change.
 * A trace is the gradient of a reply's log-probability with respect to the weights of MicroLoRA. The evidence is a set
 * of sums over the traces of all rated replies. */

/* A weight array and its gradient.  w, g: [n].  velocity: [n] for an update with momentum, or NULL. */
typedef struct {
    float *w;
    float *velocity;
    const float *g;
    size_t n;
} rvm_param;

/* The settings by which a token is drawn (ruvmlx/sampling.py). top_p, min_p and top_k are filters, which see the
 * distribution p at temperature 1.
 *   temperature: > 0
 *   top_p: keep the fewest most likely ids whose p sum to at least top_p; 1 turns this filter off
 *   min_p: keep ids with p >= min_p * max(p); 0 turns this filter off
 *   top_k: keep the k most likely ids; 0 turns this filter off
 *   u: a uniform random number, 0 <= u < 1 */
typedef struct {
    double temperature, top_p, min_p, u;
    size_t top_k;
} rvm_drawing;

typedef struct rvm_layers rvm_layers;

/* An implementation of all kernels for one instruction set.  T: number of tokens, D: hidden size, V: vocabulary
 * size, R: rank. lora_a: [D, R]   lora_b: [R, V]   s: the scale of the LoRA */
typedef struct {
    const char *name; /* name: the name of the implementation, for example "scalar" or "avx2" */

    /* Compute the dot product *out = sum_i x[i] * y[i]. */
    int (*dot)(const float *x, const float *y, size_t n, double *out);

    /* Return RVM_OK if every |x[i]| <= most. Return RVM_NOT_FINITE if an |x[i]| is larger or is NaN. most: a finite
     * number. */
    int (*all_within)(const float *x, size_t n, float most);

    /* Add a step to weights: velocity = mu * velocity + eta * g;  w += velocity      (w += eta * g without velocity)
     * One call updates several arrays. If any new weight is not finite, the call changes no array. */
    int (*micro_update)(const rvm_param *params, size_t n_params, float eta, float mu);

    /* Add the LoRA to the logits: logits += s * (hidden @ lora_a) @ lora_b      hidden: [T, D]   logits: [T, V], in
     * place
     * The kernel passes NaN on: with a NaN in an input, the result has NaN, and the kernel returns RVM_OK. */
    int (*head_add)(const float *hidden, const float *lora_a, const float *lora_b, float s, size_t tokens,
                    size_t dim, size_t vocab, size_t rank, float *logits);

    /* Add the exact eligibility trace of one generated token y to e_a and e_b.
     * h: [D], the hidden state   logits: [V], with the adapter applied   e_a: [D, R]   e_b: [R, V]
     *   u = lora_a^T h    delta = onehot(y) - softmax(logits)
     *   e_b += s * u delta^T        e_a += s * h (lora_b delta)^T
     *   logprob[0] = log p(y)       logprob[1] = log p(y) under logits - s * lora_b^T u, the frozen model */
    int (*trace_accumulate)(const float *h, const float *logits, const float *lora_a, const float *lora_b,
                            float s, size_t dim, size_t vocab, size_t rank, size_t y, float *e_a, float *e_b,
                            double *logprob);

    /* Compute the KL divergence between the model with the adapter (new) and the frozen model, as the mean over M
     * contexts:
     * out[0] = mean_m KL(new || frozen),  new_m ~ p0_m * e^d_m,  d_m = s * u_m @ lora_b
     * out[1] = mean_m log sum_v p0_m[v] e^d_m[v] / sum_v p0_m[v]
     * p0: [M, V] probabilities of M contexts before the change d of the logits; the sum of a row can differ from 1   u:
     * [M, R] = hidden @ lora_a
     * log_ratio: [M, V] = log(p0 / frozen), or NULL if p0 is the frozen model's distribution */
    int (*kl_to_frozen)(const float *p0, const float *log_ratio, const float *u, const float *lora_b, float s,
                        size_t contexts, size_t vocab, size_t rank, double *out);

    /* Add one rating of weight w to the evidence for n coordinates. A coordinate is one learned number
     * (ruvmlx/sona/instant.py).
     * held, out: [3, n], the sums G, S and L before and after   gradient (g), information (f): [n]
     *   out = kept * held + (w g, (w g)^2, |w| f)
     * The kernel passes NaN on (see head_add). */
    int (*evidence_add)(const float *held, const float *gradient, const float *information, float w,
                        float kept, size_t n, float *out);

    /* Compute the learned numbers (theta) from the evidence, which is the sums G, S and L of evidence_add. The call
     * computes the coordinates [first, last) of n, for each of the R ranks of the LoRA.
     * evidence: [3, R, n]   precision: [n]   theta: [R, n], of which only the coordinates [first, last) are written
     *   theta = step * G / (precision + L) * G^2 / (G^2 + agree * S + 1e-12)
     * For each rank, theta is also multiplied by max(0, 1 - noise * sum S / max(sum G^2, 1e-12)), with sums over
     * [first, last).
     * The kernel passes NaN on (see head_add). */
    int (*evidence_push)(const float *evidence, const float *precision, float step, float agree, float noise,
                         size_t rank, size_t n, size_t first, size_t last, float *theta);

    /* Compute lora_b after a rating: out = c * lora_b, but the columns at[i] become s * block[.][i]. If c is 0, the
     * call does not read lora_b, so lora_b can be NULL.
     * block: [R, width], of which the first n columns are used   at: [n]   out: [R, V]
     * Return RVM_NOT_FINITE if a number of c * lora_b or s * block is not within +-most; in this case out is undefined.
     * */
    int (*micro_place)(const float *lora_b, float c, const float *block, const int32_t *at, float s,
                       size_t rank, size_t vocab, size_t n, size_t width, float most, float *out);

    /* Compute the log-probabilities of tokens: logprob[t] = logits[t][y[t]] - logsumexp(logits[t])      logits: [T, V]
     * y, logprob: [T] */
    int (*logprobs)(const float *logits, const int32_t *y, size_t tokens, size_t vocab, double *logprob);

    /* Draw a token. The filters keep some ids, and each id has the weight p^(1 / temperature). *token = the first id at
     * which the running sum of the weights exceeds u times the sum of all weights. With top_p or top_k, the most likely
     * ids come first, and ids of equal probability are ordered by id. Without these filters, the ids come in rising
     * order.
     * logits: [V]   scratch: [2 V] */
    int (*draw)(const float *logits, size_t vocab, const rvm_drawing *how, uint64_t *scratch, int32_t *token);

    const rvm_layers *layers; /* layers: the functions of rvm_layers.h for the same instruction set */
} rvm_kernels;

/* Return the implementation called `name`, or the fastest implementation for NULL. Return NULL if there is no such
 * implementation that this machine can run. */
RVM_API const rvm_kernels *rvm_impl(const char *name);

/* Return the name of implementation number `index` of the implementations that this machine can run, in the order of
 * speed, fastest first. Return NULL after the last implementation. */
RVM_API const char *rvm_impl_name(size_t index);

RVM_API int rvm_abi_version(void);

#endif
