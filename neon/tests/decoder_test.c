/* This test checks the decoder, pages and threads without Python, so it also runs under sanitizers and qemu. The build
 * links the library's sources, and the linker's --wrap counts calls of malloc and similar functions. */
#define _GNU_SOURCE
#define SEQUENCE_MALLOC
#include "model.h"
#include "sequence.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static _Atomic size_t allocations, mappings;

#ifdef RVM_WRAPPED
void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t n);
void *__real_aligned_alloc(size_t align, size_t n);
void *__real_mmap(void *at, size_t n, int protection, int flags, int file, off_t offset);
void *__wrap_malloc(size_t n) {
    allocations++;
    return __real_malloc(n);
}
void *__wrap_calloc(size_t n, size_t size) {
    allocations++;
    return __real_calloc(n, size);
}
void *__wrap_realloc(void *p, size_t n) {
    allocations++;
    return __real_realloc(p, n);
}
void *__wrap_aligned_alloc(size_t align, size_t n) {
    allocations++;
    return __real_aligned_alloc(align, n);
}
void *__wrap_mmap(void *at, size_t n, int protection, int flags, int file, off_t offset) {
    mappings++;
    return __real_mmap(at, n, protection, flags, file, offset);
}
#endif

static rvm_decoder *decoder(const model *m, const char *impl, uint32_t threads) {
    rvm_decoder_config config = m->config;
    rvm_decoder *d = NULL;
    config.impl = impl, config.threads = threads;
    const int rc = rvm_decoder_create(&config, &m->weights, &d);
    CHECK(rc == RVM_OK && d, "%d", rc);
    return d;
}

/* Return 1 with RVM_FEW. Races do not depend on the implementation, so the test then runs only the fastest one, and the
 * scalar one once. */
static int few(void) { return getenv("RVM_FEW") != NULL; }

enum { V = 333, D = 64, STEPS = 160, ROWS = STEPS + 20 };

static int32_t token(size_t i) { return (int32_t)(i * 37 % V); }

/* Return a sequence with enough pages for a walk. With a window it drops old pages, except those that a trim can need. */
static sequence start(const model *m, rvm_decoder *d) {
    sequence c = sequence_of(d, STEPS);
    c.keep = m->config.sliding_window ? m->config.sliding_window + 20 : 0;
    c.hot = m->shape.hot, c.warm = m->shape.warm;
    return c;
}

/* Compute the logits of ROWS positions: a chunk, single tokens across pages, a trim, and a chunk with all outputs. */
static void walk(sequence *c, float *logits) {
    int32_t tokens[STEPS + 20];
    float hidden[D];
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) tokens[i] = token(i);
    int rc = sequence_forward(c, tokens, 33, 33, NULL, logits, NULL);
    for (size_t i = 33; i < STEPS && rc == RVM_OK; i++)
        rc = sequence_forward(c, tokens + i, 1, 1, hidden, logits + i * V, NULL);
    sequence_trim(c, rc == RVM_OK ? 20 : 0);
    if (rc == RVM_OK) rc = sequence_forward(c, tokens + STEPS - 20, 20, 20, NULL, logits + STEPS * V, NULL);
    CHECK(rc == RVM_OK && c->offset == STEPS, "%d at %zu", rc, c->offset);
}

static float *walked(const model *m, const char *impl, uint32_t threads) {
    rvm_decoder *d = decoder(m, impl, threads);
    sequence c = start(m, d);
    float *logits = calloc(ROWS * V, sizeof *logits);
    walk(&c, logits);
    sequence_end(&c);
    rvm_decoder_destroy(d);
    return logits;
}

static double distance(const float *a, const float *b, size_t n) {
    double worst = 0, top = 0;
    for (size_t i = 0; i < n; i++) {
        worst = fmax(worst, fabs((double)a[i] - b[i]));
        top = fmax(top, fabs((double)b[i]));
        if (isnan(a[i]) || isnan(b[i])) return INFINITY;
    }
    return worst / top;
}

/* The last three shapes are those of families. */
static model *made_as(size_t i, size_t n, shape s) {
    if (i + 3 == n) return make_family(s);
    if (i + 2 == n) return make_layer_norms(s);
    return i + 1 == n ? make_alibi(s) : make(s);
}

