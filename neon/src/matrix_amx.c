/* This file has the matrix kernels for AMX. In a panel of 16 tokens, one instruction multiplies one plane of 16 tokens
 * by 16 rows. In a panel of 6 to 15 tokens, one instruction multiplies the planes of up to 8 tokens by 16 rows of
 * weights without super-blocks (amx_few.h). In all other cases the kernels of AVX-512 with VNNI run. Both kinds of
 * kernel give the same bits, because they add integers within a block, and add the blocks in the same order.
 *
 * The kernel unpacks weights once for up to PANELS panels. AMX instructions compute the products of a block of 32
 * columns in tile registers and store these products in memory; vector instructions add them to the sums LAG blocks
 * later. The kernel reads activations in slices of columns that stay in the L2 cache. The kernel unpacks super-blocks
 * (amx_super.h) for only SUPER_PANELS panels, so that a slice has more columns and the kernel reads and writes y less
 * often (matmul_bench: 8 panels are 10% faster than 16 or 4). */
#include "matrix_512vnni.h"

enum { PANELS = 16, SUPER_PANELS = 8, LAG = 2, RING = 4, SLICE_BYTES = 768 << 10 };

/* ---- tile registers ---- */

/* The numbers 0 to 7 of the tile registers are macros, because the intrinsics accept only literal numbers. */
#define PRODUCTS_0 0
#define PRODUCTS_1 1
#define PRODUCTS_2 2
#define PRODUCTS_3 3
#define ACTS_0 4
#define ACTS_1 5
#define CODES_0 6
#define CODES_1 7

