// attend_decode_matrix: attend_decode on matrix units, for GPUs whose ordinary lanes cannot unpack and multiply as fast
//   as memory delivers (an H200 would need all of its f32 rate for 4-bit pages and four heads).
//   Arguments, outputs and grid are attend_decode's.   Templates: D (64, 128), G (1 to 8)
//   Threadgroup memory: 28 KB at most.   Twin: backends/mlx/kernels/decode.py::attend_ops
KERNEL_START
typedef Matrix<D, G> M;
constexpr int SIMDS = 4, Q_COLD = M::PARTS * M::DK / 2 * 32; // where the cold queries begin
constexpr int WORK = 2 * Q_COLD, JOIN = SIMDS * G * D;
SHARED(uint, memory, (WORK > JOIN ? WORK : JOIN));
SHARED(ushort, probabilities, SIMDS * M::PARTS * 8 * M::COLUMN);
SHARED(float, ends, SIMDS * 8 * 2);
SHARED(uint, tails, SIMDS * TAIL);
SHARED(float, sums, 8); // of each head's q_cold

const auto P = params + (int)group_at.z * PARAMS;
const int group = P[GROUP], n_kv = P[KV_HEADS], n_cold = P[N_COLD], n_warm = P[N_WARM];
const int n_pages = n_cold + n_warm + P[N_HOT], n_tokens = P[N_TOKENS], first = P[FIRST];
const int head = group_at.y * G, kv = head / group;
const uint query = group_at.z * n_kv * group + head; // of the first of G heads
const int cost = cost_before(first / PAGE, n_cold, n_warm) + (int)group_at.x * P[SPLIT];
const int begin = first_page_from(cost, n_cold, n_warm), end = min(first_page_from(cost + P[SPLIT], n_cold, n_warm), n_pages);
const uint row = lane / 4, column = lane % 4;
const float scale = as_f32(P[SCALE]);

// The first page is asked for before anything else is done.
const int last = max(n_pages - 1, 0); // page ids are read one page ahead
int id = pages[P[TABLE] + min(begin + (int)simd_at, last)], next_id = pages[P[TABLE] + min(begin + SIMDS + (int)simd_at, last)];
ColdPage<D> held;
if (begin + (int)simd_at < min(end, n_cold)) {
    const auto data = cold + (ulong)(id * n_kv + kv) * (ulong)page_bytes(COLD, D);
    load_cold_k<D>(data, held, lane);
    load_cold_v<D>(data, held, lane);
}

// Queries as the lanes want them, two halves to a word: first for hot and warm pages, then for cold ones.
for (int i = thread_at; i < Q_COLD; i += 32 * SIMDS) {
    const int at = i % 32, pair = i / 32 % (M::DK / 2), part = M::PACKED ? at / 16 : i / (M::DK * 16);
    const int g = M::PACKED ? at / 4 % 4 : at / 4, d = at % 4 * M::DK + 2 * pair;
    float a = 0, b = 0;
    if (g < G) a = q[(query + g) * D + d] * scale, b = q[(query + g) * D + d + 1] * scale;
    memory[i] = pack_halves(part_of(a, part), part_of(b, part));
}
for (int i = thread_at; i < Q_COLD; i += 32 * SIMDS) {
    const int at = i / 4 % 32, e = i / 128 % (M::DK / 8), part = M::PACKED ? at / 16 : i / (M::DK * 16);
    const int g = M::PACKED ? at / 4 % 4 : at / 4, d = at % 4 * M::DK + 8 * e + i % 4;
    float a = 0, b = 0;
    if (g < G) a = q_cold[(query + g) * D + d] * scale, b = q_cold[(query + g) * D + d + 4] * scale;
    memory[Q_COLD + i] = pack_halves(part_of(a, part), part_of(b, part));
}
for (int g = simd_at; g < 8; g += SIMDS) {
    const float sum = g < G ? sum_of_query<D>(q_cold, (query + g) * D, lane) * scale : 0.0f;
    if (lane == 0) sums[g] = sum;
}
BARRIER();

