/* These functions make a decoder: they check sizes, divide the decoder's memory among its arrays and set LoRAs. */
#include "decoder.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGN = 64 };

/* An allocator that assigns parts of one block of memory (the arena). The first pass over the arrays counts the bytes,
 * and the second pass assigns addresses. */
typedef struct {
    uint8_t *base;
    size_t used;
} arena;

static void *take(arena *a, size_t bytes) {
    uint8_t *p = a->base ? a->base + a->used : NULL;
    a->used += (bytes + ALIGN - 1) / ALIGN * ALIGN;
    return p;
}

static float *take_floats(arena *a, size_t n) { return take(a, n * sizeof(float)); }

static void take_input(arena *a, const rvm_decoder *d, size_t tokens, input *in) {
    in->x = take_floats(a, tokens * d->most_in);
    for (size_t f = 0; f < FORMS; f++) {
        const size_t step = f == FORM_FLOAT ? 1 : f == FORM_GROUPS ? 32 : 256;
        const size_t bytes = rvm_acts_bytes(d->acts[f], tokens, (d->most_in + step - 1) / step * step);
        in->acts[f] = d->wanted[f] ? take(a, bytes) : NULL;
    }
    in->u = take_floats(a, 3 * tokens * RVM_MAX_RANK);
}

/* Return 1 if some layer has heads that the attention kernels must not turn by rope. */
static int any_still(const rvm_decoder *d) {
    if (d->config.rope_dims < d->config.head_dim) return 1;
    for (size_t i = 0; i < d->config.n_layers; i++)
        if (d->layers[i].no_rope) return 1;
    return 0;
}

/* Fill d->still with cosines of 1 and sines of 0, which turn nothing. */
static void fill_still(const rvm_decoder *d) {
    const size_t hd = d->config.head_dim;
    for (size_t i = 0; d->still && i < d->config.max_tokens * hd; i++) d->still[i] = i % hd < hd / 2 ? 1.0f : 0.0f;
}

static void lay_out(arena *a, rvm_decoder *d) {
    const rvm_decoder_config *c = &d->config;
    const size_t t = c->max_tokens, few = min_size(t, MOST_GROUPED), rows = d->query_block * d->group;
    d->x = take_floats(a, t * c->hidden_size);
    d->turn = take_floats(a, t * c->head_dim);
    d->still = any_still(d) ? take_floats(a, t * c->head_dim) : NULL;
    d->qkv = take_floats(a, t * d->qkv_width);
    d->attended = take_floats(a, t * d->q_width);
    d->gate = take_floats(a, t * c->intermediate_size);
    d->up = d->gated ? take_floats(a, t * c->intermediate_size) : NULL;
    d->tmp = take_floats(a, t * c->hidden_size);
    d->partial = take_floats(a, (size_t)MOST_PARTS * few * c->n_heads * RVM_PARTIAL(c->head_dim));
    take_input(a, d, t, &d->shared);
    d->own = take(a, c->threads * sizeof *d->own);
    d->scratch = take(a, c->threads * sizeof *d->scratch);
    d->parts = take(a, c->threads * sizeof *d->parts);
    for (size_t i = 0; i < c->threads; i++) {
        input own;
        take_input(a, d, 1, &own);
        float *scratch = take_floats(a, rvm_attention_scratch(rows, c->head_dim));
        float *parts = take_floats(a, MOST_PARTS * d->group * RVM_PARTIAL(c->head_dim));
        if (a->base) d->own[i] = own, d->scratch[i] = scratch, d->parts[i] = parts;
    }
}

static int good_config(const rvm_decoder_config *c) {
    const uint32_t sizes[] = {c->n_layers,          c->n_heads,    c->n_kv_heads, c->head_dim, c->hidden_size,
                              c->intermediate_size, c->vocab_size, c->max_tokens, c->threads};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i] == 0 || sizes[i] >= 1u << 24) return 0;
    return c->head_dim % 2 == 0 && c->head_dim <= RVM_MAX_HEAD_DIM && c->n_heads % c->n_kv_heads == 0 &&
           c->threads <= 1024 && c->rope_dims % 2 == 0 && c->rope_dims <= c->head_dim &&
           (c->rope_frequencies || !c->rope_dims) && c->norm_eps > 0 && isfinite(c->rope_factor) &&
           c->rope_factor > 0 && isfinite(c->query_beta) && (c->query_beta == 0 || c->query_span >= 1);
}

