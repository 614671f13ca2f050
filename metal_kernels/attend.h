// These functions compute attention over half a page with the 32 lanes (threads) of a simdgroup. This header needs
// pages.h.
//
// A simdgroup takes half a page and not a whole page, so that two pages already give work to all four simdgroups of a
// threadgroup.
//
// The D numbers of a token lie in LANES lanes, 8 numbers in each lane; with D = 80, the lanes past D do nothing. So a
// simdgroup reads ROWS tokens at once. G query heads use the same keys, so one read of the keys serves all G heads.
// After STEPS reads, each lane holds LANES partial sums. One transposing butterfly (transposing_sum) adds the partial
// sums over the lanes, and sum i ends in lane i. Afterwards lane row * LANES + step * HEADS + head holds the scores of
// its head: for each of the BLOCKS blocks of tokens, the score of one token.

CONSTANT int PART = PAGE / 2; // PART: the number of tokens in half a page

template <int D, int G> struct Tile {
    enum {
        HEADS = G <= 1 ? 1 : G <= 2 ? 2 : G <= 4 ? 4 : 8,
        LANES = D <= 64 ? 8 : D <= 128 ? 16 : 32,
        ROWS = 32 / LANES,
        STEPS = LANES / HEADS,
        BLOCKS = PART / (ROWS * STEPS),
    };
};

// Add numbers over 2 W lanes that hold 2 W numbers each. Afterwards sum[0] of lane j is the sum of the lanes' numbers
// sum[j]. The function is recursive, because compilers do not unroll a loop over halves, and would then keep `sum` in
// memory.
template <int W> FN void transposing_sum(THREAD float *sum, uint j) {
    UNROLL for (int i = 0; i < W; i++) {
        const float keep = j & W ? sum[i + W] : sum[i], give = j & W ? sum[i] : sum[i + W];
        sum[i] = keep + shuffle_xor(give, W);
    }
    transposing_sum<W / 2>(sum, j);
}
template <> FN void transposing_sum<0>(THREAD float *, uint) {}

FN float dot8(float c, THREAD const float *x, THREAD const float *y) {
    UNROLL for (int i = 0; i < 8; i++) c = fma(x[i], y[i], c);
    return c;
}

// Compute the scores s[t][head] = q . k_t for the tokens first + t of the page. The caller applies the token's scale
// and bias.
template <int BITS, int D, int G>
FN void page_scores(GLOBAL_IN(uchar) page, uint first, LOCAL(float) q, LOCAL(float) s, uint lane) {
    typedef Tile<D, G> T;
    const uint j = lane % T::LANES, row = lane / T::LANES, step = j / T::HEADS, head = j % T::HEADS;
    const bool live = 8 * j < D;
    float own[G][8];
    UNROLL for (int g = 0; g < G; g++)
        UNROLL for (int i = 0; i < 8; i++) own[g][i] = live ? (float)q[g * D + 8 * j + i] : 0.0f;
    for (int b = 0; b < T::BLOCKS; b++) {
        float sum[T::LANES];
        UNROLL for (int u = 0; u < T::STEPS; u++) {
            float k[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            if (live) load_numbers<BITS, D>(page, first + (b * T::STEPS + u) * T::ROWS + row, 8 * j, k);
            UNROLL for (int g = 0; g < T::HEADS; g++)
                sum[u * T::HEADS + g] = g < G ? dot8(0, own[g < G ? g : 0], k) : 0.0f;
        }
        transposing_sum<T::LANES / 2>(sum, j);
        s[((b * T::STEPS + step) * T::ROWS + row) * T::HEADS + head] = sum[0];
    }
}

// Compute o[head][8] += sum of p[t][head] * v_t over the tokens t that this lane reads, from token `first` of the page
// on. p: the weights of the tokens. valid: the number of tokens in the page.
template <int BITS, int D, int G>
FN void page_values(GLOBAL_IN(uchar) page, uint first, LOCAL(float) p, THREAD float *o, uint lane, int valid) {
    typedef Tile<D, G> T;
    const uint j = lane % T::LANES, row = lane / T::LANES;
    if (8 * j >= D) return;
    const auto values = page + v_at(BITS, D);
    for (int b = 0; b < PART / T::ROWS; b += 4) {
        UNROLL for (int u = 0; u < 4; u++) {
            const int t = (b + u) * T::ROWS + row;
            if (BITS == 16 && (int)first + t >= valid) continue;
            float v[8];
            load_numbers<BITS, D>(values, first + t, 8 * j, v);
            UNROLL for (int g = 0; g < G; g++) {
                const float pg = p[t * T::HEADS + g];
                UNROLL for (int i = 0; i < 8; i++) o[g * 8 + i] = fma(pg, v[i], o[g * 8 + i]);
            }
        }
    }
}

template <int D, int G>
FN void scores_of(int bits, GLOBAL_IN(uchar) page, uint first, LOCAL(float) q, LOCAL(float) s, uint lane) {
    if (bits == 4) page_scores<4, D, G>(page, first, q, s, lane);
    else if (bits == 8) page_scores<8, D, G>(page, first, q, s, lane);
    else page_scores<16, D, G>(page, first, q, s, lane);
}

template <int D, int G>
FN void values_of(int bits, GLOBAL_IN(uchar) page, uint first, LOCAL(float) p, THREAD float *o, uint lane, int valid) {
    if (bits == 4) page_values<4, D, G>(page, first, p, o, lane, valid);
    else if (bits == 8) page_values<8, D, G>(page, first, p, o, lane, valid);
    else page_values<16, D, G>(page, first, p, o, lane, valid);
}

// These two functions return the maximum (max_over_tokens) or the sum (sum_over_tokens) of x over the lanes that have
// the same head.
template <int HEADS> FN float max_over_tokens(float x) {
    UNROLL for (int w = HEADS; w < 32; w *= 2) x = fmax(x, shuffle_xor(x, w));
    return x;
}
template <int HEADS> FN float sum_over_tokens(float x) {
    UNROLL for (int w = HEADS; w < 32; w *= 2) x += shuffle_xor(x, w);
    return x;
}
