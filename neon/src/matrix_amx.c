/* AMX: integer products of 16 tokens x 16 rows in one instruction, for panels of 16 tokens; for 3 to 15 tokens, both
 * planes of up to 8. One or two tokens and float weights go through the kernels of AVX-512 with VNNI. The bits are the same: both sum integers, and add the sums of
 * blocks in the same order.
 *
 * A part is the columns that share a scale: a block of 32, or half a block in Q6_K. Weights are unpacked once for up
 * to PANELS panels. The products of a part are formed in tile registers, stored, and added to the sums by vectors,
 * LAG parts later.
 * Activations are read in slices of columns that stay in the L2 cache. */
#include "matrix_512vnni.h"

enum { PANELS = 16, LAG = 2, RING = 4, SLICE_BYTES = 768 << 10 };

/* ---- tile registers ---- */

/* The intrinsics want numbers. */
#define PRODUCTS_0 0
#define PRODUCTS_1 1
#define PRODUCTS_2 2
#define PRODUCTS_3 3
#define ACTS_0 4
#define ACTS_1 5
#define CODES 6

typedef struct {
    uint8_t palette, reserved[15];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

_Static_assert(sizeof(tile_config) == 64, "what the processor reads");

/* For parts of n columns. */
static tile_config config_for(uint8_t n) {
    return (tile_config){.palette = 1,
                         .row_bytes = {64, 64, 64, 64, n, n, 64},
                         .rows = {16, 16, 16, 16, 16, 16, n / 4}};
}

/* Compilers do not know how much memory the intrinsics read: what lies at p is complete. */
INLINE void settle(const void *p) { __asm__ volatile("" ::"r"(p) : "memory"); }

INLINE void use(const tile_config *c) {
    settle(c);
    if (c->palette) _tile_loadconfig(c);
    else _tile_release();
}

/* The configuration of this thread, to `use` afterwards: llama.cpp sets its own once and expects to find it. */
INLINE tile_config current(void) {
    tile_config c;
    _tile_storeconfig(&c);
    settle(&c);
    return c;
}

/* c = q . codes in the registers PRODUCTS_0, _1 for even parts, _2, _3 for odd ones: one for each plane.
 *   q: [16 tokens][planes][32]   codes: [columns / 4][16 rows][4] */
INLINE void multiply_part(size_t part, const uint8_t *q, const uint8_t *codes, const size_t planes) {
    _tile_loadd(ACTS_0, q, 32 * planes);
    if (planes == 2) _tile_loadd(ACTS_1, q + 32, 32 * planes);
    _tile_loadd(CODES, codes, 64);
    if (part % 2 == 0) {
        _tile_zero(PRODUCTS_0);
        _tile_dpbsud(PRODUCTS_0, ACTS_0, CODES);
        if (planes == 1) return;
        _tile_zero(PRODUCTS_1);
        _tile_dpbsud(PRODUCTS_1, ACTS_1, CODES);
    } else {
        _tile_zero(PRODUCTS_2);
        _tile_dpbsud(PRODUCTS_2, ACTS_0, CODES);
        if (planes == 1) return;
        _tile_zero(PRODUCTS_3);
        _tile_dpbsud(PRODUCTS_3, ACTS_1, CODES);
    }
}

/* to: [planes][16 tokens][16 rows] */
INLINE void store_part(size_t part, int32_t *to, const size_t planes) {
    if (part % 2 == 0) {
        _tile_stored(PRODUCTS_0, to, 64);
        if (planes == 2) _tile_stored(PRODUCTS_1, to + 256, 64);
    } else {
        _tile_stored(PRODUCTS_2, to, 64);
        if (planes == 2) _tile_stored(PRODUCTS_3, to + 256, 64);
    }
}

/* ---- weights ---- */

/* Up to 256 columns of a tile. */
typedef struct {
    _Alignas(64) weights block[8];
    float scale[16][TILE], bias[8][TILE]; /* of each part */
} unpacked;

/* n blocks from column k on, which begins a group or a super-block. */
INLINE void unpack_columns(const rvm_matrix_spec *spec, const uint8_t *tile, size_t k, size_t n, const uint32_t kind,
                           const int affine, unpacked *to) {
    const size_t group = spec->group, scales = TILE * float_size(spec->scale_kind);
    if (is_super(kind)) {
        const uint8_t *p = tile + super_front(spec) + k / SUPER_COLS * super_bytes(kind);
        const uint8_t *at = super_scale(spec, tile, k / SUPER_COLS, p), *bytes = p;
        _Alignas(64) uint8_t six[SUPER_HEAD];
        const f32x d = f_load(at, RVM_F16), low = f_mul(f_load(at + 2 * TILE, RVM_F16), f_all(-1));
        if (kind != RVM_Q6_K) unpack_six_bits(p + 4 * TILE, six), bytes = six;
        p += SUPER_HEAD;
        for (size_t b = 0; b < 8; b++, p += block_bytes(kind)) {
            f32x f[2];
            super_factors(f, bytes, b, d, low, kind);
            _mm512_storeu_ps(kind == RVM_Q6_K ? to->scale[2 * b] : to->scale[b], f[0]);
            _mm512_storeu_ps(kind == RVM_Q6_K ? to->scale[2 * b + 1] : to->bias[b], f[1]);
            unpack(p, kind == RVM_Q4_K ? RVM_Q4 : kind, 0, to->block + b);
        }
        return;
    }
    const size_t front = affine ? 2 * scales : scales;
    const uint8_t *p = tile + k / group * (front + group / 32 * block_bytes(kind));
    f32x s = f_zero(), bias = f_zero();
    for (size_t b = 0; b < n; b++, p += block_bytes(kind)) {
        if (32 * b % group == 0) {
            s = f_load(p, spec->scale_kind);
            bias = affine ? f_load(p + scales, spec->scale_kind) : s;
            p += front;
        }
        _mm512_storeu_ps(to->scale[b], s);
        if (affine) _mm512_storeu_ps(to->bias[b], bias);
        unpack(p, kind, 0, to->block + b);
    }
}

/* ---- sums ---- */

/* The products of a part as floats, exactly as from one integer: without Q8 their parts are below 2^24.
 * from: a token's [16 rows], the second plane's `plane` behind   start: the token's, as in start_of */
INLINE f32x exact_sum(const int32_t *from, const size_t plane, const size_t planes, int32_t start,
                      const uint32_t kind) {
    const i32x first = _mm512_load_si512(from);
    if (planes == 1) return f_of(i_add(first, i_all(start)));
    const i32x low = i_add(_mm512_load_si512(from + plane), i_all(start));
    if (kind == RVM_Q8) return f_of(i_join(first, low));
    return f_fma(f_all(HIGH), f_of(first), f_of(low));
}

/* sum[t] += a part, for the `some` <= T first tokens.   d: what follows the integers of its block, in a panel of n
 * from: the products; a token's are `token` apart, its planes `plane` */
INLINE void add_part(f32x *sum, const int32_t *from, const size_t token, const size_t plane, const unpacked *w,
                     size_t part, const uint8_t *d, size_t n, size_t some, const size_t T, const size_t planes,
                     const uint32_t kind, const int affine) {
    const size_t halves = kind == RVM_Q6_K ? 2 : 1, second = part % halves;
    const f32x s = _mm512_load_ps(w->scale[part]), b = _mm512_load_ps(w->bias[affine ? part : 0]);
    UNROLL for (size_t t = 0; t < T; t++, d += 4)
        if (t < some) {
            int32_t start = 0;
            if (kind == RVM_Q6_K) start = second ? 4 * act_i32(d + 8 * n) - act_i32(d + 16 * n) : act_i32(d + 16 * n);
            else if (!affine) start = act_i32(d + (kind == RVM_Q4 ? 8 : 12) * n);
            const f32x dot = exact_sum(from + token * t, plane, planes, start, kind);
            sum[t] = f_fma(f_mul(s, f_all(act_f32(d))), dot, sum[t]);
            if (affine) sum[t] = f_fma(b, f_all(act_f32(d + 4 * n)), sum[t]);
        }
}

/* ---- the matrix ---- */

typedef struct {
    const rvm_matrix_spec *spec;
    const uint8_t *acts; /* its first panel */
    size_t panels, begin, end; /* columns */
    float *y;
    size_t y_stride;
} slice;

/* 256 columns of a tile for a panel. */
typedef struct {
    float *sums; /* [16 tokens][16 rows] */
    const unpacked *w;
    const uint8_t *act; /* the panel, from the first block of w on */
} unit;

/* All parts of all units: the products of one part are formed while those of an earlier one are added. */
INLINE void multiply_units(const unit *units, size_t count, size_t parts, const size_t planes, const uint32_t kind,
                           const int affine) {
    const size_t halves = kind == RVM_Q6_K ? 2 : 1, block_acts = PANEL * act_bytes(planes);
    _Alignas(64) int32_t c[RING][512];
    const unit *u = units, *adding = units;
    f32x sum[PANEL];
    UNROLL for (size_t t = 0; t < PANEL; t++) sum[t] = _mm512_load_ps(units->sums + TILE * t);
    for (size_t i = 0, part = 0, added = 0; i < count * parts + LAG; i++) {
        if (i && i <= count * parts) store_part(i - 1, c[(i - 1) % RING], planes);
        if (i < count * parts) {
            const size_t block = part / halves, quad = part % halves * 4;
            const uint8_t *codes = (const uint8_t *)(u->w->block[block].v + quad);
            multiply_part(i, u->act + block * block_acts + 4 * quad, codes, planes);
            if (++part == parts) part = 0, u++;
        }
        if (i >= LAG) {
            const uint8_t *d = adding->act + added / halves * block_acts + 32 * planes * PANEL;
            add_part(sum, c[(i - LAG) % RING], TILE, 256, adding->w, added, d, PANEL, PANEL, PANEL, planes, kind,
                     affine);
            if (++added < parts) continue;
            UNROLL for (size_t t = 0; t < PANEL; t++) _mm512_store_ps(adding->sums + TILE * t, sum[t]);
            added = 0;
            if (++adding == units + count) break;
            UNROLL for (size_t t = 0; t < PANEL; t++) sum[t] = _mm512_load_ps(adding->sums + TILE * t);
        }
    }
}

/* One or two tiles of the slice for all its panels. */
INLINE void multiply(const slice *s, const uint8_t *const *tile, const size_t tiles, const size_t *rows,
                     const size_t planes, const uint32_t kind, const int affine) {
    const size_t halves = kind == RVM_Q6_K ? 2 : 1, panel_bytes = PANEL * (s->spec->cols / 32) * act_bytes(planes);
    _Alignas(64) float sums[2][PANELS][PANEL * TILE];
    unpacked w[2];
    unit units[2 * PANELS];
    for (size_t i = 0; i < tiles; i++)
        for (size_t t = 0; t < PANEL * s->panels; t++) {
            const __mmask16 valid = (__mmask16)((1u << rows[i]) - 1);
            const float *y = s->y + t * s->y_stride + TILE * i;
            _mm512_store_ps(sums[i][0] + TILE * t, s->begin ? _mm512_maskz_loadu_ps(valid, y) : f_zero());
        }
    for (size_t k = s->begin; k < s->end; k += SUPER_COLS) {
        const size_t blocks = min_size(s->end - k, SUPER_COLS) / 32, parts = halves * blocks;
        size_t count = 0;
        for (size_t i = 0; i < tiles; i++) unpack_columns(s->spec, tile[i], k, blocks, kind, affine, w + i);
        settle(w);
        for (size_t p = 0; p < s->panels; p++) {
            const uint8_t *act = s->acts + p * panel_bytes + k / 32 * PANEL * act_bytes(planes);
            for (size_t i = 0; i < tiles; i++) units[count++] = (unit){sums[i][p], w + i, act};
        }
        multiply_units(units, count, parts, planes, kind, affine);
    }
    for (size_t i = 0; i < tiles; i++)
        for (size_t t = 0; t < PANEL * s->panels; t++)
            f_store(s->y + t * s->y_stride + TILE * i, _mm512_load_ps(sums[i][0] + TILE * t), rows[i]);
}

INLINE void multiply_tiles(slice s, const rvm_matrix *m, size_t begin, size_t end, const size_t planes,
                           const uint32_t kind, const int affine) {
    for (size_t tile = begin; tile < end; tile += 2, s.y += 2 * TILE) {
        const uint8_t *const two[2] = {tile_at(m, tile), tile_at(m, tile) + tile_bytes(&m->spec)};
        const size_t left = m->spec.rows - tile * TILE;
        const size_t rows[2] = {min_size(left, TILE), left > TILE ? min_size(left - TILE, TILE) : 0};
        if (end - tile >= 2) multiply(&s, two, 2, rows, planes, kind, affine);
        else multiply(&s, two, 1, rows, planes, kind, affine);
    }
}

#define TILES(name, planes, kind, affine)                                               \
    static void name(slice s, const rvm_matrix *m, size_t begin, size_t end) {          \
        multiply_tiles(s, m, begin, end, planes, kind, affine);                         \
    }

TILES(tiles_8_q4_affine, 1, RVM_Q4, 1)
TILES(tiles_8_q4_symmetric, 1, RVM_Q4, 0)
TILES(tiles_8_q8_affine, 1, RVM_Q8, 1)
TILES(tiles_8_q8_symmetric, 1, RVM_Q8, 0)
TILES(tiles_16_q4_affine, 2, RVM_Q4, 1)
TILES(tiles_16_q4_symmetric, 2, RVM_Q4, 0)
TILES(tiles_16_q8_affine, 2, RVM_Q8, 1)
TILES(tiles_16_q8_symmetric, 2, RVM_Q8, 0)
TILES(tiles_8_q4_k, 1, RVM_Q4_K, 1)
TILES(tiles_8_q5_k, 1, RVM_Q5_K, 1)
TILES(tiles_8_q6_k, 1, RVM_Q6_K, 0)
TILES(tiles_16_q4_k, 2, RVM_Q4_K, 1)
TILES(tiles_16_q5_k, 2, RVM_Q5_K, 1)
TILES(tiles_16_q6_k, 2, RVM_Q6_K, 0)

typedef void tiles_function(slice, const rvm_matrix *, size_t, size_t);

static tiles_function *tiles_for(const rvm_matrix_spec *spec, size_t planes) {
    static tiles_function *const all[2][2][2] = {
        {{tiles_8_q4_symmetric, tiles_8_q4_affine}, {tiles_8_q8_symmetric, tiles_8_q8_affine}},
        {{tiles_16_q4_symmetric, tiles_16_q4_affine}, {tiles_16_q8_symmetric, tiles_16_q8_affine}}};
    static tiles_function *const super[2][3] = {{tiles_8_q4_k, tiles_8_q5_k, tiles_8_q6_k},
                                                {tiles_16_q4_k, tiles_16_q5_k, tiles_16_q6_k}};
    if (is_super(spec->kind)) return super[planes - 1][spec->kind - RVM_Q4_K];
    return all[planes - 1][spec->kind == RVM_Q8][spec->affine];
}

/* The full panels among `tokens`. */
static void full_panels(const rvm_matrix *m, size_t planes, const void *a, size_t tokens, size_t tile_begin,
                        size_t tile_end, float *y, size_t y_stride) {
    const rvm_matrix_spec *spec = &m->spec;
    const tile_config ours = config_for(spec->kind == RVM_Q6_K ? 16 : 32), before = current();
    use(&ours);
    for (size_t t = 0; t + PANEL <= tokens; t += PANELS * PANEL) {
        const size_t panels = min_size((tokens - t) / PANEL, PANELS), step = PANEL * panels * act_bytes(planes);
        const size_t cols = round_up(SLICE_BYTES / step * 32 + 1, SUPER_COLS);
        for (size_t k = 0; k < spec->cols; k += cols) {
            const slice s = {spec, acts_panel(a, planes, spec->cols, t), panels, k, min_size(k + cols, spec->cols),
                             y + t * y_stride + tile_begin * TILE, y_stride};
            tiles_for(spec, planes)(s, m, tile_begin, tile_end);
        }
    }
    use(&before);
}

/* ---- few tokens ----
 *
 * The planes of a token are rows below each other, as they lie in a panel: [tokens][planes][32]. */

enum { LEAST = 3, MOST = 8 };

static tile_config config_for_few(uint8_t n, uint8_t rows) {
    return (tile_config){.palette = 1, .row_bytes = {64, 64, 0, 0, n, 0, 64}, .rows = {rows, rows, 0, 0, rows, 0, n / 4}};
}

/* c = q . codes in the register PRODUCTS_0 for even parts, PRODUCTS_1 for odd ones. */
INLINE void multiply_few(size_t part, const uint8_t *q, const uint8_t *codes) {
    _tile_loadd(ACTS_0, q, 32);
    _tile_loadd(CODES, codes, 64);
    if (part % 2 == 0) {
        _tile_zero(PRODUCTS_0);
        _tile_dpbsud(PRODUCTS_0, ACTS_0, CODES);
    } else {
        _tile_zero(PRODUCTS_1);
        _tile_dpbsud(PRODUCTS_1, ACTS_0, CODES);
    }
}

INLINE void store_few(size_t part, int32_t *to) {
    if (part % 2 == 0) _tile_stored(PRODUCTS_0, to, 64);
    else _tile_stored(PRODUCTS_1, to, 64);
}

/* As quantised_tile, for tokens i .. i + some of a panel of n; some <= T. */
INLINE void few_tile(const rvm_matrix_spec *spec, const uint8_t *tile, const uint8_t *act, size_t n, size_t i,
                     size_t some, const size_t T, const size_t planes, const uint32_t kind, const int affine, float *y,
                     size_t y_stride, size_t rows) {
    const size_t halves = kind == RVM_Q6_K ? 2 : 1, block_acts = n * act_bytes(planes);
    const size_t bytes = tile_bytes(spec) * BLOCK_COLS / spec->cols; /* of a block with its scales, about */
    const uint8_t *soon = tile + AHEAD;
    _Alignas(64) int32_t c[RING][256];
    unpacked w;
    f32x sum[MOST];
    UNROLL for (size_t t = 0; t < T; t++) sum[t] = f_zero();
    for (size_t k = 0; k < spec->cols; k += SUPER_COLS) {
        const size_t blocks = min_size(spec->cols - k, SUPER_COLS) / BLOCK_COLS, parts = halves * blocks;
        unpack_columns(spec, tile, k, blocks, kind, affine, &w);
        settle(&w);
        for (size_t part = 0; part < parts + LAG; part++) {
            if (part && part <= parts) store_few(part - 1, c[(part - 1) % RING]);
            if (part < parts) {
                const size_t block = part / halves, quad = part % halves * 4;
                const uint8_t *codes = (const uint8_t *)(w.block[block].v + quad);
                multiply_few(part, act + block * block_acts + 32 * planes * i + 4 * quad, codes);
                for (size_t at = 0; at < bytes / halves; at += 64) prefetch_line(soon + at);
                soon += bytes / halves;
            }
            if (part < LAG) continue;
            const uint8_t *d = act + (part - LAG) / halves * block_acts + 32 * planes * n + 4 * i;
            add_part(sum, c[(part - LAG) % RING], TILE * planes, TILE, &w, part - LAG, d, n, some, T, planes, kind,
                     affine);
        }
        act += blocks * block_acts;
    }
    UNROLL for (size_t t = 0; t < T; t++)
        if (t < some) f_store(y + t * y_stride, sum[t], rows);
}

#define FEW_TOKENS(name, planes, kind, affine)                                                                      \
    static void name(const rvm_matrix_spec *spec, const uint8_t *tile, const uint8_t *act, size_t n, size_t i,     \
                     size_t some, float *y, size_t y_stride, size_t rows) {                                         \
        if (some <= 4) few_tile(spec, tile, act, n, i, some, 4, planes, kind, affine, y, y_stride, rows);           \
        else few_tile(spec, tile, act, n, i, some, MOST, planes, kind, affine, y, y_stride, rows);                  \
    }

FEW_TOKENS(few_8_q4_affine, 1, RVM_Q4, 1)
FEW_TOKENS(few_8_q4_symmetric, 1, RVM_Q4, 0)
FEW_TOKENS(few_8_q8_affine, 1, RVM_Q8, 1)
FEW_TOKENS(few_8_q8_symmetric, 1, RVM_Q8, 0)
FEW_TOKENS(few_16_q4_affine, 2, RVM_Q4, 1)
FEW_TOKENS(few_16_q4_symmetric, 2, RVM_Q4, 0)
FEW_TOKENS(few_16_q8_affine, 2, RVM_Q8, 1)
FEW_TOKENS(few_16_q8_symmetric, 2, RVM_Q8, 0)
FEW_TOKENS(few_8_q4_k, 1, RVM_Q4_K, 1)
FEW_TOKENS(few_8_q5_k, 1, RVM_Q5_K, 1)
FEW_TOKENS(few_8_q6_k, 1, RVM_Q6_K, 0)
FEW_TOKENS(few_16_q4_k, 2, RVM_Q4_K, 1)
FEW_TOKENS(few_16_q5_k, 2, RVM_Q5_K, 1)
FEW_TOKENS(few_16_q6_k, 2, RVM_Q6_K, 0)

typedef void few_function(const rvm_matrix_spec *, const uint8_t *, const uint8_t *, size_t, size_t, size_t, float *,
                          size_t, size_t);

static few_function *few_for(const rvm_matrix_spec *spec, size_t planes) {
    static few_function *const all[2][2][2] = {
        {{few_8_q4_symmetric, few_8_q4_affine}, {few_8_q8_symmetric, few_8_q8_affine}},
        {{few_16_q4_symmetric, few_16_q4_affine}, {few_16_q8_symmetric, few_16_q8_affine}}};
    static few_function *const super[2][3] = {{few_8_q4_k, few_8_q5_k, few_8_q6_k},
                                              {few_16_q4_k, few_16_q5_k, few_16_q6_k}};
    if (is_super(spec->kind)) return super[planes - 1][spec->kind - RVM_Q4_K];
    return all[planes - 1][spec->kind == RVM_Q8][spec->affine];
}

/* A panel of LEAST to 15 tokens. */
static void few_tokens(const rvm_matrix *m, size_t planes, const uint8_t *act, size_t n, size_t tile_begin,
                       size_t tile_end, float *y, size_t y_stride) {
    const rvm_matrix_spec *spec = &m->spec;
    few_function *few = few_for(spec, planes);
    const size_t apart = tile_bytes(spec);
    const tile_config before = current();
    for (size_t i = 0, some; i < n; i += some) {
        some = min_size(n - i, MOST);
        const tile_config ours = config_for_few(spec->kind == RVM_Q6_K ? 16 : 32, (uint8_t)(some * planes));
        const uint8_t *p = tile_at(m, tile_begin);
        use(&ours);
        for (size_t tile = tile_begin; tile < tile_end; tile++, p += apart)
            few(spec, p, act, n, i, some, y + i * y_stride + tile * TILE, y_stride,
                min_size(TILE, spec->rows - tile * TILE));
    }
    use(&before);
}

static int matmul_in_tiles(const rvm_matrix *m, rvm_acts_kind kind, const void *a, size_t tokens, size_t tile_begin,
                           size_t tile_end, float *y, size_t y_stride) {
    const size_t planes = act_planes(kind), full = kind == RVM_ACTS_FLOAT ? 0 : tokens / PANEL * PANEL;
    if (rvm_matmul_refuses(m, kind, a, tokens, tile_begin, tile_end, y, y_stride)) return RVM_BAD_ARGUMENT;
    if (full) full_panels(m, planes, a, full, tile_begin, tile_end, y, y_stride);
    if (full == tokens) return RVM_OK;
    const void *rest = full ? acts_panel(a, planes, m->spec.cols, full) : a;
    if (kind != RVM_ACTS_FLOAT && tokens - full >= LEAST) {
        few_tokens(m, planes, rest, tokens - full, tile_begin, tile_end, y + full * y_stride, y_stride);
        return RVM_OK;
    }
    return matmul(m, kind, rest, tokens - full, tile_begin, tile_end, y + full * y_stride, y_stride);
}

/* Rounds of products from the L1 cache. */
static uint64_t peak_in_tiles(uint64_t rounds, int32_t *sum) {
    _Alignas(64) uint8_t q[1024], codes[512];
    _Alignas(64) int32_t c[512];
    const tile_config ours = config_for(32), before = current();
    for (size_t i = 0; i < sizeof q; i++) q[i] = (uint8_t)(11 * i), codes[i % 512] = (uint8_t)(37 * i);
    use(&ours);
    settle(q), settle(codes);
    for (uint64_t i = 0; i < rounds; i++) multiply_part(i % 2, q, codes, 2);
    store_part(0, c, 2);
    use(&before);
    *sum = c[0] ^ c[256];
    return rounds * 2 * PANEL * TILE * 32;
}

const rvm_matmul rvm_matmul_amx = {
    .name = "amx",
    .acts = acts,
    .matmul = matmul_in_tiles,
    .page_queries = page_queries,
    .page_scores = page_scores,
    .page_values = page_values,
    .peak = peak_in_tiles,
};
