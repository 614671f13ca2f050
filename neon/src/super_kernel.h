/* This header has the matrix kernels for super-blocks (matrix.h). matrix_kernel.h includes this header after the
   functions that this header uses.
 *
 * The 256 columns of a super-block share one float scale of the activations and one float scale of each row of weights.
 * The scales of blocks of 32 columns are integers, so the scaled sum of all blocks is an integer. Q6_K has two scales
 * for a block, so the kernel adds the two halves of the block separately. The sum of each half starts from -32 times
 * the sum of its activations, because a weight is code - 32. */

typedef uint64_t eight_words __attribute__((vector_size(64), aligned(1), may_alias));

/* Unpack the six-bit scales and lows of 8 groups x 16 rows: twelve bytes of each row become [8][16] scales and [8][16]
   lows. */
INLINE void unpack_six_bits(const uint8_t *p, uint8_t *to) {
    const eight_words a = *(const eight_words *)p, b = *(const eight_words *)(p + 64),
                      c = *(const eight_words *)(p + 128);
    const uint64_t six = 0x3f3f3f3f3f3f3f3f, four = 0x0f0f0f0f0f0f0f0f, two = 0x3030303030303030;
    *(eight_words *)to = a & six;
    *(eight_words *)(to + 64) = (c & four) | (a >> 2 & two);
    *(eight_words *)(to + 128) = b & six;
    *(eight_words *)(to + 192) = (c >> 4 & four) | (b >> 2 & two);
}

/* Compute the dot products of one block and T tokens (T * planes <= STEP), multiply them by the scale of the block or
 * of each half, and add them to whole[t][plane].
 *   q, start: the addresses for the first token and the first half   n: tokens of the panel */
INLINE void add_super(i32x *whole, const uint8_t *scales, const weights *w, const uint8_t *q, const uint8_t *start,
                      size_t n, const size_t T, const size_t planes, const uint32_t kind) {
    const size_t halves = kind == RVM_Q6_K ? 2 : 1;
    UNROLL for (size_t h = 0; h < halves; h++, start += 4 * n * planes) {
        const i32x scale = i_load8(scales + TILE * h);
        i32x acc[2 * STEP];
        UNROLL for (size_t i = 0; i < T * planes; i++)
            acc[i] = i_all(halves == 2 ? act_i32(start + 4 * n * (i % planes) + 4 * (i / planes)) : 0);
        if (halves == 2) dots_part(acc, w, q, LINE_COLS, T * planes, kind, 4 * h, 4);
        else dots(acc, w, q, LINE_COLS, T * planes, kind);
        UNROLL for (size_t i = 0; i < T * planes; i++) whole[i] = i_mla(whole[i], acc[i], scale);
    }
}

/* Return one dot product as a float, joined from the dot products of its one or two planes. */
INLINE f32x f_join(const i32x *whole, const size_t planes) {
    return planes == 2 ? f_fma(f_all(HIGH), f_of(whole[0]), f_of(whole[1])) : f_of(whole[0]);
}

/* Return sum + low * (lows . the sums of the blocks' activations), for token i and 16 rows. lows: int8 [8][16]; low:
   -dmin times the token's scale d */
INLINE f32x add_lows(f32x sum, f32x low, const uint8_t *lows, const uint8_t *act, size_t n, size_t i,
                     const size_t planes) {
    f32x m = f_zero();
    UNROLL for (size_t b = 0; b < 8; b++)
        m = f_fma(f_of(i_load8(lows + TILE * b)), f_all(act_f32(super_sum(act, planes, n, i, b))), m);
    return f_fma(low, m, sum);
}

/* Compute y of T tokens for one tile of super-blocks; the parameters are those of quantised_tile. */
INLINE void super_tile(const rvm_matrix_spec *spec, const uint8_t *tile, const uint8_t *act, size_t n, size_t i,
                       const size_t T, const size_t planes, const uint32_t kind, float *y, size_t y_stride,
                       size_t rows) {
    const uint32_t block = kind == RVM_Q4_K ? RVM_Q4 : kind;
    const size_t step = STEP < planes ? 1 : STEP / planes, supers = spec->cols / SUPER_COLS;
    const size_t scales = kind == RVM_Q6_K ? 2 * TILE : TILE; /* scales: the number of bytes of the scales of a block */
    const uint8_t *p = tile + super_front(spec);
    const int ahead = reads_ahead(n) && i == 0;
    f32x sum[MAX_T];
    UNROLL for (size_t t = 0; t < T; t++) sum[t] = f_zero();
    for (size_t k = 0; k < supers; k++, act += n * super_act_bytes(planes)) {
        _Alignas(64) uint8_t six[SUPER_HEAD];
        const f32x d = f_load(kind == RVM_Q6_K ? tile + 2 * TILE * k : p, RVM_F16);
        const f32x low = kind == RVM_Q6_K ? d : f_mul(f_load(p + 2 * TILE, RVM_F16), f_all(-1));
        const uint8_t *bytes = kind == RVM_Q6_K ? p : six;
        i32x whole[2 * MAX_T];
        UNROLL for (size_t t = 0; t < T * planes; t++) whole[t] = i_all(0);
        if (kind != RVM_Q6_K) unpack_six_bits(p + 4 * TILE, six);
        if (ahead)
            UNROLL for (size_t b = 0; b < SUPER_HEAD; b += 64) prefetch_line(p + AHEAD + b), prefetch_close(p + CLOSE + b);
        p += SUPER_HEAD;
        for (size_t b = 0; b < 8; b++, p += block_bytes(kind)) {
            const uint8_t *q = line_at(act, planes, n, b / 2, i) + b % 2 * 32,
                          *start = super_start(act, planes, n, i, 2 * b, 0);
            weights w;
            if (ahead) prefetch_ahead(p, kind);
            unpack(p, block, T * planes, &w);
            UNROLL for (size_t t = 0; t < T; t += step)
                add_super(whole + planes * t, bytes + scales * b, &w, q + LINE_COLS * planes * t, start + 4 * t, n,
                          T - t < step ? T - t : step, planes, block);
        }
        UNROLL for (size_t t = 0; t < T; t++) {
            const f32x da = f_all(act_f32(super_d(act, planes, n, i + t)));
            sum[t] = f_fma(f_mul(d, da), f_join(whole + planes * t, planes), sum[t]);
            if (kind != RVM_Q6_K) sum[t] = add_lows(sum[t], f_mul(low, da), six + 128, act, n, i + t, planes);
        }
    }
    UNROLL for (size_t t = 0; t < T; t++) f_store(y + t * y_stride, sum[t], rows);
}