static void test_implementations(void) {
    const shape shapes[] = {{RVM_Q4, 4, 2, 32, 0, 0, 0},    {RVM_Q8, 6, 2, 16, 40, 0, 0},
                            {RVM_F16, 3, 3, 18, 0, 0, 0},   {RVM_F32, 8, 1, 80, 1, 0, 0},
                            {RVM_BF16, 5, 1, 128, 70, 0, 0}, {RVM_Q4, 4, 2, 64, 0, 64, 0},
                            {RVM_F16, 6, 2, 18, 0, 64, 64}, {RVM_F32, 5, 1, 128, 150, 64, 64},
                            {RVM_Q8, 6, 2, 32, 0, 64, 64},
                            {RVM_Q4, 3, 1, 64, 0, 64, 64},  {RVM_F32, 5, 5, 80, 0, 64, 64}};
    const size_t n_shapes = sizeof shapes / sizeof *shapes;
    for (size_t s = 0; s < n_shapes; s++) {
        model *m = made_as(s, n_shapes, shapes[s]);
        float *want = walked(m, "scalar", 1);
        const double again = distance(want + (STEPS - 20) * V, want + STEPS * V, 20 * V);
        /* Products with quantised matrices round the activations to 8 bits. If two sums differ in their last bit,
         * the rounded values can differ by one step. */
        const int rounds = shapes[s].kind == RVM_Q4 || shapes[s].kind == RVM_Q8;
        const double most = shapes[s].hot ? 1e-3 : rounds ? 3e-4 : 1e-4;
        CHECK(again < most, "shape %zu: a chunk differs from single tokens by %g", s, again);
        for (size_t i = 0; rvm_matmul_impl_name(i); i++) {
            const char *name = rvm_matmul_impl_name(i);
            if (few() && i && (s || rvm_matmul_impl_name(i + 1))) continue;
            float *got = strcmp(name, "scalar") ? walked(m, name, 1) : want, *other = walked(m, name, 3);
            const double off = distance(got, want, ROWS * V);
            CHECK(off < 2e-3, "shape %zu: %s differs from scalar by %g", s, name, off);
            CHECK(memcmp(got, other, ROWS * V * sizeof *got) == 0, "shape %zu: %s with 3 threads", s, name);
            free(other);
            if (got != want) free(got);
            if (s == 0) printf("%s: compared\n", name);
        }
        free(want);
        destroy(m);
    }
}

enum { MANY = 5 };

/* Start sequences of different lengths, with pages of all tiers of the shape. */
static void start_many(const model *m, rvm_decoder *d, sequence *c) {
    static const size_t lengths[MANY] = {129, 1, 64, 40, 95};
    int32_t tokens[96];
    for (size_t i = 0; i < MANY; i++) {
        c[i] = start(m, d);
        for (size_t done = 0, n; done < lengths[i]; done += n) {
            n = lengths[i] - done < 33 ? lengths[i] - done : 33;
            for (size_t j = 0; j < n; j++) tokens[j] = token(i * 50 + done + j);
            CHECK(sequence_forward(c + i, tokens, n, 0, NULL, NULL, NULL) == RVM_OK, "sequence %zu", i);
        }
    }
}

/* Compute the next token of each of the first n sequences in one call. */
static int step_many(rvm_decoder *d, sequence *c, size_t n, size_t step, float *hidden, float *logits) {
    rvm_row rows[MANY];
    for (size_t i = 0; i < n; i++) {
        CHECK(sequence_reserve(c + i, 1) == RVM_OK, "pages of %zu", i);
        rows[i] = (rvm_row){c[i].pages, c[i].offset, token(step * MANY + i)};
    }
    const int rc = rvm_decoder_step(d, rows, n, hidden, logits, NULL);
    for (size_t i = 0; i < n && rc == RVM_OK; i++) c[i].offset++;
    return rc;
}

