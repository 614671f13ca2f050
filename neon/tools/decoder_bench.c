/* This program measures the time that the decoder needs for one token, and the times of the decoder's parts. The
 * program uses a random model of a given shape, so it needs no model file.
 *
 *   decoder_bench [shape] [threads] [context] [impl] [tiered]
 *
 * shape: starter (135M), 1b or 7b, with 4-bit weights in groups of 32. tiered: pages of tokens older than the newest
 * 256 have 8 bits in the KV cache, and pages of tokens older than the newest 2,048 have 4 bits.
 *
 * The program prints medians of the tokens per second: of a prefill of 256 tokens, and of decoding after `context`
 * tokens. The program also prints the mean milliseconds of each part of a decoded token, the rate at which a decoded
 * token reads the weights beside the rate of one thread that only reads memory, and the tokens per second of several
 * sequences of `context` tokens that are decoded together. */
#define _GNU_SOURCE
#include "../tests/sequence.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, size_t n) {
    qsort(x, n, sizeof *x, by_size);
    return x[n / 2];
}

static size_t weight_bytes;

/* Return a packed matrix. All matrices of a shape are packed from the same random rows, because new random rows for
 * each matrix would take minutes. */
static const rvm_matrix *matrix(size_t rows, size_t cols) {
    static uint32_t *packed;
    static float *scales, *biases;
    static size_t room;
    rvm_matrix_spec spec;
    if (rows * cols > room) {
        room = rows * cols;
        packed = realloc(packed, room / 2), scales = realloc(scales, room / 8), biases = realloc(biases, room / 8);
        for (size_t i = 0; i < room / 8; i++) packed[i] = (uint32_t)i * 2654435761u ^ (uint32_t)(i >> 7) * 40503u;
        for (size_t i = 0; i < room / 32; i++)
            scales[i] = (float)(5 + i % 7) / 1024.0f, biases[i] = -7.5f * scales[i] + (float)(i % 3) / 2048.0f;
    }
    int rc = rvm_matrix_plan(RVM_Q4, rows, cols, 32, scales, biases, RVM_F32, &spec);
    void *memory = aligned_alloc(RVM_ALIGNMENT, rvm_matrix_bytes(&spec));
    weight_bytes += rvm_matrix_bytes(&spec);
    if (rc == RVM_OK) rc = rvm_matrix_pack(&spec, packed, scales, biases, RVM_F32, 0, rows, memory);
    if (rc != RVM_OK) exit(2);
    return memory;
}

static float *ones(size_t n) {
    float *x = malloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = 1;
    return x;
}

typedef struct {
    const char *name;
    uint32_t layers, heads, kv_heads, head_dim, hidden, ffn, vocab;
} shape;

static const shape SHAPES[] = {{"starter", 30, 9, 3, 64, 576, 1536, 49152},
                               {"1b", 16, 32, 8, 64, 2048, 8192, 32768},
                               {"7b", 32, 32, 8, 128, 4096, 14336, 32000}};

static rvm_decoder *make(const shape *s, uint32_t threads, const char *impl) {
    rvm_decoder_layer *layers = calloc(s->layers, sizeof *layers);
    double *frequencies = malloc(s->head_dim / 2 * sizeof *frequencies);
    const size_t q = (size_t)s->heads * s->head_dim, kv = (size_t)s->kv_heads * s->head_dim;
    const size_t out[] = {q, kv, kv, s->hidden, s->ffn, s->ffn, s->hidden};
    const size_t in[] = {s->hidden, s->hidden, s->hidden, q, s->hidden, s->hidden, s->ffn};
    for (size_t i = 0; i < s->head_dim / 2; i++) frequencies[i] = pow(10000, -2.0 * (double)i / s->head_dim);
    for (size_t i = 0; i < s->layers; i++) {
        for (size_t j = 0; j < RVM_N_PROJ; j++) layers[i].matrix[j] = matrix(out[j], in[j]);
        layers[i].input_norm = ones(s->hidden), layers[i].post_norm = ones(s->hidden);
    }
    const rvm_matrix *embedding = matrix(s->vocab, s->hidden);
    const rvm_decoder_weights weights = {embedding, embedding, ones(s->hidden), layers, NULL};
    const rvm_decoder_config config = {
        .n_layers = s->layers, .n_heads = s->heads, .n_kv_heads = s->kv_heads, .head_dim = s->head_dim,
        .hidden_size = s->hidden, .intermediate_size = s->ffn, .vocab_size = s->vocab, .max_tokens = 256,
        .threads = threads, .precise = 1, .norm_eps = 1e-5f, .rope_dims = s->head_dim, .rope_frequencies = frequencies,
        .rope_factor = 1,
        .impl = impl};
    rvm_decoder *d;
    if (rvm_decoder_create(&config, &weights, &d) != RVM_OK) exit(2);
    return d;
}

