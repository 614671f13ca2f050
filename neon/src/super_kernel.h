/* Super-blocks (matrix.h) in the matrix kernels; included by matrix_kernel.h behind its operations.
 *
 * Q4_K and Q5_K are affine groups of 32: what is new is how their scales are stored. Q6_K has two scales for the
 * 32 columns of a block of activations, so its halves are summed apart, each from -32 times its own sum. */

typedef uint64_t eight_words __attribute__((vector_size(64), aligned(1), may_alias));

/* The scales and lows of 8 groups x 16 rows: twelve bytes of each row -> [8][16] scales, [8][16] lows. */
INLINE void unpack_six_bits(const uint8_t *p, uint8_t *to) {
    const eight_words a = *(const eight_words *)p, b = *(const eight_words *)(p + 64),
                      c = *(const eight_words *)(p + 128);
    const uint64_t six = 0x3f3f3f3f3f3f3f3f, four = 0x0f0f0f0f0f0f0f0f, two = 0x3030303030303030;
    *(eight_words *)to = a & six;
    *(eight_words *)(to + 64) = (c & four) | (a >> 2 & two);
    *(eight_words *)(to + 128) = b & six;
    *(eight_words *)(to + 192) = (c >> 4 & four) | (b >> 2 & two);
}

/* sum[t] += one block of Q6_K times T <= STEP tokens; s: the scales of both halves. */
INLINE void add_halves(f32x *sum, const f32x *s, const weights *w, const uint8_t *q, const uint8_t *d, size_t n,
                       const size_t T, const size_t planes) {
    UNROLL for (size_t h = 0; h < 2; h++) {
        i32x acc[2 * STEP];
        UNROLL for (size_t t = 0; t < T; t++) {
            const int32_t first = act_i32(d + 4 * t + 16 * n);
            acc[planes * t] = i_all(0);
            acc[planes * t + planes - 1] = i_all(h == 0 ? first : 4 * act_i32(d + 4 * t + 8 * n) - first);
        }
        dots_part(acc, w, q, T * planes, RVM_Q6_K, 4 * h, 4);
        UNROLL for (size_t t = 0; t < T; t++) {
            const i32x dot = planes == 2 ? i_join(acc[2 * t], acc[2 * t + 1]) : acc[t];
            sum[t] = f_fma(f_mul(s[h], f_all(act_f32(d + 4 * t))), f_of(dot), sum[t]);
        }
    }
}

/* The factors of block b of a super-block: scale and low, or two scales. */
INLINE void super_factors(f32x *f, const uint8_t *bytes, size_t b, f32x d, f32x low, const uint32_t kind) {
    const int two = kind == RVM_Q6_K;
    f[0] = f_mul(d, f_bytes(bytes + TILE * (two ? 2 * b : b)));
    f[1] = f_mul(two ? d : low, f_bytes(bytes + (two ? TILE * (2 * b + 1) : 128 + TILE * b)));
}

/* As quantised_tile. */
INLINE void super_tile(const rvm_matrix_spec *spec, const uint8_t *tile, const uint8_t *act, size_t n, size_t i,
                       const size_t T, const size_t planes, const uint32_t kind, float *y, size_t y_stride,
                       size_t rows) {
    const uint32_t block = kind == RVM_Q4_K ? RVM_Q4 : kind;
    const size_t step = STEP < planes ? 1 : STEP / planes, supers = spec->cols / SUPER_COLS;
    const uint8_t *p = tile + super_front(spec);
    const int ahead = reads_ahead(n);
    f32x sum[MAX_T];
    UNROLL for (size_t t = 0; t < T; t++) sum[t] = f_zero();
    for (size_t k = 0; k < supers; k++) {
        _Alignas(64) uint8_t six[SUPER_HEAD];
        const f32x d = f_load(kind == RVM_Q6_K ? tile + 2 * TILE * k : p, RVM_F16);
        const f32x low = kind == RVM_Q6_K ? d : f_mul(f_load(p + 2 * TILE, RVM_F16), f_all(-1));
        const uint8_t *bytes = kind == RVM_Q6_K ? p : six;
        if (kind != RVM_Q6_K) unpack_six_bits(p + 4 * TILE, six);
        if (ahead) UNROLL for (size_t b = 0; b < SUPER_HEAD; b += 64) prefetch_line(p + AHEAD + b);
        p += SUPER_HEAD;
        for (size_t b = 0; b < 8; b++, p += block_bytes(kind), act += n * act_bytes(planes)) {
            const uint8_t *q = act + 32 * planes * i, *rest = act + 32 * planes * n + 4 * i;
            weights w;
            f32x f[2];
            if (ahead) prefetch_block(p + AHEAD, kind);
            super_factors(f, bytes, b, d, low, kind);
            unpack(p, block, T * planes, &w);
            UNROLL for (size_t t = 0; t < T; t += step) {
                const size_t now = T - t < step ? T - t : step;
                const uint8_t *qt = q + 32 * planes * t;
                if (kind == RVM_Q6_K) add_halves(sum + t, f, &w, qt, rest + 4 * t, n, now, planes);
                else add_block(sum + t, f[0], f[1], &w, qt, rest + 4 * t, n, now, planes, block, 1);
            }
        }
    }
    UNROLL for (size_t t = 0; t < T; t++) f_store(y + t * y_stride, sum[t], rows);
}
