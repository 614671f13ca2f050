/* This file computes what a rating changes, with kernels of rvm_kernels and rvm_matmul. The formulas are in
 * rvm_rating.h, ruvmlx/sona/instant.py and ruvmlx/sona/kl_probe.py. */
#include "rvm.h"

#include <math.h>
#include <string.h>

/* Return how much the LoRA, at scale 1, raises the logit of the token that follows a context: the mean of
 * (u @ lora_b)[following] over the contexts [first, last). u: the hidden state of a context times lora_a. */
static double gained(const rvm_text *t, const float *lora_b, size_t first, size_t last) {
    double sum = 0;
    for (size_t i = first; i < last; i++)
        for (size_t r = 0; r < t->rank; r++)
            sum += (double)t->u[i * t->rank + r] * lora_b[r * t->vocab + (size_t)t->following[i]];
    return sum / (double)(last - first);
}

static int refuses(const rvm_text *t) {
    if (!t->p0 || !t->u || !t->following || t->vocab == 0 || t->rank == 0 || t->rank > RVM_MAX_RANK) return 1;
    for (size_t g = 1; g < RVM_GROUPS; g++)
        if (t->ends[g] < t->ends[g - 1]) return 1;
    for (size_t i = 0; i < t->ends[RVM_GROUPS - 1]; i++)
        if (t->following[i] < 0 || (size_t)t->following[i] >= t->vocab) return 1;
    return 0;
}

int rvm_distance(const rvm_kernels *k, const rvm_text *t, const float *lora_b, float s, double *out) {
    if (!k || !t || !lora_b || !out || refuses(t)) return RVM_BAD_ARGUMENT;
    double rest = 0;
    out[0] = out[1] = out[2] = 0;
    for (size_t g = 0, at = 0; g < RVM_GROUPS; at = t->ends[g++]) {
        const size_t n = t->ends[g] - at;
        if (n == 0) continue;
        double found[2];
        int rc = k->kl_to_frozen(t->p0 + at * t->vocab, t->log_ratio ? t->log_ratio + at * t->vocab : NULL,
                                 t->u + at * t->rank, lora_b, s, n, t->vocab, t->rank, found);
        if (rc != RVM_OK) return rc;
        if (g == 0) out[0] = found[0];
        if (t->share[g] != 0) out[1] += t->share[g] * (found[1] - s * gained(t, lora_b, at, t->ends[g]));
    }
    int rc = t->rest ? k->dot(t->rest, lora_b, t->rank * t->vocab, &rest) : RVM_OK;
    if (rc == RVM_OK && t->slope) rc = k->dot(t->slope, lora_b, t->rank * t->vocab, &out[2]);
    out[1] += s * rest;
    return rc;
}

typedef struct {
    size_t tokens, features, theta, along, ends; /* tokens, features: the numbers of tokens and features; theta, along, ends: bytes of these scratch arrays */
} plan;

static size_t up(size_t bytes) { return (bytes + RVM_ALIGNMENT - 1) / RVM_ALIGNMENT * RVM_ALIGNMENT; }

static plan plan_of(const rvm_asking *a, size_t rank) {
    const size_t tokens = rvm_matrix_rows(a->features), cols = rvm_matrix_cols(a->features);
    return (plan){tokens, cols, up(4 * rank * (tokens + cols)), up(4 * rank * cols), up(4 * rank * a->n_ends)};
}

size_t rvm_asking_scratch(const rvm_asking *a, size_t rank) {
    if (!a || !a->precision || !a->features || rank == 0 || rank > RVM_MAX_RANK) return 0;
    const plan n = plan_of(a, rank);
    if (a->n_ends && !a->ends) return 0;
    for (size_t i = 0; i < a->n_ends; i++)
        if (a->ends[i] < 0 || (size_t)a->ends[i] >= n.tokens) return 0;
    const size_t acts = rvm_acts_bytes(RVM_ACTS_FLOAT, rank, n.features);
    return acts ? n.theta + n.along + n.ends + acts + RVM_ALIGNMENT : 0;
}

static char *aligned(void *scratch) { return (char *)up((size_t)scratch); }

