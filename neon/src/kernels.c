/* This file has the functions of the table rvm_kernels; rvm_kernels.h has the formulas. The build compiles this file
 * once for each instruction set, with -DRVM_IMPL=<name>. The file exports only the table rvm_impl_<name>. */
#include "draw.h"
#include "rvm.h"
#include "vec.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

#define REQUIRE(condition) \
    if (!(condition)) return RVM_BAD_ARGUMENT

static int bad_rank(size_t r) { return r == 0 || r > RVM_MAX_RANK; }

/* Compute *out = sum_i x[i] * y[i]. The function adds the products of a block in float and adds the sums of blocks in
 * double, so that the rounding error grows little with n. */
static int k_dot(const float *x, const float *y, size_t n, double *out) {
    REQUIRE(x && y && n && out);
    *out = 0;
    for (size_t i = 0; i < n; i += BLOCK) *out += dot_of(x + i, y + i, min_size(BLOCK, n - i));
    return isfinite(*out) ? RVM_OK : RVM_NOT_FINITE;
}

/* Return the largest |c * x[i]|, as the bits of a float without its sign bit. */
static uint32_t largest(const float *x, size_t n, float c) {
    uint32_t top = 0;
    SIMD(reduction(max : top))
    for (size_t i = 0; i < n; i++) {
        uint32_t m = magnitude(c * x[i]);
        top = m > top ? m : top;
    }
    return top;
}

static int k_all_within(const float *x, size_t n, float most) {
    REQUIRE(x && n && most >= 0 && isfinite(most));
    return largest(x, n, 1) <= magnitude(most) ? RVM_OK : RVM_NOT_FINITE;
}

/* Return 1 if the weights p->w would be finite after the step. A finite sum w + v shows that w and v are finite, too.
   */
static int step_is_finite(const rvm_param *p, float eta, float mu) {
    const float *restrict w = p->w, *restrict v = p->velocity, *restrict g = p->g;
    uint32_t top = 0;
    if (v) {
        SIMD(reduction(max : top))
        for (size_t i = 0; i < p->n; i++) {
            uint32_t m = magnitude(w[i] + (mu * v[i] + eta * g[i]));
            top = m > top ? m : top;
        }
    } else {
        SIMD(reduction(max : top))
        for (size_t i = 0; i < p->n; i++) {
            uint32_t m = magnitude(w[i] + eta * g[i]);
            top = m > top ? m : top;
        }
    }
    return is_finite_magnitude(top);
}

static void step(const rvm_param *p, float eta, float mu) {
    float *restrict w = p->w, *restrict v = p->velocity;
    const float *restrict g = p->g;
    if (v) {
        SIMD()
        for (size_t i = 0; i < p->n; i++) {
            v[i] = mu * v[i] + eta * g[i];
            w[i] += v[i];
        }
    } else {
        SIMD()
        for (size_t i = 0; i < p->n; i++) w[i] += eta * g[i];
    }
}

static int k_micro_update(const rvm_param *params, size_t n_params, float eta, float mu) {
    REQUIRE(params && n_params);
    for (size_t i = 0; i < n_params; i++) REQUIRE(params[i].w && params[i].g && params[i].n);
    for (size_t i = 0; i < n_params; i++)
        if (!step_is_finite(&params[i], eta, mu)) return RVM_NOT_FINITE;
    for (size_t i = 0; i < n_params; i++) step(&params[i], eta, mu);
    return RVM_OK;
}

/* head_add computes GROUP tokens together, one block of BLOCK vocabulary entries after the other. So head_add reads
 * each block of lora_b from memory only once for GROUP tokens. */
enum { GROUP = 32 };

static int k_head_add(const float *hidden, const float *lora_a, const float *lora_b, float s, size_t tokens,
                      size_t dim, size_t vocab, size_t rank, float *logits) {
    REQUIRE(hidden && lora_a && lora_b && logits && tokens && dim && vocab && !bad_rank(rank));
    float u[GROUP][RVM_MAX_RANK];
    for (size_t t0 = 0; t0 < tokens; t0 += GROUP) {
        size_t nt = min_size(GROUP, tokens - t0);
        for (size_t t = 0; t < nt; t++) project(u[t], hidden + (t0 + t) * dim, lora_a, s, dim, rank);
        for (size_t v = 0; v < vocab; v += BLOCK)
            for (size_t t = 0; t < nt; t++)
                add_rows(logits + (t0 + t) * vocab + v, lora_b + v, vocab, u[t], rank,
                         min_size(BLOCK, vocab - v));
    }
    return RVM_OK;
}

