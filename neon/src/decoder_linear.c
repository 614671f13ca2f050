/* This file has the matrix phases of the decoder. These phases compute the inputs of linear layers, the products, and
   the operations directly after the products.
 *
 * A matrix phase multiplies by the weights of one role (q/k/v, o, gate/up, down or head). Before the products, a thread
 * makes the input: the thread normalises the rows, merges the attention of the key ranges, or takes the rows as they
 * are (down), and it quantises the result if the weights are quantised. For one token it takes little time to make the
 * input. So each thread makes its own copy of the input when the thread takes its first piece of work, which saves a
 * barrier. For more tokens, a separate phase makes the input. */
#include "decoder.h"

#include <string.h>

/* Set *first to the first linear layer of the role in layer i. Return the number of linear layers of the role. */
static size_t members(rvm_decoder *d, size_t i, role r, const linear **first) {
    layer *l = d->layers + i;
    switch (r) {
    case ROLE_QKV: *first = l->linear + RVM_Q_PROJ; return 3;
    case ROLE_O: *first = l->linear + RVM_O_PROJ; return 1;
    case ROLE_GATE_UP: *first = l->linear + (d->gated ? RVM_GATE_PROJ : RVM_UP_PROJ); return d->gated ? 2 : 1;
    case ROLE_DOWN: *first = l->linear + RVM_DOWN_PROJ; return 1;
    default: *first = &d->head; return 1;
    }
}

/* The weight and the bias of the norm before the linear layers of a role (a set of linear layers with the same input).
   */
typedef struct {
    const float *weight, *bias;
} norm;

static norm norm_of(const rvm_decoder *d, const layer *l, role r) {
    if (r == ROLE_QKV) return (norm){l->input_norm, l->input_norm_bias};
    if (r == ROLE_HEAD) return (norm){d->norm, d->norm_bias};
    return (norm){l->post_norm, l->post_norm_bias};
}

static int norm_rows(const rvm_decoder *d, norm of, const float *x, size_t n, float *y) {
    const size_t dim = d->config.hidden_size;
    const float eps = d->config.norm_eps;
    return d->config.layer_norm ? d->kernels->layer_norm(x, of.weight, of.bias, eps, n, dim, y)
                                : d->kernels->rms_norm(x, of.weight, eps, n, dim, y);
}

/* Return the rows of floats that a role reads, for the tokens [begin, end) of the stage. For ROLE_DOWN the rows exist
 * already. For the other roles the function computes them into to->x, except that one key range of ROLE_O needs no
 * computation. */
static const float *rows_of(const stage *s, role r, const input *to, size_t begin, size_t end) {
    rvm_decoder *d = s->c->d;
    const size_t dim = d->config.hidden_size, at = s->first + begin, n = end - begin;
    const layer *l = d->layers + s->layer;
    switch (r) {
    case ROLE_O: return merged(s, begin, end, to->x + begin * d->q_width);
    case ROLE_DOWN: return d->gate + at * d->config.intermediate_size;
    default:
        checked(s->c, norm_rows(d, norm_of(d, l, r), d->x + at * dim, n, to->x + begin * dim));
        return to->x + begin * dim;
    }
}

/* Return the kind of the activations in this form. */
static rvm_acts_kind acts_kind(const stage *s, form f) {
    static const rvm_acts_kind coarse[FORMS] = {RVM_ACTS_FLOAT, RVM_ACTS_8, RVM_ACTS_SUPER_8};
    return s->coarse ? coarse[f] : s->c->d->acts[f];
}

