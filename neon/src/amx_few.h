/* This header multiplies FEW_LEAST to 15 tokens by weights in AMX tile registers; matrix_amx.c includes it.
 *
 * A plane is one int8 part of each activation of a token. The planes of up to 8 tokens, in their order in a panel, are
 * the rows of one register. One instruction computes the products of these planes with a block of weights. The kernel
 * stores the products; vector instructions scale them and add them to the sums LAG blocks later, in the order of
 * quantised_tile. For super-blocks, this method would not be faster. */

/* FEW_LEAST: the minimum number of tokens of a panel for these kernels; with fewer tokens, kernels without tile
 * registers are as fast or faster. FEW_MOST: the maximum number of tokens in one tile register. */
enum { FEW_LEAST = 6, FEW_MOST = 8 };

/* Return the configuration of the tile registers for products, activations and weight codes of `rows` planes and 32
   columns. */
static tile_config config_for_few(size_t rows) {
    const uint8_t r = (uint8_t)rows;
    return (tile_config){.palette = 1, .row_bytes = {64, 0, 64, 0, 32, 0, 64}, .rows = {r, 0, r, 0, r, 0, 8}};
}

/* Multiply the tokens i .. i + some - 1 of a panel of n tokens, some <= FEW_MOST, by one tile of weights, and store the
   results in y. */
INLINE void few_tile(const rvm_matrix_spec *spec, const uint8_t *tile, const uint8_t *act, size_t n, size_t i,
                     size_t some, const size_t planes, const uint32_t kind, const int affine, float *y,
                     size_t y_stride, size_t rows) {
    const size_t cols = spec->cols, block_acts = n * act_bytes(planes);
    const size_t bytes = tile_bytes(spec) * BLOCK_COLS / cols; /* bytes: approximately the bytes of a block with its scales */
    const uint8_t *soon = tile + AHEAD;
    _Alignas(64) int32_t c[RING][FEW_MOST * 2 * TILE];
    unpacked w;
    f32x sum[FEW_MOST];
    UNROLL for (size_t t = 0; t < FEW_MOST; t++) sum[t] = f_zero();
    for (size_t k = 0; k < cols; k += SUPER_COLS, act += SUPER_COLS / BLOCK_COLS * block_acts) {
        const size_t parts = min_size(cols - k, SUPER_COLS) / BLOCK_COLS;
        unpack_columns(spec, tile, k, parts, kind, affine, &w);
        settle(&w);
        for (size_t part = 0; part < parts + LAG; part++) {
            if (part && part <= parts) store_part(part - 1, c[(part - 1) % RING], 1);
            if (part < parts) {
                /* each plane is a row of the tile register, so the argument `planes` is 1 */
                multiply_part(part, act + part * block_acts + 32 * planes * i, (const uint8_t *)w.block[part].v, 1);
                for (size_t at = 0; at < bytes; at += 64) prefetch_line(soon + at);
                soon += bytes;
            }
            if (part < LAG) continue;
            const uint8_t *d = act + (part - LAG) * block_acts + 32 * planes * n + 4 * i;
            add_part(sum, c[(part - LAG) % RING], TILE * planes, TILE, &w, part - LAG, d, n, some, FEW_MOST, planes,
                     kind, affine);
        }
    }
    UNROLL for (size_t t = 0; t < FEW_MOST; t++)
        if (t < some) f_store(y + t * y_stride, sum[t], rows);
}

#define FEW(name, planes, kind, affine)                                                                               \
    static void name(const rvm_matrix_spec *spec, const uint8_t *tile, const uint8_t *act, size_t n, size_t i,        \
                     size_t some, float *y, size_t y_stride, size_t rows) {                                           \
        few_tile(spec, tile, act, n, i, some, planes, kind, affine, y, y_stride, rows);                               \
    }

FEW(few_8_q4_affine, 1, RVM_Q4, 1)
FEW(few_8_q4_symmetric, 1, RVM_Q4, 0)
FEW(few_8_q8_affine, 1, RVM_Q8, 1)
FEW(few_8_q8_symmetric, 1, RVM_Q8, 0)
FEW(few_16_q4_affine, 2, RVM_Q4, 1)
FEW(few_16_q4_symmetric, 2, RVM_Q4, 0)
FEW(few_16_q8_affine, 2, RVM_Q8, 1)
FEW(few_16_q8_symmetric, 2, RVM_Q8, 0)

typedef void few_function(const rvm_matrix_spec *, const uint8_t *, const uint8_t *, size_t, size_t, size_t, float *,
                          size_t, size_t);

static few_function *few_for(const rvm_matrix_spec *spec, size_t planes) {
    static few_function *const all[2][2][2] = {
        {{few_8_q4_symmetric, few_8_q4_affine}, {few_8_q8_symmetric, few_8_q8_affine}},
        {{few_16_q4_symmetric, few_16_q4_affine}, {few_16_q8_symmetric, few_16_q8_affine}}};
    return all[planes - 1][spec->kind == RVM_Q8][spec->affine];
}

/* Multiply a panel of n tokens, FEW_LEAST <= n < 16, by weights without super-blocks. */
static void few_panel(const rvm_matrix *m, rvm_acts_kind kind, const uint8_t *act, size_t n, size_t tile_begin,
                      size_t tile_end, float *y, size_t y_stride) {
    const rvm_matrix_spec *spec = &m->spec;
    const size_t planes = act_planes(kind), apart = tile_bytes(spec);
    few_function *multiply_few = few_for(spec, planes);
    const tile_config before = current();
    for (size_t i = 0, some; i < n; i += some) {
        some = min_size(n - i, FEW_MOST);
        const tile_config ours = config_for_few(some * planes);
        const uint8_t *p = tile_at(m, tile_begin);
        use(&ours);
        for (size_t tile = tile_begin; tile < tile_end; tile++, p += apart)
            multiply_few(spec, p, act, n, i, some, y + i * y_stride + tile * TILE, y_stride,
                         min_size(TILE, spec->rows - tile * TILE));
    }
    use(&before);
}
