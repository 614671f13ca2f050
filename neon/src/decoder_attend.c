/* The attention phases of the decoder store keys and values in pages, and compute the attention of the queries over all
 * pages. */
#include "decoder.h"

#include <math.h>
#include <string.h>

typedef struct {
    size_t first, stop;
} range;

/* Return the range of pages that hold the tokens which the queries [begin, end) of the stage see. */
static range pages_seen(const stage *s, size_t begin, size_t end) {
    const size_t first = s->first + begin, last = s->first + end - 1;
    return (range){first_page_seen(position_of(s->c, first), s->c->window), position_of(s->c, last) / PAGE + 1};
}

static size_t parts_in(range pages) {
    return min_size(MOST_PARTS, (pages.stop - pages.first + PART_PAGES - 1) / PART_PAGES);
}

static range part_of(range pages, size_t part, size_t parts) {
    const size_t n = pages.stop - pages.first;
    return (range){pages.first + part * n / parts, pages.first + (part + 1) * n / parts};
}

/* The number of parts (key ranges) depends on the number of pages and not on their tiers. A prompt has one part, so that
   its bits do not depend on how the caller divides it. The function must not read the page table, because a slow thread
   can call this function when the caller's page table no longer exists. */
size_t parts_of(const stage *s) {
    const int in_prompt = s->coarse && s->c->bits == BITS_8_TO_LAST_VALUES;
    return s->c->rows || in_prompt || s->n > FEW ? 1 : parts_in(pages_seen(s, 0, s->n));
}

/* Return the address of the partial attention of a head of the stage's token t, for the key range `part`. The results
 * for the later parts of this token and head follow at equal distances in memory. */
static float *partial_at(const stage *s, size_t part, size_t head, size_t t) {
    const rvm_decoder *d = s->c->d;
    return d->partial + ((part * d->config.n_kv_heads + head) * s->n + t) * d->group * RVM_PARTIAL(d->config.head_dim);
}

/* Merge the partial attention of all key ranges of token t for all heads. out: [q_width] */
static void merge_parts(const stage *s, size_t t, size_t parts, float *out) {
    rvm_decoder *d = s->c->d;
    const size_t hd = d->config.head_dim, stride = (size_t)(partial_at(s, 1, 0, 0) - d->partial);
    for (size_t h = 0; h < d->config.n_kv_heads; h++)
        checked(s->c, d->kernels->merge(partial_at(s, 0, h, t), parts, stride, d->group, hd, out + h * d->group * hd));
}

const float *merged(const stage *s, size_t begin, size_t end, float *made) {
    rvm_decoder *d = s->c->d;
    float *attended = d->attended + (s->first + begin) * d->q_width;
    if (parts_of(s) > 1) {
        for (size_t t = begin; t < end; t++) merge_parts(s, t, parts_of(s), made + (t - begin) * d->q_width);
        return made;
    }
    for (size_t t = begin; s->c->groups && t < end; t++) {
        const size_t parts = parts_in(pages_seen(s, t, t + 1));
        if (parts > 1) merge_parts(s, t, parts, attended + (t - begin) * d->q_width);
    }
    return attended;
}

/* Return the cosines and sines of the angles by which the attention kernels turn token t of the chunk. */
static const float *turn_of(const stage *s, size_t t) {
    const rvm_decoder *d = s->c->d;
    const int still = d->layers[s->layer].no_rope || d->config.rope_dims < d->config.head_dim;
    return (still ? d->still : d->turn) + t * d->config.head_dim;
}

/* Return 1 if rope turns only a part of each head. If rope turns only a part, heads_phase turns this part, because the
   attention kernels turn only whole heads. */
static int turns_part(const stage *s) {
    const rvm_decoder_config *c = &s->c->d->config;
    return c->rope_dims && c->rope_dims < c->head_dim && !s->c->d->layers[s->layer].no_rope;
}

/* Turn the first rope_dims numbers of each of n heads in place by rope. */
static void turn_part(const stage *s, size_t t, size_t n, float *x) {
    const rvm_decoder *d = s->c->d;
    const size_t hd = d->config.head_dim, dims = d->config.rope_dims;
    float turned[RVM_MAX_HEAD_DIM];
    for (size_t h = 0; h < n; h++, x += hd) {
        checked(s->c, d->kernels->rope(x, d->turn + t * hd, 1, 1, dims, 0, turned));
        memcpy(x, turned, dims * sizeof *x);
    }
}

/* Return the factor of a query at this position: 1 + beta ln(1 + floor(position / span)). */
static float query_scale(const rvm_decoder *d, size_t position) {
    return (float)(1 + d->config.query_beta * log1p(floor((double)position / d->config.query_span)));
}

/* Finish the queries and keys of token t in place: apply the norms of heads, turn a part of each head by rope, and
   scale the queries. */
