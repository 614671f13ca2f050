/* This header multiplies super-blocks in AMX tile registers; matrix_amx.c includes it.
 *
 * While the kernel unpacks 256 columns of a tile, it multiplies the codes of a block by its integer scale: w = scale * code,
 * or scale * (code - 32) in Q6_K, |w| <= 4096. The kernel stores w = 256 high + low, with high int8 and low uint8. The
 * product of a token's activations q and a row is then 256 (q . high) + (q . low) for all 256 columns. Vector
 * instructions join, scale and add these two sums while the tile registers compute the products of the next 256
 * columns: once per 256 columns, not once per block of 32. */

/* The numbers w of 256 columns of a tile: the weight codes multiplied by their integer scales. */
typedef struct {
    _Alignas(64) uint8_t high[4][16 * 64], low[4][16 * 64]; /* high[i], low[i]: 64 columns as [columns / 4][16 rows][4] */
    float d[TILE], dmin[TILE], lows[8][TILE];               /* dmin: the file's dmin times -1 */
} folded;

/* Return the 16-bit words scale[r] of 16 rows r, each twice. */
INLINE __m512i scale_words(const uint8_t *scales) {
    const __m512i s = i_load8(scales);
    return _mm512_or_si512(_mm512_slli_epi32(s, 16), _mm512_and_si512(s, _mm512_set1_epi32(0xffff)));
}

/* Compute w for 4 columns.   v: the codes of these columns; scale: the result of scale_words; zero: the number that is
   subtracted from codes, in each word */
INLINE void fold_four(__m512i v, __m512i scale, __m512i zero, uint8_t *high, uint8_t *low) {
    const __m512i byte = _mm512_set1_epi16(255);
    const __m512i even = _mm512_mullo_epi16(_mm512_sub_epi16(_mm512_and_si512(v, byte), zero), scale);
    const __m512i odd = _mm512_mullo_epi16(_mm512_sub_epi16(_mm512_srli_epi16(v, 8), zero), scale);
    _mm512_store_si512(high, _mm512_or_si512(_mm512_srli_epi16(even, 8), _mm512_andnot_si512(byte, odd)));
    _mm512_store_si512(low, _mm512_or_si512(_mm512_and_si512(even, byte), _mm512_slli_epi16(odd, 8)));
}

/* Unpack the 256 columns of the super-block that begins at column k, multiply their codes by their scales, and store
   the result in `to`. */
INLINE void fold(const rvm_matrix_spec *spec, const uint8_t *tile, size_t k, const uint32_t kind, folded *to) {
    const uint8_t *p = tile + super_front(spec) + k / SUPER_COLS * super_bytes(kind);
    const uint8_t *at = super_scale(spec, tile, k / SUPER_COLS, p), *bytes = p;
    const size_t halves = kind == RVM_Q6_K ? 2 : 1, vectors = 8 / halves; /* vectors: the number of vectors of codes that share a scale */
    const __m512i zero = _mm512_set1_epi16(kind == RVM_Q6_K ? 32 : 0);
    _Alignas(64) uint8_t six[SUPER_HEAD];
    _mm512_storeu_ps(to->d, f_load(at, RVM_F16));
    if (kind != RVM_Q6_K) {
        unpack_six_bits(p + 4 * TILE, six), bytes = six;
        _mm512_storeu_ps(to->dmin, f_mul(f_load(at + 2 * TILE, RVM_F16), f_all(-1)));
        for (size_t b = 0; b < 8; b++) _mm512_storeu_ps(to->lows[b], f_of(i_load8(six + 128 + TILE * b)));
    }
    p += SUPER_HEAD;
    for (size_t b = 0; b < 8; b++, p += block_bytes(kind)) {
        weights w;
        unpack(p, kind == RVM_Q4_K ? RVM_Q4 : kind, 0, &w);
        UNROLL for (size_t h = 0; h < halves; h++) {
            const __m512i scale = scale_words(bytes + TILE * (halves * b + h));
            UNROLL for (size_t j = 0; j < vectors; j++) {
                const size_t place = 64 * (b % 2 * 8 + vectors * h + j);
                fold_four(w.v[vectors * h + j], scale, zero, to->high[b / 2] + place, to->low[b / 2] + place);
            }
        }
    }
}

/* One unit of work: the product of 256 columns of a tile and a panel. */
typedef struct {
    float *sums; /* [16 tokens][16 rows] */
    const folded *w;
    const uint8_t *act; /* act: the panel's activations, from these 256 columns on */
} super_unit;

