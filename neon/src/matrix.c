/* These functions pack weights and return facts about packed weights. */
#include "matrix.h"
#include "page_terms.h"

#include <math.h>

static int is_float_kind(uint32_t kind) { return kind == RVM_F16 || kind == RVM_BF16 || kind == RVM_F32; }

/* Return 1 if the spec is valid. With rows and cols below 2^31, all numbers of bytes stay far below 2^63. */
static int good_spec(const rvm_matrix_spec *s) {
    const uint64_t limit = 1u << 31;
    if (!s || s->rows == 0 || s->cols == 0 || s->rows >= limit || s->cols >= limit) return 0;
    if (s->rows * s->cols >= (uint64_t)1 << 48) return 0;
    if (is_super(s->kind)) return s->group == SUPER_COLS && s->cols % SUPER_COLS == 0;
    if (!is_quantised(s->kind)) return is_float_kind(s->kind);
    return is_float_kind(s->scale_kind) && s->affine <= 1 &&
           (s->group == 32 || s->group == 64 || s->group == 128) && s->cols % s->group == 0;
}

/* Return the half that equals x, or -1 if no half does. A NaN equals no half, so the result for a NaN is -1. */
static int32_t exact_half(float x) {
    const uint32_t b = bits_of(x), sign = b >> 16 & 0x8000, rest = b & 0x7fffffff;
    uint32_t h = rest == 0x7f800000 ? 0x7c00 : (rest - 0x38000000) >> 13;
    if (rest < 0x38800000) h = (uint32_t)(float_of(rest) * 16777216.0f); /* |x| < 2^-14: here a half is a multiple of 2^-24 */
    if (h > 0x7c00) return -1;
    h |= sign;
    return half_to_float((uint16_t)h) == x ? (int32_t)h : -1;
}

static int is_bf16(float x) { return (bits_of(x) & 0xffff) == 0; }

/* Return the narrowest of F16, BF16 and F32 that holds n values of x exactly and, if y is not NULL, n values of y. */
static uint32_t narrowest(const void *x, const void *y, uint32_t kind, size_t n) {
    int half = 1, brain = 1;
    if (kind != RVM_F32) return kind;
    for (size_t i = 0; i < n && (half || brain); i++) {
        float a = float_at(x, kind, i), b = y ? float_at(y, kind, i) : 0;
        half = half && exact_half(a) >= 0 && exact_half(b) >= 0;
        brain = brain && is_bf16(a) && is_bf16(b);
    }
    return half ? RVM_F16 : brain ? RVM_BF16 : RVM_F32;
}

static float zero_point(uint32_t kind) { return kind == RVM_Q4 ? 8.0f : 128.0f; }

static int is_symmetric(const void *scales, const void *biases, uint32_t scale_kind, uint32_t kind,
                        size_t n) {
    const float zero = zero_point(kind);
    for (size_t i = 0; biases && i < n; i++)
        if (float_at(biases, scale_kind, i) != -zero * float_at(scales, scale_kind, i)) return 0;
    return 1;
}

int rvm_matrix_plan(rvm_kind kind, size_t rows, size_t cols, size_t group, const void *scales,
                    const void *biases, rvm_kind scale_kind, rvm_matrix_spec *spec) {
    if (!spec) return RVM_BAD_ARGUMENT;
    if (is_super((uint32_t)kind)) {
        *spec = (rvm_matrix_spec){(uint32_t)kind, RVM_F16, 0, SUPER_COLS, rows, cols};
        return good_spec(spec) ? RVM_OK : RVM_BAD_ARGUMENT;
    }
    const int q = is_quantised(kind);
    const uint32_t narrow = group > 128 ? 0 : (uint32_t)group;
    rvm_matrix_spec s = {(uint32_t)kind, q ? (uint32_t)scale_kind : RVM_F32, 0, q ? narrow : 0, rows, cols};
    if (!good_spec(&s) || (q && !scales)) return RVM_BAD_ARGUMENT;
    if (q) {
        const size_t n = rows * (cols / group);
        s.affine = !is_symmetric(scales, biases, s.scale_kind, s.kind, n);
        s.scale_kind = narrowest(scales, s.affine ? biases : NULL, s.scale_kind, n);
    }
    *spec = s;
    return RVM_OK;
}

size_t rvm_matrix_bytes(const rvm_matrix_spec *spec) {
    return good_spec(spec) ? sizeof(rvm_matrix) + tile_count(spec) * tile_bytes(spec) : 0;
}

/* ---- packing ---- */

static void store_float(uint8_t *to, uint32_t to_kind, const void *from, uint32_t from_kind, size_t i) {
    const float x = float_at(from, from_kind, i);
    if (to_kind == from_kind) {
        memcpy(to, (const uint8_t *)from + i * float_size(from_kind), float_size(from_kind));
    } else if (to_kind == RVM_F32) {
        memcpy(to, &x, 4);
    } else {
        const uint16_t h = to_kind == RVM_F16 ? (uint16_t)exact_half(x) : (uint16_t)(bits_of(x) >> 16);
        memcpy(to, &h, 2);
    }
}

