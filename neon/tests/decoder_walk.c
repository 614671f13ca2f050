/* This file has the decoders, the walk and the comparison of decoder_walk.h. */
#include "decoder_walk.h"

#include <math.h>
#include <stdlib.h>

rvm_decoder *decoder(const model *m, const char *impl, uint32_t threads) {
    rvm_decoder_config config = m->config;
    rvm_decoder *d = NULL;
    config.impl = impl, config.threads = threads;
    const int rc = rvm_decoder_create(&config, &m->weights, &d);
    CHECK(rc == RVM_OK && d, "%d", rc);
    return d;
}

int runs_few(void) { return getenv("RVM_FEW") != NULL; }

int32_t token(size_t i) { return (int32_t)(i * 37 % V); }

sequence start(const model *m, rvm_decoder *d) {
    sequence c = sequence_of(d, STEPS);
    c.keep = m->config.sliding_window ? m->config.sliding_window + 20 : 0;
    c.hot = m->shape.hot, c.warm = m->shape.warm;
    return c;
}

void walk(sequence *c, float *logits) {
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

float *walk_alone(const model *m, const char *impl, uint32_t threads) {
    rvm_decoder *d = decoder(m, impl, threads);
    sequence c = start(m, d);
    float *logits = calloc(ROWS * V, sizeof *logits);
    walk(&c, logits);
    sequence_end(&c);
    rvm_decoder_destroy(d);
    return logits;
}

double distance(const float *a, const float *b, size_t n) {
    double worst = 0, top = 0;
    for (size_t i = 0; i < n; i++) {
        worst = fmax(worst, fabs((double)a[i] - b[i]));
        top = fmax(top, fabs((double)b[i]));
        if (isnan(a[i]) || isnan(b[i])) return INFINITY;
    }
    return worst / top;
}

model *make_model(size_t i, size_t n, shape s) {
    if (i + 3 == n) return make_family(s);
    if (i + 2 == n) return make_layer_norms(s);
    return i + 1 == n ? make_alibi(s) : make(s);
}