/* Compare the rows of a batch, which grows and shrinks, with each sequence alone. */
static void compare_rows(const model *m, const char *impl, uint32_t threads) {
    rvm_decoder *d = decoder(m, impl, threads);
    sequence batch[MANY], alone[MANY];
    start_many(m, d, batch), start_many(m, d, alone);
    const int exact = m->shape.kind == RVM_Q4 || m->shape.kind == RVM_Q8;
    float got[MANY * V], want[V], hidden[MANY * D], want_hidden[D];
    for (size_t step = 0; step < 20; step++) {
        const size_t n = 1 + step * 2 % MANY;
        CHECK(step_many(d, batch, n, step, hidden, got) == RVM_OK, "step %zu", step);
        for (size_t i = 0; i < n; i++) {
            const int32_t t = token(step * MANY + i);
            CHECK(sequence_forward(alone + i, &t, 1, 1, want_hidden, want, NULL) == RVM_OK, "alone %zu", i);
            const double off = distance(got + i * V, want, V), off_h = distance(hidden + i * D, want_hidden, D);
            CHECK(exact ? off == 0 && off_h == 0 : off < 1e-4 && off_h < 1e-4,
                  "%s, %u threads, step %zu: row %zu of %zu differs by %g, %g", impl, threads, step, i, n, off, off_h);
        }
    }
    for (size_t i = 0; i < MANY; i++) sequence_end(batch + i), sequence_end(alone + i);
    rvm_decoder_destroy(d);
}

static void test_rows(void) {
    const shape shapes[] = {{RVM_Q4, 4, 2, 32, 0, 0, 0},   {RVM_Q8, 6, 2, 16, 40, 0, 0},
                            {RVM_F16, 3, 3, 18, 0, 0, 0},  {RVM_Q8, 5, 1, 128, 0, 64, 64},
                            {RVM_F32, 6, 2, 18, 70, 64, 0}, {RVM_Q4, 2, 1, 80, 100, 64, 64},
                            {RVM_Q8, 6, 2, 32, 0, 64, 0},  {RVM_Q8, 4, 1, 32, 0, 64, 0},
                            {RVM_F32, 3, 3, 80, 0, 64, 64}};
    const size_t n_shapes = sizeof shapes / sizeof *shapes;
    for (size_t s = 0; s < n_shapes; s++) {
        model *m = made_as(s, n_shapes, shapes[s]);
        if (!few()) compare_rows(m, "scalar", 1);
        compare_rows(m, rvm_matmul_impl_name(0), 3);
        destroy(m);
    }
}

/* Make a fork of a sequence. The fork shares the full pages, which it neither demotes nor frees. Return the index of its
 * first page that is not shared. */
static size_t fork_of(sequence *to, const sequence *from) {
    *to = sequence_of(from->d, STEPS + 60);
    to->first = from->first, to->end = from->end, to->offset = from->offset;
    memcpy(to->pages, from->pages, from->end * sizeof *to->pages);
    const size_t own = from->offset / RVM_PAGE_TOKENS, bytes = rvm_decoder_page_bytes(from->d, RVM_HOT);
    for (size_t i = own; i < from->end; i++) {
        to->pages[i].data = page_make(bytes);
        memcpy(to->pages[i].data, from->pages[i].data, bytes);
    }
    return own;
}

static void extend(sequence *c, size_t seed, size_t n) {
    int32_t tokens[96];
    for (size_t i = 0; i < n; i++) tokens[i] = token(seed + i);
    CHECK(sequence_forward(c, tokens, n, 0, NULL, NULL, NULL) == RVM_OK, "%zu tokens", n);
}

/* Check forks, and forks of a fork, whose length is not a multiple of a page, with pages of every tier that all, some or
 * no sequences share. A row of a batch must have the same bits as its sequence alone. */