typedef struct {
    uint8_t palette, reserved[15];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

_Static_assert(sizeof(tile_config) == 64, "what the processor reads");

/* Return the configuration of the tile registers for blocks of n columns: four registers for products, two for
   activations, two for weights. */
static tile_config config_for(uint8_t n) {
    const uint8_t k = n / 4;
    return (tile_config){.palette = 1,
                         .row_bytes = {64, 64, 64, 64, n, n, 64, 64},
                         .rows = {16, 16, 16, 16, 16, 16, k, k}};
}

/* Make the compiler finish all stores to the memory at p, because the compiler does not know how much of this memory
   the tile intrinsics read. */
INLINE void settle(const void *p) { __asm__ volatile("" ::"r"(p) : "memory"); }

INLINE void use(const tile_config *c) {
    settle(c);
    if (c->palette) _tile_loadconfig(c);
    else _tile_release();
}

/* Return this thread's configuration of the tile registers, so that the kernel can restore it with `use` later. Other
 * code in the process relies on its own configuration; llama.cpp, for example, sets it only once. */
INLINE tile_config current(void) {
    tile_config c;
    _tile_storeconfig(&c);
    settle(&c);
    return c;
}

/* Compute the dot products q . codes of a part (a block of 32 columns). The results go to PRODUCTS_0 and _1 if the
 * part's number is even, else to PRODUCTS_2 and _3; there is one register for each plane.
 *   q: [16 tokens][planes][32]   codes: [8][16 rows][4] */
INLINE void multiply_part(size_t part, const uint8_t *q, const uint8_t *codes, const size_t planes) {
    _tile_loadd(ACTS_0, q, 32 * planes);
    if (planes == 2) _tile_loadd(ACTS_1, q + 32, 32 * planes);
    _tile_loadd(CODES_0, codes, 64);
    if (part % 2 == 0) {
        _tile_zero(PRODUCTS_0);
        _tile_dpbsud(PRODUCTS_0, ACTS_0, CODES_0);
        if (planes == 1) return;
        _tile_zero(PRODUCTS_1);
        _tile_dpbsud(PRODUCTS_1, ACTS_1, CODES_0);
    } else {
        _tile_zero(PRODUCTS_2);
        _tile_dpbsud(PRODUCTS_2, ACTS_0, CODES_0);
        if (planes == 1) return;
        _tile_zero(PRODUCTS_3);
        _tile_dpbsud(PRODUCTS_3, ACTS_1, CODES_0);
    }
}

/* Store the products of a part (a block of 32 columns). to: [planes][16 tokens][16 rows] */
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

/* Up to 256 unpacked columns of a tile. */
typedef struct {
    _Alignas(64) weights block[8];
    float scale[8][TILE], bias[8][TILE]; /* scale, bias: the scales and biases of each block of 32 columns */
} unpacked;

/* Unpack n blocks of 32 columns from column k on, which is the first column of a group. */
INLINE void unpack_columns(const rvm_matrix_spec *spec, const uint8_t *tile, size_t k, size_t n, const uint32_t kind,
                           const int affine, unpacked *to) {
    const size_t group = spec->group, scales = TILE * float_size(spec->scale_kind);
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

/* Return the dot products of a token and a block for 16 rows, as floats. For all kinds except Q8 the dot product of
 * each plane is below 2^24, so its conversion to float is exact.
 * from: [16 rows]; the second plane's products begin at from + plane. start: the start value of the dot product
 * (start_of) */
INLINE f32x exact_sum(const int32_t *from, const size_t plane, const size_t planes, int32_t start,
                      const uint32_t kind) {
    const i32x first = _mm512_load_si512(from);
    if (planes == 1) return f_of(i_add(first, i_all(start)));
    const i32x low = i_add(_mm512_load_si512(from + plane), i_all(start));
    if (kind == RVM_Q8) return f_of(i_join(first, low));
    return f_fma(f_all(HIGH), f_of(first), f_of(low));
}

/* Scale the products of one block and add them to sum[t], for the first `some` <= T tokens.
 * from: the products; `token` is the distance of two tokens in from, and `plane` is the distance of a token's two
 *   planes
 *   d: the address of the scales and sums that follow the block's integers in a panel of n tokens */
INLINE void add_part(f32x *sum, const int32_t *from, const size_t token, const size_t plane, const unpacked *w,
                     size_t part, const uint8_t *d, size_t n, size_t some, const size_t T, const size_t planes,
                     const uint32_t kind, const int affine) {
    const f32x s = _mm512_load_ps(w->scale[part]), b = _mm512_load_ps(w->bias[affine ? part : 0]);
    UNROLL for (size_t t = 0; t < T; t++, d += 4) {
        if (t >= some) break;
        const int32_t start = affine ? 0 : act_i32(d + (kind == RVM_Q4 ? 8 : 12) * n);
        const f32x dot = exact_sum(from + token * t, plane, planes, start, kind);
        sum[t] = f_fma(f_mul(s, f_all(act_f32(d))), dot, sum[t]);
        if (affine) sum[t] = f_fma(b, f_all(act_f32(d + 4 * n)), sum[t]);
    }
}

#include "amx_few.h"
#include "amx_super.h"

/* ---- the matrix ---- */

typedef struct {
    const rvm_matrix_spec *spec;
    rvm_acts_kind acts;
    const uint8_t *first; /* the first panel */
    size_t panels, begin, end; /* panels: the number of panels; the slice has the columns [begin, end) */
    float *y;
    size_t y_stride;
} slice;

/* One unit of work: the product of 256 columns of a tile and a panel. */
typedef struct {
    float *sums; /* [16 tokens][16 rows] */
    const unpacked *w;
    const uint8_t *act; /* act: the panel's activations, from the first block of w on */
} unit;

/* Multiply all parts (blocks of 32 columns) of all units. The tile registers compute the products of a part while
   vector instructions add the products of an earlier part. */
INLINE void multiply_units(const unit *units, size_t count, size_t parts, const size_t planes, const uint32_t kind,
                           const int affine) {
    const size_t block_acts = PANEL * act_bytes(planes);
    _Alignas(64) int32_t c[RING][512];
    const unit *u = units, *adding = units;
    f32x sum[PANEL];
    UNROLL for (size_t t = 0; t < PANEL; t++) sum[t] = _mm512_load_ps(units->sums + TILE * t);
    for (size_t i = 0, part = 0, added = 0; i < count * parts + LAG; i++) {
        if (i && i <= count * parts) store_part(i - 1, c[(i - 1) % RING], planes);
        if (i < count * parts) {
            multiply_part(i, u->act + part * block_acts, (const uint8_t *)u->w->block[part].v, planes);
            if (++part == parts) part = 0, u++;
        }
        if (i >= LAG) {
            const uint8_t *d = adding->act + added * block_acts + 32 * planes * PANEL;
            add_part(sum, c[(i - LAG) % RING], TILE, PANEL * TILE, adding->w, added, d, PANEL, PANEL, PANEL, planes,
                     kind, affine);
            if (++added < parts) continue;
            UNROLL for (size_t t = 0; t < PANEL; t++) _mm512_store_ps(adding->sums + TILE * t, sum[t]);
            added = 0;
            if (++adding == units + count) break;
            UNROLL for (size_t t = 0; t < PANEL; t++) sum[t] = _mm512_load_ps(adding->sums + TILE * t);
        }
    }
}

/* Multiply up to 256 columns from column k on, for all panels of the slice, one tile after the other. */
INLINE void multiply_columns(const slice *s, const uint8_t *const *tile, const size_t tiles, size_t k,
                             float (*sums)[PANELS][PANEL * TILE], const size_t planes, const uint32_t kind,
                             const int affine) {
    const size_t panel_bytes = PANEL * token_bytes(s->acts, s->spec->cols);
    const size_t blocks = min_size(s->end - k, SUPER_COLS) / 32;
    const uint8_t *act = s->first + PANEL * token_bytes(s->acts, k);
    unpacked w[2];
    unit units[2 * PANELS];
    for (size_t i = 0; i < tiles; i++) unpack_columns(s->spec, tile[i], k, blocks, kind, affine, w + i);
    settle(w);
    for (size_t u = 0; u < tiles * s->panels; u++)
        units[u] = (unit){sums[u % tiles][u / tiles], w + u % tiles, act + u / tiles * panel_bytes};
    multiply_units(units, tiles * s->panels, blocks, planes, kind, affine);
}

/* Prefetch the tile's super-block at column k or, if the slice ends there, the super-block of the second next tile. */
INLINE void prefetch_super(const slice *s, const uint8_t *tile, size_t k) {
    const size_t bytes = super_bytes(s->spec->kind);
    if (k == s->end) tile += 2 * tile_bytes(s->spec), k = s->begin;
    const uint8_t *p = tile + super_front(s->spec) + k / SUPER_COLS * bytes;
    for (size_t i = 0; i < bytes; i += 64) prefetch_line(p + i);
}

/* Multiply the 256 columns of a super-block from column k on, for all panels of the slice. */
INLINE void super_columns(const slice *s, const uint8_t *const *tile, const size_t tiles, size_t k,
                          float (*sums)[PANELS][PANEL * TILE], const size_t planes, const uint32_t kind) {
    const size_t panel_bytes = PANEL * token_bytes(s->acts, s->spec->cols);
    const uint8_t *act = s->first + PANEL * token_bytes(s->acts, k);
    folded w[2];
    super_unit units[2 * SUPER_PANELS];
    for (size_t i = 0; i < tiles; i++) fold(s->spec, tile[i], k, kind, w + i);
    settle(w);
    for (size_t i = 0; i < tiles; i++) prefetch_super(s, tile[i], k + SUPER_COLS);
    for (size_t u = 0; u < tiles * s->panels; u++)
        units[u] = (super_unit){sums[u % tiles][u / tiles], w + u % tiles, act + u / tiles * panel_bytes};
    multiply_supers(units, tiles * s->panels, planes, kind);
}

/* Multiply one or two tiles of the slice for all panels of the slice. */
INLINE void multiply(const slice *s, const uint8_t *const *tile, const size_t tiles, const size_t *rows,
                     const size_t planes, const uint32_t kind, const int affine) {
    _Alignas(64) float sums[2][PANELS][PANEL * TILE];
    for (size_t i = 0; i < tiles; i++)
        for (size_t t = 0; t < PANEL * s->panels; t++) {
            const __mmask16 valid = (__mmask16)((1u << rows[i]) - 1);
            const float *y = s->y + t * s->y_stride + TILE * i;
            _mm512_store_ps((float *)sums[i] + TILE * t, s->begin ? _mm512_maskz_loadu_ps(valid, y) : f_zero());
        }
    for (size_t k = s->begin; k < s->end; k += SUPER_COLS) {
        if (is_super(kind)) super_columns(s, tile, tiles, k, sums, planes, kind);
        else multiply_columns(s, tile, tiles, k, sums, planes, kind, affine);
    }
    for (size_t i = 0; i < tiles; i++)
        for (size_t t = 0; t < PANEL * s->panels; t++)
            f_store(s->y + t * s->y_stride + TILE * i, _mm512_load_ps((float *)sums[i] + TILE * t), rows[i]);
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

/* Compute the results of all panels that have 16 tokens. */
static void full_panels(const rvm_matrix *m, rvm_acts_kind kind, const void *a, size_t tokens, size_t tile_begin,
                        size_t tile_end, float *y, size_t y_stride) {
    const rvm_matrix_spec *spec = &m->spec;
    const tile_config ours = config_for(is_super(spec->kind) ? 64 : 32), before = current();
    use(&ours);
    const size_t most = is_super(spec->kind) ? SUPER_PANELS : PANELS;
    for (size_t t = 0; t + PANEL <= tokens; t += most * PANEL) {
        const size_t panels = min_size((tokens - t) / PANEL, most);
        const size_t cols = SUPER_COLS * (SLICE_BYTES / (PANEL * panels * token_bytes(kind, SUPER_COLS)) + 1);
        for (size_t k = 0; k < spec->cols; k += cols) {
            const slice s = {spec, kind, acts_panel(a, kind, spec->cols, t), panels, k, min_size(k + cols, spec->cols),
                             y + t * y_stride + tile_begin * TILE, y_stride};
            tiles_for(spec, act_planes(kind))(s, m, tile_begin, tile_end);
        }
    }
    use(&before);
}

static int matmul_in_tiles(const rvm_matrix *m, rvm_acts_kind kind, const void *a, size_t tokens, size_t tile_begin,
                           size_t tile_end, float *y, size_t y_stride) {
    const size_t full = kind == RVM_ACTS_FLOAT ? 0 : tokens / PANEL * PANEL;
    if (rvm_matmul_refuses(m, kind, a, tokens, tile_begin, tile_end, y, y_stride)) return RVM_BAD_ARGUMENT;
    if (full) full_panels(m, kind, a, full, tile_begin, tile_end, y, y_stride);
    if (full == tokens) return RVM_OK;
    const void *rest = full ? acts_panel(a, kind, m->spec.cols, full) : a;
    if (kind != RVM_ACTS_FLOAT && !is_super(m->spec.kind) && tokens - full >= FEW_LEAST) {
        few_panel(m, kind, rest, tokens - full, tile_begin, tile_end, y + full * y_stride, y_stride);
        return RVM_OK;
    }
    return matmul(m, kind, rest, tokens - full, tile_begin, tile_end, y + full * y_stride, y_stride);
}

/* Compute products of data in the L1 cache `rounds` times, to measure the peak rate of the AMX instructions. */
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