/* Set a linear layer of the decoder. Return 0 if the matrix does not have the sizes [out, in]. */
static int set_linear(rvm_decoder *d, linear *l, const rvm_matrix *m, const float *bias, size_t out, size_t in) {
    *l = (linear){.matrix = m, .bias = bias, .in = in, .out = out};
    if (!m || rvm_matrix_rows(m) != out || rvm_matrix_cols(m) != in) return 0;
    l->tiles = rvm_matrix_tiles(m);
    const rvm_acts_kind kind = rvm_matrix_acts(m, d->config.precise ? 16 : 8);
    while (d->acts[l->form] != kind) l->form++;
    d->wanted[l->form] = 1;
    return 1;
}

static int set_layer(rvm_decoder *d, layer *to, const rvm_decoder_layer *from) {
    const size_t dim = d->config.hidden_size, f = d->config.intermediate_size;
    const size_t out[] = {d->q_width, d->kv_width, d->kv_width, dim, f, f, dim};
    const size_t in[] = {dim, dim, dim, d->q_width, dim, dim, f};
    to->input_norm = from->input_norm, to->post_norm = from->post_norm;
    to->input_norm_bias = from->input_norm_bias, to->post_norm_bias = from->post_norm_bias;
    to->q_norm = from->q_norm, to->k_norm = from->k_norm, to->no_rope = from->no_rope != 0;
    for (size_t i = 0; i < RVM_N_PROJ; i++)
        if ((d->gated || i != RVM_GATE_PROJ) &&
            !set_linear(d, to->linear + i, from->matrix[i], from->bias[i], out[i], in[i]))
            return 0;
    if (!d->gated && from->matrix[RVM_GATE_PROJ]) return 0;
    return to->input_norm && to->post_norm && !to->q_norm == !to->k_norm;
}

static int set_weights(rvm_decoder *d, const rvm_decoder_weights *w) {
    const size_t dim = d->config.hidden_size, v = d->config.vocab_size;
    if (!w->embedding || !w->norm || !w->layers) return 0;
    if (rvm_matrix_rows(w->embedding) != v || rvm_matrix_cols(w->embedding) != dim) return 0;
    d->embedding = w->embedding, d->norm = w->norm, d->norm_bias = w->norm_bias;
    d->gated = w->layers[0].matrix[RVM_GATE_PROJ] != NULL;
    for (size_t i = 0; i < d->config.n_layers; i++)
        if (!set_layer(d, d->layers + i, w->layers + i)) return 0;
    return set_linear(d, &d->head, w->lm_head, NULL, v, dim);
}

static void set_sizes(rvm_decoder *d) {
    const rvm_decoder_config *c = &d->config;
    const size_t ins[] = {c->hidden_size, c->intermediate_size, (size_t)c->n_heads * c->head_dim};
    d->q_width = ins[2];
    d->kv_width = (size_t)c->n_kv_heads * c->head_dim;
    d->qkv_width = d->q_width + 2 * d->kv_width;
    d->group = c->n_heads / c->n_kv_heads;
    d->query_block = d->group < QUERY_ROWS ? QUERY_ROWS / d->group : 1;
    for (size_t i = 0; i < 3; i++) d->most_in = ins[i] > d->most_in ? ins[i] : d->most_in;
    d->acts[FORM_FLOAT] = RVM_ACTS_FLOAT;
    d->acts[FORM_GROUPS] = c->precise ? RVM_ACTS_16 : RVM_ACTS_8;
    d->acts[FORM_SUPER] = c->precise ? RVM_ACTS_SUPER_16 : RVM_ACTS_SUPER_8;
}

static int fill(rvm_decoder *d, const rvm_decoder_weights *weights) {
    const rvm_decoder_config *c = &d->config;
    d->matmul = rvm_matmul_impl(c->impl);
    if (!d->matmul || !(d->kernels = rvm_layers_impl(rvm_matmul_layers(d->matmul)))) return RVM_BAD_ARGUMENT;
    set_sizes(d);
    d->layers = calloc(c->n_layers, sizeof *d->layers);
    d->frequencies = malloc((c->rope_dims / 2 + 1) * sizeof *d->frequencies);
    if (!d->layers || !d->frequencies || !(d->pool = pool_create(c->threads))) return RVM_NO_MEMORY;
    if (c->alibi_slopes) {
        if (!(d->slopes = malloc(c->n_heads * sizeof *d->slopes))) return RVM_NO_MEMORY;
        memcpy(d->slopes, c->alibi_slopes, c->n_heads * sizeof *d->slopes);
        d->config.alibi_slopes = d->slopes;
    }
    if (c->rope_dims) memcpy(d->frequencies, c->rope_frequencies, c->rope_dims / 2 * sizeof *d->frequencies);
    d->config.rope_frequencies = d->frequencies, d->config.impl = d->matmul->name;
    if (!set_weights(d, weights)) return RVM_BAD_ARGUMENT;
    arena a = {NULL, 0};
    lay_out(&a, d);
    d->arena = aligned_alloc(ALIGN, d->arena_bytes = a.used);
    if (!d->arena) return RVM_NO_MEMORY;
    a = (arena){d->arena, 0};
    lay_out(&a, d);
    fill_still(d);
    return RVM_OK;
}

