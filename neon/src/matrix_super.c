/* This file packs GGUF's super-blocks of 256 columns, and reads a packed row back.
 *
 *   Q4_K  f16 d, f16 dmin | scales[12] | qs[128]
 *   Q5_K  f16 d, f16 dmin | scales[12] | qh[32] | qs[128]
 *   Q6_K  ql[128] | qh[64] | i8 scales[16] | f16 d
 *
 * Packing does not change the codes, only their order (matrix.h). */
#include "matrix.h"

size_t rvm_super_source(uint32_t kind) { return kind == RVM_Q4_K ? 144 : kind == RVM_Q5_K ? 176 : 210; }

/* ---- codes of 32 columns in the order of the GGUF file ---- */

/* qs: for each 64 columns, the low nibbles of 32 bytes hold the first 32 columns, and the high nibbles hold the last
   32. */
static unsigned nibble(const uint8_t *qs, size_t block, size_t c) {
    return qs[block / 2 * 32 + c] >> 4 * (block % 2) & 15u;
}

static void codes_q4(const uint8_t *from, size_t block, uint8_t *q) {
    for (size_t c = 0; c < 32; c++) q[c] = (uint8_t)nibble(from + 16, block, c);
}

static void codes_q5(const uint8_t *from, size_t block, uint8_t *q) {
    for (size_t c = 0; c < 32; c++)
        q[c] = (uint8_t)(nibble(from + 48, block, c) | (from[16 + c] >> block & 1u) << 4);
}

/* ql: the low nibbles of 64 bytes hold the low 4 bits of the first 64 of 128 columns. qh: block b of each four blocks
   of 32 columns has the bits 2b and 2b + 1 of 32 bytes. */
static void codes_q6(const uint8_t *from, size_t block, uint8_t *q) {
    const uint8_t *ql = from + 64 * (block / 4) + 32 * (block % 2), *qh = from + 128 + 32 * (block / 4);
    for (size_t c = 0; c < 32; c++) {
        const unsigned low = ql[c] >> 4 * (block / 2 % 2) & 15u, high = qh[c] >> 2 * (block % 4) & 3u;
        q[c] = (uint8_t)(low | high << 4);
    }
}

/* ---- packing ---- */

/* Pack 32 codes of a row into a block. q: the codes; at: the address of the row's first byte in the block */
static void pack_codes(uint32_t kind, const uint8_t *q, uint8_t *at) {
    for (size_t c = 0; c < 16; c++) at[c / 4 * 64 + c % 4] = (uint8_t)((q[c] & 15) | q[16 + c] << 4);
    if (kind == RVM_Q5_K)
        for (size_t c = 0; c < 32; c++) at[256 + c % 4] |= (uint8_t)(q[c] >> 4 << c / 4);
    if (kind == RVM_Q6_K)
        for (size_t c = 0; c < 32; c++) at[256 + c / 16 * 64 + c % 4] |= (uint8_t)(q[c] >> 4 << 2 * (c / 4 % 4));
}

static void pack_scales(uint32_t kind, const uint8_t *from, size_t row, uint8_t *d, uint8_t *p) {
    const int six = kind == RVM_Q6_K;
    memcpy(d + 2 * row, from + (six ? 208 : 0), 2);
    if (!six) memcpy(p + 32 + 2 * row, from + 2, 2);
    for (size_t b = 0; b < (six ? 16 : 12); b++) p[(six ? 0 : 64) + TILE * b + row] = from[(six ? 192 : 4) + b];
}

void rvm_super_pack(const rvm_matrix_spec *s, const uint8_t *from, size_t row, uint8_t *tile) {
    void (*const codes)(const uint8_t *, size_t, uint8_t *) =
        s->kind == RVM_Q4_K ? codes_q4 : s->kind == RVM_Q5_K ? codes_q5 : codes_q6;
    uint8_t *p = tile + super_front(s);
    for (size_t i = 0; i < s->cols / SUPER_COLS; i++, from += rvm_super_source(s->kind)) {
        uint8_t q[32];
        pack_scales(s->kind, from, row, (uint8_t *)super_scale(s, tile, i, p), p);
        p += SUPER_HEAD;
        for (size_t b = 0; b < SUPER_COLS / 32; b++, p += block_bytes(s->kind)) {
            codes(from, b, q);
            pack_codes(s->kind, q, p + 4 * row);
        }
    }
}

/* ---- conversion of a row to floats ---- */

/* Set out to the six-bit scale and low of group g of row r. Byte b of row r is at bytes[16 b + r]. */
static void six_bits(const uint8_t *bytes, size_t g, size_t r, int out[2]) {
    const int scale = bytes[TILE * (g % 4) + r], low = bytes[TILE * (4 + g % 4) + r];
    const int rest = bytes[TILE * (8 + g % 4) + r];
    out[0] = g < 4 ? scale & 63 : (rest & 15) | scale >> 6 << 4;
    out[1] = g < 4 ? low & 63 : rest >> 4 | low >> 6 << 4;
}

const uint8_t *rvm_super_block(const rvm_matrix_spec *s, const uint8_t *tile, size_t k, size_t r, int factors[2]) {
    const size_t b = k % SUPER_COLS / 32;
    const uint8_t *p = tile + super_front(s) + k / SUPER_COLS * super_bytes(s->kind);
    if (s->kind != RVM_Q6_K) six_bits(p + 64, b, r, factors);
    else for (size_t h = 0; h < 2; h++) factors[h] = (int8_t)p[TILE * (2 * b + h) + r];
    return p + SUPER_HEAD + b * block_bytes(s->kind);
}

void rvm_super_floats(const rvm_matrix_spec *s, const uint8_t *tile, size_t k, size_t r, float d[2]) {
    const size_t i = k / SUPER_COLS;
    const uint8_t *p = tile + super_front(s) + i * super_bytes(s->kind);
    d[0] = float_at(super_scale(s, tile, i, p), RVM_F16, r);
    d[1] = s->kind == RVM_Q6_K ? 0 : -float_at(p + 32, RVM_F16, r);
}

void rvm_super_row(const rvm_matrix_spec *s, const uint8_t *tile, size_t row, float *out) {
    for (size_t k = 0; k < s->cols; k += 32) {
        int f[2];
        float d[2];
        const uint8_t *block = rvm_super_block(s, tile, k, row, f);
        rvm_super_floats(s, tile, k, row, d);
        for (size_t c = 0; c < 32; c++) {
            const float q = (float)block_code(block, s->kind, row, c);
            if (s->kind == RVM_Q6_K) out[k + c] = d[0] * (float)f[c / 16] * (q - 32.0f);
            else out[k + c] = d[0] * (float)f[0] * q + d[1] * (float)f[1];
        }
    }
}
