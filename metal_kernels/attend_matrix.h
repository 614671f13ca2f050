// These functions compute attention over one page with matrix units, which multiply 16 x 16 by 16 x 8 matrices with f16
// inputs and f32 sums. This header needs pages.h and the function `multiply`.
//
// multiply(c, a0, a1, a2, a3, b0, b1) adds A B to C. Lane 4 * row + column holds these numbers; each 32-bit word holds
// two halves:
//   a0: A[row][2 column, +1]   a1: A[row + 8][same]   a2: A[row][2 column + 8, +9]   a3: A[row + 8][same]
//   b0: B[2 column, +1][row]   b1: B[2 column + 8, +9][row]
//   c0, c1: C[row][2 column, +1]   c2, c3: C[row + 8][same]
// A's columns can have any order if B's rows have the same order. So a lane takes D/4 consecutive numbers of a key,
// which are whole words of memory, and D/8 numbers of the value of every fourth token. 8-bit and 4-bit numbers are
// exact in f16. Queries and probabilities are not exact in f16, so each is the sum of two f16 parts. For up to 4 heads,
// the two parts lie side by side in the 8 columns of B (PACKED). For more heads, a second product adds the second f16
// part (part 1).

template <int D, int G> struct Matrix {
    enum {
        PACKED = G <= 4,
        PARTS = PACKED ? 1 : 2,
        DK = D / 4,              // DK: the number of elements of a key that one lane holds
        DV = D / 8,              // DV: the number of elements of a value that one lane holds
        TILES = PACKED ? 2 : 4,  // TILES: the number of tiles of 16 tokens whose probabilities one lane computes
        COLUMN = 72,             // COLUMN: the distance of two columns of probabilities in halves: 64, and 8 more that prevent bank conflicts
    };
};

// A word of A holds two numbers of a lane's key, and a word of B holds the same two numbers of the query. The pairs are
// (0,4) (1,5) (2,6) (3,7) for 4-bit numbers, and (0,1) (2,3) ... for wider numbers, because these pairs take the fewest
// operations to unpack.
// 0x6400 is the half 1024, whose last bit has the value 1. The function `nibbles` writes a number into the low bits of
// this half and then subtracts 1024. It does not shift the higher of two neighbouring nibbles, which makes the half
// 1024 + 16 x; it multiplies this half by 1/16 and subtracts 64.
FN uint nibbles(uint w, int i) {
    const uint u = i < 2 ? w : w >> 8;
    if (i % 2) return half2_fma((u & 0x00f000f0u) | 0x64006400u, 0x2c002c00u, 0xd400d400u); // x / 16 - 64
    return half2_sub((u & 0x000f000fu) | 0x64006400u, 0x64006400u);
}
FN uint bytes(uint w, uint select) { return half2_sub(byte_permute(w, 0x64646464u, select), 0x64806480u); }

// Threadgroup memory holds the queries in up to four forms. A form has the pairs of 8-bit and 16-bit numbers (wide) or
// the pairs of 4-bit numbers, and its queries are rotated or not. Only the forms that the keys of some tier need are
// stored. form_at returns how many stored forms lie before a form.
CONST_FN bool has_form(bool wide, bool rotated) {
    return wide ? has_keys(8, rotated) || has_keys(16, rotated) : has_keys(4, rotated);
}
CONST_FN int form_at(bool wide, bool rotated) {
    return wide ? rotated && has_form(true, false)
                : has_form(true, false) + has_form(true, true) + (rotated && has_form(false, false));
}

// Return a float that pack_halves rounds to one of the two f16 parts of x: part 0 is the f16 number nearest to x, and
// part 1 is the f16 number nearest to x - part 0.
FN float part_of(float x, int part) {
    const float high = half_to_f32(f32_to_half(x));
    return part ? x - high : x;
}

template <int N> FN void load_words(GLOBAL_IN(uchar) p, uint at, THREAD uint *w) {
    if (N == 1) {
        w[0] = load_u32(p, at);
    } else if (N == 2) {
        const uint2 v = load_u32x2(p, at);
        w[0] = v.x, w[N > 1] = v.y;
    } else {
        UNROLL for (int i = 0; i + 3 < N; i += 4) {
            const uint4 v = load_u32x4(p, at + 4 * i);
            w[i] = v.x, w[i + 1] = v.y, w[i + 2] = v.z, w[i + 3] = v.w;
        }
    }
}

