/* This header is a part of rvm.h, which includes it. */
#ifndef RVM_PUBLIC_LAYERS_H
#define RVM_PUBLIC_LAYERS_H

/* rvm_layers has the computations of a decoder between its matrix products: norms, rope, attention, activation
 * functions. */

/* RVM_PARTIAL: the number of floats of a row of partial attention: the sum O, the largest score m, the weights' sum l */
#define RVM_PARTIAL(head_dim) ((head_dim) + 2)

/* An rvm_row stands for the next token of one sequence, which has `offset` tokens. pages[i] holds the positions 64 i to
 * 64 i + 63 of the sequence. */
typedef struct {
    const rvm_page *pages;
    size_t offset;
    int32_t token;
} rvm_row;

/* The arguments of attention: queries of consecutive tokens, over one key-value head, for all `group` query heads that
 * share this head. */
typedef struct {
    const rvm_page *pages;    /* pages: [end_page]; the pages before first_page are not read */
    const rvm_row *rows;      /* rows: not NULL: query t is the next token of sequence rows[t]. Every row has the offset
                               * `position`, and `pages` is rows[0].pages. A page that all rows share is read once. */
    size_t head;              /* head: the index of the head-page in each page: layer * n_kv_heads + key-value head */
    const rvm_matmul *matmul; /* matmul: the implementation that reads pages of codes (warm, cold); can be NULL if all pages are hot */
    size_t head_dim, group;
    const float *q; /* q: the queries before rope: token t, head g begins at q + t * q_stride + g * head_dim */
    size_t q_stride;
    const float *turn; /* turn: [queries][head_dim]: the cosines, then the sines, of the rope angles of each query */
    size_t queries, position; /* position: the position of the first query; a query sees its own token and the earlier tokens (see window) */
    const float *slopes;      /* slopes: [group], ALiBi adds slope * (key's position - query's position) to a score; NULL: no slopes */
    size_t window;            /* window: the maximum number of tokens that a query sees, its own included; 0: no maximum */
    size_t first_page, end_page;
    float *out; /* out: the results: token t, head g begins at out + t * out_stride + g * head_dim */
    size_t out_stride;
    float *partial; /* partial: not NULL: attend writes here for merge, and not to out: [queries * group][RVM_PARTIAL(head_dim)] */
    float *scratch; /* scratch: scratch memory, [rvm_attention_scratch(queries * group, head_dim)] */
} rvm_attention;

RVM_API size_t rvm_attention_scratch(size_t rows, size_t head_dim);

/* An implementation of all layers for one instruction set. Arrays are float32 if no other type is named. T is
 * the number of tokens, and D is the width of a row. */
struct rvm_layers {
    const char *name; /* name: the name of the implementation, the same as in rvm_kernels */

    /* RMS norm: y = x / sqrt(mean(x^2) + eps) * weight      x, y: [T, D]   weight: [D] */
    int (*rms_norm)(const float *x, const float *weight, float eps, size_t tokens, size_t dim, float *y);

    /* LayerNorm: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias
     * x, y: [T, D]   weight: [D]   bias: [D] or NULL */
    int (*layer_norm)(const float *x, const float *weight, const float *bias, float eps, size_t tokens, size_t dim,
                      float *y);

    /* Turn the pairs (x_i, x_{i + d/2}) of each head by the angles of the token (RoPE). If traditional, turn the pairs
     * (x_2i, x_2i+1).
     * x, y: [T, heads, d]   turn: [T, d], the cosines of d/2 angles, then their sines */
    int (*rope)(const float *x, const float *turn, size_t tokens, size_t heads, size_t head_dim,
                int traditional, float *y);

    /* SwiGLU: y = gate / (1 + e^-gate) * up      y and gate can be the same array */
    int (*swiglu)(const float *gate, const float *up, size_t n, float *y);

    /* GELU: y = x * Phi(x), Phi: the cumulative standard normal distribution      y and x can be the same array */
    int (*gelu)(const float *x, size_t n, float *y);

    /* to_half converts floats to halves, and from_half converts halves to floats. to_half rounds to nearest, ties to
     * even; an overflow becomes infinity. from_half is exact. */
    int (*to_half)(const float *x, size_t n, uint16_t *y);
    int (*from_half)(const uint16_t *x, size_t n, float *y);

    /* Compute a LoRA, y += s (x A) B, in two steps, so that threads can share the columns of B. Step 1:
     * u = s x A      x: [T, in]   A: [in, R]   u: [T, R]
     *
     * bits: 32, or 4 for packed factors: A is then [R, packed in], and B is [R, packed out]. A packed row of n weights
     * has G = ceil(n / 32) groups of 32 weights, and a weight is scale * code + bias, with the scale and the bias of its
     * group. The row has 6 G words of 4 bytes:
     *
     *     4 G words: the codes, eight in a word, lowest bits first | G floats: the scales | G floats: the biases
     *
     * ruvmlx/lora/quantised.py packs rows. The codes after the n-th of a row are padding. */
    int (*lora_project)(const float *x, const float *lora_a, int bits, float s, size_t tokens, size_t in, size_t rank,
                        float *u);
    /* Step 2 of a LoRA: y[t][i] += (u B)[t][first + i], i < n      B: [R, out]   y: rows of `stride` floats */
    int (*lora_add)(const float *u, const float *lora_b, int bits, size_t tokens, size_t rank, size_t out, size_t first,
                    size_t n, float *y, size_t stride);

    /* Store the keys and values of T tokens of one head in a hot page, after the first `at` tokens of the page. k, v:
     * rows of `stride` floats; the function turns k by rope before it stores k. */
    int (*append)(const float *k, const float *v, size_t stride, const float *turn, size_t tokens,
                  size_t head_dim, size_t at, uint16_t *keys, uint16_t *values);

    /* Compute attention, softmax(q . k / sqrt(head_dim)) v, over the pages [first_page, end_page). */
    int (*attend)(const rvm_attention *a);

    /* Join `parts` partial results of attend into out[rows][head_dim]. Part i begins at partial + i * stride. */
    int (*merge)(const float *partial, size_t parts, size_t stride, size_t rows, size_t head_dim, float *out);

    /* Convert head-pages to a lower tier, as rvm_pages_demote does. All implementations give the same bytes. */
    int (*demote)(rvm_tier from, const uint8_t *src, rvm_tier to, uint8_t *dst, size_t n, size_t head_dim);
};

/* Return the layers of the implementation rvm_impl(name). */
RVM_API const rvm_layers *rvm_layers_impl(const char *name);

#endif