int rvm_decoder_create(const rvm_decoder_config *config, const rvm_decoder_weights *weights, rvm_decoder **out) {
    if (!out) return RVM_BAD_ARGUMENT;
    *out = NULL;
    if (!config || !weights || !good_config(config)) return RVM_BAD_ARGUMENT;
    rvm_decoder *d = calloc(1, sizeof *d);
    if (!d) return RVM_NO_MEMORY;
    d->config = *config;
    atomic_flag_clear(&d->busy);
    const int rc = fill(d, weights);
    if (rc == RVM_OK) *out = d;
    else rvm_decoder_destroy(d);
    return rc;
}

void rvm_decoder_destroy(rvm_decoder *d) {
    if (!d) return;
    pool_destroy(d->pool);
    for (size_t i = 0; d->layers && i < d->config.n_layers; i++)
        for (size_t m = 0; m < RVM_N_PROJ; m++) free(d->layers[i].linear[m].lora.a);
    free(d->head.lora.a);
    free(d->embedding_lora.a);
    free(d->layers);
    free(d->frequencies);
    free(d->slopes);
    free(d->arena);
    free(d);
}

const char *rvm_decoder_matmul_name(const rvm_decoder *d) { return d->matmul->name; }
size_t rvm_decoder_bytes(const rvm_decoder *d) { return d->arena_bytes; }

int rvm_decoder_use_threads(rvm_decoder *d, uint32_t n) {
    if (!d || n == 0) return RVM_BAD_ARGUMENT;
    pool_limit(d->pool, n);
    return RVM_OK;
}

void rvm_decoder_profile(rvm_decoder *d, double seconds[RVM_N_PARTS]) {
    memcpy(seconds, d->seconds, sizeof d->seconds);
    memset(d->seconds, 0, sizeof d->seconds);
}

/* The place of a LoRA: its field in the decoder, and the sizes of its matrices A [in, rank] and B [rank, out]. */
typedef struct {
    lora *lora;
    size_t in, out;
} place;

/* Return the place of a module in layer i. The field `lora` is NULL if the model does not have the module. */
static place place_of(rvm_decoder *d, size_t i, rvm_module module) {
    if (module == RVM_EMBEDDING) return (place){&d->embedding_lora, d->config.vocab_size, d->config.hidden_size};
    if (module != RVM_LM_HEAD && (module >= RVM_N_PROJ || i >= d->config.n_layers)) return (place){0};
    linear *l = module == RVM_LM_HEAD ? &d->head : d->layers[i].linear + module;
    return l->matrix ? (place){&l->lora, l->in, l->out} : (place){0};
}

static int copy_lora(lora *to, const place *p, const float *a, const float *b, int bits, size_t rank, float scale) {
    const size_t na = rank * lora_words(p->in, bits), nb = rank * lora_words(p->out, bits);
    float *memory = malloc((na + nb) * sizeof *memory);
    if (!memory) return RVM_NO_MEMORY;
    memcpy(memory, a, na * sizeof *a);
    memcpy(memory + na, b, nb * sizeof *b);
    *to = (lora){memory, memory + na, bits, rank, scale};
    return RVM_OK;
}

int rvm_decoder_set_lora(rvm_decoder *d, size_t i, rvm_module module, const float *lora_a, const float *lora_b,
                         int bits, size_t rank, float scale) {
    if (!d || rank > RVM_MAX_RANK || (bits != 32 && bits != 4) || (rank && (!lora_a || !lora_b)) || !isfinite(scale)) return RVM_BAD_ARGUMENT;
    const place p = place_of(d, i, module);
    if (!p.lora) return RVM_BAD_ARGUMENT;
    if (atomic_flag_test_and_set(&d->busy)) return RVM_BUSY;
    lora made = {0};
    const int rc = rank ? copy_lora(&made, &p, lora_a, lora_b, bits, rank, scale) : RVM_OK;
    if (rc == RVM_OK) {
        free(p.lora->a);
        *p.lora = made;
    }
    atomic_flag_clear(&d->busy);
    return rc;
}