static void compare_forks(const model *m, const char *impl, uint32_t threads) {
    static const size_t parent[MANY] = {0, 0, 0, 2, 2};
    rvm_decoder *d = decoder(m, impl, threads);
    sequence c[MANY];
    size_t own[MANY] = {0};
    c[0] = sequence_of(d, STEPS + 60), c[0].hot = m->shape.hot, c[0].warm = m->shape.warm;
    extend(c, 0, 75), extend(c, 75, 66); /* 141: two pages and 13 tokens */
    c[0].hot = c[0].warm = 0;
    for (size_t i = 1; i < MANY; i++) {
        own[i] = fork_of(c + i, c + parent[i]);
        if (i == 2) extend(c + i, 500, 60);
    }
    for (size_t i = 0; i < MANY; i++) extend(c + i, 90 * i, 202 - c[i].offset);
    if (m->shape.hot) CHECK(sequence_demote(c + 1, 2, RVM_WARM) == RVM_OK, "a page of its own");
    float got[MANY * V], want[MANY * V], hidden[MANY * D];
    for (size_t step = 0; step < 12; step++) {
        for (size_t i = 0; i < MANY; i++) {
            const int32_t t = token(step * MANY + i);
            CHECK(sequence_forward(c + i, &t, 1, 1, hidden, want + i * V, NULL) == RVM_OK, "alone %zu", i);
            c[i].offset--;
        }
        CHECK(step_many(d, c, MANY, step, hidden, got) == RVM_OK, "step %zu", step);
        CHECK(memcmp(got, want, sizeof got) == 0, "%s, %u threads, step %zu", impl, threads, step);
        for (size_t i = 1; i < MANY; i++)
            CHECK(memcmp(got, got + i * V, V * sizeof *got), "row %zu is row 0", i);
    }
    for (size_t i = MANY; i-- > 0;) c[i].first = own[i] > c[i].first ? own[i] : c[i].first, sequence_end(c + i);
    rvm_decoder_destroy(d);
}

static void test_forks_in_a_batch(void) {
    const shape shapes[] = {{RVM_Q4, 4, 2, 32, 0, 0, 0}, {RVM_Q8, 5, 1, 128, 0, 64, 64}, {RVM_Q8, 6, 2, 16, 0, 64, 0}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        model *m = make(shapes[s]);
        for (size_t i = 0; rvm_matmul_impl_name(i); i++)
            if (!few() || i == 0) compare_forks(m, rvm_matmul_impl_name(i), 1 + 2 * (i % 2 == 0));
        destroy(m);
    }
}

/* Draws and traces of several replies on the decoder's threads must equal single calls. One call among them is invalid. */
enum { REPLIES = 7, RANK = 2 };

typedef struct {
    float *hidden, *logits, *a, *b, e_a[REPLIES][D * RANK], e_b[REPLIES][RANK * V];
    uint64_t scratch[REPLIES][2 * V];
    rvm_reply draw[REPLIES], trace[REPLIES];
} replies;

static void prepare_replies(replies *r) {
    memset(r->e_a, 0, sizeof r->e_a), memset(r->e_b, 0, sizeof r->e_b);
    for (size_t i = 0; i < REPLIES; i++) {
        const float *hidden = r->hidden + i * D, *logits = r->logits + i * V;
        const rvm_drawing how = {.temperature = 0.5 + 0.1 * (double)i, .top_p = i % 2 ? 0.9 : 1, .u = 0.13 * (double)i};
        r->draw[i] = (rvm_reply){.what = RVM_REPLY_DRAW, .status = -1, .logits = logits, .vocab = V,
                                 .scratch = r->scratch[i], .drawing = how};
        r->trace[i] = (rvm_reply){.what = i == 4 ? 99 : RVM_REPLY_TRACE, .status = -1, .scale = 0.7f, .hidden = hidden,
                                  .logits = logits, .lora_a = r->a, .lora_b = r->b, .e_a = r->e_a[i],
                                  .e_b = r->e_b[i], .dim = D, .vocab = V, .rank = RANK};
    }
}

