// These functions quantise pages; they need pages.h. All implementations give the same bytes, because all use float32,
// divisions (no reciprocals), and rounding with ties to even.
//   8 bits:  s = f16(absmax / 127)        q = clamp(rint(x / s), -127, 127)        x ~ s q
//   4 bits:  s = f16((max - min) / 15)    b = f16(min)    q = clamp(rint((x - b) / s), 0, 15)        x ~ s q + b
//   If s = 0, then q = 0. A scale or bias of -0 is stored as +0, because the sign of a zero minimum depends on the
//   order of comparisons.
//   Products s * q are exact in float32, so a compiler can fuse s * q - b without a change of the result. For the
//   products that a compiler must not fuse with a sum, the code uses the function `product`.

FN float max_over_lanes(float x) {
    UNROLL for (int w = 1; w < 32; w *= 2) x = fmax(x, shuffle_xor(x, w));
    return x;
}
FN float min_over_lanes(float x) {
    UNROLL for (int w = 1; w < 32; w *= 2) x = fmin(x, shuffle_xor(x, w));
    return x;
}

FN uint stored_half(float x) {
    const uint bits = f32_to_half(x);
    return bits == 0x8000u ? 0u : bits;
}

template <int BITS> FN uint code_of(float x, float s, float b) {
    if (s == 0) return 0;
    if (BITS == 8) return (uint)(int)fmin(fmax(rint(x / s), -127.0f), 127.0f) & 255u;
    return (uint)fmin(fmax(rint((x - b) / s), 0.0f), 15.0f);
}

// A simdgroup holds four of a token's numbers in each lane. These numbers of all lanes are a block: block n has the
// token's numbers 128 n .. 128 n + 127, and lane l holds the numbers 4 l .. 4 l + 3 of the block.
CONST_FN int blocks_of(int D) { return (D + 127) / 128; }

// Load x[0..3] = the dequantised numbers d .. d+3 of token t of K (value = 0) or V (value = 1). The results for numbers
// from D on are zeros. Rotated keys stay rotated.
template <int BITS, int D> FN void load_values(GLOBAL_IN(uchar) page, int value, uint t, uint d, THREAD float *x) {
    UNROLL for (int i = 0; i < 4; i++) x[i] = 0;
    if (d >= D) return;
    const uint at = value ? v_at(BITS, D) : 0;
    if (BITS == 16) {
        const uint2 w = load_u32x2(page, at + (t * D + d) * 2);
        halves_to_f32(w.x, x), halves_to_f32(w.y, x + 2);
        return;
    }
    const float s = half_to_f32(load_u16(page, (value ? v_scale_at(BITS, D) : k_scale_at(BITS, D)) + 2 * t));
    if (BITS == 8) {
        const uint w = load_u32(page, at + t * D + d) ^ 0x80808080u;
        UNROLL for (int i = 0; i < 4; i++) x[i] = s * byte_to_f32(w, i);
    } else {
        const uint w = load_u16(page, at + (t * D + d) / 2);
        const float b = half_to_f32(load_u16(page, (value ? v_bias_at(BITS, D) : k_bias_at(BITS, D)) + 2 * t));
        UNROLL for (int i = 0; i < 4; i++) x[i] = fma(s, nibble_to_f32(w, i), b);
    }
}

CONST_FN int hadamard_block(int D) { return D % 128 == 0 ? 128 : D % 64 == 0 ? 64 : D % 32 == 0 ? 32 : 16; }

// Multiply one block of a token's numbers by a block-diagonal orthonormal Hadamard matrix, which is its own inverse.
// For h = 1, 2, 4 up to B / 2, each pair (x_i, x_{i + h}) becomes (sum, difference). At the end each number is
// multiplied by 1 / sqrt(B). B is the number of rows of each block of the matrix.
template <int D> FN void hadamard(THREAD float *x, uint lane) {
    constexpr int B = hadamard_block(D);
    const float a = x[0] + x[1], b = x[0] - x[1], c = x[2] + x[3], d = x[2] - x[3];
    x[0] = a + c, x[1] = b + d, x[2] = a - c, x[3] = b - d;
    UNROLL for (int w = 1; w < B / 4; w *= 2)
        UNROLL for (int i = 0; i < 4; i++) {
            const float other = shuffle_xor(x[i], w);
            x[i] = lane & w ? other - x[i] : x[i] + other;
        }
    const float norm = B == 128 ? 0.08838834764831845f : B == 64 ? 0.125f : B == 32 ? 0.17677669529663687f : 0.25f;
    UNROLL for (int i = 0; i < 4; i++) x[i] = product(x[i], norm);
}