static void finish_heads(const stage *s, size_t t) {
    rvm_decoder *d = s->c->d;
    const layer *l = d->layers + s->layer;
    const size_t hd = d->config.head_dim, n = d->config.n_heads, n_kv = d->config.n_kv_heads;
    float *q = d->qkv + t * d->qkv_width, *k = q + d->q_width;
    if (l->q_norm) {
        checked(s->c, d->kernels->rms_norm(q, l->q_norm, d->config.norm_eps, n, hd, q));
        checked(s->c, d->kernels->rms_norm(k, l->k_norm, d->config.norm_eps, n_kv, hd, k));
    }
    if (turns_part(s)) turn_part(s, t, n + n_kv, q);
    if (d->config.query_beta == 0) return;
    const float scale = query_scale(d, position_of(s->c, t));
    for (size_t i = 0; scale != 1 && i < d->q_width; i++) q[i] *= scale;
}

void heads_phase(const stage *s) {
    if (!s->c->d->layers[s->layer].q_norm && s->c->d->config.query_beta == 0 && !turns_part(s)) return;
    for (uint32_t t; pool_next(s->w, (uint32_t)s->n, &t);)
        if (!stopped(s->c)) finish_heads(s, t);
}

static const rvm_page *pages_of(const call *c, size_t t) { return c->rows ? c->rows[t].pages : c->pages; }

/* Store the keys and values of one key-value head in pages, for the tokens [begin, end) of the chunk, which belong to
 * one sequence. */
static void append(const stage *s, size_t head, size_t begin, size_t end) {
    rvm_decoder *d = s->c->d;
    const size_t hd = d->config.head_dim;
    const size_t at = (s->layer * d->config.n_kv_heads + head) * rvm_head_page_bytes(RVM_HOT, hd);
    const rvm_page *pages = pages_of(s->c, begin);
    for (size_t t = begin, n; t < end; t += n) {
        const size_t position = position_of(s->c, t);
        uint16_t *keys = (uint16_t *)(void *)(pages[position / PAGE].data + at);
        n = min_size(end - t, PAGE - position % PAGE);
        const float *k = d->qkv + t * d->qkv_width + d->q_width + head * hd;
        checked(s->c, d->kernels->append(k, k + d->kv_width, d->qkv_width, turn_of(s, t), n, hd, position % PAGE,
                                         keys, keys + PAGE * hd));
    }
}

void append_phase(const stage *s) {
    const size_t blocks = (s->n + PAGE - 1) / PAGE, heads = s->c->d->config.n_kv_heads;
    for (uint32_t i; pool_next(s->w, (uint32_t)(blocks * heads), &i);)
        if (!stopped(s->c))
            append(s, i % heads, i / heads * PAGE, min_size(s->n, (i / heads + 1) * (size_t)PAGE));
}

/* Compute the attention of the stage's queries [begin, end), which belong to one sequence or to a group of rows, over a
 * range of pages. partial: the output for `merge`; NULL: the output goes to d->attended */
static void attend(const stage *s, size_t head, size_t begin, size_t end, range pages, float *partial) {
    rvm_decoder *d = s->c->d;
    const size_t hd = d->config.head_dim, t = s->first + begin;
    rvm_attention a = {
        .pages = pages_of(s->c, t),
        .rows = s->c->rows ? s->c->rows + t : NULL,
        .head = s->layer * d->config.n_kv_heads + head,
        .matmul = d->matmul,
        .head_dim = hd,
        .group = d->group,
        .q = d->qkv + t * d->qkv_width + head * d->group * hd,
        .q_stride = d->qkv_width,
        .turn = turn_of(s, t),
        .queries = end - begin,
        .position = position_of(s->c, t),
        .slopes = d->slopes ? d->slopes + head * d->group : NULL,
        .window = s->c->window,
        .first_page = pages.first,
        .end_page = pages.stop,
        .out = d->attended + t * d->q_width + head * d->group * hd,
        .out_stride = d->q_width,
        .partial = partial,
        .scratch = d->scratch[s->w->thread],
    };
    checked(s->c, d->kernels->attend(&a));
}

/* Compute the attention of one block of the chunk's queries, for one head and one key range. If parts is 1, the block
   reads the pages that its own queries see. If parts is more than 1, all blocks of the chunk use the same key ranges. */
static void attend_block(const stage *s, size_t head, size_t begin, size_t end, size_t part, size_t parts) {
    if (parts == 1) {
        attend(s, head, begin, end, pages_seen(s, begin, end), NULL);
        return;
    }
    attend(s, head, begin, end, part_of(pages_seen(s, 0, s->n), part, parts), partial_at(s, part, head, begin));
}

