/* The decoder's attention phases: keys and values into their pages, queries over all pages. */
#include "decoder.h"

/* Pages that the queries [begin, end) of the stage see some token of: [*first, *stop). */
static void pages_seen(const stage *s, size_t begin, size_t end, size_t *first, size_t *stop) {
    const size_t position = s->c->position + s->first;
    *first = first_page_seen(position + begin, s->c->window);
    *stop = (position + end + PAGE - 1) / PAGE;
}

/* By the number of pages and not by their tiers: a thread that lags may ask when the caller's table is gone. */
size_t parts_of(const stage *s) {
    size_t first, stop;
    if (s->n > FEW) return 1;
    pages_seen(s, 0, s->n, &first, &stop);
    return smaller(MOST_PARTS, (stop - first + PART_PAGES - 1) / PART_PAGES);
}

void merge_parts(const stage *s, size_t begin, size_t end, float *out) {
    rvm_decoder *d = s->c->d;
    const size_t parts = parts_of(s), hd = d->config.head_dim, row = RVM_PARTIAL(hd), heads = d->config.n_kv_heads;
    for (size_t t = begin; t < end; t++)
        for (size_t h = 0; h < heads; h++)
            checked(s->c, d->kernels->merge(d->partial + (h * s->n + t) * d->group * row, parts,
                                            heads * s->n * d->group * row, d->group, hd,
                                            out + (t - begin) * d->q_width + h * d->group * hd));
}

/* Tokens [begin, end) of the chunk, one head, into their pages. */
static void append(const stage *s, size_t head, size_t begin, size_t end) {
    rvm_decoder *d = s->c->d;
    const size_t hd = d->config.head_dim;
    const size_t at = (s->layer * d->config.n_kv_heads + head) * rvm_head_page_bytes(RVM_HOT, hd);
    for (size_t t = begin, n; t < end; t += n) {
        const size_t position = s->c->position + t;
        uint16_t *keys = (uint16_t *)(void *)(s->c->pages[position / PAGE].data + at);
        n = smaller(end - t, PAGE - position % PAGE);
        const float *k = d->qkv + t * d->qkv_width + d->q_width + head * hd;
        checked(s->c, d->kernels->append(k, k + d->kv_width, d->qkv_width, d->turn + t * hd, n, hd, position % PAGE,
                                         keys, keys + PAGE * hd));
    }
}

void append_phase(const stage *s) {
    const size_t blocks = (s->n + PAGE - 1) / PAGE, heads = s->c->d->config.n_kv_heads;
    for (uint32_t i; pool_next(s->w, (uint32_t)(blocks * heads), &i);)
        if (!stopped(s->c))
            append(s, i % heads, i / heads * PAGE, smaller(s->n, (i / heads + 1) * (size_t)PAGE));
}

/* Queries [begin, end) of the stage against the part-th of `parts` key ranges. */
static void attend(const stage *s, size_t head, size_t begin, size_t end, size_t part, size_t parts) {
    rvm_decoder *d = s->c->d;
    const size_t hd = d->config.head_dim, t = s->first + begin;
    size_t first, stop;
    pages_seen(s, parts > 1 ? 0 : begin, parts > 1 ? s->n : end, &first, &stop); /* parts: the same for all blocks */
    float *out = d->attended + t * d->q_width + head * d->group * hd;
    float *partial = d->partial + ((part * d->config.n_kv_heads + head) * s->n + begin) * d->group * RVM_PARTIAL(hd);
    rvm_attention a = {
        .pages = s->c->pages,
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
void attend_phase(const stage *s) {
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
