/* The decoder of rvm.h: every thread walks through the same phases of a chunk of tokens (pool.h).
 *
 *   embed                                            x, and the rope angles of each position
 *   for each layer
 *     qkv      norm(x) @ Wqkv^T                      chunks of matrix tiles
 *     append   turned k, v into the cache            one token: part of attend
 *     attend   per key-value head, query block and key range
 *     o        x += merged attention @ Wo^T
 *     gate_up  silu(norm(x) @ Wg^T) * (norm(x) @ Wu^T)
 *     down     x += that @ Wd^T
 *   head       the last `outputs` tokens:  norm(x) @ Wv^T
 *
 * The input of a matrix phase (norm, merge, quantised activations) is cheap for one token: each thread
 * makes its own when it takes its first chunk, which saves a barrier. For more tokens it is a phase.
 * The order of every sum depends on the sizes alone, never on the number of threads: results are the same
 * bits. */
#define _GNU_SOURCE /* clock_gettime under -std=c11 */
#include "decoder.h"

#include <math.h>
#include <string.h>
#include <time.h>

/* One call. Every thread has a copy, which says all that the order of the phases depends on. */
typedef struct {
    rvm_decoder *d;
    rvm_cache *cache;
    size_t position, window; /* of the chunk's first token; the cache's own */
    const int32_t *tokens;
    size_t n, outputs; /* tokens of the chunk; of them, read at the end */
    float *hidden, *logits;
    const int *cancel;
    int with_head_lora;
} call;

_Static_assert(sizeof(call) <= POOL_CONTEXT, "threads copy it");

/* Where a phase stands: tokens [first, first + n) of the chunk. */
typedef struct {
    call *c;
    pool_worker *w;
    size_t layer, first, n;
} stage;

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

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

static void fail(call *c, int status) {
    int ok = RVM_OK;
    atomic_compare_exchange_strong(&c->d->status, &ok, status);
}

/* Is there no more work to do?  Chunks are then claimed and dropped, so that all threads leave soon. */
static int stopped(call *c) {
    if (c->cancel && __atomic_load_n(c->cancel, __ATOMIC_RELAXED)) fail(c, RVM_CANCELLED);
    return atomic_load_explicit(&c->d->status, memory_order_relaxed) != RVM_OK;
}

static void checked(call *c, int rc) {
    if (rc != RVM_OK) fail(c, rc);
}

/* Linear layers ---------------------------------------------------------------------------------- */

/* The layers of a role; returns how many. */
static size_t members(rvm_decoder *d, size_t i, role r, const linear **first) {
    layer *l = d->layers + i;
    switch (r) {
    case ROLE_QKV: *first = l->linear + RVM_Q_PROJ; return 3;
    case ROLE_O: *first = l->linear + RVM_O_PROJ; return 1;
    case ROLE_GATE_UP: *first = l->linear + RVM_GATE_PROJ; return 2;
    case ROLE_DOWN: *first = l->linear + RVM_DOWN_PROJ; return 1;
    default: *first = &d->head; return 1;
    }
}

/* The float rows that a role reads, tokens [begin, end) of the stage: where they are, or made in to->x. */
static const float *rows_of(const stage *s, role r, const input *to, size_t begin, size_t end) {
    rvm_decoder *d = s->c->d;
    const size_t dim = d->config.hidden_size, at = s->first + begin, n = end - begin;
    const layer *l = d->layers + s->layer;
    const float *weight = r == ROLE_QKV ? l->input_norm : r == ROLE_HEAD ? d->norm : l->post_norm;
    switch (r) {
    case ROLE_O: return d->attended + at * d->q_width;
    case ROLE_DOWN: return d->gate + at * d->config.intermediate_size;
    default:
        checked(s->c, d->kernels->rms_norm(d->x + at * dim, weight, d->config.rms_norm_eps, n, dim,
                                           to->x + begin * dim));
        return to->x + begin * dim;
    }
}

/* Pages that the queries [begin, end) of the stage see some token of: [*first, *stop). */
static void pages_seen(const stage *s, size_t begin, size_t end, size_t *first, size_t *stop) {
    const size_t position = s->c->position + s->first, window = s->c->window;
    const size_t oldest = position + begin + 1;
    *first = window && oldest > window ? (oldest - window) / PAGE : 0;
    *stop = (position + end + PAGE - 1) / PAGE;
}

