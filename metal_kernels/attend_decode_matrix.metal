// attend_decode_matrix: compute attend_decode with matrix units. It is for GPUs whose f32 units cannot unpack and multiply numbers as fast
//   as the memory delivers them. For example, with 4-bit pages and four heads, an H200 would need its full f32 rate.
//   The arguments, outputs, grid and the word ALIBI are the same as those of attend_decode.   Templates: D (64, 128), G (1 to 8)
//   Threadgroup memory: 28 KB at most.   The same in MLX operations: backends/mlx/kernels/decode.py::attend_ops
KERNEL_START
typedef Matrix<D, G> M;
constexpr int SIMDS = 4, FORM = M::PARTS * M::DK / 2 * 32; // FORM: 32-bit words of all queries in one form (attend_matrix.h)
constexpr int WORK = (form_at(false, true) + has_form(false, true)) * FORM, JOIN = SIMDS * G * D;
SHARED(uint, memory, (WORK > JOIN ? WORK : JOIN));
SHARED(ushort, probabilities, SIMDS * M::PARTS * 8 * M::COLUMN);
SHARED(float, ends, SIMDS * 8 * 2);
SHARED(uint, tails, SIMDS * TAIL);
SHARED(float, sums, 2 * 8); // sum(q) for the query of each head, then for the rotated query of each head

const auto P = params + (int)group_at.z * PARAMS;
int n[N_TIERS];
load_counts(P, n);
const int group = P[GROUP], n_kv = P[KV_HEADS];
const int n_pages = count_pages(n), n_tokens = P[N_TOKENS], first = P[FIRST];
const int head = group_at.y * G, kv = head / group;
const uint query = group_at.z * n_kv * group + head; // index of the query of the first of the G heads
const int cost = cost_before(first / PAGE, n) + (int)group_at.x * P[SPLIT];
const int begin = first_page_from(cost, n), end = min(first_page_from(cost + P[SPLIT], n), n_pages);
const uint row = lane / 4, column = lane % 4;
const float scale = as_f32(P[SCALE]);

// Load this simdgroup's first page, if it has 4 bits, before all other work, because the load takes the longest time.
const int last = max(n_pages - 1, 0); // index of the last page; the loop reads the page ids one page ahead of the pages
int id = pages[P[TABLE] + min(begin + (int)simd_at, last)], next_id = pages[P[TABLE] + min(begin + SIMDS + (int)simd_at, last)];
HeldPage<D> held;
int n_held = 0; // number of 4-bit pages, which are the oldest pages, because a newer tier never has fewer bits
UNROLL for (int tier = 0; tier < N_TIERS; tier++) n_held += bits_of(tier) == 4 ? n[tier] : 0;
if (begin + (int)simd_at < min(end, n_held)) {
    const int tier = tier_of(begin + (int)simd_at, n);
    const auto data = POOL_OF(tier) + (ulong)(id * n_kv + kv) * (ulong)page_bytes(tier, D);
    hold_k<D>(data, held, lane);
    hold_v<D>(data, held, lane);
}

// Store the queries in the order in which the lanes load them, with two halves in a word. Store them in each form (attend_matrix.h) that the keys of
// a tier need.
UNROLL for (int rotated = 0; rotated < 2; rotated++) {
    const auto from = rotated ? q_rotated : q;
    const auto wide = memory + form_at(true, rotated) * FORM, narrow = memory + form_at(false, rotated) * FORM;
    if (has_form(true, rotated))
        for (int i = thread_at; i < FORM; i += 32 * SIMDS) {
            const int at = i % 32, pair = i / 32 % (M::DK / 2), part = M::PACKED ? at / 16 : i / (M::DK * 16);
            const int g = M::PACKED ? at / 4 % 4 : at / 4, d = at % 4 * M::DK + 2 * pair;
            float a = 0, b = 0;
            if (g < G) a = from[(query + g) * D + d] * scale, b = from[(query + g) * D + d + 1] * scale;
            wide[i] = pack_halves(part_of(a, part), part_of(b, part));
        }
    if (has_form(false, rotated))
        for (int i = thread_at; i < FORM; i += 32 * SIMDS) {
            const int at = i / 4 % 32, e = i / 128 % (M::DK / 8), part = M::PACKED ? at / 16 : i / (M::DK * 16);
            const int g = M::PACKED ? at / 4 % 4 : at / 4, d = at % 4 * M::DK + 8 * e + i % 4;
            float a = 0, b = 0;
            if (g < G) a = from[(query + g) * D + d] * scale, b = from[(query + g) * D + d + 4] * scale;
            narrow[i] = pack_halves(part_of(a, part), part_of(b, part));
        }
}
for (int g = simd_at; g < 8; g += SIMDS) {
    float sum = 0, sum_rotated = 0;
    if (has_keys(4, false) && g < G) sum = sum_of_query<D>(q, (query + g) * D, lane) * scale;
    if (has_keys(4, true) && g < G) sum_rotated = sum_of_query<D>(q_rotated, (query + g) * D, lane) * scale;
    if (lane == 0) sums[g] = sum, sums[8 + g] = sum_rotated;
}
BARRIER();