static void test_replies(void) {
    model *m = make((shape){RVM_Q4, 4, 2, 32, 0, 0, 0});
    rvm_decoder *alone = decoder(m, NULL, 1), *together = decoder(m, NULL, 4);
    replies *r = calloc(2, sizeof *r);
    r[0].hidden = r[1].hidden = floats(REPLIES * D, 1, 0), r[0].logits = r[1].logits = floats(REPLIES * V, 4, 0);
    r[0].a = r[1].a = floats(D * RANK, 1, 0), r[0].b = r[1].b = floats(RANK * V, 0.1f, 0);
    for (size_t round = 0; round < 50; round++) {
        prepare_replies(r), prepare_replies(r + 1);
        for (size_t i = 0; i < REPLIES; i++) {
            rvm_decoder_replies(alone, r->draw + i, 1);
            r->trace[i].token = r->draw[i].token;
            rvm_decoder_replies(alone, r->trace + i, 1);
        }
        CHECK(rvm_decoder_replies(together, r[1].draw, REPLIES) == RVM_OK, "draws");
        for (size_t i = 0; i < REPLIES; i++) r[1].trace[i].token = r[1].draw[i].token;
        CHECK(rvm_decoder_replies(together, r[1].trace, REPLIES) == RVM_OK, "traces");
        for (size_t i = 0; i < REPLIES; i++) {
            CHECK(r[1].draw[i].status == RVM_OK && r[1].draw[i].token == r->draw[i].token, "token of %zu", i);
            CHECK(r[1].trace[i].status == (i == 4 ? RVM_BAD_ARGUMENT : RVM_OK), "status of %zu", i);
        }
        CHECK(memcmp(r[0].e_a, r[1].e_a, sizeof r->e_a) == 0 && memcmp(r[0].e_b, r[1].e_b, sizeof r->e_b) == 0, "traces");
        CHECK(memcmp(r->trace[3].logprob, r[1].trace[3].logprob, sizeof r->trace[3].logprob) == 0, "logprob");
    }
    CHECK(r->e_b[3][5] != 0 && r->e_a[3][5] != 0 && r->e_b[4][5] == 0, "something was added, but to no bad call");
    CHECK(rvm_decoder_replies(together, r->draw, 0) == RVM_BAD_ARGUMENT, "none");
    CHECK(rvm_decoder_replies(NULL, r->draw, 1) == RVM_BAD_ARGUMENT, "no decoder");
    free(r->hidden), free(r->logits), free(r->a), free(r->b), free(r);
    rvm_decoder_destroy(alone), rvm_decoder_destroy(together);
    destroy(m);
}

/* Check that one invalid row leaves all sequences unchanged. */
static void test_bad_rows(void) {
    model *m = make((shape){RVM_Q4, 4, 2, 32, 0, 64, 0});
    rvm_decoder *d = decoder(m, NULL, 2);
    sequence c[MANY];
    start_many(m, d, c);
    float hidden[MANY * D], before[MANY * V], after[MANY * V];
    CHECK(step_many(d, c, MANY, 0, hidden, before) == RVM_OK, "all good");
    for (size_t i = 0; i < MANY; i++) c[i].offset--;
    const rvm_page none[3] = {{0}};
    rvm_row rows[97], good;
    for (size_t i = 0; i < 97; i++) rows[i] = (rvm_row){c[i % MANY].pages, c[i % MANY].offset, token(i % MANY)};
    CHECK(rvm_decoder_step(d, rows, 0, hidden, after, NULL) == RVM_BAD_ARGUMENT, "no row");
    CHECK(rvm_decoder_step(d, rows, 97, NULL, NULL, NULL) == RVM_BAD_ARGUMENT, "too many");
    CHECK(rvm_decoder_step(d, NULL, 2, hidden, after, NULL) == RVM_BAD_ARGUMENT, "nothing");
    for (size_t i = 0; i < 5; i++) {
        rvm_row *bad = rows + 2;
        good = *bad;
        if (i == 0) bad->token = V;
        if (i == 1) bad->token = -1;
        if (i == 2) bad->pages = NULL;
        if (i == 3) bad->pages = none;
        if (i == 4) *bad = (rvm_row){c[0].pages, 5, 0}; /* invalid: the token would go into a warm page */
        CHECK(rvm_decoder_step(d, rows, MANY, hidden, after, NULL) == RVM_BAD_ARGUMENT, "fault %zu", i);
        *bad = good;
    }
    const int stop = 1;
    CHECK(rvm_decoder_step(d, rows, MANY, hidden, after, &stop) == RVM_CANCELLED, "cancelled");
    CHECK(step_many(d, c, MANY, 0, hidden, after) == RVM_OK, "good again");
    CHECK(memcmp(before, after, sizeof before) == 0, "other bits after the faults");
    for (size_t i = 0; i < MANY; i++) sequence_end(c + i);
    rvm_decoder_destroy(d);
    destroy(m);
}

