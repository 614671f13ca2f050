/* This header multiplies super-blocks (matrix.h) by many tokens with AVX-512 and VNNI; matrix_avx512vnni.c includes it.
 *
 * The kernel of super_kernel.h reads four activations for each vpdpbusd, and unpacks the weights again for every 16
 * tokens. Here, two tiles share the activations, and up to PART_TOKENS tokens share the unpacked weights. Sixteen
 * registers have the dot products of two tiles and PLANES planes of tokens: 8 of the current block, and 8 of the
 * current super-block. PAIRS pairs of tiles share the activations of a super-block, which stay in the L2 cache. The sums
 * of these tiles take 256 KiB of the stack. */

enum { PLANES = 4, PAIRS = 8, PART_TOKENS = 256 };

/* An unpacked super-block of two tiles. codes[s][b]: block b of tile s; scales: one for each block, or one for each half
   of a block of Q6_K; lows: one for each block; low: -dmin */
typedef struct {
    weights codes[2][8];
    i32x scales[2][16];
    f32x lows[2][8], d[2], low[2];
} super_pair;

/* Unpack super-block k of a tile into side s of `to`. */
INLINE void unpack_super(const rvm_matrix_spec *spec, const uint8_t *tile, size_t k, const uint32_t kind, size_t s,
                         super_pair *to) {
    const uint8_t *p = tile + super_front(spec) + k * super_bytes(kind), *at = super_scale(spec, tile, k, p);
    const uint8_t *bytes = p;
    _Alignas(64) uint8_t six[SUPER_HEAD];
    to->d[s] = f_load(at, RVM_F16);
    if (kind != RVM_Q6_K) {
        unpack_six_bits(p + 4 * TILE, six), bytes = six;
        to->low[s] = f_mul(f_load(at + 2 * TILE, RVM_F16), f_all(-1));
        for (size_t b = 0; b < 8; b++) to->lows[s][b] = f_of(i_load8(six + 128 + TILE * b));
    }
    for (size_t i = 0; i < (kind == RVM_Q6_K ? 16 : 8); i++) to->scales[s][i] = i_load8(bytes + TILE * i);
    p += SUPER_HEAD;
    for (size_t b = 0; b < 8; b++, p += block_bytes(kind)) {
        weights w;
        unpack(p, kind == RVM_Q4_K ? RVM_Q4 : kind, 0, &w);
        to->codes[s][b] = w;
    }
}

/* Multiply n vectors of block b, from vector j on, by the activations. Multiply the dot products by scale number `scale`,
 * and add them to whole[s][r]. Number r = t * planes + p is plane p of token t.
 *   q: the block's activations for r = 0   start: the address of the first token's start value, or NULL for 0 */
INLINE void add_pair(i32x whole[2][PLANES], const super_pair *of, const uint8_t *q, const uint8_t *start, size_t b,
                     size_t scale, const size_t j, const size_t n, const size_t planes) {
    i32x acc[2][PLANES];
    UNROLL for (size_t r = 0; r < PLANES; r++)
        acc[0][r] = acc[1][r] = i_all(start ? act_i32(start + 4 * (PANEL * (r % planes) + r / planes)) : 0);
    UNROLL for (size_t c = j; c < j + n; c++) {
        const __m512i v = of->codes[0][b].v[c], w = of->codes[1][b].v[c];
        UNROLL for (size_t r = 0; r < PLANES; r++) {
            const __m512i x = _mm512_set1_epi32(act_i32(q + LINE_COLS * r + 4 * c));
            acc[0][r] = _mm512_dpbusd_epi32(acc[0][r], v, x);
            acc[1][r] = _mm512_dpbusd_epi32(acc[1][r], w, x);
        }
    }
    UNROLL for (size_t s = 0; s < 2; s++)
        UNROLL for (size_t r = 0; r < PLANES; r++) whole[s][r] = i_mla(whole[s][r], acc[s][r], of->scales[s][scale]);
}

/* Multiply a super-block of two tiles by the tokens i to i + PLANES / planes - 1 of a full panel. Add the products to
   sums [tokens][2][16] in the order of super_tile. act: the panel's activations for the super-block */
INLINE void add_super_pair(const super_pair *of, const uint8_t *act, size_t i, const size_t planes, const uint32_t kind,
                           float *sums) {
    const size_t T = PLANES / planes;
    i32x whole[2][PLANES];
    UNROLL for (size_t r = 0; r < PLANES; r++) whole[0][r] = whole[1][r] = i_all(0);
    for (size_t b = 0; b < 8; b++) {
        const uint8_t *q = line_at(act, planes, PANEL, b / 2, i) + b % 2 * 32,
                      *start = super_start(act, planes, PANEL, i, 2 * b, 0);
        HIDE_ORIGIN(q);
        HIDE_ORIGIN(start);
        if (kind == RVM_Q6_K) {
            add_pair(whole, of, q, start, b, 2 * b, 0, 4, planes);
            add_pair(whole, of, q, start + 4 * PANEL * planes, b, 2 * b + 1, 4, 4, planes);
        } else {
            add_pair(whole, of, q, NULL, b, b, 0, 8, planes);
        }
    }
    UNROLL for (size_t t = 0; t < T; t++) {
        const f32x da = f_all(act_f32(super_d(act, planes, PANEL, i + t)));
        f32x m[2] = {f_zero(), f_zero()};
        if (kind != RVM_Q6_K)
            UNROLL for (size_t b = 0; b < 8; b++) {
                const f32x x = f_all(act_f32(super_sum(act, planes, PANEL, i + t, b)));
                UNROLL for (size_t s = 0; s < 2; s++) m[s] = f_fma(of->lows[s][b], x, m[s]);
            }
        UNROLL for (size_t s = 0; s < 2; s++) {
            float *at = sums + TILE * (2 * t + s);
            f32x sum = f_load((const uint8_t *)at, RVM_F32);
            sum = f_fma(f_mul(of->d[s], da), f_join(whole[s] + planes * t, planes), sum);
            if (kind != RVM_Q6_K) sum = f_fma(f_mul(of->low[s], da), m[s], sum);
            f_store(at, sum, TILE);
        }
    }
}