/* Move the nibbles 0, 1, 2, 3 of a to the low nibbles of 4 bytes. */
static uint32_t spread(uint32_t a) {
    a = (a | a << 8) & 0x00ff00ff;
    return (a | a << 4) & 0x0f0f0f0f;
}

/* Pack 32 columns of a row of 4-bit codes. row: the 16 bytes of these codes; block: the address of the row's first 4
   bytes in the block */
static void pack_q4(uint8_t *block, const uint8_t *row) {
    for (size_t j = 0; j < 4; j++) {
        const uint32_t low = row[2 * j] | (uint32_t)row[2 * j + 1] << 8;
        const uint32_t high = row[8 + 2 * j] | (uint32_t)row[9 + 2 * j] << 8;
        const uint32_t both = spread(low) | spread(high) << 4;
        const uint8_t bytes[4] = {(uint8_t)both, (uint8_t)(both >> 8), (uint8_t)(both >> 16),
                                  (uint8_t)(both >> 24)};
        memcpy(block + 4 * TILE * j, bytes, 4);
    }
}

static void pack_q8(uint8_t *block, const uint8_t *row) {
    for (size_t j = 0; j < 8; j++) memcpy(block + 4 * TILE * j, row + 4 * j, 4);
}

/* Pack one row of a quantised tile. row: the row's index in the tile; i: the row's index in `weights` */
static void pack_quantised(const rvm_matrix_spec *s, const uint8_t *weights, const void *scales,
                           const void *biases, uint32_t scale_kind, size_t i, size_t row, uint8_t *tile) {
    const size_t size = float_size(s->scale_kind), groups = s->cols / s->group;
    const size_t row_bytes = s->kind == RVM_Q4 ? 16 : 32;
    const uint8_t *from = weights + i * (s->cols / 32) * row_bytes;
    for (size_t g = 0; g < groups; g++) {
        store_float(tile + row * size, s->scale_kind, scales, scale_kind, i * groups + g);
        if (s->affine)
            store_float(tile + (TILE + row) * size, s->scale_kind, biases, scale_kind, i * groups + g);
        tile += scales_bytes(s);
        for (size_t c = 0; c < s->group; c += 32, from += row_bytes, tile += block_bytes(s->kind)) {
            if (s->kind == RVM_Q4) pack_q4(tile + 4 * row, from);
            else pack_q8(tile + 4 * row, from);
        }
    }
}

static void pack_float(const rvm_matrix_spec *s, const uint8_t *weights, size_t i, size_t row,
                       uint8_t *tile) {
    const size_t size = float_size(s->kind);
    const uint8_t *from = weights + i * s->cols * size;
    for (size_t k = 0; k < s->cols; k++) memcpy(tile + (k * TILE + row) * size, from + k * size, size);
}

/* Return the address of row i of a matrix of GGUF blocks. */
static const uint8_t *source_row(const rvm_matrix_spec *s, const void *weights, size_t i) {
    return (const uint8_t *)weights + i * (s->cols / SUPER_COLS) * rvm_super_source(s->kind);
}

static void write_head(const rvm_matrix_spec *spec, void *memory) {
    rvm_matrix head = {.spec = *spec};
    memcpy(head.magic, MATRIX_MAGIC, sizeof head.magic);
    memcpy(memory, &head, sizeof head);
}

int rvm_matrix_pack(const rvm_matrix_spec *spec, const void *weights, const void *scales, const void *biases,
                    rvm_kind scale_kind, size_t row_begin, size_t row_end, void *memory) {
    if (!good_spec(spec) || !weights || !memory || (uintptr_t)memory % RVM_ALIGNMENT) return RVM_BAD_ARGUMENT;
    const int super = is_super(spec->kind), q = is_quantised(spec->kind) && !super;
    if (q && (!scales || (spec->affine && !biases) || !is_float_kind(scale_kind))) return RVM_BAD_ARGUMENT;
    if (row_begin >= row_end || row_end > spec->rows || row_begin % TILE) return RVM_BAD_ARGUMENT;
    if (row_end % TILE && row_end != spec->rows) return RVM_BAD_ARGUMENT;
    if (row_begin == 0) write_head(spec, memory);
    for (size_t first = row_begin; first < row_end; first += TILE) {
        uint8_t *tile = (uint8_t *)memory + sizeof(rvm_matrix) + first / TILE * tile_bytes(spec);
        memset(tile, 0, tile_bytes(spec));
        for (size_t n = first; n < min_size(first + TILE, row_end); n++) {
            if (super) rvm_super_pack(spec, source_row(spec, weights, n - row_begin), n - first, tile);
            else if (q) pack_quantised(spec, weights, scales, biases, scale_kind, n - row_begin, n - first, tile);
            else pack_float(spec, weights, n - row_begin, n - first, tile);
        }
    }
    return RVM_OK;
}

/* ---- facts about a packed matrix ---- */

static int is_packed(const rvm_matrix *w) {
    return w && (uintptr_t)w % RVM_ALIGNMENT == 0 && memcmp(w->magic, MATRIX_MAGIC, sizeof w->magic) == 0;
}

