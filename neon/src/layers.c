/* This file has the kernels of a decoder between its matrix products (norms, rope, activation functions, LoRA);
 * rvm_layers.h has the formulas. The build compiles this file once for each instruction set, with -DRVM_IMPL=<name>.
 * The file exports only the table rvm_layers_<name>. Attention is in attend.c, and demotion is in demote.c. */
#include "layers.h"

#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

static int k_rms_norm(const float *x, const float *weight, float eps, size_t tokens, size_t dim, float *y) {
    REQUIRE(x && weight && y && tokens && dim);
    for (; tokens--; x += dim, y += dim) {
        const float scale = 1.0f / sqrtf(dot_of(x, x, dim) / (float)dim + eps);
        SIMD()
        for (size_t i = 0; i < dim; i++) y[i] = x[i] * scale * weight[i];
    }
    return RVM_OK;
}

/* The variance is the mean of the squared differences from the mean. The mean of squares minus the squared mean would
 * lose all digits in a row whose numbers are far from zero. */
static int k_layer_norm(const float *x, const float *weight, const float *bias, float eps, size_t tokens, size_t dim,
                        float *y) {
    REQUIRE(x && weight && y && tokens && dim);
    for (; tokens--; x += dim, y += dim) {
        const float mean = sum_of(x, dim) / (float)dim;
        SIMD()
        for (size_t i = 0; i < dim; i++) y[i] = x[i] - mean;
        const float scale = 1.0f / sqrtf(dot_of(y, y, dim) / (float)dim + eps);
        if (bias) {
            SIMD()
            for (size_t i = 0; i < dim; i++) y[i] = y[i] * scale * weight[i] + bias[i];
        } else {
            SIMD()
            for (size_t i = 0; i < dim; i++) y[i] = y[i] * scale * weight[i];
        }
    }
    return RVM_OK;
}

static void rope_pairs(const float *restrict x, const float *restrict turn, size_t half, float *restrict y) {
    const float *c = turn, *s = turn + half;
    for (size_t i = 0; i < half; i++) {
        const float a = x[2 * i], b = x[2 * i + 1];
        y[2 * i] = a * c[i] - b * s[i];
        y[2 * i + 1] = a * s[i] + b * c[i];
    }
}

static int k_rope(const float *x, const float *turn, size_t tokens, size_t heads, size_t head_dim,
                  int traditional, float *y) {
    REQUIRE(x && turn && y && tokens && heads && head_dim && head_dim % 2 == 0);
    for (size_t t = 0; t < tokens; t++, turn += head_dim)
        for (size_t h = 0; h < heads; h++, x += head_dim, y += head_dim)
            if (traditional)
                rope_pairs(x, turn, head_dim / 2, y);
            else
                rope_head(x, turn, head_dim / 2, 1.0f, y);
    return RVM_OK;
}

static int k_swiglu(const float *gate, const float *up, size_t n, float *y) {
    REQUIRE(gate && up && y && n);
    SIMD()
    for (size_t i = 0; i < n; i++) y[i] = gate[i] / (1.0f + exp_f32(-gate[i])) * up[i];
    return RVM_OK;
}

/* Return gelu(x) = x (1 + erf(x / sqrt(2))) / 2. The smaller tail of the distribution is erfc(z) / 2, z = |x| /
 * sqrt(2). With t = 1 / (1 + 0.4 z), erfc(z) = e^(-z^2) t p(t). p is a minimax fit of degree 8: the extremes of its
 * relative error are about equal, 1.3e-7, or 2.6e-7 with the rounding of p in float32. */
static inline float gelu_of(float x) {
    const float z = fabsf(x) * 0.70710678118654752f, t = 1.0f / (1.0f + 0.4f * z);
    float p = 0.050284482538700104f;
    p = p * t - 0.18299277126789093f;
    p = p * t + 0.16923823952674866f;
    p = p * t - 0.005742526613175869f;
    p = p * t + 0.14149895310401917f;
    p = p * t + 0.1685229390859604f;
    p = p * t + 0.207845538854599f;
    p = p * t + 0.22566939890384674f;
    p = p * t + 0.22567586600780487f;
    const float tail = 0.5f * t * p * exp_up_to_88(-z * z);
    return x * (x < 0 ? tail : 1.0f - tail);
}

static int k_gelu(const float *x, size_t n, float *y) {
    REQUIRE(x && y && n);
    SIMD()
    for (size_t i = 0; i < n; i++) y[i] = gelu_of(x[i]);
    return RVM_OK;
}

static int k_to_half(const float *x, size_t n, uint16_t *y) {
    REQUIRE(x && y && n);
    to_halves(x, n, y);
    return RVM_OK;
}

