/* This test compares the outputs of all kernels of rvm_kernels except `draw`, in every implementation, with those of
 * "scalar", for the same inputs. All implementations compile some code from one source, which could be wrong in all of
 * them, so the test also compares micro_update and rope with their formulas. The test needs only rvm.h, so it also runs
 * without Python: under qemu and sanitizers. Each float array starts 4 bytes after an address that malloc returned, and
 * ends where the allocated memory ends. */
#include "rvm.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    size_t tokens, dim, vocab, rank;
} sizes;

enum { N_ARRAYS = 16, N_SCALARS = 8 };
enum { H, Z, A, B, G_A, G_B, E_A, E_B, V_B, P0, U, LOGITS, HELD, MORE, THETA, PLACED };

/* The inputs and outputs of one round of all kernels except `draw`. */
typedef struct {
    sizes n;
    float *x[N_ARRAYS];
    size_t len[N_ARRAYS];
    int32_t *y;
    double *logprob, trace[2], scalar[N_SCALARS];
    int rc[14];
} world;

static uint32_t state;

static float uniform(void) { /* [-1, 1) */
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / 8388608.0f - 1.0f;
}

static float *array(size_t n, float spread) {
    float *x = (float *)malloc(4 * (n + 1)) + 1;
    for (size_t i = 0; i < n; i++) x[i] = spread * (uniform() + uniform() + uniform());
    return x;
}

static world make(sizes n, uint32_t seed) {
    const size_t a = n.dim * n.rank, b = n.rank * n.vocab, z = n.tokens * n.vocab;
    world w = {.n = n,
               .len = {n.tokens * n.dim, z, a, b, a, b, a, b, b, z, n.tokens * n.rank, z, 3 * b, 3 * b, b, b}};
    state = seed;
    for (int i = 0; i < N_ARRAYS; i++) w.x[i] = array(w.len[i], i == Z ? 5.0f : 0.5f);
    for (size_t i = 0; i < z; i++) w.x[P0][i] = (1.001f + uniform()) / (float)n.vocab;
    for (size_t i = b; i < 3 * b; i++) w.x[HELD][i] = fabsf(w.x[HELD][i]); /* in HELD, the sums S and L are not negative */
    if (n.vocab > 2) w.x[Z][n.vocab - 1] = -INFINITY;
    w.y = malloc(n.tokens * sizeof *w.y);
    for (size_t t = 0; t < n.tokens; t++) w.y[t] = (int32_t)(t % (n.vocab / 2 + 1));
    w.logprob = calloc(n.tokens, sizeof *w.logprob);
    return w;
}

static void destroy(world *w) {
    for (int i = 0; i < N_ARRAYS; i++) free(w->x[i] - 1);
    free(w->y);
    free(w->logprob);
}