const auto tail = tails + (int)simd_at * TAIL;
const auto p_half = probabilities + (int)simd_at * M::PARTS * 8 * M::COLUMN;
const int first_head = M::PACKED ? column % 2 * 2 : column * 2; // this lane's two: of scores and of o
const int first_tile = M::PACKED ? column / 2 * 2 : 0;          // this lane's tiles of 16 tokens: of scores
const float q_sum[2] = {sums[first_head], sums[first_head + 1]};
float m[2] = {NEG_INF, NEG_INF}, l[2] = {0, 0}, biased[2] = {0, 0}, o_tile[D / 16][4];
UNROLL for (int i = 0; i < D / 16; i++) UNROLL for (int r = 0; r < 4; r++) o_tile[i][r] = 0;

for (int page = begin + (int)simd_at; page < end; page += SIMDS) {
    const int tier = page < n_cold ? COLD : page < n_cold + n_warm ? WARM : HOT;
    const auto pool = tier == COLD ? cold : tier == WARM ? warm : hot;
    const auto data = tier == HOT && page == last ? open + (ulong)((int)group_at.z * n_kv + kv) * (ulong)page_bytes(HOT, D)
                                                  : pool + (ulong)(id * n_kv + kv) * (ulong)page_bytes(tier, D);
    const bool next_cold = page + SIMDS < min(end, n_cold);
    const auto next = cold + (ulong)(next_cold ? next_id * n_kv + kv : 0) * (ulong)page_bytes(COLD, D);
    id = next_id, next_id = pages[P[TABLE] + min(page + 2 * SIMDS, last)];
    float c[4][4];
    UNROLL for (int i = 0; i < 4; i++) UNROLL for (int r = 0; r < 4; r++) c[i][r] = 0;
    if (tier == COLD) {
        store_tail<D>(tail, held, lane);
        SIMD_BARRIER();
        matrix_scores_cold<D, G>(held, memory + Q_COLD, c, lane);
        if (next_cold) load_cold_k<D>(next, held, lane);
    } else if (tier == WARM) {
        forget<D>(held);
        matrix_scores<WARM, D, G>(data, memory, c, lane);
    } else {
        forget<D>(held);
        matrix_scores<HOT, D, G>(data, memory, c, lane);
    }

    // Row r / 2, head r % 2 of each tile; packed: the two parts of a score are added, half the tiles in each lane.
    float x[M::TILES][4], top[2] = {NEG_INF, NEG_INF};
    UNROLL for (int i = 0; i < M::TILES; i++)
        UNROLL for (int r = 0; r < 4; r++) {
            const float other = c[(i + 2) % 4][r];
            x[i][r] = c[i][r];
            if (M::PACKED) x[i][r] = (column < 2 ? c[i][r] : other) + shuffle_xor(column < 2 ? other : c[i][r], 2);
            const int t = 16 * (first_tile + i) + row + r / 2 * 8, token = page * PAGE + t;
            if (tier == COLD) x[i][r] = fma(tail_half(tail, K_SCALE + t), x[i][r], tail_half(tail, K_BIAS + t) * q_sum[r % 2]);
            if (tier == WARM) x[i][r] *= half_to_f32(load_u16(data, k_scale_at(WARM, D) + 2 * t));
            if (token < first || token >= n_tokens) x[i][r] = NEG_INF;
            top[r % 2] = fmax(top[r % 2], x[i][r]);
        }
    float at[2], shrink[2];
    UNROLL for (int h = 0; h < 2; h++) {
        UNROLL for (int w = M::PACKED ? 2 : 4; w < 32; w *= 2) top[h] = fmax(top[h], shuffle_xor(top[h], w));
        const float m_new = fmax(m[h], top[h]);
        at[h] = m_new == NEG_INF ? 0.0f : m_new;
        shrink[h] = fast_exp2(m[h] - at[h]);
        m[h] = m_new, l[h] *= shrink[h], biased[h] *= shrink[h];
    }
    UNROLL for (int i = 0; i < M::TILES; i++)
        UNROLL for (int r = 0; r < 4; r++) {
            const int t = 16 * (first_tile + i) + row + r / 2 * 8, to = (first_head + r % 2) * M::COLUMN + t % 4 * 16 + t / 4;
            float p = fast_exp2(x[i][r] - at[r % 2]);
            l[r % 2] += p;
            if (tier == COLD) biased[r % 2] = fma(p, tail_half(tail, V_BIAS + t), biased[r % 2]), p *= tail_half(tail, V_SCALE + t);
            if (tier == WARM) p *= half_to_f32(load_u16(data, v_scale_at(WARM, D) + 2 * t));
            const uint high = f32_to_half(p);
            p_half[to] = high;
            p_half[to + (M::PACKED ? 4 : 8) * M::COLUMN] = f32_to_half(p - half_to_f32(high));
        }
    UNROLL for (int i = 0; i < D / 16; i++) UNROLL for (int r = 0; r < 4; r++) o_tile[i][r] *= shrink[r % 2];
    SIMD_BARRIER();
    if (tier == COLD) {
        matrix_values<COLD, D, G>(data, held, p_half, o_tile, lane, PAGE);
        if (next_cold) load_cold_v<D>(next, held, lane);
    } else if (tier == WARM) {
        matrix_values<WARM, D, G>(data, held, p_half, o_tile, lane, PAGE);
    } else {
        matrix_values<HOT, D, G>(data, held, p_half, o_tile, lane, n_tokens - page * PAGE);
    }
    SIMD_BARRIER();
}