/* Check that 64 tokens need no allocation. */
static void test_no_allocation(void) {
    model *m = make((shape){RVM_Q4, 4, 2, 32, 0, 0, 0});
    rvm_decoder *d = decoder(m, NULL, 2);
    sequence c = start(m, d);
    float *logits = malloc(V * sizeof *logits), hidden[D];
    int32_t first[30] = {0};
    CHECK(sequence_reserve(&c, 30 + 64) == RVM_OK, "pages");
    CHECK(sequence_forward(&c, first, 30, 1, hidden, logits, NULL) == RVM_OK, "prefill");
    const size_t before = allocations, mapped = mappings;
    for (size_t i = 0; i < 64; i++) {
        const int32_t t = token(i);
        CHECK(sequence_forward(&c, &t, 1, 1, hidden, logits, NULL) == RVM_OK, "step %zu", i);
    }
    CHECK(allocations == before, "%zu allocations", allocations - before);
#ifdef RVM_WRAPPED
    CHECK(before > 0 && mappings == mapped, "%zu mappings", mappings - mapped);
    printf("64 tokens: %zu allocations, %zu mappings\n", allocations - before, mappings - mapped);
#else
    (void)mapped;
#endif
    free(logits);
    sequence_end(&c);
    rvm_decoder_destroy(d);
    destroy(m);
}

static void test_bad_arguments(void) {
    model *m = make((shape){RVM_Q4, 4, 2, 32, 0, 0, 0});
    rvm_decoder *d = decoder(m, NULL, 1), *none = NULL;
    sequence c = start(m, d);
    float *logits = malloc(97 * V * sizeof *logits);
    int32_t tokens[97] = {0};
    CHECK(sequence_forward(&c, tokens, 0, 0, NULL, NULL, NULL) == RVM_BAD_ARGUMENT, "no token");
    CHECK(sequence_forward(&c, tokens, 97, 1, NULL, logits, NULL) == RVM_BAD_ARGUMENT, "too many");
    CHECK(sequence_forward(&c, tokens, 2, 3, NULL, logits, NULL) == RVM_BAD_ARGUMENT, "too many outputs");
    tokens[1] = V;
    CHECK(sequence_forward(&c, tokens, 2, 1, NULL, logits, NULL) == RVM_BAD_ARGUMENT, "unknown token");
    tokens[1] = -1;
    CHECK(sequence_forward(&c, tokens, 2, 1, NULL, logits, NULL) == RVM_BAD_ARGUMENT, "negative token");
    CHECK(sequence_forward(&c, tokens, 1, 0, NULL, NULL, NULL) == RVM_OK, "one token unread");
    rvm_page pages[2] = {{c.pages[0].data, RVM_WARM, 0}};
    CHECK(rvm_decoder_forward(d, pages, 1, tokens, 1, 0, NULL, NULL, NULL) == RVM_BAD_ARGUMENT, "into a warm page");
    CHECK(rvm_decoder_forward(d, pages + 1, 1, tokens, 1, 0, NULL, NULL, NULL) == RVM_BAD_ARGUMENT, "no page");
    CHECK(rvm_decoder_forward(d, NULL, 1, tokens, 1, 0, NULL, NULL, NULL) == RVM_BAD_ARGUMENT, "no table");
    CHECK(rvm_decoder_set_lora(d, 3, RVM_Q_PROJ, logits, logits, 1, 1) == RVM_BAD_ARGUMENT, "layer 3 of 3");
    rvm_decoder_config config = m->config;
    config.head_dim = 33;
    CHECK(rvm_decoder_create(&config, &m->weights, &none) == RVM_BAD_ARGUMENT && !none, "odd head_dim");
    config = m->config, config.hidden_size = 96;
    CHECK(rvm_decoder_create(&config, &m->weights, &none) == RVM_BAD_ARGUMENT && !none, "other matrices");
    config = m->config, config.impl = "avx1024";
    CHECK(rvm_decoder_create(&config, &m->weights, &none) == RVM_BAD_ARGUMENT && !none, "unknown impl");
    sequence_end(&c);
    rvm_decoder_destroy(d);
    rvm_decoder_destroy(NULL);
    free(logits);
    destroy(m);
}

/* Raise the cancel flag. The tests raise it before and during a call, which must not change earlier tokens. */
static void *raise_flag(void *flag) {
    const struct timespec moment = {0, 300000};
    nanosleep(&moment, NULL);
    __atomic_store_n((int *)flag, 1, __ATOMIC_RELAXED);
    return NULL;
}