/* Compute both softmax denominators of a token in one pass: for the logits with the adapter (live), and for the logits
 * without the adapter (frozen). Return the largest change |shift| of a logit by the adapter, as the bits of a float
 * without its sign bit. */
static uint32_t live_and_frozen(const float *logits, const float *lora_b, const float *u, size_t vocab,
                                size_t rank, expsum *live, expsum *frozen) {
    float shift[BLOCK], tmp[BLOCK];
    uint32_t top = 0;
    for (size_t v = 0; v < vocab; v += BLOCK) {
        size_t n = min_size(BLOCK, vocab - v);
        const float *z = logits + v;
        expsum_add(live, z, n, tmp);
        set_rows(shift, lora_b + v, vocab, u, rank, n);
        SIMD(reduction(max : top))
        for (size_t i = 0; i < n; i++) {
            uint32_t m = magnitude(shift[i]);
            top = m > top ? m : top;
            tmp[i] = z[i] - shift[i];
        }
        expsum_add(frozen, tmp, n, tmp);
    }
    return top;
}

/* Compute e[i] += c * x[i] for all i. Return sum_i x[i] * b[i]. */
static float add_and_dot(float *restrict e, const float *restrict x, const float *restrict b, float c,
                         size_t n) {
    float s = 0;
    SIMD(reduction(+ : s))
    for (size_t i = 0; i < n; i++) {
        e[i] += c * x[i];
        s += x[i] * b[i];
    }
    return s;
}

static int k_trace_accumulate(const float *h, const float *logits, const float *lora_a, const float *lora_b,
                              float s, size_t dim, size_t vocab, size_t rank, size_t y, float *e_a,
                              float *e_b, double *logprob) {
    REQUIRE(h && logits && lora_a && lora_b && e_a && e_b && logprob);
    REQUIRE(dim && vocab && !bad_rank(rank) && y < vocab);
    float u[RVM_MAX_RANK] = {0}, delta[BLOCK], g[RVM_MAX_RANK];
    double b_delta[RVM_MAX_RANK], frozen_y = logits[y];
    expsum live = EXPSUM_EMPTY, frozen = EXPSUM_EMPTY;

    project(u, h, lora_a, s, dim, rank);
    uint32_t shift = live_and_frozen(logits, lora_b, u, vocab, rank, &live, &frozen);
    for (size_t k = 0; k < rank; k++) frozen_y -= (double)u[k] * lora_b[k * vocab + y];
    logprob[0] = logits[y] - expsum_log(&live);
    logprob[1] = frozen_y - expsum_log(&frozen);
    if (!isfinite(logprob[0]) || !isfinite(logprob[1]) || !is_finite_magnitude(shift)) return RVM_NOT_FINITE;

    for (size_t k = 0; k < rank; k++) b_delta[k] = lora_b[k * vocab + y];
    for (size_t v = 0; v < vocab; v += BLOCK) {
        size_t n = min_size(BLOCK, vocab - v);
        const float minus_p = (float)(-1 / live.sum);
        SIMD()
        for (size_t i = 0; i < n; i++) delta[i] = minus_p * exp_f32(logits[v + i] - live.max);
        for (size_t k = 0; k < rank; k++)
            b_delta[k] += add_and_dot(e_b + k * vocab + v, delta, lora_b + k * vocab + v, u[k], n);
    }
    for (size_t k = 0; k < rank; k++) {
        e_b[k * vocab + y] += u[k];
        g[k] = s * (float)b_delta[k];
    }
    add_outer(e_a, h, g, dim, rank);
    return RVM_OK;
}

/* Sums for the KL divergence of one context of kl_to_frozen, in which d is the change of each logit. p0, s, t, r: the
 * sums over v of p0, p0 e^x, p0 e^x x and p0 e^x log_ratio, with x = d - max. max is the largest d so far, or 0 if all
 * |d| of the context are at most NEAR. */
typedef struct {
    float max;
    double p0, s, t, r;
} tilt;

/* If all changes |d| of the logits are at most NEAR, e^d cannot overflow, so the code does not have to find the largest
   d. */
static const float NEAR = 8;

/* Add the n tokens of a block of the vocabulary to the sums. d: the change of each token's logit. near: 1 if no |d|
   exceeds NEAR. If near is 1, the caller has divided d by ln 2. */