/* Compute all forms of the role's input for the tokens [begin, end), and store them in `to`. */
static void prepare(const stage *s, role r, const input *to, size_t begin, size_t end) {
    rvm_decoder *d = s->c->d;
    const linear *l;
    const size_t count = members(d, s->layer, r, &l), in = l->in;
    const float *x = rows_of(s, r, to, begin, end);
    int wanted[FORMS] = {0};
    for (size_t i = 0; i < count; i++) {
        wanted[l[i].form] = 1;
        if (l[i].lora.rank)
            checked(s->c, d->kernels->lora_project(x, l[i].lora.a, l[i].lora.bits, l[i].lora.scale, end - begin, in,
                                                   l[i].lora.rank,
                                                   to->u + i * s->n * RVM_MAX_RANK + begin * l[i].lora.rank));
    }
    x -= begin * in; /* the kernel `acts` counts tokens from the first token of the stage, so x begins there */
    for (size_t f = 0; f < FORMS; f++)
        if (wanted[f]) checked(s->c, d->matmul->acts(acts_kind(s, f), x, in, s->n, in, begin, end, to->acts[f]));
    if (r == ROLE_HEAD && to == &d->shared && s->c->hidden)
        memcpy(s->c->hidden + begin * in, x + begin * in, (end - begin) * in * sizeof *x);
}

/* Return the number of tokens that a thread takes at a time to make their input. For at most TOKEN_BLOCK tokens the
   number is 1, so that all threads take part. */
static size_t token_block(size_t n) { return n <= TOKEN_BLOCK ? 1 : TOKEN_BLOCK; }

void prepare_phase(const stage *s, role r) {
    const size_t step = token_block(s->n);
    for (uint32_t i; pool_next(s->w, (uint32_t)((s->n + step - 1) / step), &i);)
        if (!stopped(s->c)) prepare(s, r, &s->c->d->shared, i * step, min_size(s->n, (i + 1) * step));
}

/* Compute the outputs y of linear layer i of a role for the tiles [begin, end) of its weights, for all tokens of the
   stage. */
static void multiply(const stage *s, const linear *l, size_t i, const input *from, size_t begin, size_t end,
                     float *y, size_t stride) {
    rvm_decoder *d = s->c->d;
    const size_t row = begin * RVM_TILE_ROWS, rows = min_size(end * RVM_TILE_ROWS, l->out) - row;
    checked(s->c, d->matmul->matmul(l->matrix, acts_kind(s, l->form), from->acts[l->form], s->n, begin, end, y,
                                    stride));
    if (l->bias)
        for (size_t t = 0; t < s->n; t++)
            for (size_t k = 0; k < rows; k++) y[t * stride + row + k] += l->bias[row + k];
    if (l->lora.rank && (l != &d->head || s->c->with_head_lora)) {
        const float *u = from->u + i * s->n * RVM_MAX_RANK;
        checked(s->c, d->kernels->lora_add(u, l->lora.b, l->lora.bits, s->n, l->lora.rank, l->out, row, rows,
                                           y + row, stride));
    }
}

static void add_rows_to(float *x, const float *y, size_t n, size_t stride, size_t row, size_t rows) {
    for (size_t t = 0; t < n; t++)
        for (size_t k = row; k < row + rows; k++) x[t * stride + k] += y[t * stride + k];
}

/* Compute the outputs of the linear layers q, k and v, and store them side by side in d->qkv. */
static void do_qkv(const stage *s, const linear *l, const input *from, size_t begin, size_t end) {
    rvm_decoder *d = s->c->d;
    float *y = d->qkv + s->first * d->qkv_width;
    for (size_t i = 0; i < 3; begin -= min_size(begin, l[i].tiles), end -= min_size(end, l[i].tiles), y += l[i].out, i++)
        if (begin < l[i].tiles && begin < end)
            multiply(s, l + i, i, from, begin, min_size(end, l[i].tiles), y, d->qkv_width);
}

/* Compute the numbers between the two matrices of the MLP into d->gate: silu(gate) * up, or gelu(up) in models without
   a gate. */