/* Into how many key ranges the stage's attention is cut. */
static size_t parts_of(const stage *s) {
    size_t first, stop;
    if (s->n > FEW) return 1;
    pages_seen(s, 0, s->n, &first, &stop);
    return smaller(MOST_PARTS, (stop - first + PART_PAGES - 1) / PART_PAGES);
}

/* Attention of the stage's tokens [begin, end) from its key ranges into `out`, [tokens, q_width]. */
static void merge(const stage *s, size_t begin, size_t end, float *out) {
    rvm_decoder *d = s->c->d;
    const size_t parts = parts_of(s), hd = d->config.head_dim, row = RVM_PARTIAL(hd), heads = d->config.n_kv_heads;
    for (size_t t = begin; t < end; t++)
        for (size_t h = 0; h < heads; h++)
            checked(s->c, d->kernels->merge(d->partial + (h * s->n + t) * d->group * row, parts,
                                            heads * s->n * d->group * row, d->group, hd,
                                            out + (t - begin) * d->q_width + h * d->group * hd));
}

/* 8 bits are too few: on the starter model they cost 0.003 nats of KL, and greedy replies differ. With
 * config.precise a token goes through the matrices as two, x rounded to 8 bits and what that leaves over,
 * and the two products are added: as good as 15 bits (1e-6 nats), while weights are read and unpacked once.
 * x: row t is token t of the stage */
static void quantise(const stage *s, const float *x, size_t in, const input *to, size_t begin, size_t end) {
    rvm_decoder *d = s->c->d;
    if (!d->config.precise) {
        checked(s->c, d->matmul->acts(RVM_Q4, x, in, s->n, in, begin, end, to->acts_q));
        return;
    }
    for (size_t t = begin; t < end; t++) {
        float *pair = to->pairs + 2 * t * in;
        memcpy(pair, x + t * in, in * sizeof *x);
        checked(s->c, d->kernels->residual(x + t * in, in, pair + in));
    }
    checked(s->c, d->matmul->acts(RVM_Q4, to->pairs, in, 2 * s->n, in, 2 * begin, 2 * end, to->acts_q));
}

/* Everything that the role's matrices read of tokens [begin, end), into `to`. */
static void prepare(const stage *s, role r, const input *to, size_t begin, size_t end) {
    rvm_decoder *d = s->c->d;
    const linear *l;
    const size_t count = members(d, s->layer, r, &l), in = l->in;
    const float *x = rows_of(s, r, to, begin, end);
    int quantised = 0, plain = 0;
    if (r == ROLE_O && parts_of(s) > 1) {
        merge(s, begin, end, to->x + begin * in);
        x = to->x + begin * in;
    }
    for (size_t i = 0; i < count; i++) {
        if (is_quantised(l[i].matrix)) quantised = 1;
        else plain = 1;
        if (l[i].lora.rank)
            checked(s->c, d->kernels->lora_project(x, l[i].lora.a, l[i].lora.scale, end - begin, in, l[i].lora.rank,
                                                   to->u + i * s->n * RVM_MAX_RANK + begin * l[i].lora.rank));
    }
    x -= begin * in; /* acts counts tokens from the stage's first */
    if (quantised) quantise(s, x, in, to, begin, end);
    if (plain) checked(s->c, d->matmul->acts(RVM_F32, x, in, s->n, in, begin, end, to->acts_f));
    if (r == ROLE_HEAD && to == &d->shared && s->c->hidden)
        memcpy(s->c->hidden + begin * in, x + begin * in, (end - begin) * in * sizeof *x);
}

static void prepare_phase(const stage *s, role r) {
    const uint32_t blocks = (uint32_t)((s->n + TOKEN_BLOCK - 1) / TOKEN_BLOCK);
    for (uint32_t i; pool_next(s->w, blocks, &i);)
        if (!stopped(s->c))
            prepare(s, r, &s->c->d->shared, i * TOKEN_BLOCK, smaller(s->n, (i + 1) * (size_t)TOKEN_BLOCK));
}

