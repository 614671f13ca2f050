/* This header is a part of rvm.h, which includes it. */
#ifndef RVM_PUBLIC_RATING_H
#define RVM_PUBLIC_RATING_H

/* These functions compute what a rating changes (ruvmlx/sona/instant.py). Each function runs several kernels in one
 * call, because a call from Python takes longer than one of these kernels.
 *
 * k, m: the implementations of the kernels that the function runs */

enum { RVM_GROUPS = 3 };

/* The reference contexts (positions in fixed texts), in RVM_GROUPS groups. The first group is from answers, and the
 * other groups are from prose. M: the number of contexts; V: the number of tokens in the vocabulary; R: the rank. */
typedef struct {
    const float *p0, *log_ratio, *u; /* p0 [M, V], log_ratio [M, V] or NULL, u [M, R]: the arguments of rvm_kernels.kl_to_frozen */
    const int32_t *following;        /* following: [M]: the column in V of the token that follows each context */
    const float *rest, *slope;       /* rest, slope: [R, V] or NULL: rvm_distance adds dot(rest, s * lora_b) to out[1]; slope: for out[2] */
    uint64_t ends[RVM_GROUPS];       /* ends: the end of each group among the M contexts, ascending; a group can be empty */
    double share[RVM_GROUPS];        /* share: the fraction of all prose that each group stands for; 0 for answers */
    uint64_t vocab, rank;
} rvm_text;

/* Measure the effect of an adapter with the weights s * lora_b [R, V] on the texts. out[0]: the mean KL divergence from
 * the frozen model in answers, in nats. out[1]: the increase of the mean negative log-likelihood of prose. out[2]:
 * dot(slope, lora_b), or 0 if there is no slope. */
RVM_API int rvm_distance(const rvm_kernels *k, const rvm_text *text, const float *lora_b, float s, double *out);

/* The parameters of the kernel rvm_kernels.evidence_push, which turns evidence into the weights of tokens or of
 * features. */
typedef struct {
    float step, agree, noise;
} rvm_push;

/* The rule by which evidence becomes weights. cap: the approximate maximum of the KL divergence in answers, in nats,
 * that the changes of all tokens together cause. The changes of the tokens that end a reply do not count towards this
 * KL divergence. */
typedef struct {
    rvm_push tokens, features;
    double cap;
} rvm_rule;

/* What a rating can change: A tokens whose weights change, k features of each token, and the tokens that end a
 * reply. */
typedef struct {
    const float *precision;     /* precision: [A + k]: the prior precision of each weight */
    const rvm_matrix *features; /* features: [A, k]: the features of each token */
    const int32_t *ends;        /* ends: [n_ends]: the indices, below A, of the tokens that end a reply */
    uint64_t n_ends;
} rvm_asking;

/* Return the number of bytes of scratch memory that rvm_asked and rvm_rated need. The scratch memory needs no
 * alignment. Return 0 for invalid sizes. */
RVM_API size_t rvm_asking_scratch(const rvm_asking *asking, size_t rank);

/* Compute weights from evidence [3, R, A + k]: block [R, A + 1] = theta_tokens + theta_features @ features^T. The last
 * column, which stands for all tokens that ratings do not change, is 0. If `answers` is not NULL, measure the KL
 * divergence of an adapter with the weights scale * block. If this KL is above rule->cap, scale all columns except
 * `ends` down until the KL is about the cap. */
RVM_API int rvm_asked(const rvm_kernels *k, const rvm_matmul *m, const rvm_asking *asking, const rvm_rule *rule,
                      const rvm_text *answers, float scale, const float *evidence, size_t rank, void *scratch,
                      float *block);

/* A rating: the gradient and the information of the rated reply at weight 1 (rvm_kernels.evidence_add). weight: the
 * weight of the rating; kept: the factor by which older evidence is multiplied. */
typedef struct {
    const float *gradient, *information; /* gradient, information: [R, A + k]: a number for each rank and weight */
    const float *rest;                   /* rest: [R, A + 1]: numbers that rvm_rated adds to the weights from the evidence */
    float weight, kept;
} rvm_rating;

/* Add a rating to the evidence and compute the new weights: evidence = held plus the rating; block =
 * rvm_asked(evidence) + rest. answers: the same as in rvm_asked. Return RVM_NOT_FINITE if a number of block is not
 * within +-most, or a number of evidence is not within +-most^2. */
RVM_API int rvm_rated(const rvm_kernels *k, const rvm_matmul *m, const rvm_asking *asking, const rvm_rule *rule,
                      const rvm_text *answers, float scale, const float *held, const rvm_rating *rating,
                      float most, size_t rank, void *scratch, float *evidence, float *block);

#endif
