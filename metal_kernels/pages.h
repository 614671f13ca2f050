// Pages of the KV cache: 64 tokens of one layer and one KV head, D numbers each.   Layouts: README.md
//   hot:  K f16 [64][D], V f16 [64][D]
//   warm: K int8 [64][D], V int8 [64][D], K scale f16 [64], V scale f16 [64]
//   cold: K u4 [64][D/2] rotated (hadamard in quantise.h), V u4 [64][D/2], K scale, K bias, V scale, V bias f16 [64] each
// A pool is [pages][n_kv_heads][bytes of a page].

CONSTANT int PAGE = 64; // tokens
CONSTANT int COLD = 0, WARM = 1, HOT = 2;

// What a sequence is to the attention kernels: params int32 [sequences][16]
CONSTANT int N_COLD = 0, N_WARM = 1, N_HOT = 2; // pages of each tier, oldest first in this order
CONSTANT int N_TOKENS = 3;                      // only the last page may be partly filled, and only a hot one
CONSTANT int FIRST = 4;                         // first visible token
CONSTANT int TABLE = 5;                         // where the sequence's page ids begin in `pages`
CONSTANT int SPLIT = 6;                         // decode: what a threadgroup takes, in cold pages (page_cost)
CONSTANT int KV_HEADS = 7, GROUP = 8;           // n_heads = KV_HEADS * GROUP
CONSTANT int SCALE = 9;                         // bits of a float: log2(e) / sqrt(D)
CONSTANT int N_NEW = 10;                        // prefill: tokens of the chunk
CONSTANT int SPLITS = 12;                       // decode: threadgroups per head
CONSTANT int HEAD = 13, HEADS = 14;             // gather: first KV head, and how many
CONSTANT int PARAMS = 16;

#define NEG_INF as_f32(0xff800000u)

CONST_FN int page_bytes(int tier, int D) {
    return tier == HOT ? 256 * D : tier == WARM ? 128 * D + 256 : 64 * D + 512;
}
CONST_FN int v_at(int tier, int D) { return tier == HOT ? 128 * D : tier == WARM ? 64 * D : 32 * D; }
CONST_FN int k_scale_at(int tier, int D) { return tier == WARM ? 128 * D : 64 * D; }
CONST_FN int k_bias_at(int D) { return 64 * D + 128; }
CONST_FN int v_scale_at(int tier, int D) { return tier == WARM ? 128 * D + 128 : 64 * D + 256; }
CONST_FN int v_bias_at(int D) { return 64 * D + 384; }

// Threadgroups of the decode kernels get pages of equal cost, not equal numbers: warm and hot pages are larger and
// keep less in flight. A threadgroup takes the pages that begin in its stretch of SPLIT.
CONSTANT int WARM_COST = 3, HOT_COST = 6; // a cold page costs 1
FN int cost_before(int page, int n_cold, int n_warm) {
    const int warm = min(max(page - n_cold, 0), n_warm), hot = max(page - n_cold - n_warm, 0);
    return min(page, n_cold) + WARM_COST * warm + HOT_COST * hot;
}
FN int first_page_from(int cost, int n_cold, int n_warm) { // the inverse, rounded up
    const int warm = min(max(cost - n_cold, 0), WARM_COST * n_warm), hot = max(cost - n_cold - WARM_COST * n_warm, 0);
    return min(cost, n_cold) + (warm + WARM_COST - 1) / WARM_COST + (hot + HOT_COST - 1) / HOT_COST;
}

// Small integers become floats by writing them below the mantissa of 2^23: exact, and two cheap operations.
FN float byte_to_f32(uint word, int i) { return as_f32(0x4b000000u | (word >> (8 * i) & 255u)) - 8388736.0f; }
FN float nibble_to_f32(uint word, int i) { return as_f32(0x4b000000u | (word >> (4 * i) & 15u)) - 8388608.0f; }

FN void halves_to_f32(uint word, THREAD float *x) {
    x[0] = half_to_f32(word & 0xffffu);
    x[1] = half_to_f32(word >> 16);
}

// x[0..7] = eight halves
FN void load_halves(GLOBAL_IN(uchar) p, uint at, THREAD float *x) {
    const uint4 w = load_u32x4(p, at);
    halves_to_f32(w.x, x), halves_to_f32(w.y, x + 2), halves_to_f32(w.z, x + 4), halves_to_f32(w.w, x + 6);
}

FN float sum_over_lanes(float x) {
    UNROLL for (int w = 1; w < 32; w *= 2) x += shuffle_xor(x, w);
    return x;
}

// The sum of D numbers from q[at] on, for the simdgroup: what a cold key's bias is multiplied by.
template <int D> FN float sum_of_query(GLOBAL_IN(float) q, uint at, uint lane) {
    float sum = 0;
    for (uint d = lane; d < D; d += 32) sum += q[at + d];
    return sum_over_lanes(sum);
}

// x[0..7] = numbers d .. d+7 of token t of a block K or V, without scale and bias
template <int TIER, int D> FN void load_numbers(GLOBAL_IN(uchar) block, uint t, uint d, THREAD float *x) {
    if (TIER == HOT) {
        load_halves(block, (t * D + d) * 2, x);
    } else if (TIER == WARM) {
        const uint2 w = load_u32x2(block, t * D + d);
        UNROLL for (int i = 0; i < 4; i++) {
            x[i] = byte_to_f32(w.x ^ 0x80808080u, i);
            x[i + 4] = byte_to_f32(w.y ^ 0x80808080u, i);
        }
    } else {
        const uint w = load_u32(block, (t * D + d) / 2);
        UNROLL for (int i = 0; i < 8; i++) x[i] = nibble_to_f32(w, i);
    }
}