/* y[t] = product of pair t's first + of its second, a panel of tokens at a time. */
static void multiply_tiles(const stage *s, const linear *l, const input *from, size_t begin, size_t end, float *y,
                           size_t stride) {
    rvm_decoder *d = s->c->d;
    const size_t row = begin * RVM_TILE_ROWS, rows = smaller(end * RVM_TILE_ROWS, l->out) - row;
    const size_t panel_bytes = rvm_acts_bytes(RVM_Q4, PANEL, l->in);
    float *product = d->product[s->w->thread];
    for (size_t t = 0; t < s->n; t += PANEL / 2) {
        const size_t n = smaller(PANEL / 2, s->n - t);
        const uint8_t *acts = (const uint8_t *)from->acts_q + 2 * t / PANEL * panel_bytes;
        checked(s->c, d->matmul->matmul(l->matrix, acts, 2 * n, begin, end, product, l->out));
        for (size_t i = 0; i < n; i++) {
            const float *a = product + 2 * i * l->out + row, *b = a + l->out;
            float *to = y + (t + i) * stride + row;
            for (size_t k = 0; k < rows; k++) to[k] = a[k] + b[k];
        }
    }
}

/* So few tiles at a time that they stay in the L2 cache while all tokens pass. */
static void multiply_pairs(const stage *s, const linear *l, const input *from, size_t begin, size_t end, float *y,
                           size_t stride) {
    const size_t fit = L2_BYTES / (l->in * RVM_TILE_ROWS), step = s->n > PANEL / 2 ? (fit ? fit : 1) : end - begin;
    for (size_t tile = begin; tile < end; tile += step)
        multiply_tiles(s, l, from, tile, smaller(tile + step, end), y, stride);
}

/* y rows of the tiles [begin, end) of the i-th layer of a role, for all tokens of the stage. */
static void multiply(const stage *s, const linear *l, size_t i, const input *from, size_t begin, size_t end,
                     float *y, size_t stride) {
    rvm_decoder *d = s->c->d;
    const size_t row = begin * RVM_TILE_ROWS, rows = smaller(end * RVM_TILE_ROWS, l->out) - row;
    const int quantised = is_quantised(l->matrix);
    if (quantised && d->config.precise)
        multiply_pairs(s, l, from, begin, end, y, stride);
    else
        checked(s->c, d->matmul->matmul(l->matrix, quantised ? from->acts_q : from->acts_f, s->n, begin, end, y,
                                        stride));
    if (l->bias)
        for (size_t t = 0; t < s->n; t++)
            for (size_t k = 0; k < rows; k++) y[t * stride + row + k] += l->bias[row + k];
    if (l->lora.rank && (l != &d->head || s->c->with_head_lora)) {
        const float *u = from->u + i * s->n * RVM_MAX_RANK;
        checked(s->c, d->kernels->lora_add(u, l->lora.b, s->n, l->lora.rank, l->out, row, rows, y + row, stride));
    }
}

static void add_rows_to(float *x, const float *y, size_t n, size_t stride, size_t row, size_t rows) {
    for (size_t t = 0; t < n; t++)
        for (size_t k = row; k < row + rows; k++) x[t * stride + k] += y[t * stride + k];
}

/* Layers below each other: q, k and v side by side in d->qkv. */
static void do_qkv(const stage *s, const linear *l, const input *from, size_t begin, size_t end) {
    rvm_decoder *d = s->c->d;
    float *y = d->qkv + s->first * d->qkv_width;
    for (size_t i = 0; i < 3; begin -= smaller(begin, l[i].tiles), end -= smaller(end, l[i].tiles), y += l[i].out, i++)
        if (begin < l[i].tiles && begin < end)
            multiply(s, l + i, i, from, begin, smaller(end, l[i].tiles), y, d->qkv_width);
}

static void do_gate_up(const stage *s, const linear *l, const input *from, size_t begin, size_t end) {
    rvm_decoder *d = s->c->d;
    const size_t f = d->config.intermediate_size, row = begin * RVM_TILE_ROWS;
    const size_t rows = smaller(end * RVM_TILE_ROWS, f) - row;
    float *gate = d->gate + s->first * f, *up = d->up + s->first * f;
    multiply(s, l, 0, from, begin, end, gate, f);
    multiply(s, l + 1, 1, from, begin, end, up, f);
    for (size_t t = 0; t < s->n; t++)
        d->kernels->swiglu(gate + t * f + row, up + t * f + row, rows, gate + t * f + row);
}

