/* This program makes random calls of the C API with libFuzzer and -fsanitize=address: `python -m tests.campaigns.fuzz_c`.
 *
 * The first byte of an input selects a function of the C API, the next bytes are its numeric arguments, and the
 * remaining bytes fill its arrays. An array has exactly as many bytes as the API says, so an access beyond it ends the
 * program. The program does not use sizes above MOST bytes, even if the API accepts them. */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */
#include "rvm.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 1 << 20 };

typedef struct {
    const uint8_t *at;
    size_t left;
} input;

static uint64_t take(input *in, size_t bytes) {
    uint64_t value = 0;
    const size_t n = bytes < in->left ? bytes : in->left;
    memcpy(&value, in->at, n);
    in->at += n, in->left -= n;
    return value;
}

/* Return a size from the input, usually a number below 250, sometimes any number. */
static size_t take_size(input *in) {
    const uint64_t byte = take(in, 1);
    return byte < 250 ? byte : take(in, 8);
}

/* Return an array of `bytes` bytes at a multiple of 64, filled with the remaining bytes of the input. */
static void *array(const input *in, size_t bytes) {
    void *made;
    if (posix_memalign(&made, RVM_ALIGNMENT, bytes ? bytes : 1)) abort();
    for (size_t i = 0; i < bytes; i++) ((uint8_t *)made)[i] = in->left ? in->at[i % in->left] : 0;
    return made;
}

static void must(int holds) {
    if (!holds) abort();
}

/* Convert a page of random bytes to the shared order and back, then demote other pages to any tier. */
static void use_pages(input *in) {
    const rvm_tier tier = (rvm_tier)take_size(in), to = (rvm_tier)take_size(in);
    const size_t head_dim = take_size(in), n = take(in, 1) % 3;
    const size_t bytes = rvm_head_page_bytes(tier, head_dim), lower = rvm_head_page_bytes(to, head_dim);
    uint8_t *page = array(in, bytes ? bytes : 64), *shared = array(in, bytes ? bytes : 64);
    uint8_t *again = array(in, bytes ? bytes : 64);
    const int made = rvm_page_canonical(tier, page, head_dim, shared);
    must((made == RVM_OK) == (bytes != 0) && rvm_page_from_canonical(tier, shared, head_dim, again) == made);
    if (bytes) { /* twice: the page after both conversions; its bytes outside the padding must not change */
        uint8_t *twice = array(in, bytes);
        must(rvm_page_canonical(tier, again, head_dim, twice) == RVM_OK);
        must(rvm_page_from_canonical(tier, twice, head_dim, page) == RVM_OK && !memcmp(page, again, bytes));
        free(twice);
    }
    uint8_t *from = array(in, n * bytes), *below = array(in, n * lower);
    const int demoted = rvm_pages_demote(tier, from, to, below, n, head_dim);
    must(demoted != RVM_OK || (bytes && lower) || !n);
    free(page), free(shared), free(again), free(from), free(below);
}

/* Look up rows of the matrix, and multiply it by one token with the scalar implementation and the fastest
   implementation. */
static void use_matrix(const input *in, const rvm_matrix *w) {
    const size_t rows = rvm_matrix_rows(w), cols = rvm_matrix_cols(w);
    if (rows > MOST / 8 || cols > MOST / 8) return;
    float *out = array(in, cols * sizeof *out), *x = array(in, cols * sizeof *x), *y = array(in, rows * sizeof *y);
    must(rvm_matrix_row(w, rows, out) == RVM_BAD_ARGUMENT);
    for (size_t row = 0; row < rows && row < 40; row++) must(rvm_matrix_row(w, row, out) == RVM_OK);
    const rvm_acts_kind kind = rvm_matrix_acts(w, 16);
    const size_t bytes = rvm_acts_bytes(kind, 1, cols);
    const char *const names[] = {"scalar", NULL};
    for (size_t i = 0; bytes && bytes <= MOST && i < 2; i++) {
        const rvm_matmul *m = rvm_matmul_impl(names[i]);
        void *acts = array(in, bytes);
        if (m->acts(kind, x, cols, 1, cols, 0, 1, acts) == RVM_OK)
            m->matmul(w, kind, acts, 1, 0, rvm_matrix_tiles(w), y, rows);
        free(acts);
    }
    free(out), free(x), free(y);
}

/* Run rvm_matrix_check on random bytes in place of a file with a packed matrix. */
static void check_file(input *in) {
    const size_t bytes = in->left < MOST ? in->left : MOST;
    rvm_matrix *w = array(in, bytes);
    if (rvm_matrix_check(w, bytes) == RVM_OK) use_matrix(in, w);
    free(w);
}

