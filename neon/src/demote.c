/* Demotion converts pages of one tier to pages of a lower tier: it quantises the keys and values to fewer bits. The
 * build compiles this file once for each instruction set, as it does with layers.c, but without fused multiply-add, so
 * that all instruction sets give the bytes that metal_kernels/README.md defines.
 *
 * The code converts 16 tokens of keys, or 32 tokens of values, together. The numbers that are converted together are a
 * panel x [columns][lanes], and the lanes are the rows of a tile.
 *   In a panel of keys, the columns are dimensions and the lanes are tokens.
 *   In a panel of values, the columns are tokens and the lanes are dimensions.
 * Four interleaved columns of 16 lanes are one line of a block. A token's scale applies to a lane of keys, or to a
 * column of values. */
#include "layers.h"
#include "pages.h"

#define INLINE static inline __attribute__((always_inline))

enum { SPAN = PAGE_BLOCK, LINE = 4 * PAGE_TILE };

/* A panel, and the scales and biases of its tokens. */
typedef struct {
    float x[SPAN * RVM_MAX_HEAD_DIM];
    uint8_t code[SPAN * RVM_MAX_HEAD_DIM];
    float scale[SPAN], bias[SPAN];
    size_t columns, lanes, used; /* used: the number of columns (keys) or lanes (values) that are not padding */
} panel;

/* Round the floats x to IEEE halves. The function stores -0 as +0. */
static void round_to_half(float *x, size_t n, uint8_t *to) {
    uint16_t h[SPAN];
    for (size_t i = 0; i < n; i += LANES) l_store_half(h + i, l_load(x + i));
    for (size_t i = 0; i < n; i++) h[i] = h[i] & 0x7fff ? h[i] : 0;
    from_halves(h, n, x);
    if (to) memcpy(to, h, n * sizeof *h);
}

/* ---- the smallest and the largest number of each token's keys or values: they give the scale of the codes ---- */

static inline float less(float a, float b) { return a < b ? a : b; }
static inline float more(float a, float b) { return a > b ? a : b; }

static void extremes_of_lanes(const panel *p, float *low, float *high) {
    for (size_t r = 0; r < PAGE_TILE; r++) low[r] = INFINITY, high[r] = -INFINITY;
    for (size_t c = 0; c < p->used; c++) {
        const float *x = p->x + c * PAGE_TILE;
        SIMD()
        for (size_t r = 0; r < PAGE_TILE; r++) low[r] = less(x[r], low[r]), high[r] = more(x[r], high[r]);
    }
}

/* Find the smallest and the largest number of a column, 16 numbers at a time. The vectors compare in another order than
 * a loop would, but this order does not change a minimum or maximum. */
static void extremes_of_column(const float *x, size_t n, float *low, float *high) {
    float least[PAGE_TILE], most[PAGE_TILE];
    for (size_t r = 0; r < PAGE_TILE; r++) least[r] = INFINITY, most[r] = -INFINITY;
    for (; n >= PAGE_TILE; n -= PAGE_TILE, x += PAGE_TILE) {
        SIMD()
        for (size_t r = 0; r < PAGE_TILE; r++) least[r] = less(x[r], least[r]), most[r] = more(x[r], most[r]);
    }
    for (size_t r = 0; r < n; r++) least[r] = less(x[r], least[r]), most[r] = more(x[r], most[r]);
    for (size_t h = PAGE_TILE / 2; h; h /= 2)
        for (size_t r = 0; r < h; r++) {
            least[r] = less(least[r + h], least[r]);
            most[r] = more(most[r + h], most[r]);
        }
    *low = *least, *high = *most;
}

static void extremes(const panel *p, int keys, float *low, float *high) {
    if (keys) {
        extremes_of_lanes(p, low, high);
        return;
    }
    for (size_t c = 0; c < p->columns; c++) extremes_of_column(p->x + c * p->lanes, p->used, low + c, high + c);
}

/* Compute the scales and biases of the panel's tokens for a tier. Store them as halves in the arrays `scales` and
 * `biases` if these pointers are not NULL. */
static void find_scales(panel *p, int keys, rvm_tier tier, uint8_t *scales, uint8_t *biases) {
    const size_t n = keys ? PAGE_TILE : SPAN;
    const float steps = (float)most_code(tier);
    float low[SPAN], high[SPAN];
    extremes(p, keys, low, high);
    for (size_t i = 0; i < n; i++) {
        p->scale[i] = (has_bias(tier) ? high[i] - low[i] : more(-low[i], high[i])) / steps;
        p->bias[i] = has_bias(tier) ? low[i] : 0;
    }
    round_to_half(p->scale, n, scales);
    if (has_bias(tier)) round_to_half(p->bias, n, biases);
}

/* ---- conversion of numbers to codes, and back ---- */

/* Return the code of x: clamp(rint((x - bias) / scale), low, high). The code of a NaN is `low`.  divisor: the scale, or
 * infinity if the scale is 0 */