/* o and down: added to the residual. */
static void do_add(const stage *s, const linear *l, const input *from, size_t begin, size_t end) {
    rvm_decoder *d = s->c->d;
    const size_t dim = d->config.hidden_size, row = begin * RVM_TILE_ROWS;
    float *y = d->tmp + s->first * dim;
    multiply(s, l, 0, from, begin, end, y, dim);
    add_rows_to(d->x + s->first * dim, y, s->n, dim, row, smaller(end * RVM_TILE_ROWS, dim) - row);
}

static int all_finite(const float *x, size_t n) {
    uint32_t top = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t m;
        memcpy(&m, x + i, 4);
        m &= 0x7fffffffu;
        top = m > top ? m : top;
    }
    return top < 0x7f800000u;
}

static void do_head(const stage *s, const linear *l, const input *from, size_t begin, size_t end) {
    const size_t v = l->out, row = begin * RVM_TILE_ROWS, rows = smaller(end * RVM_TILE_ROWS, v) - row;
    multiply(s, l, 0, from, begin, end, s->c->logits, v);
    for (size_t t = 0; t < s->n; t++)
        if (!all_finite(s->c->logits + t * v + row, rows)) fail(s->c, RVM_NOT_FINITE);
}

static void linear_phase(const stage *s, role r) {
    static void (*const work[])(const stage *, const linear *, const input *, size_t, size_t) = {
        do_qkv, do_add, do_gate_up, do_add, do_head};
    rvm_decoder *d = s->c->d;
    const linear *l;
    const size_t count = members(d, s->layer, r, &l);
    const size_t tiles = r == ROLE_QKV ? l[0].tiles + l[1].tiles + l[2].tiles : l[0].tiles;
    const size_t chunks = smaller(tiles, (size_t)CHUNKS * pool_threads(d->pool) * (s->n > 1 ? 2 : 1));
    const input *from = s->n > 1 ? &d->shared : d->own + s->w->thread;
    int ready = s->n > 1;
    (void)count;
    if (s->n > 1) prepare_phase(s, r);
    for (uint32_t i; pool_next(s->w, (uint32_t)chunks, &i);) {
        if (stopped(s->c)) continue;
        if (!ready) prepare(s, r, from, 0, 1);
        ready = 1;
        if (r == ROLE_HEAD && i == 0 && s->n == 1 && s->c->hidden)
            memcpy(s->c->hidden, from->x, l->in * sizeof *from->x);
        work[r](s, l, from, i * tiles / chunks, (i + 1) * tiles / chunks);
    }
}

/* Attention -------------------------------------------------------------------------------------- */

/* Tokens [begin, end) of the chunk, one head, into the cache. */
static void append(const stage *s, size_t head, size_t begin, size_t end) {
    rvm_decoder *d = s->c->d;
    rvm_cache *cache = s->c->cache;
    const size_t hd = d->config.head_dim, at = cache_keys_at(cache, s->layer, head);
    for (size_t t = begin, n; t < end; t += n) {
        const size_t position = s->c->position + t;
        uint8_t *page = cache->pages[position / PAGE].data + at;
        n = smaller(end - t, PAGE - position % PAGE);
        const float *k = d->qkv + t * d->qkv_width + d->q_width + head * hd;
        checked(s->c, d->kernels->append(k, k + d->kv_width, d->qkv_width, d->turn + t * hd, n, hd, position % PAGE,
                                         (uint16_t *)(void *)page, (uint16_t *)(void *)page + PAGE * hd));
    }
}

static void append_phase(const stage *s) {
    const size_t blocks = (s->n + PAGE - 1) / PAGE, heads = s->c->d->config.n_kv_heads;
    for (uint32_t i; pool_next(s->w, (uint32_t)(blocks * heads), &i);)
        if (!stopped(s->c))
            append(s, i % heads, i / heads * PAGE, smaller(s->n, (i / heads + 1) * (size_t)PAGE));
}