static void test_cancel(void) {
    model *m = make((shape){RVM_Q4, 4, 2, 32, 0, 0, 0});
    rvm_decoder *d = decoder(m, NULL, 3);
    sequence c = sequence_of(d, 2200), other = sequence_of(d, 2200);
    float *logits = malloc(V * sizeof *logits), *want = malloc(V * sizeof *want);
    int32_t tokens[96] = {0};
    size_t done = 0;
    for (int i = 0; i < 20; i++) {
        int flag = i == 0;
        pthread_t thread;
        if (i) pthread_create(&thread, NULL, raise_flag, &flag);
        int rc = RVM_OK;
        for (int j = 0; j < 1000 && rc == RVM_OK; j++) {
            rc = sequence_forward(&c, tokens, 96, 1, NULL, logits, &flag);
            if (rc == RVM_OK) done += 96;
            if (done > 2000) sequence_trim(&c, done), done = 0;
        }
        CHECK(rc == RVM_CANCELLED && c.offset == done, "%d at %zu", rc, c.offset);
        if (i) pthread_join(thread, NULL);
    }
    CHECK(sequence_forward(&c, tokens, 5, 1, NULL, logits, NULL) == RVM_OK, "after a cancel");
    while (other.offset < done) sequence_forward(&other, tokens, 96, 0, NULL, NULL, NULL);
    CHECK(sequence_forward(&other, tokens, 5, 1, NULL, want, NULL) == RVM_OK, "the same, undisturbed");
    CHECK(memcmp(logits, want, V * sizeof *want) == 0, "other bits after a cancel");
    free(logits), free(want);
    sequence_end(&c), sequence_end(&other);
    rvm_decoder_destroy(d);
    destroy(m);
}

static void test_fork(void) {
    model *m = make((shape){RVM_Q4, 4, 2, 32, 0, 0, 0});
    rvm_decoder *d = decoder(m, NULL, 3);
    sequence c = start(m, d);
    float *want = walked(m, NULL, 1), *got = calloc(ROWS * V, sizeof *got);
    walk(&c, got);
    const pid_t child = fork();
    if (child == 0) {
        alarm(60);
        sequence other = start(m, d);
        memset(got, 0, ROWS * V * sizeof *got);
        walk(&other, got);
        const int same = memcmp(got, want, ROWS * V * sizeof *got) == 0;
        sequence_end(&other);
        rvm_decoder_destroy(d);
        _exit(!same);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0, "the child ended with %d", status);
    sequence_trim(&c, c.offset);
    walk(&c, got);
    CHECK(memcmp(got, want, ROWS * V * sizeof *got) == 0, "the parent after the fork");
    free(got), free(want);
    sequence_end(&c);
    rvm_decoder_destroy(d);
    destroy(m);
}

/* The work of a thread that demotes pages while a call reads them. */
typedef struct {
    const rvm_decoder *d;
    rvm_page from, to;
    int rc;
} demotion;

static void *demoted(void *what) {
    demotion *job = what;
    job->rc = rvm_decoder_demote(job->d, &job->from, &job->to);
    return NULL;
}

static void test_demotion_beside_a_call(void) {
    model *m = make((shape){RVM_Q8, 4, 2, 32, 0, 0, 0});
    rvm_decoder *d = decoder(m, NULL, 2);
    sequence c = start(m, d);
    float *logits = malloc(V * sizeof *logits);
    int32_t tokens[70] = {0};
    CHECK(sequence_forward(&c, tokens, 70, 0, NULL, NULL, NULL) == RVM_OK, "prefill");
    uint8_t *made[2][RVM_HOT];
    for (int beside = 0; beside < 2; beside++)
        for (rvm_tier tier = RVM_COLD; tier < RVM_HOT; tier++) {
            const size_t bytes = rvm_decoder_page_bytes(d, tier);
            uint8_t *to = made[beside][tier] = page_make(bytes);
            demotion job = {d, c.pages[0], {to, tier, 0}, -1};
            pthread_t thread;
            pthread_create(&thread, NULL, demoted, &job);
            for (int i = 0; beside && i < 20; i++)
                CHECK(sequence_forward(&c, tokens, 1, 1, NULL, logits, NULL) == RVM_OK, "beside");
            pthread_join(thread, NULL);
            CHECK(job.rc == RVM_OK, "%d", job.rc);
            CHECK(!beside || memcmp(to, made[0][tier], bytes) == 0, "tier %d", (int)tier);
        }
    const rvm_page warm = {made[0][RVM_WARM], RVM_WARM, 0}, cold = {made[1][RVM_COLD], RVM_COLD, 0};
    CHECK(rvm_decoder_demote(d, &warm, &cold) == RVM_OK, "warm to cold");
    CHECK(memcmp(made[0][0], made[1][0], rvm_decoder_page_bytes(d, RVM_COLD)) == 0, "hot to cold is both steps");
    CHECK(rvm_decoder_demote(d, &cold, &warm) == RVM_BAD_ARGUMENT, "cold to warm");
    for (int i = 0; i < 2 * RVM_HOT; i++) free(made[i / RVM_HOT][i % RVM_HOT]);
    free(logits);
    sequence_end(&c);
    rvm_decoder_destroy(d);
    destroy(m);
}

