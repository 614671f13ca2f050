/* This file runs the decoder of rvm.h. In each call of the decoder, every thread goes through the same phases (pool.h).
 * A call computes a chunk, which is consecutive tokens of one sequence, or one token of each of several sequences; only
 * the attention of these two kinds of chunk is different. The phases are:
 *
 *   embed                                            x, and the rope angles of each position
 *   for each layer
 *     qkv      norm(x) @ Wqkv^T                      a thread takes some tiles (16 rows) of the matrix at a time
 *     heads    q, k normed, partly turned, q scaled  only in model families that do so
 *     append   turned k, v into their pages          for one token, and for rows: part of attend
 *     attend   attention                             per key-value head, query block and key range
 *     o        x += merged attention @ Wo^T
 *     gate_up  silu(norm(x) @ Wg^T) * (norm(x) @ Wu^T), or gelu(norm(x) @ Wu^T)
 *     down     x += the result of gate_up @ Wd^T
 *   head       the last `outputs` tokens:  norm(x) @ Wv^T
 *
 * The order of the additions in a sum depends only on the sizes, so the results have the same bits for any number of
 * threads. */
#define _GNU_SOURCE /* for clock_gettime under -std=c11 */
#include "decoder.h"

#include <math.h>
#include <string.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void tock(const stage *s, int part) {
    if (s->w->thread != 0) return;
    const double t = now();
    s->c->d->seconds[part] += t - s->c->d->tick;
    s->c->d->tick = t;
}

/* Return weight i of a packed row of `width` weights (rvm_layers.h describes the row). */
static float packed_weight(const float *row, size_t width, size_t i) {
    const size_t groups = (width + 31) / 32, g = i / 32;
    const uint8_t pair = ((const uint8_t *)row)[i / 2];
    return row[4 * groups + g] * (float)(i % 2 ? pair >> 4 : pair & 15) + row[5 * groups + g];
}

/* Add the embedding's LoRA to the row x [hidden_size] of a token: x += scale * A[token] B. */
static void add_embedding_lora(const stage *s, size_t token, float *x) {
    rvm_decoder *d = s->c->d;
    const lora *l = &d->embedding_lora;
    const size_t vocab = d->config.vocab_size, dim = d->config.hidden_size;
    float u[RVM_MAX_RANK];
    for (size_t k = 0; k < l->rank; k++)
        u[k] = l->scale * (l->bits == 4 ? packed_weight(l->a + k * lora_words(vocab, 4), vocab, token) : l->a[token * l->rank + k]);
    if (l->rank) checked(s->c, d->kernels->lora_add(u, l->b, l->bits, 1, l->rank, dim, 0, dim, x, dim));
}

static void embed(const stage *s, size_t t) {
    rvm_decoder *d = s->c->d;
    const size_t hd = d->config.head_dim, half = d->config.rope_dims / 2, dim = d->config.hidden_size;
    const double position = (double)position_of(s->c, t), factor = d->config.rope_factor;
    const int32_t token = s->c->rows ? s->c->rows[t].token : s->c->tokens[t];
    for (size_t i = 0; i < half; i++) {
        d->turn[t * hd + i] = (float)(factor * cos(position * d->frequencies[i]));
        d->turn[t * hd + half + i] = (float)(factor * sin(position * d->frequencies[i]));
    }
    checked(s->c, rvm_matrix_row(d->embedding, (size_t)token, d->x + t * dim));
    add_embedding_lora(s, (size_t)token, d->x + t * dim);
}

static void embed_phase(const stage *s) {
    if (s->n <= TOKEN_BLOCK) return; /* run_forward has embedded so few tokens already, before it wakes the other threads */
    const uint32_t blocks = (uint32_t)((s->n + TOKEN_BLOCK - 1) / TOKEN_BLOCK);
    for (uint32_t i; pool_next(s->w, blocks, &i);)
        for (size_t t = i * TOKEN_BLOCK; t < min_size(s->n, (i + 1) * (size_t)TOKEN_BLOCK) && !stopped(s->c); t++)
            embed(s, t);
}

/* Run one layer. Return 0 if no more phases are needed. The last layer computes queries, keys and values of all tokens
 * of the chunk, but its later results only for the last `outputs` tokens. */