/* Return the number of blocks into which the chunk's queries are divided. A short chunk is divided into more blocks
   than necessary, so that the threads get about equal shares. The bits of a query's result do not depend on the size of
   the block. */
static size_t blocks_in(const stage *s, size_t parts) {
    const rvm_decoder *d = s->c->d;
    const size_t heads = d->config.n_kv_heads * parts, threads = d->config.threads, least = 4;
    size_t blocks = (s->n + d->query_block - 1) / d->query_block;
    while (heads * blocks < 4 * threads && heads * blocks % threads && s->n / (blocks + 1) >= least) blocks++;
    return blocks;
}

/* Compute the attention of a chunk of one sequence. The threads take the last blocks of queries first, because the
   queries of these blocks see the most keys. */
static void attend_chunk(const stage *s) {
    rvm_decoder *d = s->c->d;
    const size_t heads = d->config.n_kv_heads, parts = parts_of(s), blocks = blocks_in(s, parts);
    const size_t step = (s->n + blocks - 1) / blocks, one = s->c->n == 1 && s->c->outputs;
    for (uint32_t i; pool_next(s->w, (uint32_t)(heads * parts * blocks), &i);) {
        if (stopped(s->c)) continue;
        const size_t head = i % heads, part = i / heads % parts, block = blocks - 1 - i / heads / parts;
        if (one && part == parts - 1) append(s, head, 0, 1);
        if (block * step < s->n) attend_block(s, head, block * step, min_size(s->n, (block + 1) * step), part, parts);
    }
}

static range pages_of_row(const call *c, size_t t) {
    const size_t offset = c->rows[t].offset;
    return (range){first_page_seen(offset, c->window), offset / PAGE + 1};
}

/* Return 1 if row t is in the same group as row t - 1. */
static int goes_on(const call *c, size_t t) {
    const rvm_row *a = c->rows + t - 1, *b = c->rows + t;
    const size_t first = pages_of_row(c, t).first;
    return a->offset == b->offset && a->pages[first].data == b->pages[first].data;
}

void group_rows(call *c) {
    c->groups = c->group_chunks = 0;
    if (c->n > MOST_GROUPED) return;
    for (size_t t = 0, begin = 0; t < c->n; t++) {
        if (t + 1 < c->n && t + 1 - begin < c->d->query_block && goes_on(c, t + 1)) continue;
        c->group_end[c->groups++] = (uint8_t)(t + 1);
        c->group_chunks += c->d->config.n_kv_heads * parts_in(pages_of_row(c, t));
        begin = t + 1;
    }
}

/* Compute piece i of the attention of the groups of rows: one key range of one head of one group. Each row has the same
 * key ranges, and so the same sums, as a row that runs alone. */
static void attend_group(const stage *s, size_t i) {
    const size_t heads = s->c->d->config.n_kv_heads;
    size_t g = 0, begin = 0, parts;
    for (; i >= heads * (parts = parts_in(pages_of_row(s->c, begin))); begin = s->c->group_end[g++]) i -= heads * parts;
    const size_t head = i % heads, part = i / heads, end = s->c->group_end[g];
    for (size_t t = begin; part == parts - 1 && t < end; t++) append(s, head, t, t + 1);
    attend(s, head, begin, end, part_of(pages_of_row(s->c, begin), part, parts),
           parts > 1 ? partial_at(s, part, head, begin) : NULL);
}

/* Compute the attention of one head of a row. The row has the same key ranges, and so the same sums, as a row that runs
   alone. */
static void attend_row(const stage *s, size_t head, size_t t) {
    rvm_decoder *d = s->c->d;
    const range pages = pages_seen(s, t, t + 1);
    const size_t parts = parts_in(pages), hd = d->config.head_dim, part_floats = d->group * RVM_PARTIAL(hd);
    float *partial = d->parts[s->w->thread];
    append(s, head, t, t + 1);
    for (size_t i = 0; i < parts; i++)
        attend(s, head, t, t + 1, part_of(pages, i, parts), parts > 1 ? partial + i * part_floats : NULL);
    if (parts > 1)
        checked(s->c, d->kernels->merge(partial, parts, part_floats, d->group, hd,
                                        d->attended + t * d->q_width + head * d->group * hd));
}

void attend_phase(const stage *s) {
    const size_t heads = s->c->d->config.n_kv_heads;
    if (!s->c->rows) {
        attend_chunk(s);
        return;
    }
    for (uint32_t i; s->c->groups && pool_next(s->w, (uint32_t)s->c->group_chunks, &i);)
        if (!stopped(s->c)) attend_group(s, i);
    if (s->c->groups) return;
    for (uint32_t i; pool_next(s->w, (uint32_t)(heads * s->n), &i);)
        if (!stopped(s->c)) attend_row(s, i % heads, i / heads);
}