/* Run many short jobs on more threads than cores. The number of threads changes, and the threads sleep in pauses. */
static void test_threads(void) {
    model *m = make((shape){RVM_F32, 4, 2, 32, 0, 0, 0});
    const struct timespec pause = {0, 2000000};
    float *want = walked(m, NULL, 1), *got = calloc(ROWS * V, sizeof *got);
    for (uint32_t threads = 1; threads <= 16; threads += 5) {
        rvm_decoder *d = decoder(m, NULL, threads);
        sequence c = start(m, d);
        for (uint32_t i = 0; i < 4; i++) {
            rvm_decoder_use_threads(d, i % 2 ? threads : 1 + i);
            sequence_trim(&c, c.offset);
            walk(&c, got);
            CHECK(memcmp(got, want, ROWS * V * sizeof *got) == 0, "%u threads", threads);
            nanosleep(&pause, NULL);
        }
        sequence_end(&c);
        rvm_decoder_destroy(d);
        rvm_decoder_destroy(decoder(m, NULL, threads)); /* a decoder that never ran a call */
    }
    free(got), free(want);
    destroy(m);
}

/* Check the head alone, and that a LoRA that is set and removed gives the same bits as before. */
static void test_head_and_lora(void) {
    model *m = make((shape){RVM_Q8, 4, 2, 32, 0, 0, 0});
    rvm_decoder *d = decoder(m, NULL, 2);
    float *plain = calloc(ROWS * V, sizeof *plain), *changed = calloc(ROWS * V, sizeof *changed);
    float *a = floats(160 * 3, 0.3f, 0), *b = floats(3 * V, 0.3f, 0), *hidden = floats(200 * D, 1, 0);
    const size_t steps[] = {0, 0, 1};
    for (size_t i = 0; i < 3; i++) {
        sequence c = start(m, d);
        for (int module = 0; module <= RVM_LM_HEAD; module++)
            CHECK(rvm_decoder_set_lora(d, 1, (rvm_module)module, a, b, i == 1 ? 3 : 0, 0.5f) == RVM_OK, "%d", module);
        walk(&c, i ? changed : plain);
        const double off = distance(changed, plain, ROWS * V);
        if (i) CHECK(steps[i] ? off == 0 : off > 0.01, "step %zu: %g", i, off);
        sequence_end(&c);
    }
    float *many = calloc(200 * V, sizeof *many), *one = calloc(V, sizeof *one);
    CHECK(rvm_decoder_head(d, hidden, 200, 0, many) == RVM_OK, "200 tokens");
    CHECK(rvm_decoder_head(d, hidden + 131 * D, 1, 0, one) == RVM_OK, "one token");
    CHECK(memcmp(one, many + 131 * V, V * sizeof *one) == 0, "one of many");
    free(plain), free(changed), free(a), free(b), free(hidden), free(many), free(one);
    rvm_decoder_destroy(d);
    destroy(m);
}

int main(void) {
    test_implementations();
    test_rows();
    test_forks_in_a_batch();
    test_replies();
    test_bad_rows();
    test_no_allocation();
    test_bad_arguments();
    test_cancel();
    if (!getenv("RVM_NO_FORK")) test_fork(); /* qemu-user and TSan: no threads in forked children */
    test_threads();
    test_head_and_lora();
    test_demotion_beside_a_call();
    printf("%d failures\n", failures);
    return failures ? 1 : 0;
}