/* Pack a matrix of any shape, then change its head, to imitate a damaged file. */
static void pack(input *in) {
    static const size_t block[] = {144, 176, 210};
    const rvm_kind scale_kind = (rvm_kind)take(in, 1);
    rvm_matrix_spec spec = {(uint32_t)take_size(in), (uint32_t)take(in, 1), (uint32_t)take(in, 1),
                            (uint32_t)(take(in, 1) % 9 * 32), take_size(in), 0};
    spec.cols = take(in, 1) % 2 ? take_size(in) : 32 * take_size(in);
    const size_t bytes = rvm_matrix_bytes(&spec);
    if (!bytes || bytes > MOST) return;
    const int super = spec.kind >= RVM_Q4_K && spec.kind <= RVM_Q6_K, quantised = spec.kind <= RVM_Q8;
    const size_t row = super ? spec.cols / 256 * block[spec.kind - RVM_Q4_K]
                       : quantised ? spec.cols * (spec.kind == RVM_Q4 ? 4 : 8) / 8
                                   : spec.cols * (spec.kind == RVM_F32 ? 4 : 2);
    const size_t scales = quantised ? spec.rows * (spec.cols / spec.group) * (scale_kind == RVM_F32 ? 4 : 2) : 0;
    void *weights = array(in, spec.rows * row), *s = array(in, scales), *b = array(in, scales);
    uint8_t *memory = array(in, bytes);
    if (rvm_matrix_pack(&spec, weights, s, b, scale_kind, 0, spec.rows, memory) == RVM_OK) {
        must(rvm_matrix_check(memory, bytes) == RVM_OK);
        must(rvm_matrix_check(memory, bytes - 1) == RVM_BAD_ARGUMENT);
        use_matrix(in, (const rvm_matrix *)memory);
        memory[take(in, 1) % RVM_ALIGNMENT] ^= (uint8_t)take(in, 1);
        if (rvm_matrix_check(memory, bytes) == RVM_OK) use_matrix(in, (const rvm_matrix *)memory);
    }
    free(weights), free(s), free(b), free(memory);
}

static double take_double(input *in) {
    static const double odd[] = {0, 1, -1, 0.5, 1e-300, 1e300};
    const uint64_t byte = take(in, 1), any = byte < 6 ? 0 : take(in, 8);
    double value;
    memcpy(&value, &any, sizeof value);
    return byte < 6 ? odd[byte] : byte < 128 ? (double)byte / 128 : value;
}

static void draw(input *in) {
    const size_t vocab = take_size(in) % 4096;
    rvm_drawing how;
    how.temperature = take_double(in), how.top_p = take_double(in), how.min_p = take_double(in);
    how.u = take_double(in), how.top_k = take_size(in);
    const char *const names[] = {"scalar", NULL};
    float *logits = array(in, vocab * sizeof *logits);
    uint64_t *scratch = array(in, 2 * vocab * sizeof *scratch);
    for (size_t i = 0; i < 2; i++) {
        int32_t token = -1;
        if (rvm_impl(names[i])->draw(logits, vocab, &how, scratch, &token) == RVM_OK)
            must(token >= 0 && (size_t)token < vocab);
    }
    free(logits), free(scratch);
}

/* Compute attention with codes of queries and a page of random bytes. */
static void attend(input *in) {
    const int tier = (int)take_size(in);
    const size_t rows = take(in, 1) % 9, head_dim = take_size(in);
    const size_t codes = rvm_page_codes_bytes(tier, rows, head_dim), bytes = rvm_head_page_bytes((rvm_tier)tier, head_dim);
    if (!codes || !bytes || codes > MOST) return;
    const size_t stride = (head_dim + 15) / 16 * 16 + 16;
    const rvm_matmul *m = rvm_matmul_impl(take(in, 1) % 2 ? "scalar" : NULL);
    void *made = array(in, codes);
    uint8_t *page = array(in, bytes);
    float *q = array(in, rows * head_dim * sizeof *q), *sum = array(in, rows * stride * sizeof *sum);
    float *scores = array(in, rows * RVM_PAGE_TOKENS * sizeof *scores);
    if (m->page_queries(tier, q, rows, head_dim, made) == RVM_OK)
        m->page_scores(tier, page, made, rows, head_dim, NULL, scores);
    for (size_t i = 0; i < rows * RVM_PAGE_TOKENS; i++) scores[i] = (float)(i % 7) / 7; /* weights are >= 0 */
    m->page_values(tier, page, scores, rows, head_dim, NULL, sum, stride);
    free(made), free(page), free(q), free(sum), free(scores);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    void (*const calls[])(input *) = {use_pages, check_file, pack, draw, attend};
    input in = {data, bytes};
    calls[take(&in, 1) % (sizeof calls / sizeof *calls)](&in);
    return 0;
}