static void run(const rvm_kernels *k, world *w) {
    float **x = w->x;
    const sizes n = w->n;
    rvm_param step[2] = {{x[A], NULL, x[G_A], w->len[A]}, {x[B], x[V_B], x[G_B], w->len[B]}};
    int *rc = w->rc;
    *rc++ = k->dot(x[B], x[G_B], w->len[B], &w->scalar[7]);
    *rc++ = k->all_within(x[LOGITS], w->len[LOGITS], 100);
    *rc++ = k->all_within(x[Z], w->len[Z], 1e38f);
    *rc++ = k->micro_update(step, 2, 0.3f, 0.9f);
    *rc++ = k->head_add(x[H], x[A], x[B], 0.8f, n.tokens, n.dim, n.vocab, n.rank, x[LOGITS]);
    *rc++ = k->trace_accumulate(x[H], x[Z], x[A], x[B], 0.8f, n.dim, n.vocab, n.rank, (size_t)w->y[0], x[E_A],
                                x[E_B], w->trace);
    *rc++ = k->kl_to_frozen(x[P0], x[Z], x[U], x[B], 0.5f, n.tokens, n.vocab, n.rank, &w->scalar[0]);
    *rc++ = k->kl_to_frozen(x[P0], NULL, x[U], x[B], 0.1f, n.tokens, n.vocab, n.rank, &w->scalar[5]);
    const size_t half = (n.vocab + 1) / 2;
    *rc++ = k->evidence_add(x[HELD], x[B], x[V_B], 0.7f, 0.9f, w->len[B], x[MORE]);
    *rc++ = k->evidence_push(x[HELD], x[P0], 1.5f, 12, 0, n.rank, n.vocab, 0, half, x[THETA]);
    *rc++ = k->evidence_push(x[HELD], x[P0], 1.5f, 12, 0.5f, n.rank, n.vocab, half, n.vocab, x[THETA]);
    *rc++ = k->micro_place(x[B], 1.5f, x[U], w->y, 0.8f, n.rank, n.vocab, n.tokens, n.tokens, 1e8f, x[PLACED]);
    *rc++ = k->micro_place(x[B], 1.5f, x[U], w->y, 0.8f, n.rank, n.vocab, n.tokens, n.tokens, 1e-9f, x[THETA]);
    *rc++ = k->logprobs(x[Z], w->y, n.tokens, n.vocab, w->logprob);
    w->scalar[2] = w->trace[0], w->scalar[3] = w->trace[1], w->scalar[4] = w->logprob[n.tokens - 1];
}

static int differ(double got, double want) {
    if (got == want) return 0; /* the two numbers are equal, or equal infinities */
    return !(fabs(got - want) <= 2e-5 + 2e-4 * fabs(want));
}

/* Print the first outputs of `impl` that differ from those of "scalar", and return the number of differences. */
static int compare(const char *impl, const world *got, const world *want) {
    int bad = 0;
    for (int i = 0; i < N_ARRAYS; i++)
        for (size_t j = 0; j < got->len[i]; j++)
            if (differ(got->x[i][j], want->x[i][j]) && bad++ < 10)
                printf("%s: array %d [%zu] is %g, scalar says %g (V=%zu r=%zu)\n", impl, i, j, got->x[i][j],
                       want->x[i][j], got->n.vocab, got->n.rank);
    for (int i = 0; i < N_SCALARS; i++)
        if (differ(got->scalar[i], want->scalar[i]) && bad++ < 10)
            printf("%s: scalar %d is %g, scalar says %g\n", impl, i, got->scalar[i], want->scalar[i]);
    if (memcmp(got->rc, want->rc, sizeof got->rc) != 0 && bad++ < 10)
        printf("%s: return codes differ (V=%zu r=%zu)\n", impl, got->n.vocab, got->n.rank);
    return bad;
}

static int check(const rvm_kernels *k, sizes n) {
    const uint32_t seed = (uint32_t)(n.vocab * 64 + n.rank);
    world got = make(n, seed), want = make(n, seed);
    run(k, &got);
    run(rvm_impl("scalar"), &want);
    int bad = compare(k->name, &got, &want);
    destroy(&got);
    destroy(&want);
    return bad;
}

enum { COLS = 5 }; /* number of features */

/* Compute a rating with the kernels k and m: the new evidence, the block of weights from the evidence, and the distance
   of an adapter from the frozen model (rvm_distance). */