static int layer_phases(stage *s) {
    linear_phase(s, ROLE_QKV);
    heads_phase(s);
    tock(s, RVM_PART_QKV);
    if (!s->c->rows && (s->c->n > 1 || s->c->outputs == 0)) append_phase(s);
    if (s->layer + 1 == s->c->d->config.n_layers)
        s->first = s->c->n - s->c->outputs, s->n = s->c->outputs, s->coarse = s->c->bits == BITS_8;
    if (s->n == 0) return 0;
    attend_phase(s);
    tock(s, RVM_PART_ATTEND);
    linear_phase(s, ROLE_O);
    tock(s, RVM_PART_O);
    linear_phase(s, ROLE_GATE_UP);
    tock(s, RVM_PART_GATE_UP);
    linear_phase(s, ROLE_DOWN);
    tock(s, RVM_PART_DOWN);
    return 1;
}

static void forward(pool_worker *w, void *ctx) {
    call *c = ctx;
    stage s = {c, w, 0, 0, c->n, c->bits != BITS_CONFIGURED};
    embed_phase(&s);
    tock(&s, RVM_PART_EMBED);
    for (; s.layer < c->d->config.n_layers; s.layer++)
        if (!layer_phases(&s)) return;
    if (c->logits) linear_phase(&s, ROLE_HEAD);
    else if (c->hidden) prepare_phase(&s, ROLE_HEAD);
    tock(&s, RVM_PART_HEAD);
}

static int is_known(const rvm_decoder *d, int32_t token) {
    return token >= 0 && (uint32_t)token < d->config.vocab_size;
}

static void begin(rvm_decoder *d) {
    atomic_store(&d->status, RVM_OK);
    d->tick = now();
}

static int run(rvm_decoder *d, call *c, void (*job)(pool_worker *, void *)) {
    pool_run(d->pool, job, c, sizeof *c);
    return atomic_load(&d->status);
}

static int run_forward(rvm_decoder *d, call *c) {
    if (atomic_flag_test_and_set(&d->busy)) return RVM_BUSY;
    begin(d);
    for (size_t t = 0; c->n <= TOKEN_BLOCK && t < c->n; t++) embed(&(stage){c, NULL, 0, 0, c->n, 0}, t);
    const int rc = run(d, c, forward);
    if (rc == RVM_OK && c->raw) memcpy(c->raw, d->x, c->n * d->config.hidden_size * sizeof *d->x);
    atomic_flag_clear(&d->busy);
    return rc;
}

/* Return 1 if all pages that the call reads have data, and if all pages that it writes are hot. */
static int pages_fit(const rvm_decoder *d, const rvm_page *pages, size_t offset, size_t n) {
    for (size_t i = first_page_seen(offset, d->config.sliding_window); i * PAGE < offset + n; i++) {
        const int written = (i + 1) * PAGE > offset;
        if (!pages[i].data || (written ? pages[i].tier != RVM_HOT : pages[i].tier > RVM_HOT)) return 0;
    }
    return 1;
}

static int tokens_fit(const rvm_decoder *d, const rvm_page *pages, size_t offset, const int32_t *tokens, size_t n) {
    if (!d || !pages || !tokens || n == 0 || n > d->config.max_tokens) return 0;
    for (size_t t = 0; t < n; t++)
        if (!is_known(d, tokens[t])) return 0;
    return pages_fit(d, pages, offset, n);
}

int rvm_decoder_layers(rvm_decoder *d, const rvm_page *pages, size_t offset, const int32_t *tokens, size_t n,
                       float *raw, const int *cancel) {
    if (!raw || !tokens_fit(d, pages, offset, tokens, n)) return RVM_BAD_ARGUMENT;
    call c = {.d = d, .pages = pages, .position = offset, .tokens = tokens, .window = d->config.sliding_window,
              .n = n, .outputs = n, .raw = raw, .cancel = cancel};
    return run_forward(d, &c);
}

/* Run a call for one sequence. bits: the bits of the activations; the other arguments are those of
 * rvm_decoder_forward. */