static void do_gate_up(const stage *s, const linear *l, const input *from, size_t begin, size_t end) {
    rvm_decoder *d = s->c->d;
    const size_t f = d->config.intermediate_size, row = begin * RVM_TILE_ROWS;
    const size_t rows = min_size(end * RVM_TILE_ROWS, f) - row;
    float *gate = d->gate + s->first * f, *up = d->up + s->first * f;
    multiply(s, l, 0, from, begin, end, gate, f);
    if (!d->gated) {
        for (size_t t = 0; t < s->n; t++) d->kernels->gelu(gate + t * f + row, rows, gate + t * f + row);
        return;
    }
    multiply(s, l + 1, 1, from, begin, end, up, f);
    for (size_t t = 0; t < s->n; t++)
        d->kernels->swiglu(gate + t * f + row, up + t * f + row, rows, gate + t * f + row);
}

/* Compute the output of the linear layer o or down, and add it to the residual. */
static void do_add(const stage *s, const linear *l, const input *from, size_t begin, size_t end) {
    rvm_decoder *d = s->c->d;
    const size_t dim = d->config.hidden_size, row = begin * RVM_TILE_ROWS;
    float *y = d->tmp + s->first * dim;
    multiply(s, l, 0, from, begin, end, y, dim);
    add_rows_to(d->x + s->first * dim, y, s->n, dim, row, min_size(end * RVM_TILE_ROWS, dim) - row);
}

/* Return 1 if all numbers of x are finite. The exponent of NaN and infinity is all ones, so adding 1 to the exponent
 * carries into the sign bit, and the code tests this bit. The code uses this trick because every supported instruction
 * set has vector instructions for `and`, `add` and `or`, but not for the unsigned maximum. */
static int all_finite(const float *x, size_t n) {
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        bad |= (bits & 0x7f800000u) + 0x00800000u;
    }
    return bad >> 31 == 0;
}

static void do_head(const stage *s, const linear *l, const input *from, size_t begin, size_t end) {
    const size_t v = l->out, row = begin * RVM_TILE_ROWS, rows = min_size(end * RVM_TILE_ROWS, v) - row;
    multiply(s, l, 0, from, begin, end, s->c->logits, v);
    for (size_t t = 0; t < s->n; t++)
        if (!all_finite(s->c->logits + t * v + row, rows)) fail(s->c, RVM_NOT_FINITE);
}

void linear_phase(const stage *s, role r) {
    static void (*const work[])(const stage *, const linear *, const input *, size_t, size_t) = {
        do_qkv, do_add, do_gate_up, do_add, do_head};
    rvm_decoder *d = s->c->d;
    const linear *l;
    members(d, s->layer, r, &l);
    const size_t tiles = r == ROLE_QKV ? l[0].tiles + l[1].tiles + l[2].tiles : l[0].tiles;
    const size_t chunks = min_size(tiles, (size_t)CHUNKS * pool_threads(d->pool) * (s->n > 1 ? 2 : 1));
    const input *from = s->n > 1 ? &d->shared : d->own + s->w->thread;
    int ready = s->n > 1;
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

/* Compute the input of the output head from hidden states that have already gone through the final norm. */
static void prepare_head(const stage *s, size_t begin, size_t end) {
    rvm_decoder *d = s->c->d;
    const linear *l = &d->head;
    const size_t in = l->in, rank = l->lora.rank;
    const float *x = s->c->hidden;
    if (rank)
        checked(s->c, d->kernels->lora_project(x + begin * in, l->lora.a, l->lora.bits, l->lora.scale, end - begin,
                                               in, rank, d->shared.u + begin * rank));
    checked(s->c, d->matmul->acts(acts_kind(s, l->form), x, in, s->n, in, begin, end,
                                  d->shared.acts[l->form]));
}

void head_phases(const stage *s) {
    rvm_decoder *d = s->c->d;
    const linear *l = &d->head;
    const size_t chunks = min_size(l->tiles, (size_t)CHUNKS * pool_threads(d->pool)), step = token_block(s->n);
    for (uint32_t i; pool_next(s->w, (uint32_t)((s->n + step - 1) / step), &i);)
        prepare_head(s, i * step, min_size(s->n, (i + 1) * step));
    for (uint32_t i; pool_next(s->w, (uint32_t)chunks, &i);)
        do_head(s, l, &d->shared, i * l->tiles / chunks, (i + 1) * l->tiles / chunks);
}