static inline __attribute__((always_inline)) void tilt_sums(tilt *a, const float *p0, const float *log_ratio,
                                                            const float *d, const int near, size_t n) {
    const float m = a->max;
    float sum_p = 0, sum_s = 0, sum_t = 0, sum_r = 0;
    SIMD(reduction(+ : sum_p, sum_s, sum_t, sum_r))
    for (size_t i = 0; i < n; i++) {
        const float x = near ? d[i] : d[i] - m, w = p0[i] * (near ? exp2_near(x) : exp_up_to_88(x));
        sum_p += p0[i];
        sum_s += w;
        sum_t += w * x;
        if (log_ratio) sum_r += w * log_ratio[i];
    }
    a->p0 += sum_p, a->s += sum_s, a->t += near ? LN2 * sum_t : sum_t, a->r += sum_r;
}

static void tilt_near(tilt *a, const float *p0, const float *log_ratio, const float *d, size_t n) {
    a->max = 0;
    if (log_ratio)
        tilt_sums(a, p0, log_ratio, d, 1, n);
    else
        tilt_sums(a, p0, NULL, d, 1, n);
}

static void tilt_add(tilt *a, const float *p0, const float *log_ratio, const float *d, size_t n) {
    const float m = max_of(d, n, a->max);
    if (m > a->max) {
        double rise = (double)m - a->max, keep = exp_f32((float)-rise);
        a->t = keep * (a->t - rise * a->s);
        a->s *= keep;
        a->r *= keep;
        a->max = m;
    }
    if (log_ratio)
        tilt_sums(a, p0, log_ratio, d, 0, n);
    else
        tilt_sums(a, p0, NULL, d, 0, n);
}

/* A lora_b of at most NARROW floats stays in the cache. With such a lora_b, kl_to_frozen reads p0 one context after the
 * other, each from beginning to end, which is twice as fast as reading the same block of several contexts. */
enum { NARROW = 1 << 14 };

static int k_kl_to_frozen(const float *p0, const float *log_ratio, const float *u, const float *lora_b, float s,
                          size_t contexts, size_t vocab, size_t rank, double *out) {
    REQUIRE(p0 && u && lora_b && out && contexts && vocab && !bad_rank(rank));
    float c[GROUP][RVM_MAX_RANK], most[RVM_MAX_RANK], d[BLOCK];
    int near[GROUP];
    const size_t group = rank * vocab <= NARROW ? 1 : GROUP, all = contexts * vocab;
    for (size_t k = 0; k < rank; k++) most[k] = float_of(largest(lora_b + k * vocab, vocab, 1));
    out[0] = out[1] = 0;
    for (size_t m0 = 0; m0 < contexts; m0 += group) {
        size_t nm = min_size(group, contexts - m0);
        tilt acc[GROUP];
        for (size_t m = 0; m < nm; m++) {
            float bound = 0;
            for (size_t k = 0; k < rank; k++) {
                c[m][k] = s * u[(m0 + m) * rank + k];
                bound += fabsf(c[m][k]) * most[k];
            }
            near[m] = bound <= NEAR;
            if (near[m])
                for (size_t k = 0; k < rank; k++) c[m][k] *= (float)(1 / LN2);
            acc[m] = (tilt){-FLT_MAX, 0, 0, 0, 0};
        }
        for (size_t v = 0; v < vocab; v += BLOCK) {
            size_t n = min_size(BLOCK, vocab - v);
            for (size_t m = 0; m < nm; m++) {
                set_rows(d, lora_b + v, vocab, c[m], rank, n);
                const size_t at = (m0 + m) * vocab + v;
                size_t next = at + vocab; /* next: the index in p0 of the block that the loop reads next */
                if (m + 1 == nm) next = m0 * vocab + v + BLOCK;
                if (m + 1 == nm && nm > 1 && v + BLOCK >= vocab) next = (m0 + nm) * vocab;
                if (next < all) {
                    const size_t bytes = min_size(BLOCK, all - next) * sizeof *p0;
                    prefetch_l2(p0 + next, bytes);
                    if (log_ratio) prefetch_l2(log_ratio + next, bytes);
                }
                (near[m] ? tilt_near : tilt_add)(&acc[m], p0 + at, log_ratio ? log_ratio + at : NULL, d, n);
            }
        }
        for (size_t m = 0; m < nm; m++) {
            const double log_s = log(acc[m].s / acc[m].p0);
            out[0] += ((acc[m].t + acc[m].r) / acc[m].s - log_s) / (double)contexts;
            out[1] += (acc[m].max + log_s) / (double)contexts;
        }
    }
    return isfinite(out[0]) && isfinite(out[1]) ? RVM_OK : RVM_NOT_FINITE;
}