/* Queries [begin, end) of the stage against the part-th of `parts` key ranges. */
static void attend(const stage *s, size_t head, size_t begin, size_t end, size_t part, size_t parts) {
    rvm_decoder *d = s->c->d;
    rvm_cache *cache = s->c->cache;
    const size_t hd = d->config.head_dim, t = s->first + begin;
    size_t first, stop;
    pages_seen(s, parts > 1 ? 0 : begin, parts > 1 ? s->n : end, &first, &stop); /* parts: the same for all blocks */
    float *out = d->attended + t * d->q_width + head * d->group * hd;
    float *partial = d->partial + ((part * d->config.n_kv_heads + head) * s->n + begin) * d->group * RVM_PARTIAL(hd);
    rvm_attention a = {
        .pages = cache->pages,
        .head = s->layer * d->config.n_kv_heads + head,
        .matmul = d->matmul,
        .head_dim = hd,
        .group = d->group,
        .q = d->qkv + t * d->qkv_width + head * d->group * hd,
        .q_stride = d->qkv_width,
        .turn = d->turn + t * hd,
        .queries = end - begin,
        .position = s->c->position + t,
        .window = s->c->window,
        .first_page = first + part * (stop - first) / parts,
        .end_page = first + (part + 1) * (stop - first) / parts,
        .out = out,
        .out_stride = d->q_width,
        .partial = parts > 1 ? partial : NULL,
        .scratch = d->scratch[s->w->thread],
    };
    checked(s->c, d->kernels->attend(&a));
}

/* The last blocks see the most keys: they go first. */
static void attend_phase(const stage *s) {
    rvm_decoder *d = s->c->d;
    const size_t heads = d->config.n_kv_heads, parts = parts_of(s), step = d->query_block;
    const size_t blocks = (s->n + step - 1) / step, one = s->c->n == 1 && s->c->outputs;
    for (uint32_t i; pool_next(s->w, (uint32_t)(heads * parts * blocks), &i);) {
        if (stopped(s->c)) continue;
        const size_t head = i % heads, part = i / heads % parts, block = blocks - 1 - i / heads / parts;
        if (one && part == parts - 1) append(s, head, 0, 1);
        attend(s, head, block * step, smaller(s->n, (block + 1) * step), part, parts);
    }
}

/* The whole model -------------------------------------------------------------------------------- */

static void embed(const stage *s, size_t t) {
    rvm_decoder *d = s->c->d;
    const size_t hd = d->config.head_dim, half = hd / 2, dim = d->config.hidden_size;
    const double position = (double)(s->c->position + t);
    for (size_t i = 0; i < half; i++) {
        d->turn[t * hd + i] = (float)cos(position * d->frequencies[i]);
        d->turn[t * hd + half + i] = (float)sin(position * d->frequencies[i]);
    }
    checked(s->c, rvm_matrix_row(d->embedding, (size_t)s->c->tokens[t], d->x + t * dim));
}

static void embed_phase(const stage *s) {
    if (s->n <= TOKEN_BLOCK) return; /* done before the others were called */
    const uint32_t blocks = (uint32_t)((s->n + TOKEN_BLOCK - 1) / TOKEN_BLOCK);
    for (uint32_t i; pool_next(s->w, blocks, &i);)
        for (size_t t = i * TOKEN_BLOCK; t < smaller(s->n, (i + 1) * (size_t)TOKEN_BLOCK) && !stopped(s->c); t++)
            embed(s, t);
}

/* Of the last layer only what is read is computed: keys and values of all tokens, the rest for `outputs`. */
static int layer_phases(stage *s) {
    linear_phase(s, ROLE_QKV);
    tock(s, RVM_PART_QKV);
    if (s->c->n > 1 || s->c->outputs == 0) append_phase(s);
    if (s->layer + 1 == s->c->d->config.n_layers) s->first = s->c->n - s->c->outputs, s->n = s->c->outputs;
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
    stage s = {c, w, 0, 0, c->n};
    embed_phase(&s);
    tock(&s, RVM_PART_EMBED);
    for (; s.layer < c->d->config.n_layers; s.layer++)
        if (!layer_phases(&s)) return;
    if (c->logits) linear_phase(&s, ROLE_HEAD);
    else if (c->hidden) prepare_phase(&s, ROLE_HEAD);
    tock(&s, RVM_PART_HEAD);
}

