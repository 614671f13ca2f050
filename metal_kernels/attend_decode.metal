// attend_decode: compute o_h = sum_t softmax_t(q_h . k_t / sqrt(D)) v_t over a tiered KV cache, for one new token of each sequence.
//   q, q_rotated: f32 [sequences][n_heads][D]; q_rotated is q times the matrix that rotates keys   params: int32 [sequences][PARAMS], see pages.h
//   pages: int32 page ids   cold, warm ..: the pool of each tier   open: the last hot page of each sequence, [sequences][n_kv_heads][256 D bytes]
//   o: f32 [sequences][n_heads][splits][D]   ml: f32 [sequences][n_heads][splits][2], the pairs (m, l). A split is the part of the pages that
//   one threadgroup takes; attend_merge joins the splits. Of each split, with x = q . k * log2(e) / sqrt(D):
//     m = max_t x_t, l = sum_t 2^(x_t - m), o = sum_t 2^(x_t - m) v_t
//   grid: (splits, n_heads / G, sequences) threadgroups of 4 simdgroups; a simdgroup takes every fourth half of a page
//   G query heads share a KV head, so each number is read once for G heads.   Templates: D (64, 80, 128, 256), G (1 to 8; at most 4 for D = 256)
//   The inner loops use no scales and biases. In place of that, the kernel applies a key's scale and bias to the key's score, because
//   q . (s n + b) = s (q . n) + b sum(q). The kernel applies a value's scale and bias to the value's probability.
//   The kernel attend_decode_alibi has this body and the word ALIBI, and one more argument:
//   slopes: f32 [n_heads]; slope * (key's position - query's position) is added to a score (with_slope in pages.h)
//   Threadgroup memory: 4 * max(2GD + 4*32*HEADS, 4GD) + 40 HEADS bytes, 16,704 bytes at most.
//   The same in MLX operations: backends/mlx/kernels/decode.py::attend_ops
KERNEL_START
typedef Tile<D, G> T;
constexpr int SIMDS = 4;
constexpr int WORK = 2 * G * D + SIMDS * PART * T::HEADS, JOIN = SIMDS * G * D;
SHARED(float, memory, (WORK > JOIN ? WORK : JOIN));
SHARED(float, ends, SIMDS * T::HEADS * 2);
SHARED(float, sums, 2 * T::HEADS); // sum(q) for the query of each head, then for the rotated query of each head

const auto P = params + (int)group_at.z * PARAMS;
int n[N_TIERS];
load_counts(P, n);
const int group = P[GROUP], n_kv = P[KV_HEADS];
const int n_pages = count_pages(n), n_tokens = P[N_TOKENS], first = P[FIRST];
const int head = group_at.y * G, kv = head / group;
const uint query = group_at.z * n_kv * group + head; // index of the query of the first of the G heads
const int cost = cost_before(first / PAGE, n) + (int)group_at.x * P[SPLIT];
const int begin = first_page_from(cost, n), end = min(first_page_from(cost + P[SPLIT], n), n_pages);

const float scale = as_f32(P[SCALE]);
for (uint i = thread_at; i < G * D; i += 32 * SIMDS) {
    memory[i] = q[query * D + i] * scale;
    memory[G * D + i] = q_rotated[query * D + i] * scale;
}
for (int g = simd_at; g < T::HEADS; g += SIMDS) {
    float sum = 0, sum_rotated = 0;
    if (has_keys(4, false) && g < G) sum = sum_of_query<D>(q, (query + g) * D, lane) * scale;
    if (has_keys(4, true) && g < G) sum_rotated = sum_of_query<D>(q_rotated, (query + g) * D, lane) * scale;
    if (lane == 0) sums[g] = sum, sums[T::HEADS + g] = sum_rotated;
}
BARRIER();

const auto s = memory + (2 * G * D + (int)simd_at * PART * T::HEADS);
const uint j = lane % T::LANES, row = lane / T::LANES, step = j / T::HEADS;
const float q_sum = sums[j % T::HEADS], q_sum_rotated = sums[T::HEADS + j % T::HEADS];
#ifdef ALIBI
const float slope = slopes[head + min((int)(j % T::HEADS), G - 1)]; // lanes without a head compute a score that nothing uses
#endif
float m = NEG_INF, l = 0, biased = 0; // m: the maximum for this lane's head; l and biased: sums over this lane's tokens only
float acc[G * 8];
UNROLL for (int i = 0; i < G * 8; i++) acc[i] = 0;