static inline float code_of(float x, float divisor, float bias, float low, float high) {
    return less(more(rintf((x - bias) / divisor), low), high);
}

static void divisors(const panel *p, float *to) {
    for (size_t i = 0; i < SPAN; i++) to[i] = p->scale[i] == 0 ? INFINITY : p->scale[i];
}

/* Convert the numbers of one column to codes.  own: 1 if each lane has its own scale, 0 if all lanes have the same
 * scale */
INLINE void code_column(const float *x, size_t n, const float *divisor, const float *bias, const size_t own,
                        rvm_tier tier, uint8_t *code) {
    const float low = (float)least_code(tier), high = (float)most_code(tier);
    const int zero = page_zero(tier);
    SIMD()
    for (size_t r = 0; r < n; r++)
        code[r] = (uint8_t)((int)code_of(x[r], divisor[own * r], bias[own * r], low, high) + zero);
}

INLINE void number_column(const uint8_t *code, size_t n, const float *scale, const float *bias, const size_t own,
                          rvm_tier tier, float *x) {
    const int zero = page_zero(tier);
    SIMD()
    for (size_t r = 0; r < n; r++) x[r] = scale[own * r] * (float)((int)code[r] - zero) + bias[own * r];
}

static void to_codes(panel *p, int keys, rvm_tier tier) {
    const size_t n = p->lanes, zero = (size_t)page_zero(tier);
    float divisor[SPAN];
    divisors(p, divisor);
    for (size_t c = 0; c < p->columns; c++) {
        const float *x = p->x + c * n;
        uint8_t *code = p->code + c * n;
        if (keys) code_column(x, PAGE_TILE, divisor, p->bias, 1, tier, code);
        else code_column(x, n, divisor + c, p->bias + c, 0, tier, code);
        if (!keys) memset(p->code + c * n + p->used, (int)zero, n - p->used);
    }
    if (keys) memset(p->code + p->columns * n, (int)zero, (key_columns(p->columns) - p->columns) * n);
}

static void from_codes(panel *p, int keys, rvm_tier tier) {
    const size_t n = p->lanes;
    for (size_t c = 0; c < p->columns; c++) {
        if (keys) number_column(p->code + c * n, PAGE_TILE, p->scale, p->bias, 1, tier, p->x + c * n);
        else number_column(p->code + c * n, n, p->scale + c, p->bias + c, 0, tier, p->x + c * n);
    }
}

/* ---- conversion of codes to the blocks of a page, and back ---- */

/* Interleave four columns of 16 bytes as byte[lane][4]. The function `separate` does the reverse. */
static void interleave(const uint8_t *const column[4], uint8_t *line) {
    for (size_t r = 0; r < PAGE_TILE; r++)
        for (size_t i = 0; i < 4; i++) line[4 * r + i] = column[i][r];
}

static void separate(const uint8_t *line, uint8_t *const column[4]) {
    for (size_t r = 0; r < PAGE_TILE; r++)
        for (size_t i = 0; i < 4; i++) column[i][r] = line[4 * r + i];
}

/* Write a block from 32 columns of codes. `lanes` is the distance from one column of codes to the next, in codes. A
 * byte of 4-bit codes has the code of column c in its lower half and the code of column c + 16 in its upper half. */
static void to_block(const uint8_t *code, size_t lanes, rvm_tier tier, uint8_t *block) {
    const int two = TIERS[tier].bits == 4;
    for (size_t j = 0; j < (two ? 4 : 8); j++, block += LINE) {
        uint8_t both[4][PAGE_TILE];
        const uint8_t *column[4];
        for (size_t i = 0; i < 4; i++) {
            const uint8_t *low = code + (4 * j + i) * lanes, *high = low + 16 * lanes;
            column[i] = low;
            if (!two) continue;
            for (size_t r = 0; r < PAGE_TILE; r++) both[i][r] = (uint8_t)(low[r] | high[r] << 4);
            column[i] = both[i];
        }
        interleave(column, block);
    }
}

static void from_block(const uint8_t *block, size_t lanes, rvm_tier tier, uint8_t *code) {
    const int two = TIERS[tier].bits == 4;
    for (size_t j = 0; j < (two ? 4 : 8); j++, block += LINE) {
        uint8_t *low = code + 4 * j * lanes, *high = low + 16 * lanes;
        separate(block, (uint8_t *const[4]){low, low + lanes, low + 2 * lanes, low + 3 * lanes});
        for (size_t i = 0; two && i < 4; i++)
            for (size_t r = 0; r < PAGE_TILE; r++) {
                high[i * lanes + r] = low[i * lanes + r] >> 4;
                low[i * lanes + r] &= 15;
            }
    }
}

/* The description of the blocks of a page that store the codes of a panel. */
typedef struct {
    size_t count, at, apart; /* count: number of blocks; at: bytes before the first block; apart: bytes from one block to the next */
    size_t step;             /* step: the number of the panel's codes from one block to the next */
} blocks;