static int tokens_are_known(const rvm_decoder *d, const int32_t *tokens, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (tokens[i] < 0 || (uint32_t)tokens[i] >= d->config.vocab_size) return 0;
    return 1;
}

static void begin(rvm_decoder *d) {
    atomic_store(&d->status, RVM_OK);
    d->tick = now();
}

static int run(rvm_decoder *d, call *c, void (*job)(pool_worker *, void *)) {
    pool_run(d->pool, job, c, sizeof *c);
    return atomic_load(&d->status);
}

int rvm_decoder_forward(rvm_decoder *d, rvm_cache *cache, const int32_t *tokens, size_t n, size_t outputs,
                        float *hidden, float *logits, const int *cancel) {
    if (!d || !cache || !tokens || n == 0 || n > d->config.max_tokens || outputs > n) return RVM_BAD_ARGUMENT;
    if (outputs == 0 && (hidden || logits)) return RVM_BAD_ARGUMENT;
    if (!tokens_are_known(d, tokens, n)) return RVM_BAD_ARGUMENT;
    if (atomic_flag_test_and_set(&d->busy)) return RVM_BUSY;
    call c = {.d = d, .cache = cache, .position = cache->offset, .window = cache->window, .tokens = tokens, .n = n,
              .outputs = outputs, .hidden = hidden, .logits = logits, .cancel = cancel, .with_head_lora = 1};
    begin(d);
    int rc = cache_reserve(cache, n);
    for (size_t t = 0; n <= TOKEN_BLOCK && t < n; t++) embed(&(stage){&c, NULL, 0, 0, n}, t);
    if (rc == RVM_OK) rc = run(d, &c, forward);
    if (rc == RVM_OK) cache->offset += n;
    atomic_flag_clear(&d->busy);
    return rc;
}

/* hidden, already normed, through the head, max_tokens at a time. */
static void head_job(pool_worker *w, void *ctx) {
    call *c = ctx;
    rvm_decoder *d = c->d;
    stage s = {c, w, 0, 0, c->n};
    const linear *l = &d->head;
    const uint32_t blocks = (uint32_t)((s.n + TOKEN_BLOCK - 1) / TOKEN_BLOCK);
    const size_t chunks = smaller(l->tiles, (size_t)CHUNKS * pool_threads(d->pool));
    for (uint32_t i; pool_next(w, blocks, &i);) {
        const size_t begin = i * TOKEN_BLOCK, end = smaller(s.n, begin + TOKEN_BLOCK), in = l->in;
        if (l->lora.rank)
            checked(c, d->kernels->lora_project(c->hidden + begin * in, l->lora.a, l->lora.scale, end - begin, in,
                                                l->lora.rank, d->shared.u + begin * l->lora.rank));
        if (is_quantised(l->matrix)) quantise(&s, c->hidden, in, &d->shared, begin, end);
        else checked(c, d->matmul->acts(RVM_F32, c->hidden, in, s.n, in, begin, end, d->shared.acts_f));
    }
    for (uint32_t i; pool_next(w, (uint32_t)chunks, &i);)
        do_head(&s, l, &d->shared, i * l->tiles / chunks, (i + 1) * l->tiles / chunks);
}

int rvm_decoder_head(rvm_decoder *d, const float *hidden, size_t n, int with_lora, float *logits) {
    if (!d || !hidden || !logits || n == 0) return RVM_BAD_ARGUMENT;
    if (atomic_flag_test_and_set(&d->busy)) return RVM_BUSY;
    int rc = RVM_OK;
    for (size_t t = 0, step; t < n && rc == RVM_OK; t += step) {
        step = smaller(n - t, d->config.max_tokens);
        call c = {.d = d, .n = step, .hidden = (float *)hidden + t * d->config.hidden_size,
                  .logits = logits + t * d->config.vocab_size, .with_head_lora = with_lora};
        begin(d);
        rc = run(d, &c, head_job);
    }
    atomic_flag_clear(&d->busy);
    return rc;
}