static void rate(const rvm_kernels *k, const rvm_matmul *m, sizes n, const float *held, const world *w,
                 float *evidence, float *block, double *distance, int *rc) {
    /* distance: [6]: three results for a text with all optional fields, then three for a text without them */
    rvm_matrix_spec spec;
    rvm_matrix_plan(RVM_F32, n.vocab, COLS, 0, NULL, NULL, RVM_F32, &spec);
    void *features = aligned_alloc(RVM_ALIGNMENT, rvm_matrix_bytes(&spec));
    const size_t coordinates = n.vocab + COLS, width = n.vocab + 1;
    float *weights = array(n.vocab * COLS, 0.5f), *precision = array(coordinates, 0.1f);
    float *said = array(n.rank * coordinates, 0.5f), *information = array(n.rank * coordinates, 0.5f);
    float *rest = array(n.rank * width, 0.1f), *p = array(n.tokens * width, 0);
    int32_t *first = calloc(n.tokens, sizeof *first);
    for (size_t i = 0; i < n.rank * coordinates; i++) information[i] = fabsf(information[i]);
    for (size_t i = 0; i < n.tokens * width; i++) p[i] = (1.001f + uniform()) / (float)width;
    for (size_t i = 0; i < coordinates; i++) precision[i] = 1 + fabsf(precision[i]);
    rvm_matrix_pack(&spec, weights, NULL, NULL, RVM_F32, 0, n.vocab, features);
    const int32_t last = (int32_t)n.vocab - 1;
    const rvm_asking asking = {precision, features, &last, 1};
    const rvm_rule rule = {{1, 12, 0}, {1.5f, 10, 0.01f}, 0.05};
    void *scratch = malloc(rvm_asking_scratch(&asking, n.rank));
    const size_t third = n.tokens / 3;
    const rvm_text text = {w->x[P0], w->x[Z], w->x[U], w->y, w->x[G_B], w->x[V_B], {third, third + 1, n.tokens},
                           {0, 0.25, 0.75}, n.vocab, n.rank};
    const rvm_text answers = {p, NULL, w->x[U], first, NULL, NULL, {n.tokens, n.tokens, n.tokens}, {0}, width, n.rank};
    const rvm_rating rating = {said, information, rest, 0.7f, 0.9f};
    rc[0] = rvm_rated(k, m, &asking, &rule, &answers, 2, held, &rating, 1e8f, n.rank, scratch, evidence, block);
    rvm_text plain = text;
    plain.log_ratio = plain.rest = plain.slope = NULL;
    rc[1] = rvm_distance(k, &text, w->x[B], 0.5f, distance);
    rc[2] = rvm_distance(k, &plain, w->x[B], 0.05f, distance + 3);
    free(scratch);
    free(first);
    for (float **x = (float *[]){weights, precision, said, information, rest, p, NULL}; *x; x++) free(*x - 1);
    free(features);
}

static int check_rating(const rvm_kernels *k, sizes n) {
    const uint32_t seed = (uint32_t)(n.vocab * 64 + n.rank);
    world w = make(n, seed);
    const size_t all = n.rank * (n.vocab + COLS), b = n.rank * (n.vocab + 1);
    float *held = array(3 * all, 0.5f), *got = array(3 * all + b, 0), *want = array(3 * all + b, 0);
    for (size_t i = all; i < 3 * all; i++) held[i] = fabsf(held[i]);
    w.x[Z][n.vocab - 1] = 0; /* Z holds log ratios here, and no ratio is infinite */
    double far_got[6], far_want[6];
    int rc_got[3], rc_want[3], bad = 0;
    state = seed;
    rate(k, rvm_matmul_impl(NULL), n, held, &w, got, got + 3 * all, far_got, rc_got);
    state = seed;
    rate(rvm_impl("scalar"), rvm_matmul_impl("scalar"), n, held, &w, want, want + 3 * all, far_want,
         rc_want);
    for (size_t i = 0; i < 3 * all + b; i++) bad += differ(got[i], want[i]);
    for (int i = 0; i < 6; i++) bad += differ(far_got[i], far_want[i]);
    for (int i = 0; i < 3; i++) bad += rc_got[i] != RVM_OK || rc_want[i] != RVM_OK;
    if (bad) printf("%s: %d differences in a rating (V=%zu r=%zu)\n", k->name, bad, n.vocab, n.rank);
    free(held - 1);
    free(got - 1);
    free(want - 1);
    destroy(&w);
    return bad;
}