// Add K of 16 tokens x q to c[tile], for 16-bit or 8-bit pages.   q: the words of the queries that this lane uses,
// [part][DK / 2][32]
template <int BITS, int D, int G>
FN void matrix_scores(GLOBAL_IN(uchar) page, LOCAL(uint) q, THREAD float (*c)[4], uint lane) {
    typedef Matrix<D, G> M;
    constexpr int N = M::DK * BITS / 32; // N: the number of words of a key that a lane loads
    const uint row = lane / 4, column = lane % 4;
    UNROLL for (int i = 0; i < 4; i++) {
        uint x[N], y[N];
        load_words<N>(page, ((16 * i + row) * 4 + column) * N * 4, x);
        load_words<N>(page, ((16 * i + 8 + row) * 4 + column) * N * 4, y);
        UNROLL for (int k = 0; k < M::DK / 4; k++)
            UNROLL for (int part = 0; part < M::PARTS; part++) {
                const uint b0 = q[(part * M::DK / 2 + 2 * k) * 32 + lane], b1 = q[(part * M::DK / 2 + 2 * k + 1) * 32 + lane];
                if (BITS == 16) {
                    multiply(c[i], x[2 * k % N], y[2 * k % N], x[(2 * k + 1) % N], y[(2 * k + 1) % N], b0, b1);
                } else {
                    const uint u = x[k % N] ^ 0x80808080u, v = y[k % N] ^ 0x80808080u;
                    multiply(c[i], bytes(u, 0x4140), bytes(v, 0x4140), bytes(u, 0x4342), bytes(v, 0x4342), b0, b1);
                }
            }
    }
}

// The words of a 4-bit page that this lane loads. As soon as the kernel has used a part of the present page, it loads
// the same part of the next page. So the loads of the next page run during the arithmetic of the present page.
template <int D> struct HeldPage {
    uint k[8][D / 32], v[16][D / 64];
    uint4 tail; // tail: 16 bytes of scales and biases; store_tail copies them to threadgroup memory
};
template <int D> FN void hold_k(GLOBAL_IN(uchar) page, THREAD HeldPage<D> &w, uint lane) {
    UNROLL for (int i = 0; i < 8; i++)
        load_words<D / 32>(page, (8 * i + lane / 4) * (D / 2) + lane % 4 * (D / 8), w.k[i]);
    w.tail = load_u32x4(page, k_scale_at(4, D) + 16 * lane);
}
template <int D> FN void hold_v(GLOBAL_IN(uchar) page, THREAD HeldPage<D> &w, uint lane) {
    UNROLL for (int i = 0; i < 16; i++)
        load_words<D / 64>(page, v_at(4, D) + (4 * i + lane % 4) * (D / 2) + lane / 4 * (D / 16), w.v[i]);
}

// Set the words to zero after the last 4-bit page, so that the compiler can use their registers again.
template <int D> FN void forget(THREAD HeldPage<D> &w) {
    UNROLL for (int i = 0; i < 8; i++) UNROLL for (int n = 0; n < D / 32; n++) w.k[i][n] = 0;
    UNROLL for (int i = 0; i < 16; i++) UNROLL for (int n = 0; n < D / 64; n++) w.v[i][n] = 0;
    w.tail.x = w.tail.y = w.tail.z = w.tail.w = 0;
}

// The scales and biases of a page lie in this order in the page: half K_SCALE + t is the scale of token t's key, and so
// on.
CONSTANT int TAIL = 128, K_SCALE = 0, K_BIAS = PAGE, V_SCALE = 2 * PAGE, V_BIAS = 3 * PAGE; // TAIL: words of a page's scales and biases
template <int D> FN void store_tail(LOCAL(uint) tail, THREAD const HeldPage<D> &w, uint lane) {
    tail[4 * lane] = w.tail.x, tail[4 * lane + 1] = w.tail.y, tail[4 * lane + 2] = w.tail.z, tail[4 * lane + 3] = w.tail.w;
}
FN float tail_half(LOCAL(uint) tail, int i) { return half_to_f32((uint)tail[i / 2] >> (i % 2 * 16) & 0xffffu); }

