// A page of the KV cache holds the keys and values of 64 tokens of one layer and one KV head. A key or a value has D
// numbers. README.md draws the layouts:
//   16 bits: K f16 [64][D], V f16 [64][D]
//    8 bits: K int8 [64][D], V int8 [64][D], K scale f16 [64], V scale f16 [64]
//    4 bits: K u4 [64][D/2], V u4 [64][D/2], K scale, K bias, V scale, V bias f16 [64] each
// A pool is an array of pages: [pages][n_kv_heads][bytes of a page].

CONSTANT int PAGE = 64; // PAGE: the number of tokens in a page

// This table lists the tiers (storage precisions) of the KV cache. Each tier has one row, from the oldest tokens to the
// newest. 4-bit codes have a bias, and 8-bit codes have none.
//   pool     the kernels' argument that holds the pages of the tier
//   rotated  1 if keys are rotated (hadamard in quantise.h) before they become codes; their queries are rotated, too
//   cost     the time of attention over a page, relative to a cold page. A warm page costs 3, and not 2 as its size
//            suggests, because a GPU runs fewer loads of large pages at once.
// TIERS passes `x` to each ROW. ruvmlx/tiers.py and neon/include/rvm_pages.h have the same rows.
//            name   pool  bits  rotated  cost
#define TIERS(ROW, x)              \
    ROW(x, COLD, cold, 4, true, 1) \
    ROW(x, WARM, warm, 8, false, 3) \
    ROW(x, HOT, hot, 16, false, 6)

#define TIER_NUMBER(x, name, pool, bits, rotated, cost) name,
enum { TIERS(TIER_NUMBER, 0) N_TIERS };

#define TIER_BITS(tier, name, pool, bits, rotated, cost) (tier) == name ? bits :
#define TIER_ROTATED(tier, name, pool, bits, rotated, cost) (tier) == name ? rotated :
#define TIER_COST(tier, name, pool, bits, rotated, cost) (tier) == name ? cost :
#define TIER_POOL(tier, name, pool, bits, rotated, cost) (tier) == name ? pool :
CONST_FN int bits_of(int tier) { return TIERS(TIER_BITS, tier) 16; }
CONST_FN bool is_rotated(int tier) { return TIERS(TIER_ROTATED, tier) false; }
CONST_FN int cost_of(int tier) { return TIERS(TIER_COST, tier) 0; }
#define POOL_OF(tier) (TIERS(TIER_POOL, tier) hot)

// has_keys is true if some tier has keys of `bits` bits that are rotated (rotated = 1) or not rotated (rotated = 0).
#define TIER_KEYS(x, name, pool, width, turned, cost) || (width == bits && turned == rotated)
CONST_FN bool has_keys(int bits, bool rotated) { return false TIERS(TIER_KEYS, 0); }

// The parameters of a sequence for the attention kernels are int32 numbers: params [sequences][PARAMS]. The first
// N_TIERS parameters are the numbers of pages in the tiers; tier 0 has the oldest pages.
enum {
    N_TOKENS = N_TIERS, // N_TOKENS: the number of tokens in the sequence; only the last page can be partly filled, and only if it is hot
    FIRST,              // FIRST: the index of the first token that the query sees; gather's output begins with this token's page
    TABLE,              // TABLE: the index in `pages` at which the page ids of the sequence begin
    SPLIT,              // SPLIT: decode kernels: the work of one threadgroup, as a sum of page costs (cost_before)
    KV_HEADS,           // KV_HEADS: the number of KV heads; the number of query heads is KV_HEADS * GROUP
    GROUP,
    SCALE,              // SCALE: the scale of the scores, stored as the bits of the float log2(e) / sqrt(D)
    N_NEW,              // N_NEW: prefill kernels: the number of tokens in the present chunk of the prompt
    SPLITS,             // SPLITS: decode kernels: the number of splits of a head; each split is the work of one threadgroup
    HEAD,               // HEAD: kernel gather: the index of the first KV head
    HEADS,              // HEADS: kernel gather: the number of KV heads
    PARAMS = 16,
};

#define NEG_INF as_f32(0xff800000u)

CONST_FN bool has_bias(int bits) { return bits == 4; }