int rvm_matrix_check(const void *memory, size_t bytes) {
    const rvm_matrix *w = memory;
    if (bytes < sizeof *w || !is_packed(w) || !good_spec(&w->spec)) return RVM_BAD_ARGUMENT;
    return rvm_matrix_bytes(&w->spec) <= bytes ? RVM_OK : RVM_BAD_ARGUMENT;
}

rvm_kind rvm_matrix_kind(const rvm_matrix *w) { return is_packed(w) ? (rvm_kind)w->spec.kind : (rvm_kind)0; }
size_t rvm_matrix_rows(const rvm_matrix *w) { return is_packed(w) ? w->spec.rows : 0; }
size_t rvm_matrix_cols(const rvm_matrix *w) { return is_packed(w) ? w->spec.cols : 0; }
size_t rvm_matrix_tiles(const rvm_matrix *w) { return is_packed(w) ? tile_count(&w->spec) : 0; }

rvm_acts_kind rvm_matrix_acts(const rvm_matrix *w, int bits) {
    if (!is_packed(w) || (bits != 8 && bits != 16)) return (rvm_acts_kind)0;
    if (!is_quantised(w->spec.kind)) return RVM_ACTS_FLOAT;
    if (is_super(w->spec.kind)) return bits == 8 ? RVM_ACTS_SUPER_8 : RVM_ACTS_SUPER_16;
    return bits == 8 ? RVM_ACTS_8 : RVM_ACTS_16;
}

static void quantised_row(const rvm_matrix *w, size_t row, float *out) {
    const rvm_matrix_spec *spec = &w->spec;
    const size_t r = row % TILE;
    const uint8_t *p = tile_at(w, row / TILE);
    for (size_t k = 0; k < spec->cols; k += spec->group) {
        const float s = float_at(p, spec->scale_kind, r);
        const float b = spec->affine ? float_at(p, spec->scale_kind, TILE + r) : -zero_point(spec->kind) * s;
        p += scales_bytes(spec);
        for (size_t c = 0; c < spec->group; c++) {
            const float product =
                s * (float)block_code(p + c / 32 * block_bytes(spec->kind), spec->kind, r, c % 32);
            out[k + c] = product + b;
        }
        p += spec->group / 32 * block_bytes(spec->kind);
    }
}

int rvm_matrix_row(const rvm_matrix *w, size_t row, float *out) {
    if (!is_packed(w) || !out || row >= w->spec.rows) return RVM_BAD_ARGUMENT;
    if (is_super(w->spec.kind)) {
        rvm_super_row(&w->spec, tile_at(w, row / TILE), row % TILE, out);
    } else if (is_quantised(w->spec.kind)) {
        quantised_row(w, row, out);
    } else {
        const uint8_t *p = tile_at(w, row / TILE);
        for (size_t k = 0; k < w->spec.cols; k++) out[k] = float_at(p, w->spec.kind, k * TILE + row % TILE);
    }
    return RVM_OK;
}

/* ---- activations ---- */

size_t rvm_acts_bytes(rvm_acts_kind kind, size_t tokens, size_t cols) {
    const size_t limit = (size_t)1 << 31;
    if (tokens == 0 || cols == 0 || tokens >= limit || cols >= limit) return 0;
    if (kind == RVM_ACTS_FLOAT) return round_up(tokens * cols * 4, RVM_ALIGNMENT);
    if ((kind != RVM_ACTS_8 && kind != RVM_ACTS_16 && !is_super_acts(kind)) || cols % act_cols(kind)) return 0;
    return round_up(tokens * token_bytes(kind, cols), RVM_ALIGNMENT);
}

int rvm_acts_refuses(rvm_acts_kind kind, const float *x, size_t x_stride, size_t tokens, size_t cols,
                     size_t token_begin, size_t token_end, const void *acts) {
    return !x || !acts || (uintptr_t)acts % RVM_ALIGNMENT || rvm_acts_bytes(kind, tokens, cols) == 0 ||
           x_stride < cols || token_begin > token_end || token_end > tokens;
}

int rvm_matmul_refuses(const rvm_matrix *w, rvm_acts_kind kind, const void *acts, size_t tokens,
                       size_t tile_begin, size_t tile_end, const float *y, size_t y_stride) {
    return !is_packed(w) || !acts || (uintptr_t)acts % RVM_ALIGNMENT || !y ||
           kind != rvm_matrix_acts(w, (int)act_planes(kind) * 8) ||
           rvm_acts_bytes(kind, tokens, w->spec.cols) == 0 || tile_begin > tile_end ||
           tile_end > tile_count(&w->spec) || y_stride < w->spec.rows;
}

size_t rvm_page_codes_bytes(int tier, size_t rows, size_t head_dim) {
    const size_t most = (size_t)1 << 24;
    if (!is_code_tier(tier) || rows == 0 || rows > most || !good_head_dim(head_dim)) return 0;
    return rows * row_codes((rvm_tier)tier, head_dim);
}
