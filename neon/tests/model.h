/* This header makes random models of small, unusual shapes, and defines CHECK. */
#ifndef RVM_MODEL_H
#define RVM_MODEL_H

#include "rvm.h"

#include <stdio.h>

extern int failures;

#define CHECK(condition, ...)                                      \
    do {                                                           \
        if (!(condition)) {                                        \
            failures++;                                            \
            printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            printf(__VA_ARGS__);                                   \
            printf("\n");                                         \
        }                                                          \
    } while (0)

typedef struct {
    rvm_kind kind;
    uint32_t heads, kv_heads, head_dim, window;
    uint32_t hot, warm; /* hot, warm: the ages in tokens at which pages become warm and cold; 0: never */
} shape;

/* A random model: the memory to free, and the configuration and weights for a decoder. */
typedef struct {
    shape shape;
    rvm_decoder_config config;
    rvm_decoder_weights weights;
    rvm_decoder_layer layers[3];
    double frequencies[RVM_MAX_HEAD_DIM / 2];
    void *owned[64];
    size_t n_owned;
} model;

/* Return n random numbers in [middle - spread, middle + spread). The caller frees them. */
float *floats(size_t n, float spread, float middle);

/* Make a random model of this shape with Llama's architecture. */
model *make(shape s);

/* Make a model whose queries and keys have norms. One layer of the model has no rope, and the model scales queries by
 * their positions. */
model *make_family(shape s);

/* Make a model whose LayerNorms have biases. Rope turns a part of each head. */
model *make_layer_norms(shape s);

/* Make a model as make_layer_norms does, but without rope: ALiBi's slopes change the scores. The MLP of the model has
 * no gate. */
model *make_alibi(shape s);

void destroy(model *m);

#endif