static int k_from_half(const uint16_t *x, size_t n, float *y) {
    REQUIRE(x && y && n);
    from_halves(x, n, y);
    return RVM_OK;
}

enum { PACKED = 256 }; /* PACKED: the number of weights of a packed row that are unpacked at a time */

/* Unpack the groups that have the weights [first, first + n) of a packed row of `width` weights. */
static void unpack_groups(const float *row, size_t width, size_t first, size_t n, float *restrict y) {
    const size_t groups = lora_words(width, 4) / 6, end = (first + n + 31) / 32;
    const float *scales = row + 4 * groups, *biases = scales + groups;
    for (size_t g = first / 32, at = 0; g < end; g++, at += 32) {
        const uint8_t *codes = (const uint8_t *)row + 16 * g;
        const float s = scales[g], b = biases[g];
        for (size_t j = 0; j < 16; j++) {
            y[at + 2 * j] = s * (float)(codes[j] & 15) + b;
            y[at + 2 * j + 1] = s * (float)(codes[j] >> 4) + b;
        }
    }
}

/* lora_project of a packed A. Each part of A is unpacked once for all tokens. */
static void project_packed(const float *x, const float *a, float s, size_t tokens, size_t in, size_t rank, float *u) {
    float w[PACKED];
    memset(u, 0, tokens * rank * sizeof *u);
    for (size_t k = 0; k < rank; k++, a += lora_words(in, 4))
        for (size_t i = 0; i < in; i += PACKED) {
            const size_t n = min_size(PACKED, in - i);
            unpack_groups(a, in, i, n, w);
            for (size_t t = 0; t < tokens; t++) u[t * rank + k] += s * dot_of(x + t * in + i, w, n);
        }
}

/* lora_add of a packed B. Each part of B, four rows at a time, is unpacked once for all tokens. */
static void add_packed(const float *u, const float *b, size_t tokens, size_t rank, size_t out, size_t first, size_t n,
                       float *y, size_t stride) {
    float w[4][PACKED + 32], c[4];
    for (size_t i = 0; i < n; i += PACKED)
        for (size_t k = 0; k < rank; k += 4) {
            const size_t rows = min_size(4, rank - k), some = min_size(PACKED, n - i);
            for (size_t r = 0; r < rows; r++) unpack_groups(b + (k + r) * lora_words(out, 4), out, first + i, some, w[r]);
            for (size_t t = 0; t < tokens; t++) {
                memcpy(c, u + t * rank + k, rows * sizeof *c);
                add_rows(y + t * stride + i, w[0] + (first + i) % 32, PACKED + 32, c, rows, some);
            }
        }
}

static int k_lora_project(const float *x, const float *lora_a, int bits, float s, size_t tokens, size_t in, size_t rank,
                          float *u) {
    REQUIRE(x && lora_a && u && tokens && in && rank && rank <= RVM_MAX_RANK && (bits == 32 || bits == 4));
    if (bits == 4) project_packed(x, lora_a, s, tokens, in, rank, u);
    else for (size_t t = 0; t < tokens; t++) project(u + t * rank, x + t * in, lora_a, s, in, rank);
    return RVM_OK;
}

static int k_lora_add(const float *u, const float *lora_b, int bits, size_t tokens, size_t rank, size_t out,
                      size_t first, size_t n, float *y, size_t stride) {
    REQUIRE(u && lora_b && y && tokens && n && rank && rank <= RVM_MAX_RANK && first + n <= out);
    REQUIRE(bits == 32 || bits == 4);
    if (bits == 4) {
        add_packed(u, lora_b, tokens, rank, out, first, n, y, stride);
        return RVM_OK;
    }
    float c[RVM_MAX_RANK]; /* a copy of u, so that clang knows that y does not overlap it */
    for (size_t i = 0; i < n; i += BLOCK) /* a block of B stays in the L1 cache while all tokens use it */
        for (size_t t = 0; t < tokens; t++) {
            memcpy(c, u + t * rank, rank * sizeof *c);
            add_rows(y + t * stride + i, lora_b + first + i, out, c, rank, min_size(BLOCK, n - i));
        }
    return RVM_OK;
}

const rvm_layers LAYERS_JOIN(rvm_layers, RVM_IMPL) = {
    .name = TEXT(RVM_IMPL),
    .rms_norm = k_rms_norm,
    .layer_norm = k_layer_norm,
    .rope = k_rope,
    .swiglu = k_swiglu,
    .gelu = k_gelu,
    .to_half = k_to_half,
    .from_half = k_from_half,
    .lora_project = k_lora_project,
    .lora_add = k_lora_add,
    .append = LAYER(append),
    .attend = LAYER(attend),
    .merge = LAYER(merge),
    .demote = LAYER(demote),
};
