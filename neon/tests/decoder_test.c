/* This test checks the decoder, pages and threads without Python, so it also runs under sanitizers and qemu. The build
 * links the library's sources, and the linker's --wrap counts calls of malloc and similar functions. */
#define _GNU_SOURCE
#include "decoder_walk.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static _Atomic size_t allocations, mappings;

#ifdef RVM_WRAPPED
void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t n);
void *__real_aligned_alloc(size_t align, size_t n);
void *__real_mmap(void *at, size_t n, int protection, int flags, int file, off_t offset);
void *__wrap_malloc(size_t n) {
    allocations++;
    return __real_malloc(n);
}
void *__wrap_calloc(size_t n, size_t size) {
    allocations++;
    return __real_calloc(n, size);
}
void *__wrap_realloc(void *p, size_t n) {
    allocations++;
    return __real_realloc(p, n);
}
void *__wrap_aligned_alloc(size_t align, size_t n) {
    allocations++;
    return __real_aligned_alloc(align, n);
}
void *__wrap_mmap(void *at, size_t n, int protection, int flags, int file, off_t offset) {
    mappings++;
    return __real_mmap(at, n, protection, flags, file, offset);
}
#endif

static void test_implementations(void) {
    const shape shapes[] = {{RVM_Q4, 4, 2, 32, 0, 0, 0},    {RVM_Q8, 6, 2, 16, 40, 0, 0},
                            {RVM_F16, 3, 3, 18, 0, 0, 0},   {RVM_F32, 8, 1, 80, 1, 0, 0},
                            {RVM_BF16, 5, 1, 128, 70, 0, 0}, {RVM_Q4, 4, 2, 64, 0, 64, 0},
                            {RVM_F16, 6, 2, 18, 0, 64, 64}, {RVM_F32, 5, 1, 128, 150, 64, 64},
                            {RVM_Q8, 6, 2, 32, 0, 64, 64},
                            {RVM_Q4, 3, 1, 64, 0, 64, 64},  {RVM_F32, 5, 5, 80, 0, 64, 64}};
    const size_t n_shapes = sizeof shapes / sizeof *shapes;
    for (size_t s = 0; s < n_shapes; s++) {
        model *m = make_model(s, n_shapes, shapes[s]);
        float *want = walk_alone(m, "scalar", 1);
        const double again = distance(want + (STEPS - 20) * V, want + STEPS * V, 20 * V);
        /* Products with quantised matrices round the activations to integers. If two activations differ in their last
         * bit, the rounded activations can differ by one step. */
        const int rounds = shapes[s].kind == RVM_Q4 || shapes[s].kind == RVM_Q8;
        const double most = shapes[s].hot ? 1e-3 : rounds ? 3e-4 : 1e-4;
        CHECK(again < most, "shape %zu: a chunk differs from single tokens by %g", s, again);
        for (size_t i = 0; rvm_matmul_impl_name(i); i++) {
            const char *name = rvm_matmul_impl_name(i);
            if (runs_few() && i && (s || rvm_matmul_impl_name(i + 1))) continue;
            float *got = strcmp(name, "scalar") ? walk_alone(m, name, 1) : want, *other = walk_alone(m, name, 3);
            const double off = distance(got, want, ROWS * V);
            CHECK(off < 2e-3, "shape %zu: %s differs from scalar by %g", s, name, off);
            CHECK(memcmp(got, other, ROWS * V * sizeof *got) == 0, "shape %zu: %s with 3 threads", s, name);
            free(other);
            if (got != want) free(got);
            if (s == 0) printf("%s: compared\n", name);
        }
        free(want);
        destroy(m);
    }
}

/* Check that the decoder allocates no memory while it computes 64 tokens. */
static void test_no_allocation(void) {
    model *m = make((shape){RVM_Q4, 4, 2, 32, 0, 0, 0});
    rvm_decoder *d = decoder(m, NULL, 2);
    sequence c = start(m, d);
    float *logits = malloc(V * sizeof *logits), hidden[D];
    int32_t first[30] = {0};
    CHECK(sequence_reserve(&c, 30 + 64) == RVM_OK, "pages");
    CHECK(sequence_forward(&c, first, 30, 1, hidden, logits, NULL) == RVM_OK, "prefill");
    const size_t before = allocations, mapped = mappings;
    for (size_t i = 0; i < 64; i++) {
        const int32_t t = token(i);
        CHECK(sequence_forward(&c, &t, 1, 1, hidden, logits, NULL) == RVM_OK, "step %zu", i);
    }
    CHECK(allocations == before, "%zu allocations", allocations - before);
#ifdef RVM_WRAPPED
    CHECK(before > 0 && mappings == mapped, "%zu mappings", mappings - mapped);
    printf("64 tokens: %zu allocations, %zu mappings\n", allocations - before, mappings - mapped);
#else
    (void)mapped;
#endif
    free(logits);
    sequence_end(&c);
    rvm_decoder_destroy(d);
    destroy(m);
}