const auto tail = tails + (int)simd_at * TAIL;
const auto p_half = probabilities + (int)simd_at * M::PARTS * 8 * M::COLUMN;
const int first_head = M::PACKED ? column % 2 * 2 : column * 2; // the first of the two heads of which this lane has the scores and o
const int first_tile = M::PACKED ? column / 2 * 2 : 0;          // the first tile of 16 tokens of which this lane has the scores
const float q_sum[2] = {sums[first_head], sums[first_head + 1]};
const float q_sum_rotated[2] = {sums[8 + first_head], sums[8 + first_head + 1]};
#ifdef ALIBI
const float slope[2] = {slopes[head + min(first_head, G - 1)], slopes[head + min(first_head + 1, G - 1)]};
#endif
float m[2] = {NEG_INF, NEG_INF}, l[2] = {0, 0}, biased[2] = {0, 0}, o_tile[D / 16][4];
UNROLL for (int i = 0; i < D / 16; i++) UNROLL for (int r = 0; r < 4; r++) o_tile[i][r] = 0;

for (int page = begin + (int)simd_at; page < end; page += SIMDS) {
    const int tier = tier_of(page, n), bits = bits_of(tier);
    const auto data = tier == HOT && page == last ? open + (ulong)((int)group_at.z * n_kv + kv) * (ulong)page_bytes(HOT, D)
                                                  : POOL_OF(tier) + (ulong)(id * n_kv + kv) * (ulong)page_bytes(tier, D);
    const bool next_held = page + SIMDS < min(end, n_held);
    const int next_tier = next_held ? tier_of(page + SIMDS, n) : 0;
    const auto next = POOL_OF(next_tier) + (ulong)(next_held ? next_id * n_kv + kv : 0) * (ulong)page_bytes(next_tier, D);
    id = next_id, next_id = pages[P[TABLE] + min(page + 2 * SIMDS, last)];
    float c[4][4];
    UNROLL for (int i = 0; i < 4; i++) UNROLL for (int r = 0; r < 4; r++) c[i][r] = 0;
    const auto wide = memory + (is_rotated(tier) ? form_at(true, true) : form_at(true, false)) * FORM;
    if (bits == 4) {
        const auto narrow = memory + (is_rotated(tier) ? form_at(false, true) : form_at(false, false)) * FORM;
        store_tail<D>(tail, held, lane);
        SIMD_BARRIER();
        matrix_scores_held<D, G>(held, narrow, c, lane);
        if (next_held) hold_k<D>(next, held, lane);
    } else if (bits == 8) {
        forget<D>(held);
        matrix_scores<8, D, G>(data, wide, c, lane);
    } else {
        forget<D>(held);
        matrix_scores<16, D, G>(data, wide, c, lane);
    }

    // Number r of a tile has row r / 2 and head r % 2. If PACKED, add the two parts of each score; afterwards each lane keeps half of the tiles.
    float x[M::TILES][4], top[2] = {NEG_INF, NEG_INF};
    UNROLL for (int i = 0; i < M::TILES; i++)
        UNROLL for (int r = 0; r < 4; r++) {
            const float other = c[(i + 2) % 4][r];
            x[i][r] = c[i][r];
            if (M::PACKED) x[i][r] = (column < 2 ? c[i][r] : other) + shuffle_xor(column < 2 ? other : c[i][r], 2);
            const int t = 16 * (first_tile + i) + row + r / 2 * 8, token = page * PAGE + t;
            if (bits == 4) {
                const float sum = is_rotated(tier) ? q_sum_rotated[r % 2] : q_sum[r % 2];
                x[i][r] = fma(tail_half(tail, K_SCALE + t), x[i][r], tail_half(tail, K_BIAS + t) * sum);
            }
            if (bits == 8) x[i][r] *= half_to_f32(load_u16(data, k_scale_at(8, D) + 2 * t));
#ifdef ALIBI
            x[i][r] = with_slope(x[i][r], slope[r % 2], token, n_tokens);
#endif
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
            if (bits == 4) biased[r % 2] = fma(p, tail_half(tail, V_BIAS + t), biased[r % 2]), p *= tail_half(tail, V_SCALE + t);
            if (bits == 8) p *= half_to_f32(load_u16(data, v_scale_at(8, D) + 2 * t));
            const uint high = f32_to_half(p);
            p_half[to] = high;
            p_half[to + (M::PACKED ? 4 : 8) * M::COLUMN] = f32_to_half(p - half_to_f32(high));
        }
    UNROLL for (int i = 0; i < D / 16; i++) UNROLL for (int r = 0; r < 4; r++) o_tile[i][r] *= shrink[r % 2];
    SIMD_BARRIER();
    if (bits == 4) {
        matrix_values<4, D, G>(data, held, p_half, o_tile, lane, PAGE);
        if (next_held) hold_v<D>(next, held, lane);
    } else if (bits == 8) {
        matrix_values<8, D, G>(data, held, p_half, o_tile, lane, PAGE);
    } else {
        matrix_values<16, D, G>(data, held, p_half, o_tile, lane, n_tokens - page * PAGE);
    }
    SIMD_BARRIER();
}

// Add the results of the lanes that have the same head, then the results of the simdgroups.
UNROLL for (int h = 0; h < 2; h++)
    UNROLL for (int w = M::PACKED ? 2 : 4; w < 32; w *= 2) {
        l[h] += shuffle_xor(l[h], w);
        biased[h] += shuffle_xor(biased[h], w);
    }
BARRIER(); // the next lines overwrite the queries in threadgroup memory
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