static blocks blocks_of(const panel *p, int keys, rvm_tier tier, size_t token, size_t head_dim) {
    const size_t tile = key_tile(tier, head_dim), block = page_block(tier);
    if (keys) return (blocks){tile / block, keys_at(tier) + token / PAGE_TILE * tile, block, PAGE_BLOCK * p->lanes};
    return (blocks){p->lanes / PAGE_TILE, values_at(tier, head_dim) + token / SPAN * block, value_tile(tier),
                    PAGE_TILE};
}

/* ---- conversion of whole pages ---- */

static void load_hot(panel *p, int keys, const uint8_t *page, size_t token, size_t head_dim) {
    const uint16_t *h = (const uint16_t *)page + (keys ? token : PAGE_TOKENS * head_dim + token * p->lanes);
    for (size_t c = 0; c < p->columns; c++)
        from_halves(h + c * (keys ? (size_t)PAGE_TOKENS : p->lanes), p->lanes, p->x + c * p->lanes);
}

static void load_codes(panel *p, int keys, rvm_tier tier, const uint8_t *page, size_t token, size_t head_dim) {
    const size_t n = keys ? PAGE_TILE : SPAN;
    const blocks b = blocks_of(p, keys, tier, token, head_dim);
    from_halves((const uint16_t *)(page + (keys ? k_scales_at() : v_scales_at(tier))) + token, n, p->scale);
    memset(p->bias, 0, n * sizeof *p->bias);
    if (has_bias(tier))
        from_halves((const uint16_t *)(page + (keys ? k_biases_at() : v_biases_at())) + token, n, p->bias);
    for (size_t i = 0; i < b.count; i++) from_block(page + b.at + i * b.apart, p->lanes, tier, p->code + i * b.step);
    from_codes(p, keys, tier);
}

static void rotate_panel(panel *p) {
    const size_t block = hadamard_block(p->columns), n = PAGE_TILE;
    const float norm = (float)(1 / sqrt((double)block));
    for (size_t h = 1; h < block; h *= 2)
        for (size_t c = 0; c < p->columns; c++) {
            float *a = p->x + c * n, *b = a + h * n;
            if (c & h) continue;
            SIMD()
            for (size_t r = 0; r < n; r++) {
                const float sum = a[r] + b[r], difference = a[r] - b[r];
                a[r] = sum, b[r] = difference;
            }
        }
    SIMD()
    for (size_t i = 0; i < p->columns * n; i++) p->x[i] *= norm;
}

/* Convert the numbers x of a panel, which come from the next higher tier, to codes of a tier. If this tier's keys are
 * rotated, rotate the keys first; the rotation is its own inverse. */
static void lower(panel *p, int keys, rvm_tier tier, uint8_t *scales, uint8_t *biases) {
    if (keys && TIERS[tier].rotated != TIERS[tier + 1].rotated) rotate_panel(p);
    find_scales(p, keys, tier, scales, biases);
    to_codes(p, keys, tier);
}

static void store(panel *p, int keys, rvm_tier tier, uint8_t *page, size_t token, size_t head_dim) {
    uint8_t *scales = page + (keys ? k_scales_at() : v_scales_at(tier)) + 2 * token;
    uint8_t *biases = page + (keys ? k_biases_at() : v_biases_at()) + 2 * token;
    const blocks b = blocks_of(p, keys, tier, token, head_dim);
    lower(p, keys, tier, scales, biases);
    for (size_t i = 0; i < b.count; i++)
        to_block(p->code + i * b.step, p->lanes, tier, page + b.at + i * b.apart);
}

static void demote_panel(panel *p, int keys, rvm_tier from, const uint8_t *src, rvm_tier to, uint8_t *dst,
                         size_t token, size_t head_dim) {
    p->columns = keys ? head_dim : SPAN;
    p->lanes = keys ? PAGE_TILE : value_rows(head_dim);
    p->used = head_dim;
    if (from == RVM_HOT) load_hot(p, keys, src, token, head_dim);
    else load_codes(p, keys, from, src, token, head_dim);
    for (rvm_tier tier = from - 1; tier > to; tier--) {
        lower(p, keys, tier, NULL, NULL);
        from_codes(p, keys, tier);
    }
    store(p, keys, to, dst, token, head_dim);
}

int LAYER(demote)(rvm_tier from, const uint8_t *src, rvm_tier to, uint8_t *dst, size_t n, size_t head_dim) {
    const size_t there = rvm_head_page_bytes(from, head_dim), here = rvm_head_page_bytes(to, head_dim);
    if (!src || !dst || !there || !here || from <= to) return RVM_BAD_ARGUMENT;
    panel p;
    for (; n--; src += there, dst += here)
        for (size_t token = 0; token < PAGE_TOKENS; token += PAGE_TILE) {
            demote_panel(&p, 1, from, src, to, dst, token, head_dim);
            if (token % SPAN == 0) demote_panel(&p, 0, from, src, to, dst, token, head_dim);
        }
    return RVM_OK;
}