// Join the lanes that share a head, then the simdgroups.
UNROLL for (int h = 0; h < 2; h++)
    UNROLL for (int w = M::PACKED ? 2 : 4; w < 32; w *= 2) {
        l[h] += shuffle_xor(l[h], w);
        biased[h] += shuffle_xor(biased[h], w);
    }
BARRIER(); // the queries are not needed any more
UNROLL for (int i = 0; i < D / 16; i++)
    UNROLL for (int r = 0; r < 4; r++) {
        const int g = first_head + r % 2;
        float sum = o_tile[i][r];
        if (M::PACKED) sum += shuffle_xor(sum, 2);
        if (g < G && (!M::PACKED || column < 2))
            memory[((int)simd_at * G + g) * D + (int)row * M::DV + 2 * i + r / 2] = as_u32(sum + biased[r % 2]);
    }
if (row == 0 && (!M::PACKED || column < 2))
    UNROLL for (int h = 0; h < 2; h++) {
        ends[((int)simd_at * 8 + first_head + h) * 2] = m[h];
        ends[((int)simd_at * 8 + first_head + h) * 2 + 1] = l[h];
    }
BARRIER();
const uint splits = P[SPLITS];
for (uint i = thread_at; i < G * D; i += 32 * SIMDS) {
    const int g = i / D;
    float m_all = NEG_INF, l_all = 0, sum = 0;
    UNROLL for (int k = 0; k < SIMDS; k++) m_all = fmax(m_all, ends[(k * 8 + g) * 2]);
    UNROLL for (int k = 0; k < SIMDS; k++) {
        const float weight = m_all == NEG_INF ? 0.0f : exp2(ends[(k * 8 + g) * 2] - m_all);
        l_all = fma(weight, ends[(k * 8 + g) * 2 + 1], l_all);
        sum = fma(weight, as_f32(memory[(k * G + g) * D + i % D]), sum);
    }
    const uint to = (query + g) * splits + group_at.x;
    o[to * D + i % D] = sum;
    if (i % D == 0) ml[to * 2] = m_all, ml[to * 2 + 1] = l_all;
}