static void test_bad_arguments(void) {
    model *m = make((shape){RVM_Q4, 4, 2, 32, 0, 0, 0});
    rvm_decoder *d = decoder(m, NULL, 1), *none = NULL;
    sequence c = start(m, d);
    float *logits = malloc(97 * V * sizeof *logits);
    int32_t tokens[97] = {0};
    CHECK(sequence_forward(&c, tokens, 0, 0, NULL, NULL, NULL) == RVM_BAD_ARGUMENT, "no token");
    CHECK(sequence_forward(&c, tokens, 97, 1, NULL, logits, NULL) == RVM_BAD_ARGUMENT, "too many");
    CHECK(sequence_forward(&c, tokens, 2, 3, NULL, logits, NULL) == RVM_BAD_ARGUMENT, "too many outputs");
    tokens[1] = V;
    CHECK(sequence_forward(&c, tokens, 2, 1, NULL, logits, NULL) == RVM_BAD_ARGUMENT, "unknown token");
    tokens[1] = -1;
    CHECK(sequence_forward(&c, tokens, 2, 1, NULL, logits, NULL) == RVM_BAD_ARGUMENT, "negative token");
    CHECK(sequence_forward(&c, tokens, 1, 0, NULL, NULL, NULL) == RVM_OK, "one token unread");
    rvm_page pages[2] = {{c.pages[0].data, RVM_WARM, 0}};
    CHECK(rvm_decoder_forward(d, pages, 1, tokens, 1, 0, NULL, NULL, NULL) == RVM_BAD_ARGUMENT, "into a warm page");
    CHECK(rvm_decoder_forward(d, pages + 1, 1, tokens, 1, 0, NULL, NULL, NULL) == RVM_BAD_ARGUMENT, "no page");
    CHECK(rvm_decoder_forward(d, NULL, 1, tokens, 1, 0, NULL, NULL, NULL) == RVM_BAD_ARGUMENT, "no table");
    CHECK(rvm_decoder_prefill(d, pages, 1, tokens, 1, NULL, NULL, NULL) == RVM_BAD_ARGUMENT, "into a warm page");
    CHECK(rvm_decoder_prefill(d, c.pages, 1, tokens, 97, NULL, logits, NULL) == RVM_BAD_ARGUMENT, "too many");
    tokens[0] = V;
    CHECK(rvm_decoder_prefill(d, c.pages, 1, tokens, 1, NULL, logits, NULL) == RVM_BAD_ARGUMENT, "unknown token");
    CHECK(rvm_decoder_set_lora(d, 3, RVM_Q_PROJ, logits, logits, 32, 1, 1) == RVM_BAD_ARGUMENT, "layer 3 of 3");
    CHECK(rvm_decoder_set_lora(d, 1, RVM_Q_PROJ, logits, logits, 8, 1, 1) == RVM_BAD_ARGUMENT, "8 bits");
    rvm_decoder_config config = m->config;
    config.head_dim = 33;
    CHECK(rvm_decoder_create(&config, &m->weights, &none) == RVM_BAD_ARGUMENT && !none, "odd head_dim");
    config = m->config, config.hidden_size = 96;
    CHECK(rvm_decoder_create(&config, &m->weights, &none) == RVM_BAD_ARGUMENT && !none, "other matrices");
    config = m->config, config.impl = "avx1024";
    CHECK(rvm_decoder_create(&config, &m->weights, &none) == RVM_BAD_ARGUMENT && !none, "unknown impl");
    sequence_end(&c);
    rvm_decoder_destroy(d);
    rvm_decoder_destroy(NULL);
    free(logits);
    destroy(m);
}

/* Check that parts of a prompt give the bits of the whole prompt, and that rvm_decoder_forward gives other bits.
   tests/backends/test_gguf_formats.py compares the values. */
