/* This file tests the rows of a batch, forks that share pages, and replies. The results of each row and reply must have
   the same bits as in a call for this row or reply alone. */
#include "decoder_walk.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MANY = 5 };

/* Start MANY sequences of different lengths, with pages of all tiers that the model's shape asks for. */
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

/* Compute the next token of each of the first n sequences in one call.  coarse: as in rvm_decoder_step */
static int step_many(rvm_decoder *d, sequence *c, size_t n, int coarse, size_t step, float *hidden, float *logits) {
    rvm_row rows[MANY];
    for (size_t i = 0; i < n; i++) {
        CHECK(sequence_reserve(c + i, 1) == RVM_OK, "pages of %zu", i);
        rows[i] = (rvm_row){c[i].pages, c[i].offset, token(step * MANY + i)};
    }
    const int rc = rvm_decoder_step(d, rows, n, coarse, hidden, logits, NULL);
    for (size_t i = 0; i < n && rc == RVM_OK; i++) c[i].offset++;
    return rc;
}

/* Compare the results for a batch of sequences, which grows and shrinks, with the results for each sequence alone. */
static void compare_rows(const model *m, const char *impl, uint32_t threads) {
    rvm_decoder *d = decoder(m, impl, threads);
    sequence batch[MANY], alone[MANY];
    start_many(m, d, batch), start_many(m, d, alone);
    const int exact = m->shape.kind == RVM_Q4 || m->shape.kind == RVM_Q8;
    float got[MANY * V], want[V], hidden[MANY * D], want_hidden[D];
    for (size_t step = 0; step < 20; step++) {
        const size_t n = 1 + step * 2 % MANY;
        CHECK(step_many(d, batch, n, 0, step, hidden, got) == RVM_OK, "step %zu", step);
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

void test_rows(void) {
    const shape shapes[] = {{RVM_Q4, 4, 2, 32, 0, 0, 0},   {RVM_Q8, 6, 2, 16, 40, 0, 0},
                            {RVM_F16, 3, 3, 18, 0, 0, 0},  {RVM_Q8, 5, 1, 128, 0, 64, 64},
                            {RVM_F32, 6, 2, 18, 70, 64, 0}, {RVM_Q4, 2, 1, 80, 100, 64, 64},
                            {RVM_Q8, 6, 2, 32, 0, 64, 0},  {RVM_Q8, 4, 1, 32, 0, 64, 0},
                            {RVM_F32, 3, 3, 80, 0, 64, 64}};
    const size_t n_shapes = sizeof shapes / sizeof *shapes;
    for (size_t s = 0; s < n_shapes; s++) {
        model *m = make_model(s, n_shapes, shapes[s]);
        if (!runs_few()) compare_rows(m, "scalar", 1);
        compare_rows(m, rvm_matmul_impl_name(0), 3);
        destroy(m);
    }
}

/* Compare coarse steps of a decoder whose activations have 16 bits with the steps of a decoder whose activations always
   have 8 bits. Both must have the same bits. */
void test_coarse_rows(void) {
    const shape shapes[] = {{RVM_Q4, 4, 2, 32, 0, 0, 0}, {RVM_Q8, 6, 2, 16, 40, 64, 0}, {RVM_Q4, 2, 1, 80, 100, 64, 64}};
    const size_t n_shapes = sizeof shapes / sizeof *shapes;
    for (size_t s = 0; s < n_shapes; s++) {
        model *m = make_model(s, n_shapes, shapes[s]);
        rvm_decoder *d = decoder(m, NULL, 3);
        m->config.precise = 0;
        rvm_decoder *always = decoder(m, NULL, 1);
        sequence exact[MANY], coarse[MANY], wanted[MANY];
        start_many(m, d, exact), start_many(m, d, coarse), start_many(m, d, wanted);
        float fine[MANY * V], got[MANY * V], want[MANY * V], hidden[MANY * D], want_hidden[MANY * D];
        for (size_t step = 0; step < 20; step++) {
            const size_t n = 1 + step * 2 % MANY;
            CHECK(step_many(d, exact, n, 0, step, hidden, fine) == RVM_OK, "16 bits, step %zu", step);
            CHECK(step_many(d, coarse, n, 1, step, hidden, got) == RVM_OK, "coarse, step %zu", step);
            CHECK(step_many(always, wanted, n, 1, step, want_hidden, want) == RVM_OK, "8 bits, step %zu", step);
            CHECK(memcmp(got, want, n * V * sizeof *got) == 0, "shape %zu, step %zu: other logits", s, step);
            CHECK(memcmp(hidden, want_hidden, n * D * sizeof *hidden) == 0, "shape %zu, step %zu: other states", s, step);
            CHECK(distance(got, fine, n * V) > 0, "shape %zu, step %zu: the step is not coarse", s, step);
        }
        for (size_t i = 0; i < MANY; i++) sequence_end(exact + i), sequence_end(coarse + i), sequence_end(wanted + i);
        rvm_decoder_destroy(d), rvm_decoder_destroy(always);
        destroy(m);
    }
}

/* Make a fork of a sequence. The fork shares the full pages of `from`, and neither demotes nor frees them. Return the
 * index of the fork's first page that is not shared. */
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

/* Check a batch of forks, and of forks of a fork, which begin inside a page. The batches of the different shapes have
 * pages of every tier, which all, some or no sequences share. The results of a row of the batch must have the same bits
 * as the results of its sequence alone. */
static void compare_forks(const model *m, const char *impl, uint32_t threads) {
    static const size_t parent[MANY] = {0, 0, 0, 2, 2};
    rvm_decoder *d = decoder(m, impl, threads);
    sequence c[MANY];
    size_t own[MANY] = {0};
    c[0] = sequence_of(d, STEPS + 60), c[0].hot = m->shape.hot, c[0].warm = m->shape.warm;
    extend(c, 0, 75), extend(c, 75, 66); /* 141 tokens: two pages and 13 tokens */
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
        CHECK(step_many(d, c, MANY, 0, step, hidden, got) == RVM_OK, "step %zu", step);
        CHECK(memcmp(got, want, sizeof got) == 0, "%s, %u threads, step %zu", impl, threads, step);
        for (size_t i = 1; i < MANY; i++)
            CHECK(memcmp(got, got + i * V, V * sizeof *got), "row %zu is row 0", i);
    }
    for (size_t i = MANY; i-- > 0;) c[i].first = own[i] > c[i].first ? own[i] : c[i].first, sequence_end(c + i);
    rvm_decoder_destroy(d);
}

void test_forks_in_a_batch(void) {
    const shape shapes[] = {{RVM_Q4, 4, 2, 32, 0, 0, 0}, {RVM_Q8, 5, 1, 128, 0, 64, 64}, {RVM_Q8, 6, 2, 16, 0, 64, 0}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        model *m = make(shapes[s]);
        for (size_t i = 0; rvm_matmul_impl_name(i); i++)
            if (!runs_few() || i == 0) compare_forks(m, rvm_matmul_impl_name(i), 1 + 2 * (i % 2 == 0));
        destroy(m);
    }
}

/* test_replies checks that draws and traces of several replies on four threads equal calls for one reply on one thread.
 * One of the REPLIES calls for traces is invalid. */
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

void test_replies(void) {
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
void test_bad_rows(void) {
    model *m = make((shape){RVM_Q4, 4, 2, 32, 0, 64, 0});
    rvm_decoder *d = decoder(m, NULL, 2);
    sequence c[MANY];
    start_many(m, d, c);
    float hidden[MANY * D], before[MANY * V], after[MANY * V];
    CHECK(step_many(d, c, MANY, 0, 0, hidden, before) == RVM_OK, "all good");
    for (size_t i = 0; i < MANY; i++) c[i].offset--;
    const rvm_page none[3] = {{0}};
    rvm_row rows[97], good;
    for (size_t i = 0; i < 97; i++) rows[i] = (rvm_row){c[i % MANY].pages, c[i % MANY].offset, token(i % MANY)};
    CHECK(rvm_decoder_step(d, rows, 0, 0, hidden, after, NULL) == RVM_BAD_ARGUMENT, "no row");
    CHECK(rvm_decoder_step(d, rows, 97, 0, NULL, NULL, NULL) == RVM_BAD_ARGUMENT, "too many");
    CHECK(rvm_decoder_step(d, NULL, 2, 0, hidden, after, NULL) == RVM_BAD_ARGUMENT, "nothing");
    for (size_t i = 0; i < 5; i++) {
        rvm_row *bad = rows + 2;
        good = *bad;
        if (i == 0) bad->token = V;
        if (i == 1) bad->token = -1;
        if (i == 2) bad->pages = NULL;
        if (i == 3) bad->pages = none;
        if (i == 4) *bad = (rvm_row){c[0].pages, 5, 0}; /* this row is invalid, because the token would go into a warm page */
        CHECK(rvm_decoder_step(d, rows, MANY, 0, hidden, after, NULL) == RVM_BAD_ARGUMENT, "fault %zu", i);
        *bad = good;
    }
    const int stop = 1;
    CHECK(rvm_decoder_step(d, rows, MANY, 0, hidden, after, &stop) == RVM_CANCELLED, "cancelled");
    CHECK(step_many(d, c, MANY, 0, 0, hidden, after) == RVM_OK, "good again");
    CHECK(memcmp(before, after, sizeof before) == 0, "other bits after the faults");
    for (size_t i = 0; i < MANY; i++) sequence_end(c + i);
    rvm_decoder_destroy(d);
    destroy(m);
}