/* Full panels of tokens, from token t0 on, and pairs of tiles, from `tile` on. */
typedef struct {
    const rvm_matrix *w;
    const void *acts;
    size_t t0, tokens, tile, pairs;
} super_part;

typedef float pair_sums[PART_TOKENS * 2 * TILE];

/* Define a function that adds the products of all super-blocks of a part to `sums`. */
#define ADD_PAIRS(name, planes, kind)                                                                           \
    static void name(const super_part *p, pair_sums *sums) {                                                    \
        const uint32_t form = (planes) == 2 ? RVM_ACTS_SUPER_16 : RVM_ACTS_SUPER_8;                             \
        const rvm_matrix_spec *spec = &p->w->spec;                                                              \
        super_pair of;                                                                                          \
        for (size_t k = 0; k < spec->cols / SUPER_COLS; k++)                                                    \
            for (size_t i = 0; i < p->pairs; i++) {                                                             \
                for (size_t s = 0; s < 2; s++)                                                                  \
                    unpack_super(spec, tile_at(p->w, p->tile + 2 * i + s), k, kind, s, &of);                    \
                for (size_t t = 0; t < p->tokens; t += PLANES / (planes)) {                                     \
                    const uint8_t *act = acts_panel(p->acts, form, spec->cols, p->t0 + t / PANEL * PANEL);      \
                    add_super_pair(&of, act + k * PANEL * super_act_bytes(planes), t % PANEL, planes, kind,     \
                               sums[i] + 2 * TILE * t);                                                         \
                }                                                                                               \
            }                                                                                                   \
    }

ADD_PAIRS(add_8_q4_k, 1, RVM_Q4_K)
ADD_PAIRS(add_8_q5_k, 1, RVM_Q5_K)
ADD_PAIRS(add_8_q6_k, 1, RVM_Q6_K)
ADD_PAIRS(add_16_q4_k, 2, RVM_Q4_K)
ADD_PAIRS(add_16_q5_k, 2, RVM_Q5_K)
ADD_PAIRS(add_16_q6_k, 2, RVM_Q6_K)

/* Compute y of a part, of at most PART_TOKENS tokens and PAIRS pairs of tiles. */
static void multiply_part(const super_part *p, rvm_acts_kind kind, float *y, size_t y_stride) {
    static void (*const add[2][3])(const super_part *, pair_sums *) = {{add_8_q4_k, add_8_q5_k, add_8_q6_k},
                                                                        {add_16_q4_k, add_16_q5_k, add_16_q6_k}};
    _Alignas(64) pair_sums sums[PAIRS];
    const rvm_matrix_spec *spec = &p->w->spec;
    for (size_t i = 0; i < p->pairs; i++) memset(sums[i], 0, p->tokens * 2 * TILE * sizeof **sums);
    add[act_planes(kind) - 1][spec->kind - RVM_Q4_K](p, sums);
    for (size_t i = 0; i < p->pairs; i++) {
        const size_t row = (p->tile + 2 * i) * TILE, rows = min_size(2 * TILE, spec->rows - row);
        for (size_t t = 0; t < p->tokens; t++)
            memcpy(y + (p->t0 + t) * y_stride + row, sums[i] + 2 * TILE * t, rows * sizeof *y);
    }
}

/* Compute y as `matmul` does. The kernel for pairs computes full panels of tokens for pairs of tiles of super-blocks, and
   `matmul` computes the rest. */
static int matmul_in_pairs(const rvm_matrix *w, rvm_acts_kind kind, const void *acts, size_t tokens, size_t tile_begin,
                           size_t tile_end, float *y, size_t y_stride) {
    if (rvm_matmul_refuses(w, kind, acts, tokens, tile_begin, tile_end, y, y_stride)) return RVM_BAD_ARGUMENT;
    const size_t full = is_super(w->spec.kind) ? tokens / PANEL * PANEL : 0;
    const size_t odd = full ? tile_begin + (tile_end - tile_begin) / 2 * 2 : tile_begin;
    for (size_t t = 0; t < full; t += PART_TOKENS)
        for (size_t tile = tile_begin; tile < odd; tile += 2 * PAIRS) {
            const size_t n = min_size(PART_TOKENS, full - t), pairs = min_size(PAIRS, (odd - tile) / 2);
            const super_part part = {w, acts, t, n, tile, pairs};
            multiply_part(&part, kind, y, y_stride);
        }
    if (odd > tile_begin && full < tokens)
        matmul(w, kind, acts_panel(acts, kind, w->spec.cols, full), tokens - full, tile_begin, odd, y + full * y_stride,
               y_stride);
    return matmul(w, kind, acts, tokens, odd, tile_end, y, y_stride);
}