/* Check micro_update: the new weights are w + eta g, or w + (mu v + eta g) with a velocity v. */
static int check_step(const rvm_kernels *k, size_t n) {
    enum { W, G, WANT, MOVING_W, V, MOVING_WANT, ARRAYS };
    float *x[ARRAYS];
    for (int i = 0; i < ARRAYS; i++) x[i] = array(n, 0.5f);
    for (size_t i = 0; i < n; i++) {
        x[WANT][i] = x[W][i] + 0.3f * x[G][i];
        x[MOVING_WANT][i] = x[MOVING_W][i] + (0.9f * x[V][i] + 0.3f * x[G][i]);
    }
    const rvm_param step[2] = {{x[W], NULL, x[G], n}, {x[MOVING_W], x[V], x[G], n}};
    int bad = k->micro_update(step, 2, 0.3f, 0.9f) != RVM_OK;
    for (size_t i = 0; i < n; i++)
        bad += differ(x[W][i], x[WANT][i]) + differ(x[MOVING_W][i], x[MOVING_WANT][i]);
    if (bad) printf("%s: %d of %zu weights are not what the step's formula says\n", k->name, bad, n);
    for (int i = 0; i < ARRAYS; i++) free(x[i] - 1);
    return bad;
}

/* Check rope in polar coordinates: the angle of each pair of numbers grows by the token's angle, and the radius stays
   the same. */
static int check_rope(const rvm_layers *k, size_t half, int traditional) {
    enum { TOKENS = 3, HEADS = 2 };
    const size_t d = 2 * half, n = TOKENS * HEADS * d;
    float *x = array(n, 0.5f), *angle = array(TOKENS * half, 2), *turn = array(TOKENS * d, 0), *y = array(n, 0);
    for (size_t t = 0; t < TOKENS; t++)
        for (size_t i = 0; i < half; i++) {
            turn[t * d + i] = cosf(angle[t * half + i]);
            turn[t * d + half + i] = sinf(angle[t * half + i]);
        }
    int bad = k->rope(x, turn, TOKENS, HEADS, d, traditional, y) != RVM_OK;
    for (size_t i = 0; i < n / 2; i++) {
        const size_t row = i / half, pair = i % half, a = row * d + (traditional ? 2 * pair : pair);
        const size_t b = a + (traditional ? 1 : half);
        const double to = atan2(x[b], x[a]) + angle[row / HEADS * half + pair], radius = hypot(x[a], x[b]);
        bad += differ(y[a], radius * cos(to)) + differ(y[b], radius * sin(to));
    }
    if (bad) printf("%s: rope turns %d numbers wrong (traditional: %d)\n", k->name, bad, traditional);
    for (float **each = (float *[]){x, angle, turn, y, NULL}; *each; each++) free(*each - 1);
    return bad;
}

int main(void) {
    const size_t ranks[] = {1, 2, 3, 5, 8};
    const sizes shapes[] = {{1, 1, 1, 0}, {2, 3, 5, 0}, {33, 7, 65, 0}, {3, 17, 1023, 0}, {35, 5, 2051, 0}};
    const int few = getenv("RVM_FEW") != NULL; /* few: on slow machines, test each shape and each rank, but not each pair of them */
    int bad = 0, rounds = 0;
    for (size_t i = 0; rvm_impl_name(i); i++) {
        const rvm_kernels *k = rvm_impl(rvm_impl_name(i));
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
            for (size_t r = 0; r < sizeof ranks / sizeof *ranks; r++) {
                if (few && (s + r + 1) % 3) continue;
                rounds++;
                const sizes n = {shapes[s].tokens, shapes[s].dim, shapes[s].vocab, ranks[r]};
                bad += check(k, n) + check_rating(k, n);
            }
        bad += check_step(k, 67);
        for (int traditional = 0; traditional < 2; traditional++)
            bad += check_rope(rvm_layers_impl(k->name), 9, traditional);
        printf("%s: compared\n", k->name);
    }
    printf("%d rounds of all kernels, %d differences\n", rounds, bad);
    return bad ? 1 : 0;
}
