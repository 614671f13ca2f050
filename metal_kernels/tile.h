// A tile of 32 tokens, dequantised into threadgroup memory.   Needs pages.h

constexpr int TOKENS = 32;

// Rows are whole groups of 8 x 4 floats, whose order differs from token to token: lanes that read one
// column of 32 tokens, or one token's columns, meet different banks.
CONST_FN int tile_columns(int D) { return (D + 31) / 32 * 32; }
FN uint tile_at(int D, uint t, uint four) { return t * tile_columns(D) + (four ^ (t & 7)) * 4; }

// tile[t] = numbers of token first + t of K (value 0) or V (1); zeros from `valid` on.
//   block: where the numbers begin   page: where the offsets of scales and biases count from
template <int TIER, int D>
FN void fill_tile(GLOBAL_IN(uchar) page, GLOBAL_IN(uchar) block, int value, int first, int valid, LOCAL(float) tile, uint thread_at) {
    for (int i = thread_at; i < TOKENS * D / 8; i += 128) {
        const int t = i / (D / 8), d = i % (D / 8) * 8, at = first + t;
        float x[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (t < valid) load_numbers<TIER, D>(block, at, d, x);
        if (TIER != HOT && t < valid) {
            const float s = half_to_f32(load_u16(page, (value ? v_scale_at(TIER, D) : k_scale_at(TIER, D)) + 2 * at));
            const float b = TIER == COLD ? half_to_f32(load_u16(page, (value ? v_bias_at(D) : k_bias_at(D)) + 2 * at)) : 0.0f;
            UNROLL for (int k = 0; k < 8; k++) x[k] = fma(s, x[k], b);
        }
        store_local_f32x4(tile, tile_at(D, t, d / 4), x);
        store_local_f32x4(tile, tile_at(D, t, d / 4 + 1), x + 4);
    }
}
