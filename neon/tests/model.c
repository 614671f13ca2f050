/* This file makes the random models of model.h. */
#include "model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int failures;

static uint32_t state = 1;

static uint32_t next(void) { return state = state * 1664525u + 1013904223u; }

static float uniform(void) { return (float)(next() >> 8) / 8388608.0f - 1.0f; } /* [-1, 1) */

float *floats(size_t n, float spread, float middle) {
    float *x = malloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = middle + spread * uniform();
    return x;
}

static void *own(model *m, void *p) { return m->owned[m->n_owned++] = p; }

static const rvm_matrix *matrix(model *m, rvm_kind kind, size_t rows, size_t cols) {
    const int quantised = kind == RVM_Q4 || kind == RVM_Q8;
    const size_t words = rows * cols / (kind == RVM_Q4 ? 8 : 4), groups = rows * cols / 32;
    float *scales = floats(groups, 0.01f, 0.02f), *biases = floats(groups, 0.02f, kind == RVM_Q4 ? -0.15f : -2.5f);
    float *plain = floats(rows * cols, 0.15f, 0);
    uint32_t *packed = malloc(words * sizeof *packed);
    for (size_t i = 0; i < words; i++) packed[i] = next() ^ next() >> 13;
    if (kind == RVM_F16) rvm_layers_impl("scalar")->to_half(plain, rows * cols, (uint16_t *)plain);
    if (kind == RVM_BF16)
        for (size_t i = 0; i < rows * cols; i++) memcpy((uint16_t *)plain + i, (uint16_t *)(plain + i) + 1, 2);
    rvm_matrix_spec spec;
    int rc = rvm_matrix_plan(kind, rows, cols, 32, scales, biases, RVM_F32, &spec);
    void *memory = aligned_alloc(RVM_ALIGNMENT, rvm_matrix_bytes(&spec));
    const void *from = quantised ? (void *)packed : (void *)plain;
    if (rc == RVM_OK) rc = rvm_matrix_pack(&spec, from, scales, biases, RVM_F32, 0, rows, memory);
    CHECK(rc == RVM_OK, "%d", rc);
    free(scales), free(biases), free(plain), free(packed);
    return own(m, memory);
}

model *make(shape s) {
    model *m = calloc(1, sizeof *m);
    m->shape = s;
    const size_t d = 64, f = 160, q = (size_t)s.heads * s.head_dim, kv = (size_t)s.kv_heads * s.head_dim, v = 333;
    state = 7;
    for (size_t i = 0; i < s.head_dim / 2; i++) m->frequencies[i] = pow(10000.0, -2.0 * (double)i / s.head_dim);
    for (size_t i = 0; i < 3; i++) {
        rvm_decoder_layer *l = m->layers + i;
        const size_t out[] = {q, kv, kv, d, f, f, d}, in[] = {d, d, d, q, d, d, f};
        for (size_t j = 0; j < RVM_N_PROJ; j++) {
            l->matrix[j] = matrix(m, s.kind, out[j], in[j]);
            if (i == 1) l->bias[j] = own(m, floats(out[j], 0.1f, 0));
        }
        l->input_norm = own(m, floats(d, 0.2f, 1));
        l->post_norm = own(m, floats(d, 0.2f, 1));
    }
    const rvm_matrix *embedding = matrix(m, s.kind, v, d);
    m->weights = (rvm_decoder_weights){embedding, embedding, own(m, floats(d, 0.2f, 1)), m->layers, NULL};
    m->config = (rvm_decoder_config){.n_layers = 3, .n_heads = s.heads, .n_kv_heads = s.kv_heads,
                                     .head_dim = s.head_dim, .hidden_size = 64, .intermediate_size = 160,
                                     .vocab_size = 333, .sliding_window = s.window, .max_tokens = 96, .threads = 1,
                                     .precise = 1, .norm_eps = 1e-5f, .rope_dims = s.head_dim,
                                     .rope_frequencies = m->frequencies, .rope_factor = 1};
    return m;
}

model *make_family(shape s) {
    model *m = make(s);
    for (size_t i = 0; i < 3; i++) {
        m->layers[i].q_norm = own(m, floats(m->shape.head_dim, 0.3f, 1));
        m->layers[i].k_norm = own(m, floats(m->shape.head_dim, 0.3f, 1));
    }
    m->layers[1].no_rope = 1;
    m->config.rope_factor = 1.2;
    m->config.query_beta = 0.1, m->config.query_span = 50;
    return m;
}

model *make_layer_norms(shape s) {
    model *m = make(s);
    for (size_t i = 0; i < 3; i++) {
        m->layers[i].input_norm_bias = own(m, floats(m->config.hidden_size, 0.3f, 0));
        m->layers[i].post_norm_bias = own(m, floats(m->config.hidden_size, 0.3f, 0));
    }
    m->weights.norm_bias = own(m, floats(m->config.hidden_size, 0.3f, 0));
    m->config.layer_norm = 1;
    m->config.rope_dims = s.head_dim / 4 * 2;
    return m;
}

model *make_alibi(shape s) {
    model *m = make_layer_norms(s);
    for (size_t i = 0; i < 3; i++) m->layers[i].matrix[RVM_GATE_PROJ] = NULL;
    for (size_t i = 0; i < 3; i++) m->layers[i].bias[RVM_GATE_PROJ] = NULL;
    float *slopes = floats(s.heads, 0, 0);
    for (size_t i = 0; i < s.heads; i++) slopes[i] = powf(2, -8.0f * (float)(i + 1) / (float)s.heads);
    m->config.alibi_slopes = own(m, slopes);
    m->config.rope_dims = 0;
    return m;
}

void destroy(model *m) {
    for (size_t i = 0; i < m->n_owned; i++) free(m->owned[i]);
    free(m);
}