// These functions return the byte offsets of values, scales and biases in a page whose numbers have `bits` bits.
CONST_FN int v_at(int bits, int D) { return 8 * bits * D; }
CONST_FN int k_scale_at(int bits, int D) { return 16 * bits * D; }
CONST_FN int k_bias_at(int bits, int D) { return 16 * bits * D + 128; }
CONST_FN int v_scale_at(int bits, int D) { return 16 * bits * D + (has_bias(bits) ? 256 : 128); }
CONST_FN int v_bias_at(int bits, int D) { return 16 * bits * D + 384; }

CONST_FN int page_bytes(int tier, int D) {
    return 16 * bits_of(tier) * D + (bits_of(tier) == 16 ? 0 : has_bias(bits_of(tier)) ? 512 : 256);
}

// Copy the number of pages that the sequence has in each tier from params to n.
template <typename P> FN void load_counts(P params, THREAD int *n) { UNROLL for (int i = 0; i < N_TIERS; i++) n[i] = params[i]; }
FN int count_pages(THREAD const int *n) {
    int pages = 0;
    UNROLL for (int tier = 0; tier < N_TIERS; tier++) pages += n[tier];
    return pages;
}
FN int tier_of(int page, THREAD const int *n) {
    int tier = 0, end = n[0];
    UNROLL for (int i = 1; i < N_TIERS; i++) tier += page >= end, end += n[i];
    return tier;
}

// Return the sum of the costs of all pages before page number `page`. The threadgroups of the decode kernels get equal
// costs, and not equal numbers of pages: threadgroup i takes the pages that begin in its interval of SPLIT costs.
FN int cost_before(int page, THREAD const int *n) {
    int cost = 0;
    UNROLL for (int tier = 0; tier < N_TIERS; tier++) {
        const int here = tier == HOT ? page : min(page, n[tier]);
        cost += cost_of(tier) * here, page -= here;
    }
    return cost;
}
// return the first page such that the pages before it cost at least `cost` together
FN int first_page_from(int cost, THREAD const int *n) {
    int page = 0;
    UNROLL for (int tier = 0; tier < N_TIERS; tier++) {
        const int here = tier == HOT ? cost : min(cost, cost_of(tier) * n[tier]);
        page += (here + cost_of(tier) - 1) / cost_of(tier), cost -= here;
    }
    return page;
}

// These functions convert code i of a word to a float: a code of 8 bits, stored plus 128, or a code of 4 bits. The
// functions write the integer into the low mantissa bits of 2^23, then subtract. The result is exact.
FN float byte_to_f32(uint word, int i) { return as_f32(0x4b000000u | (word >> (8 * i) & 255u)) - 8388736.0f; }
FN float nibble_to_f32(uint word, int i) { return as_f32(0x4b000000u | (word >> (4 * i) & 15u)) - 8388608.0f; }

FN void halves_to_f32(uint word, THREAD float *x) {
    x[0] = half_to_f32(word & 0xffffu);
    x[1] = half_to_f32(word >> 16);
}

// Load x[0..7] = the eight halves that begin at p + at.
FN void load_halves(GLOBAL_IN(uchar) p, uint at, THREAD float *x) {
    const uint4 w = load_u32x4(p, at);
    halves_to_f32(w.x, x), halves_to_f32(w.y, x + 2), halves_to_f32(w.z, x + 4), halves_to_f32(w.w, x + 6);
}

FN float sum_over_lanes(float x) {
    UNROLL for (int w = 1; w < 32; w *= 2) x += shuffle_xor(x, w);
    return x;
}

// Return the sum of the D numbers from q[at] on, in each lane. The attention kernels multiply a key's bias by this sum
// of the query's numbers.
template <int D> FN float sum_of_query(GLOBAL_IN(float) q, uint at, uint lane) {
    float sum = 0;
    for (uint d = lane; d < D; d += 32) sum += q[at + d];
    return sum_over_lanes(sum);
}

// Load x[0..7] = the numbers d .. d+7 of token t of a page's K or V. The numbers are codes if the page has fewer than
// 16 bits; the caller applies the scales and biases.
template <int BITS, int D> FN void load_numbers(GLOBAL_IN(uchar) block, uint t, uint d, THREAD float *x) {
    if (BITS == 16) {
        load_halves(block, (t * D + d) * 2, x);
    } else if (BITS == 8) {
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

// Return the score x of a token with ALiBi's bias: slope * (key's position - query's position). A score is a logarithm
// to base 2, so the bias is multiplied by log2(e). The query is the last of the n_tokens tokens.
FN float with_slope(float x, float slope, int token, int n_tokens) {
    return fma(slope * 1.44269504f, (float)(token - (n_tokens - 1)), x);
}
