/* This file draws a token: it has the kernel `draw` of rvm_kernels (formulas in rvm_kernels.h). ruvmlx/sampling.py
 * makes the same draw with NumPy; the two can differ only by rounding. The build compiles this file once for each
 * instruction set, with -DRVM_IMPL=<name>. */
#include "draw.h"

#include "rvm.h"
#include "vec.h"

/* The distribution of the token at temperature 1: log p = (logit - max) - log_sum. */
typedef struct {
    const float *logits;
    size_t vocab;
    float max, log_sum;
} distribution;

static inline float logprob(const distribution *d, float logit) { return (logit - d->max) - d->log_sum; }

static float log_sum_of(const float *logits, size_t vocab, float max) {
    float tmp[BLOCK];
    double sum = 0;
    for (size_t v = 0; v < vocab; v += BLOCK) sum += exp_sum(logits + v, max, min_size(BLOCK, vocab - v), tmp);
    return (float)log(sum);
}

/* Return the smallest log p that the filter min_p permits, as a float. The exact limit is a double. The code rounds the
   limit up, so that a float log p is below the result exactly if the log p is below the exact limit. */
static float least_logprob(const distribution *d, double min_p) {
    if (min_p == 0) return -INFINITY;
    const double least = (double)logprob(d, d->max) + log(min_p);
    const float near = (float)least;
    return near < least ? nextafterf(near, INFINITY) : near;
}

/* ---- a draw from the most likely ids ----
 *
 * A key is a 64-bit number for one id. Keys have the reverse order of logits: the upper half of a key falls when the
 * logit rises (-0 equals 0), and the lower half is the id. So the smallest key belongs to the most likely id, and ids
 * of equal probability are ordered by id. */

static inline uint64_t key_of(float logit, size_t id) {
    const uint32_t b = bits_of(logit + 0.0f);
    return (uint64_t)(b >> 31 ? b : ~b & 0x7fffffffu) << 32 | (uint32_t)id;
}

static inline float logit_of(uint64_t key) {
    const uint32_t b = (uint32_t)(key >> 32);
    return float_of(b >> 31 ? b : ~b & 0x7fffffffu);
}

/* Collect the keys of the ids with log p >= floor, in the order of ids, and return the number of keys. If the largest
 * log p of a group of STRIDE ids is below the floor, the function skips the group; it usually skips most groups. */
static size_t collect(const distribution *d, float floor, uint64_t *keys) {
    enum { STRIDE = 128 };
    size_t n = 0;
    for (size_t v = 0; v < d->vocab; v += STRIDE) {
        const size_t end = min_size(d->vocab, v + STRIDE);
        if (!(logprob(d, max_of(d->logits + v, end - v, -INFINITY)) >= floor)) continue;
        for (size_t i = v; i < end; i++)
            if (logprob(d, d->logits[i]) >= floor) keys[n++] = key_of(d->logits[i], i);
    }
    return n;
}

/* Move keys[at] down until it is the root of a heap, which has the largest key on top. The two children of keys[at]
 * must be the roots of heaps already. */
static void sift_down(uint64_t *keys, size_t n, size_t at) {
    const uint64_t key = keys[at];
    for (size_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && keys[child + 1] > keys[child]) child++;
        if (keys[child] <= key) break;
        keys[at] = keys[child];
    }
    keys[at] = key;
}

static void heap_sort(uint64_t *keys, size_t n) {
    for (size_t i = n / 2; i-- > 0;) sift_down(keys, n, i);
    for (size_t last = n; last-- > 1;) {
        const uint64_t top = keys[0];
        keys[0] = keys[last];
        keys[last] = top;
        sift_down(keys, last, 0);
    }
}

/* Run one pass of a radix sort: copy the keys to `to`, ordered by the 11 bits from bit `shift` on. Keys with equal bits
 * keep their order. */
static void by_digit(const uint64_t *keys, size_t n, int shift, uint64_t *to) {
    enum { DIGIT = 11 };
    uint32_t at[1 << DIGIT] = {0}, sum = 0;
    for (size_t i = 0; i < n; i++) at[keys[i] >> shift & ((1 << DIGIT) - 1)]++;
    for (size_t i = 0; i < 1 << DIGIT; i++) {
        const uint32_t count = at[i];
        at[i] = sum;
        sum += count;
    }
    for (size_t i = 0; i < n; i++) to[at[keys[i] >> shift & ((1 << DIGIT) - 1)]++] = keys[i];
}

/* Sort keys that are in the order of their ids. A pass of the radix sort keeps the order of equal digits, so only the
 * upper halves of the keys, which stand for the logits, need passes. */
static void sort_keys(uint64_t *keys, size_t n, uint64_t *spare) {
    enum { FEW_KEYS = 256 };
    if (n <= FEW_KEYS) {
        heap_sort(keys, n);
        return;
    }
    by_digit(keys, n, 32, spare);
    by_digit(spare, n, 43, keys);
    by_digit(keys, n, 54, spare); /* only 10 bits of the key are left from bit 54 on */
    memcpy(keys, spare, n * sizeof *keys);
}

/* Return how many of the n most likely ids the filters keep. If the result is n, the filters can also keep ids that are
   not among these n. */