static int pushed(const rvm_kernels *k, const rvm_matmul *m, const rvm_asking *a, const rvm_rule *rule,
                  const float *evidence, size_t rank, char *scratch, float *block) {
    const plan n = plan_of(a, rank);
    const size_t all = n.tokens + n.features, first[] = {0, n.tokens, all}, width = n.tokens + 1;
    const rvm_push how[] = {rule->tokens, rule->features};
    float *theta = (float *)scratch, *along = (float *)(scratch + n.theta);
    void *acts = scratch + n.theta + n.along + n.ends;
    int rc = RVM_OK;
    for (int part = 0; part < 2 && rc == RVM_OK; part++)
        rc = k->evidence_push(evidence, a->precision, how[part].step, how[part].agree, how[part].noise, rank, all,
                              first[part], first[part + 1], theta);
    if (rc != RVM_OK) return rc;
    for (size_t r = 0; r < rank; r++)
        memcpy(along + r * n.features, theta + r * all + n.tokens, 4 * n.features);
    rc = m->acts(RVM_ACTS_FLOAT, along, n.features, rank, n.features, 0, rank, acts);
    if (rc == RVM_OK)
        rc = m->matmul(a->features, RVM_ACTS_FLOAT, acts, rank, 0, rvm_matrix_tiles(a->features), block, width);
    for (size_t r = 0; r < rank && rc == RVM_OK; r++) {
        for (size_t i = 0; i < n.tokens; i++) block[r * width + i] += theta[r * all + i];
        block[r * width + n.tokens] = 0;
    }
    return rc;
}

/* The number of steps in which held_back scales the block of weights down to the KL cap. The KL divergence is nearly
 * quadratic in the factor by which the block is multiplied. So the first step nearly reaches the cap, and the second
 * step corrects the small error. */
enum { LOOKS = 2 };

/* Scale the block of weights down until its KL divergence in answers is at most about `cap`. The columns a->ends, of
 * the tokens that end a reply, keep their values; `saved` [R, n_ends] holds these values during the call. */
static int held_back(const rvm_kernels *k, const rvm_asking *a, double cap, const rvm_text *answers, float scale,
                     size_t rank, float *saved, float *block) {
    const size_t width = rvm_matrix_rows(a->features) + 1;
    double share = 1, found[3];
    for (size_t r = 0; r < rank; r++) {
        for (size_t i = 0; i < a->n_ends; i++) saved[r * a->n_ends + i] = block[r * width + (size_t)a->ends[i]];
        for (size_t i = 0; i < a->n_ends; i++) block[r * width + (size_t)a->ends[i]] = 0;
    }
    for (int look = 0; look < LOOKS; look++) {
        int rc = rvm_distance(k, answers, block, (float)(share * scale), found);
        if (rc != RVM_OK) return rc;
        if (found[0] <= cap) break;
        share *= sqrt(cap / found[0]);
    }
    if (share < 1)
        for (size_t i = 0; i < rank * width; i++) block[i] *= (float)share;
    for (size_t r = 0; r < rank; r++)
        for (size_t i = 0; i < a->n_ends; i++) block[r * width + (size_t)a->ends[i]] = saved[r * a->n_ends + i];
    return RVM_OK;
}

int rvm_asked(const rvm_kernels *k, const rvm_matmul *m, const rvm_asking *a, const rvm_rule *rule,
              const rvm_text *answers, float scale, const float *evidence, size_t rank, void *scratch,
              float *block) {
    if (!k || !m || !rule || !evidence || !scratch || !block) return RVM_BAD_ARGUMENT;
    if (rvm_asking_scratch(a, rank) == 0) return RVM_BAD_ARGUMENT;
    const plan n = plan_of(a, rank);
    if (answers && (answers->rank != rank || answers->vocab != n.tokens + 1)) return RVM_BAD_ARGUMENT;
    int rc = pushed(k, m, a, rule, evidence, rank, aligned(scratch), block);
    if (rc != RVM_OK || !answers) return rc;
    float *saved = (float *)(aligned(scratch) + n.theta + n.along);
    return held_back(k, a, rule->cap, answers, scale, rank, saved, block);
}

int rvm_rated(const rvm_kernels *k, const rvm_matmul *m, const rvm_asking *a, const rvm_rule *rule,
              const rvm_text *answers, float scale, const float *held, const rvm_rating *rating, float most,
              size_t rank, void *scratch, float *evidence, float *block) {
    if (!k || !rating || !rating->rest || !block || rvm_asking_scratch(a, rank) == 0) return RVM_BAD_ARGUMENT;
    const plan n = plan_of(a, rank);
    const size_t all = rank * (n.tokens + n.features), said = rank * (n.tokens + 1);
    int rc = k->evidence_add(held, rating->gradient, rating->information, rating->weight, rating->kept, all, evidence);
    if (rc == RVM_OK) rc = k->all_within(evidence, 3 * all, most * most);
    if (rc == RVM_OK) rc = rvm_asked(k, m, a, rule, answers, scale, evidence, rank, scratch, block);
    if (rc != RVM_OK) return rc;
    for (size_t i = 0; i < said; i++) block[i] += rating->rest[i];
    return k->all_within(block, said, most);
}