/* Return the number of bytes per second that one thread can read from memory. */
static double read_rate(void) {
    const size_t n = (size_t)256 << 20;
    float *x = malloc(n);
    double times[5];
    memset(x, 1, n); /* the bytes are not 0: after calloc, all addresses share one page of zeros, which stays in a cache */
    for (size_t i = 0; i < 5; i++) {
        const double start = now();
        rvm_impl(NULL)->all_within(x, n / 4, 1);
        times[i] = now() - start;
    }
    free(x);
    return (double)n / median(times, 5);
}

static size_t bytes_held(const sequence *s) {
    size_t bytes = 0;
    for (size_t i = s->first; i < s->end; i++) bytes += rvm_decoder_page_bytes(s->d, (rvm_tier)s->pages[i].tier);
    return bytes;
}

enum { WIDEST = 32, STEPS = 32 };

/* Return the tokens per second when the decoder decodes `width` copies of one sequence together. */
static double batched(rvm_decoder *d, const shape *s, size_t context, size_t width) {
    static sequence copies[WIDEST];
    int32_t tokens[256] = {0};
    rvm_row rows[WIDEST];
    double times[STEPS];
    float *logits = malloc(width * s->vocab * sizeof *logits);
    for (size_t i = 0; i < width; i++) {
        copies[i] = sequence_of(d, context + STEPS);
        for (size_t n; copies[i].offset < context;) {
            n = context - copies[i].offset < 256 ? context - copies[i].offset : 256;
            if (sequence_forward(copies + i, tokens, n, 0, NULL, NULL, NULL) != RVM_OK) exit(3);
        }
    }
    for (size_t step = 0; step < STEPS; step++) {
        for (size_t i = 0; i < width; i++) {
            if (sequence_reserve(copies + i, 1) != RVM_OK) exit(3);
            rows[i] = (rvm_row){copies[i].pages, copies[i].offset++, (int32_t)(step * WIDEST + i)};
        }
        const double start = now();
        if (rvm_decoder_step(d, rows, width, 0, NULL, logits, NULL) != RVM_OK) exit(3);
        times[step] = now() - start;
    }
    for (size_t i = 0; i < width; i++) sequence_end(copies + i);
    free(logits);
    return (double)width / median(times, STEPS);
}

int main(int argc, char **argv) {
    const int tiered = strcmp(argv[argc - 1], "tiered") == 0;
    argc -= tiered;
    const char *name = argc > 1 ? argv[1] : "starter", *impl = argc > 4 ? argv[4] : NULL;
    const uint32_t threads = argc > 2 ? (uint32_t)atoi(argv[2]) : 1;
    const size_t context = argc > 3 ? (size_t)atoi(argv[3]) : 256;
    const shape *s = SHAPES;
    while (strcmp(s->name, name) != 0)
        if (++s == SHAPES + sizeof SHAPES / sizeof *SHAPES) return 1;
    rvm_decoder *d = make(s, threads, impl);
    sequence c = sequence_of(d, context + 512);
    if (tiered) c.hot = 256, c.warm = 2048;
    float *logits = malloc(s->vocab * sizeof *logits);
    int32_t tokens[256];
    double prefill[5], decode[64], parts[RVM_N_PARTS];
    for (int32_t i = 0; i < 256; i++) tokens[i] = i * 31 % (int32_t)s->vocab;
    for (size_t i = 0; i < 5; i++) {
        const double start = now();
        if (sequence_forward(&c, tokens, 256, 1, NULL, logits, NULL) != RVM_OK) return 3;
        prefill[i] = now() - start;
        sequence_trim(&c, 256);
    }
    while (c.offset < context)
        if (sequence_forward(&c, tokens, 256, 0, NULL, NULL, NULL) != RVM_OK) return 3;
    rvm_decoder_profile(d, parts);
    for (size_t i = 0; i < 64; i++) {
        const double start = now();
        if (sequence_forward(&c, tokens, 1, 1, NULL, logits, NULL) != RVM_OK) return 3;
        decode[i] = now() - start;
    }
    rvm_decoder_profile(d, parts);
    const double token = median(decode, 64), rate = read_rate();
    printf("%s, %s, %u threads: prefill %.0f tok/s, decode at %zu %.1f tok/s; weights %.0f MB at %.1f GB/s "
           "(one thread only reading: %.1f GB/s)\n", s->name, rvm_decoder_matmul_name(d), threads,
           256 / median(prefill, 5), context, 1 / token, 1e-6 * (double)weight_bytes,
           1e-9 * (double)weight_bytes / token, 1e-9 * rate);
    const char *names[] = {"embed", "qkv", "attend", "o", "gate_up", "down", "head"};
    for (size_t i = 0; i < RVM_N_PARTS; i++) printf("  %s %.3f ms", names[i], 1e3 * parts[i] / 64);
    printf("\n  pages %.1f MB\n", 1e-6 * (double)bytes_held(&c));
    sequence_end(&c);
    printf("  together:");
    for (size_t width = 1; width <= WIDEST; width *= 2) printf("  %zu: %.0f tok/s", width, batched(d, s, context, width));
    printf("\n");
    rvm_decoder_destroy(d);
    return 0;
}