static size_t keep_likely(const distribution *d, const rvm_drawing *how, const uint64_t *keys, size_t n) {
    const float least = least_logprob(d, how->min_p);
    const size_t most = how->top_k && how->top_k < n ? how->top_k : n;
    double before = 0;
    for (size_t i = 0; i < most; i++) {
        const float p = logprob(d, logit_of(keys[i]));
        if (p < least || (how->top_p < 1 && before >= how->top_p)) return i;
        before += exp_f32(p);
    }
    return most;
}

/* These are limits of log p. The draw first sorts only the ids with log p >= -7, of which there are at most e^7 =
 * 1,096. If the filters keep all these ids, and top_k is not their number, the draw tries again with the next limit. */
static const float FLOORS[] = {-7, -10, -13, -16, -20, -INFINITY};

/* Draw a token with top_p or top_k, and return its id.  keys: [2 V] */
static int32_t draw_likely(const distribution *d, const rvm_drawing *how, uint64_t *keys) {
    size_t n = 0, kept = 0;
    for (size_t i = 0; i < sizeof FLOORS / sizeof *FLOORS; i++) {
        n = collect(d, FLOORS[i], keys);
        sort_keys(keys, n, keys + d->vocab);
        kept = keep_likely(d, how, keys, n);
        if (n && (kept < n || kept == how->top_k)) break;
    }
    const double top = logprob(d, logit_of(keys[0]));
    double *mass = (double *)(void *)(keys + d->vocab), total = 0;
    for (size_t i = 0; i < kept; i++)
        mass[i] = total += exp((logprob(d, logit_of(keys[i])) - top) / how->temperature);
    size_t at = 0;
    while (at + 1 < kept && mass[at] < total && !(mass[at] > how->u * total)) at++;
    return (int32_t)(uint32_t)keys[at];
}

/* ---- a draw without top_p and top_k: the code goes through the ids in their order ---- */

/* Compute the weights w[i] = (p[i] / max p)^(1 / temperature), or 0 if log p is below the limit `least`. Return the sum
 * of the weights. */
static float weigh(const distribution *d, const float *logits, float slope, float least, size_t n, float *w) {
    float s = 0;
    SIMD(reduction(+ : s))
    for (size_t i = 0; i < n; i++) {
        const float x = logits[i] - d->max, e = exp_f32(x * slope);
        w[i] = x - d->log_sum < least ? 0.0f : e; /* a NaN stays NaN */
        s += w[i];
    }
    return s;
}

/* Draw a token without top_p and top_k, and return its id. Return -1 if all weights are 0 or a weight is NaN. sums:
 * scratch memory for the sum of the weights of each BLOCK ids */
static int32_t draw_any(const distribution *d, const rvm_drawing *how, double *sums) {
    float w[BLOCK];
    const float steepest = 3e38f, least = least_logprob(d, how->min_p);
    const float slope = 1 / how->temperature < steepest ? (float)(1 / how->temperature) : steepest;
    double total = 0, sum = 0;
    for (size_t v = 0; v < d->vocab; v += BLOCK)
        total += sums[v / BLOCK] = weigh(d, d->logits + v, slope, least, min_size(BLOCK, d->vocab - v), w);
    int32_t last = total > 0 && isfinite(total) ? 0 : -1;
    for (size_t v = 0; last >= 0 && v < d->vocab; sum += sums[v / BLOCK], v += BLOCK) {
        const int here = sum + sums[v / BLOCK] > how->u * total;
        if (!here && v + BLOCK < d->vocab) continue;
        const size_t n = min_size(BLOCK, d->vocab - v);
        weigh(d, d->logits + v, slope, least, n, w);
        double inside = sum;
        for (size_t i = 0; i < n; i++) {
            inside += w[i];
            if (w[i] > 0) last = (int32_t)(v + i);
            if (w[i] > 0 && inside > how->u * total) return last;
        }
        if (here) break; /* by rounding, u * total can exceed the sum at the block's end; in this case draw the block's last id */
    }
    return last;
}

int DRAW(const float *logits, size_t vocab, const rvm_drawing *how, uint64_t *scratch, int32_t *token) {
    if (!logits || !how || !scratch || !token || vocab == 0 || vocab > INT32_MAX) return RVM_BAD_ARGUMENT;
    if (!(how->temperature > 0) || !(how->top_p > 0) || !(how->min_p >= 0) || how->min_p >= 1) return RVM_BAD_ARGUMENT;
    if (!(how->u >= 0) || !(how->u < 1)) return RVM_BAD_ARGUMENT;
    const int sorted = how->top_p < 1 || how->top_k > 0;
    distribution d = {logits, vocab, max_of(logits, vocab, -FLT_MAX), 0};
    if (sorted || how->min_p > 0) d.log_sum = log_sum_of(logits, vocab, d.max);
    if (!isfinite(d.max) || !isfinite(d.log_sum)) return RVM_NOT_FINITE;
    *token = sorted ? draw_likely(&d, how, scratch) : draw_any(&d, how, (double *)(void *)scratch);
    return *token < 0 ? RVM_NOT_FINITE : RVM_OK;
}