static int append(rvm_decoder *d, const rvm_page *pages, size_t offset, const int32_t *tokens, size_t n, size_t outputs,
                  activation_bits bits, float *hidden, float *logits, const int *cancel) {
    if (outputs > n || !tokens_fit(d, pages, offset, tokens, n)) return RVM_BAD_ARGUMENT;
    if (outputs == 0 && (hidden || logits)) return RVM_BAD_ARGUMENT;
    call c = {.d = d, .pages = pages, .position = offset, .tokens = tokens, .window = d->config.sliding_window,
              .n = n, .outputs = outputs, .bits = bits, .hidden = hidden, .logits = logits, .cancel = cancel,
              .with_head_lora = 1};
    return run_forward(d, &c);
}

int rvm_decoder_forward(rvm_decoder *d, const rvm_page *pages, size_t offset, const int32_t *tokens, size_t n,
                        size_t outputs, float *hidden, float *logits, const int *cancel) {
    return append(d, pages, offset, tokens, n, outputs, BITS_CONFIGURED, hidden, logits, cancel);
}

int rvm_decoder_prefill(rvm_decoder *d, const rvm_page *pages, size_t offset, const int32_t *tokens, size_t n,
                        float *hidden, float *logits, const int *cancel) {
    return append(d, pages, offset, tokens, n, hidden || logits, BITS_8_TO_LAST_VALUES, hidden, logits, cancel);
}

/* A call with one row runs as a call for one sequence. The phases for one token have fewer barriers (places where
   threads wait for each other). */
int rvm_decoder_step(rvm_decoder *d, const rvm_row *rows, size_t n, int coarse, float *hidden, float *logits,
                     const int *cancel) {
    if (!d || !rows || n == 0 || n > d->config.max_tokens) return RVM_BAD_ARGUMENT;
    const activation_bits bits = coarse ? BITS_8 : BITS_CONFIGURED;
    if (n == 1) return append(d, rows->pages, rows->offset, &rows->token, 1, 1, bits, hidden, logits, cancel);
    for (size_t i = 0; i < n; i++)
        if (!rows[i].pages || !is_known(d, rows[i].token) || !pages_fit(d, rows[i].pages, rows[i].offset, 1))
            return RVM_BAD_ARGUMENT;
    call c = {.d = d, .rows = rows, .window = d->config.sliding_window, .n = n, .outputs = n, .hidden = hidden,
              .logits = logits, .cancel = cancel, .bits = bits, .with_head_lora = 1};
    group_rows(&c);
    return run_forward(d, &c);
}

static void head_job(pool_worker *w, void *ctx) {
    call *c = ctx;
    head_phases(&(stage){c, w, 0, 0, c->n, 0});
}

/* Compute the output head of n tokens, at most max_tokens tokens at a time. */
int rvm_decoder_head(rvm_decoder *d, const float *hidden, size_t n, int with_lora, float *logits) {
    if (!d || !hidden || !logits || n == 0) return RVM_BAD_ARGUMENT;
    if (atomic_flag_test_and_set(&d->busy)) return RVM_BUSY;
    int rc = RVM_OK;
    for (size_t t = 0, step; t < n && rc == RVM_OK; t += step) {
        step = min_size(n - t, d->config.max_tokens);
        call c = {.d = d, .n = step, .hidden = (float *)hidden + t * d->config.hidden_size,
                  .logits = logits + t * d->config.vocab_size, .with_head_lora = with_lora};
        begin(d);
        rc = run(d, &c, head_job);
    }
    atomic_flag_clear(&d->busy);
    return rc;
}

size_t rvm_decoder_page_bytes(const rvm_decoder *d, rvm_tier tier) {
    if (!d) return 0;
    return (size_t)d->config.n_layers * d->config.n_kv_heads * rvm_head_page_bytes(tier, d->config.head_dim);
}

/* This function reads only fields of the decoder that never change, so it can run during another call. */
int rvm_decoder_demote(const rvm_decoder *d, const rvm_page *from, const rvm_page *to) {
    if (!d || !from || !to || !from->data || !to->data) return RVM_BAD_ARGUMENT;
    return d->kernels->demote((rvm_tier)from->tier, from->data, (rvm_tier)to->tier, to->data,
                              (size_t)d->config.n_layers * d->config.n_kv_heads, d->config.head_dim);
}