static int k_evidence_add(const float *held, const float *gradient, const float *information, float w,
                          float kept, size_t n, float *out) {
    REQUIRE(held && gradient && information && out && n);
    float *restrict g = out, *restrict s = out + n, *restrict l = out + 2 * n;
    const float most = fabsf(w);
    SIMD()
    for (size_t i = 0; i < n; i++) {
        const float step = w * gradient[i];
        g[i] = kept * held[i] + step;
        s[i] = kept * held[n + i] + step * step;
        l[i] = kept * held[2 * n + i] + most * information[i];
    }
    return RVM_OK;
}

static int k_evidence_push(const float *evidence, const float *precision, float step, float agree,
                           float noise, size_t rank, size_t n, size_t first, size_t last, float *theta) {
    REQUIRE(evidence && precision && theta && !bad_rank(rank) && first < last && last <= n);
    const float least = 1e-12f; /* least: keeps the divisors above 0 where there is no evidence */
    for (size_t r = 0; r < rank; r++) {
        const float *restrict g = evidence + r * n, *restrict s = g + rank * n, *restrict l = s + rank * n;
        float *restrict out = theta + r * n;
        double signal = 0, chance = 0;
        SIMD(reduction(+ : signal, chance))
        for (size_t i = first; i < last; i++) {
            const float square = g[i] * g[i];
            signal += square, chance += s[i];
            out[i] = step * g[i] / (precision[i] + l[i]) * (square / (square + agree * s[i] + least));
        }
        const double share = 1 - noise * chance / (signal > least ? signal : least);
        const float kept = share < 0 ? 0 : (float)share; /* a NaN stays NaN */
        SIMD()
        for (size_t i = first; i < last; i++) out[i] *= kept;
    }
    return RVM_OK;
}

/* Compute y = c * x. If c is 0, x is not read. Return the largest |y[i]|, as the bits of a float without its sign
 * bit. */
static uint32_t scaled(const float *restrict x, size_t n, float c, float *restrict y) {
    uint32_t top = 0;
    if (c == 0) {
        memset(y, 0, n * sizeof *y);
        return top;
    }
    SIMD(reduction(max : top))
    for (size_t i = 0; i < n; i++) {
        y[i] = c * x[i];
        uint32_t m = magnitude(y[i]);
        top = m > top ? m : top;
    }
    return top;
}

static int k_micro_place(const float *lora_b, float c, const float *block, const int32_t *at, float s,
                         size_t rank, size_t vocab, size_t n, size_t width, float most, float *out) {
    REQUIRE((lora_b || c == 0) && block && at && out && vocab && n && n <= width && !bad_rank(rank));
    REQUIRE(most >= 0 && isfinite(most));
    for (size_t i = 0; i < n; i++) REQUIRE(at[i] >= 0 && (size_t)at[i] < vocab);
    const uint32_t limit = magnitude(most);
    if (largest(block, rank * width, s) > limit || scaled(lora_b, rank * vocab, c, out) > limit)
        return RVM_NOT_FINITE;
    for (size_t k = 0; k < rank; k++)
        for (size_t i = 0; i < n; i++) out[k * vocab + (size_t)at[i]] = s * block[k * width + i];
    return RVM_OK;
}

static int k_logprobs(const float *logits, const int32_t *y, size_t tokens, size_t vocab, double *logprob) {
    REQUIRE(logits && y && logprob && tokens && vocab);
    for (size_t t = 0; t < tokens; t++) REQUIRE(y[t] >= 0 && (size_t)y[t] < vocab);
    float tmp[BLOCK];
    int rc = RVM_OK;
    for (size_t t = 0; t < tokens; t++) {
        const float *z = logits + t * vocab;
        expsum sum = EXPSUM_EMPTY;
        for (size_t v = 0; v < vocab; v += BLOCK) expsum_add(&sum, z + v, min_size(BLOCK, vocab - v), tmp);
        logprob[t] = z[y[t]] - expsum_log(&sum);
        if (isnan(logprob[t])) rc = RVM_NOT_FINITE;
    }
    return rc;
}

extern const rvm_layers JOIN(rvm_layers_, RVM_IMPL);

const rvm_kernels JOIN(rvm_impl_, RVM_IMPL) = {
    .name = TEXT(RVM_IMPL),
    .dot = k_dot,
    .all_within = k_all_within,
    .micro_update = k_micro_update,
    .head_add = k_head_add,
    .trace_accumulate = k_trace_accumulate,
    .kl_to_frozen = k_kl_to_frozen,
    .evidence_add = k_evidence_add,
    .evidence_push = k_evidence_push,
    .micro_place = k_micro_place,
    .logprobs = k_logprobs,
    .draw = DRAW,
    .layers = &JOIN(rvm_layers_, RVM_IMPL),
};