static void test_prefill(void) {
    enum { N = 60 };
    const size_t ends[] = {1, 18, 47, N};
    model *m = make((shape){RVM_Q4, 4, 2, 32, 0, 0, 0});
    rvm_decoder *d = decoder(m, NULL, 2);
    sequence exact = start(m, d), parts = start(m, d), whole = start(m, d);
    float *want = malloc(V * sizeof *want), *got = malloc(V * sizeof *got), hidden[2][D];
    int32_t tokens[N];
    for (size_t i = 0; i < N; i++) tokens[i] = token(i);
    CHECK(sequence_reserve(&whole, N) == RVM_OK && sequence_reserve(&parts, N) == RVM_OK, "pages");
    CHECK(rvm_decoder_prefill(d, whole.pages, 0, tokens, N, hidden[0], want, NULL) == RVM_OK, "whole");
    for (size_t i = 0, begin = 0; i < 4; begin = ends[i++]) {
        const int last = ends[i] == N;
        CHECK(rvm_decoder_prefill(d, parts.pages, begin, tokens + begin, ends[i] - begin, last ? hidden[1] : NULL,
                                  last ? got : NULL, NULL) == RVM_OK, "part %zu", i);
    }
    CHECK(memcmp(got, want, V * sizeof *got) == 0, "logits");
    CHECK(memcmp(hidden[0], hidden[1], sizeof *hidden) == 0, "hidden states");
    CHECK(sequence_forward(&exact, tokens, N, 1, NULL, got, NULL) == RVM_OK, "forward");
    CHECK(memcmp(got, want, V * sizeof *got) != 0, "activations of 16 bits");
    free(want), free(got);
    sequence_end(&whole), sequence_end(&parts), sequence_end(&exact);
    rvm_decoder_destroy(d);
    destroy(m);
}

/* Check the output head alone. Check that LoRAs of 32 and of 4 bits change the logits, and that the logits have the same
   bits as before after the LoRAs are removed. The same random words serve as floats and as packed rows. */
static void test_head_and_lora(void) {
    model *m = make((shape){RVM_Q8, 4, 2, 32, 0, 0, 0});
    rvm_decoder *d = decoder(m, NULL, 2);
    float *plain = calloc(ROWS * V, sizeof *plain), *changed = calloc(ROWS * V, sizeof *changed);
    float *a = floats(160 * 3, 0.3f, 0), *b = floats(3 * V, 0.3f, 0), *hidden = floats(200 * D, 1, 0);
    for (size_t i = 0; i < 5; i++) {
        sequence c = start(m, d);
        for (int module = 0; module <= RVM_LM_HEAD; module++)
            CHECK(rvm_decoder_set_lora(d, 1, (rvm_module)module, a, b, i == 3 ? 4 : 32, i % 2 ? 3 : 0, 0.5f) == RVM_OK,
                  "%d", module);
        walk(&c, i ? changed : plain);
        const double off = distance(changed, plain, ROWS * V);
        if (i) CHECK(i % 2 ? off > 0.01 : off == 0, "step %zu: %g", i, off);
        sequence_end(&c);
    }
    float *many = calloc(200 * V, sizeof *many), *one = calloc(V, sizeof *one);
    CHECK(rvm_decoder_head(d, hidden, 200, 0, many) == RVM_OK, "200 tokens");
    CHECK(rvm_decoder_head(d, hidden + 131 * D, 1, 0, one) == RVM_OK, "one token");
    CHECK(memcmp(one, many + 131 * V, V * sizeof *one) == 0, "one of many");
    free(plain), free(changed), free(a), free(b), free(hidden), free(many), free(one);
    rvm_decoder_destroy(d);
    destroy(m);
}

int main(void) {
    test_implementations();
    test_rows();
    test_coarse_rows();
    test_forks_in_a_batch();
    test_replies();
    test_bad_rows();
    test_no_allocation();
    test_bad_arguments();
    test_prefill();
    test_cancel();
    if (!getenv("RVM_NO_FORK")) test_pools_end(); /* too slow there, with so many threads */
    if (!getenv("RVM_NO_FORK")) test_fork(); /* RVM_NO_FORK: qemu-user and TSan permit no threads in forked children */
    test_threads();
    test_head_and_lora();
    test_demotion_beside_a_call();
    printf("%d failures\n", failures);
    return failures ? 1 : 0;
}