// Add K of 16 tokens x q to c[tile], for 4-bit pages.   q: the words of the queries that this lane uses,
// [part][DK / 8][32][4]
template <int D, int G>
FN void matrix_scores_held(THREAD const HeldPage<D> &w, LOCAL(uint) q, THREAD float (*c)[4], uint lane) {
    typedef Matrix<D, G> M;
    UNROLL for (int e = 0; e < M::DK / 8; e++) // 8 numbers of a key are one word of each token, and take two products
        UNROLL for (int part = 0; part < M::PARTS; part++) {
            const uint4 b = load_local_u32x4(q, ((part * M::DK / 8 + e) * 32 + lane) * 4);
            UNROLL for (int i = 0; i < 4; i++) {
                const uint x = w.k[2 * i][e], y = w.k[2 * i + 1][e];
                multiply(c[i], nibbles(x, 0), nibbles(y, 0), nibbles(x, 1), nibbles(y, 1), b.x, b.y);
                multiply(c[i], nibbles(x, 2), nibbles(y, 2), nibbles(x, 3), nibbles(y, 3), b.z, b.w);
            }
        }
}

// Add V^T of 16 dimensions x p to o[tile].   p: the probabilities as halves, [part][8 columns][COLUMN]; token t is half
// t % 4 * 16 + t / 4 of a column
template <int BITS, int D, int G>
FN void matrix_values(GLOBAL_IN(uchar) page, THREAD const HeldPage<D> &w, LOCAL(ushort) p, THREAD float (*o)[4], uint lane, int valid) {
    typedef Matrix<D, G> M;
    constexpr int N = M::DV * BITS / 32;
    const uint row = lane / 4, column = lane % 4;
    uint4 b[M::PARTS][2];
    UNROLL for (int part = 0; part < M::PARTS; part++)
        UNROLL for (int half = 0; half < 2; half++)
            b[part][half] = load_local_halves(p, (part * 8 + row) * M::COLUMN + column * 16 + half * 8);
    UNROLL for (int k = 0; k < 4; k++) { // a product multiplies 16 tokens, of which this lane loads four
        uint x[4][N];
        UNROLL for (int i = 0; i < 4; i++) {
            const int t = 4 * (4 * k + i) + column;
            if (BITS == 4) {
                UNROLL for (int n = 0; n < N; n++) x[i][n] = w.v[4 * k + i][n % (D / 64)];
            } else if (BITS == 16 && t >= valid) {
                UNROLL for (int n = 0; n < N; n++) x[i][n] = 0;
            } else {
                load_words<N>(page, v_at(BITS, D) + (t * 8 + row) * N * 4, x[i]);
            }
        }
        UNROLL for (int part = 0; part < M::PARTS; part++) {
            const uint4 four = b[part][k / 2];
            const uint b0 = k % 2 ? four.z : four.x, b1 = k % 2 ? four.w : four.y;
            UNROLL for (int n = 0; n < N; n++) {
                if (BITS == 16) {
                    multiply(o[n], byte_permute(x[0][n], x[1][n], 0x5410), byte_permute(x[0][n], x[1][n], 0x7632),
                             byte_permute(x[2][n], x[3][n], 0x5410), byte_permute(x[2][n], x[3][n], 0x7632), b0, b1);
                } else {
                    UNROLL for (int half = 0; half < 2; half++) {
                        // `select` takes from the words of two tokens: for 4 bits the numbers 8n + 4 half ..+3, for 8
                        // bits the numbers 4n + 2 half, +1
                        const uint select = BITS == 4 ? (half ? 0x7632 : 0x5410) : (half ? 0x7362 : 0x5140);
                        const uint u = byte_permute(x[0][n], x[1][n], select), v = byte_permute(x[2][n], x[3][n], select);
                        if (BITS == 4) {
                            multiply(o[(4 * n + 2 * half) % (D / 16)], nibbles(u, 0), nibbles(u, 1), nibbles(v, 0), nibbles(v, 1), b0, b1);
                            multiply(o[(4 * n + 2 * half + 1) % (D / 16)], nibbles(u, 2), nibbles(u, 3), nibbles(v, 2), nibbles(v, 3), b0, b1);
                        } else {
                            const uint s = u ^ 0x80808080u, t = v ^ 0x80808080u;
                            multiply(o[(2 * n + half) % (D / 16)], bytes(s, 0x4140), bytes(s, 0x4342), bytes(t, 0x4140), bytes(t, 0x4342), b0, b1);
                        }
                    }
                }
            }
        }
    }
}
