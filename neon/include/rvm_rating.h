/* Part of rvm.h, which includes it. */
#ifndef RVM_PUBLIC_RATING_H
#define RVM_PUBLIC_RATING_H

/* A rating (ruvmlx/sona/instant.py): several kernels in one call, because calls from Python cost more than the kernels.
 *
 * k, m: the implementations to use. After a reply none of the data is in a cache. */

enum { RVM_GROUPS = 3 };

/* Reference contexts in groups: the first group is from answers, the others from prose.
 * M contexts; V tokens; R rank. */
typedef struct {
    const float *p0, *log_ratio, *u; /* [M, V], [M, V] or NULL, [M, R] (rvm_kernels.kl_to_frozen) */
    const int32_t *following;        /* [M]: the column of the token that follows */
    const float *rest, *slope;       /* [R, V] or NULL: dot(rest, s * lora_b) is added to the rise; slope: see below */
    uint64_t ends[RVM_GROUPS];       /* where each group ends, rising; a group may be empty */
    double share[RVM_GROUPS];        /* the group's share of all prose; 0 for answers */
    uint64_t vocab, rank;
} rvm_text;

/* Effect of an adapter with s * lora_b [R, V]: out[0] mean KL to the frozen model in answers, nats;
 * out[1] rise of the mean negative log-likelihood of prose; out[2] dot(slope, lora_b), or 0. */
RVM_API int rvm_distance(const rvm_kernels *k, const rvm_text *text, const float *lora_b, float s, double *out);

/* How evidence becomes the weights of tokens, or of features (rvm_kernels.evidence_push). */
typedef struct {
    float step, agree, noise;
} rvm_push;

/* cap: KL in answers, nats, that the change of all tokens but those that end a reply may cause. */
typedef struct {
    rvm_push tokens, features;
    double cap;
} rvm_rule;

/* The A tokens whose weights change, k features of each, and which of them end a reply. */
typedef struct {
    const float *precision;     /* [A + k] */
    const rvm_matrix *features; /* [A, k] */
    const int32_t *ends;        /* [n_ends], below A */
    uint64_t n_ends;
} rvm_asking;

/* Bytes of scratch for rvm_asked and rvm_rated, of any alignment; 0 for sizes that are refused. */
RVM_API size_t rvm_asking_scratch(const rvm_asking *asking, size_t rank);

/* Weights from evidence [3, R, A + k]: block [R, A + 1] = theta_tokens + theta_features @ features^T; the last column,
 * for all other tokens, is 0. With `answers`, an adapter of scale * block may cause a KL of about rule->cap there: all
 * columns but `ends` are scaled down if it causes more. */
RVM_API int rvm_asked(const rvm_kernels *k, const rvm_matmul *m, const rvm_asking *asking, const rvm_rule *rule,
                      const rvm_text *answers, float scale, const float *evidence, size_t rank, void *scratch,
                      float *block);

/* One rating: the gradient and information of its reply at weight 1 (rvm_kernels.evidence_add). kept: the factor of
 * older evidence. */
typedef struct {
    const float *gradient, *information; /* [R, A + k] */
    const float *rest;                   /* [R, A + 1]: added to the weights from evidence */
    float weight, kept;
} rvm_rating;

/* evidence = held plus one rating; block = rvm_asked of that + rest; answers as in rvm_asked.
 * RVM_NOT_FINITE unless all of block is within `most`, and all of evidence within its square, a finite number. */
RVM_API int rvm_rated(const rvm_kernels *k, const rvm_matmul *m, const rvm_asking *asking, const rvm_rule *rule,
                      const rvm_text *answers, float scale, const float *held, const rvm_rating *rating,
                      float most, size_t rank, void *scratch, float *evidence, float *block);

#endif