const int parts = min(PAGE / PART * end, (n_tokens + PART - 1) / PART);
for (int part = PAGE / PART * begin + (int)simd_at; part < parts; part += SIMDS) {
    const int page = part / (PAGE / PART), start = part % (PAGE / PART) * PART;
    const int tier = tier_of(page, n), bits = bits_of(tier);
    const bool last = tier == HOT && page == n_pages - 1; // `open` holds the last hot page, which new tokens fill
    const auto data = last ? open + (ulong)((int)group_at.z * n_kv + kv) * (ulong)page_bytes(HOT, D)
                           : POOL_OF(tier) + (ulong)(pages[P[TABLE] + page] * n_kv + kv) * (ulong)page_bytes(tier, D);
    scores_of<D, G>(bits, data, start, memory + (is_rotated(tier) ? G * D : 0), s, lane);

    float x[T::BLOCKS], top = NEG_INF;
    UNROLL for (int b = 0; b < T::BLOCKS; b++) {
        const int t = (b * T::STEPS + step) * T::ROWS + row, token = part * PART + t;
        x[b] = s[t * T::HEADS + j % T::HEADS];
        if (bits != 16) x[b] *= half_to_f32(load_u16(data, k_scale_at(bits, D) + 2 * (start + t)));
        if (has_bias(bits)) {
            const float sum = is_rotated(tier) ? q_sum_rotated : q_sum;
            x[b] = fma(half_to_f32(load_u16(data, k_bias_at(bits, D) + 2 * (start + t))), sum, x[b]);
        }
#ifdef ALIBI
        x[b] = with_slope(x[b], slope, token, n_tokens);
#endif
        if (token < first || token >= n_tokens) x[b] = NEG_INF;
        top = fmax(top, x[b]);
    }
    const float m_new = fmax(m, max_over_tokens<T::HEADS>(top)), at = m_new == NEG_INF ? 0.0f : m_new;
    const float shrink = exp2(m - at);
    m = m_new, l *= shrink, biased *= shrink;
    UNROLL for (int b = 0; b < T::BLOCKS; b++) {
        const int t = (b * T::STEPS + step) * T::ROWS + row;
        float p = exp2(x[b] - at);
        l += p;
        if (has_bias(bits)) biased = fma(p, half_to_f32(load_u16(data, v_bias_at(bits, D) + 2 * (start + t))), biased);
        if (bits != 16) p *= half_to_f32(load_u16(data, v_scale_at(bits, D) + 2 * (start + t)));
        s[t * T::HEADS + j % T::HEADS] = p;
    }
    UNROLL for (int g = 0; g < G; g++) {
        const float shrink_g = shuffle(shrink, g);
        UNROLL for (int i = 0; i < 8; i++) acc[g * 8 + i] *= shrink_g;
    }
    SIMD_BARRIER();
    values_of<D, G>(bits, data, start, s, acc, lane, n_tokens - page * PAGE);
    SIMD_BARRIER();
}

// Add the results of the lanes that hold different tokens, then the results of the simdgroups.
l = sum_over_tokens<T::HEADS>(l);
biased = sum_over_tokens<T::HEADS>(biased);
BARRIER(); // the next lines overwrite q and the scores in threadgroup memory
UNROLL for (int g = 0; g < G; g++) {
    const float biased_g = shuffle(biased, g);
    UNROLL for (int i = 0; i < 8; i++) {
        float sum = acc[g * 8 + i];
        UNROLL for (int w = T::LANES; w < 32; w *= 2) sum += shuffle_xor(sum, w);
        if (row == 0 && 8 * j < D) memory[((int)simd_at * G + g) * D + 8 * j + i] = sum + biased_g;
    }
}
if (lane < G) {
    ends[(simd_at * T::HEADS + lane) * 2] = m;
    ends[(simd_at * T::HEADS + lane) * 2 + 1] = l;
}
BARRIER();
const uint splits = P[SPLITS];
for (uint i = thread_at; i < G * D; i += 32 * SIMDS) {
    const int g = i / D;
    float m_all = NEG_INF, l_all = 0, sum = 0;
    UNROLL for (int k = 0; k < SIMDS; k++) m_all = fmax(m_all, ends[(k * T::HEADS + g) * 2]);
    UNROLL for (int k = 0; k < SIMDS; k++) {
        const float weight = m_all == NEG_INF ? 0.0f : exp2(ends[(k * T::HEADS + g) * 2] - m_all);
        l_all = fma(weight, ends[(k * T::HEADS + g) * 2 + 1], l_all);
        sum = fma(weight, memory[(k * G + g) * D + i % D], sum);
    }
    const uint at = (query + g) * splits + group_at.x;
    o[at * D + i % D] = sum;
    if (i % D == 0) ml[at * 2] = m_all, ml[at * 2 + 1] = l_all;
}
