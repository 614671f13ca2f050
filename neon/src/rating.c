/* A rating: kernels in a row.  Formulas: rvm.h, ruvmlx/sona/instant.py and neutral.py. */
#include "rvm.h"

#include <string.h>

typedef struct {
    size_t tokens, features, theta_bytes, along_bytes;
} plan;

static size_t up(size_t bytes) { return (bytes + RVM_ALIGNMENT - 1) / RVM_ALIGNMENT * RVM_ALIGNMENT; }

static plan plan_of(const rvm_matrix *features, size_t rank) {
    const size_t tokens = rvm_matrix_rows(features), cols = rvm_matrix_cols(features);
    return (plan){tokens, cols, up(4 * rank * (tokens + cols)), up(4 * rank * cols)};
}

size_t rvm_evidence_scratch(const rvm_matrix *features, size_t rank) {
    if (!features || rank == 0 || rank > RVM_MAX_RANK) return 0;
    const plan n = plan_of(features, rank);
    const size_t acts = rvm_acts_bytes(RVM_ACTS_FLOAT, rank, n.features);
    return acts ? n.theta_bytes + n.along_bytes + acts : 0;
}

int rvm_evidence_block(const rvm_kernels *k, const rvm_matmul *m, const float *evidence, const float *precision,
                       const rvm_matrix *features, const rvm_push how[2], size_t rank, void *scratch,
                       float *block) {
    if (!k || !m || !evidence || !precision || !how || !scratch || !block) return RVM_BAD_ARGUMENT;
    if (rvm_evidence_scratch(features, rank) == 0) return RVM_BAD_ARGUMENT;
    const plan n = plan_of(features, rank);
    const size_t all = n.tokens + n.features, first[] = {0, n.tokens, all}, width = n.tokens + 1;
    float *theta = scratch, *along = (float *)((char *)scratch + n.theta_bytes);
    void *acts = (char *)along + n.along_bytes;
    int rc = RVM_OK;
    for (int part = 0; part < 2 && rc == RVM_OK; part++)
        rc = k->evidence_push(evidence, precision, how[part].step, how[part].agree, how[part].noise, rank, all,
                              first[part], first[part + 1], theta);
    if (rc != RVM_OK) return rc;
    for (size_t r = 0; r < rank; r++)
        memcpy(along + r * n.features, theta + r * all + n.tokens, 4 * n.features);
    rc = m->acts(RVM_ACTS_FLOAT, along, n.features, rank, n.features, 0, rank, acts);
    if (rc == RVM_OK)
        rc = m->matmul(features, RVM_ACTS_FLOAT, acts, rank, 0, rvm_matrix_tiles(features), block, width);
    for (size_t r = 0; r < rank && rc == RVM_OK; r++) {
        for (size_t i = 0; i < n.tokens; i++) block[r * width + i] += theta[r * all + i];
        block[r * width + n.tokens] = 0;
    }
    return rc;
}

/* Mean over contexts of u @ lora_b at the token that follows. */
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