/* Add the products of 64 columns (a line) with high and low to tile registers: PRODUCTS_0 and _1 for the first plane,
 * _2 and _3 for the second plane. With one plane, _2 and _3 take the odd lines, because additions to the same register
 * would wait for each other. */
INLINE void multiply_line(size_t line, const super_unit *u, const size_t planes) {
    const uint8_t *q = line_at(u->act, planes, PANEL, line, 0);
    _tile_loadd(ACTS_0, q, LINE_COLS * planes);
    _tile_loadd(CODES_0, u->w->high[line], 64);
    _tile_loadd(CODES_1, u->w->low[line], 64);
    if (planes == 2 || line % 2 == 0) {
        _tile_dpbssd(PRODUCTS_0, ACTS_0, CODES_0);
        _tile_dpbsud(PRODUCTS_1, ACTS_0, CODES_1);
    } else {
        _tile_dpbssd(PRODUCTS_2, ACTS_0, CODES_0);
        _tile_dpbsud(PRODUCTS_3, ACTS_0, CODES_1);
    }
    if (planes == 1) return;
    _tile_loadd(ACTS_1, q + LINE_COLS, LINE_COLS * planes);
    _tile_dpbssd(PRODUCTS_2, ACTS_1, CODES_0);
    _tile_dpbsud(PRODUCTS_3, ACTS_1, CODES_1);
}

INLINE void zero_products(void) {
    _tile_zero(PRODUCTS_0);
    _tile_zero(PRODUCTS_1);
    _tile_zero(PRODUCTS_2);
    _tile_zero(PRODUCTS_3);
}

/* Store the four tile registers of products. to: [4][16 tokens][16 rows] */
INLINE void store_products(int32_t *to) {
    _tile_stored(PRODUCTS_0, to, 64);
    _tile_stored(PRODUCTS_1, to + 256, 64);
    _tile_stored(PRODUCTS_2, to + 512, 64);
    _tile_stored(PRODUCTS_3, to + 768, 64);
}

/* Return the dot products of token t with w = 256 high + low, from its dot products with high and with low. */
INLINE i32x from_parts(const int32_t *c, size_t t) {
    return i_add(_mm512_slli_epi32(_mm512_load_si512(c + TILE * t), 8), _mm512_load_si512(c + 256 + TILE * t));
}

/* Scale the dot products of the tokens [t, end) and add them to the sums of these tokens, in the order of super_tile. */
INLINE void add_products(const super_unit *u, const int32_t *c, size_t t, size_t end, const size_t planes,
                         const uint32_t kind) {
    const f32x d = _mm512_load_ps(u->w->d), dmin = _mm512_load_ps(u->w->dmin);
    f32x lows[8];
    if (kind != RVM_Q6_K) {
        UNROLL for (size_t b = 0; b < 8; b++) {
            lows[b] = _mm512_load_ps(u->w->lows[b]);
            __asm__("" : "+v"(lows[b])); /* without this line the compiler loads `lows` for each token, and loads limit the speed here */
        }
    }
    UNROLL for (; t < end; t++) {
        const i32x first = from_parts(c, t), second = from_parts(c + 512, t);
        const i32x whole[2] = {planes == 2 ? first : i_add(first, second), second};
        const f32x da = f_all(act_f32(super_d(u->act, planes, PANEL, t)));
        f32x sum = f_fma(f_mul(d, da), f_join(whole, planes), _mm512_load_ps(u->sums + TILE * t));
        if (kind != RVM_Q6_K) {
            f32x m = f_zero();
            UNROLL for (size_t b = 0; b < 8; b++)
                m = f_fma(lows[b], f_all(act_f32(super_sum(u->act, planes, PANEL, t, b))), m);
            sum = f_fma(f_mul(dmin, da), m, sum);
        }
        _mm512_store_ps(u->sums + TILE * t, sum);
    }
}

/* Multiply all units. The tile registers compute the products of a unit while vector instructions add the products of
   the unit before it. */
INLINE void multiply_supers(const super_unit *units, size_t count, const size_t planes, const uint32_t kind) {
    _Alignas(64) int32_t c[2][1024];
    for (size_t i = 0; i < count; i++) {
        zero_products();
        UNROLL for (size_t line = 0; line < 4; line++) {
            multiply_line(line, units + i, planes);
            if (i) add_products(units + i - 1, c[(i - 1) % 2], 4 * line, 4 * line + 4, planes, kind);
        }
        store_products(c[i % 2]);
    }
    add_products(units + count - 1, c[(count - 1) % 2], 0, PANEL, planes, kind);
}
