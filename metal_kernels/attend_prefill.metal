// attend_prefill: attention of a chunk of T new tokens over a sequence's tiers and, causally, over itself.
//   q, q_cold, o: f32 [T][n_heads][D], q_cold as cold keys are rotated   params: int32 [16], pages.h; pages: int32
//   cold, warm, hot: pools   fresh: the chunk's own keys and values, as `append` wrote them
//   grid: (ceil(T * GROUP / 32), n_kv_heads, 1) threadgroups of 4 simdgroups; 32 rows (query, head of the group) share
//   each tile of 32 tokens, 8 rows to a simdgroup. For scores a lane is a token, for values it is 4 numbers.
//   Nothing is kept but a tile: no scores in memory, no unpacked copy of the cache.   Template: D
//   Threadgroup memory: 4 * 32 * (D + D rounded up to 32) bytes, 32 KB for D = 128.
//   Twin: kernels/metal/prefill.py::attend_prefill_ops
KERNEL_START
constexpr int ROWS = 8, SIMDS = 4, TILE_ROWS = ROWS * SIMDS, COLUMNS = tile_columns(D);
SHARED(float, queries, TILE_ROWS * D);
SHARED(float, tile, TOKENS * COLUMNS);

const int group = params[GROUP], n_kv = params[KV_HEADS], kv = group_at.y, chunk = params[N_NEW];
const int n_cold = params[N_COLD], n_warm = params[N_WARM], n_pages = n_cold + n_warm + params[N_HOT];
const int n_old = params[N_TOKENS], window = params[WINDOW];
const int row0 = (int)group_at.x * TILE_ROWS, rows = min(TILE_ROWS, chunk * group - row0);
const float scale = as_f32(params[SCALE]);
const int last = n_old + (row0 + rows - 1) / group;               // position of the newest query here
const int oldest = window ? max(n_old + row0 / group - window + 1, 0) : 0; // first token that any of them sees

float m[ROWS], l[ROWS], acc[ROWS][4];
UNROLL for (int r = 0; r < ROWS; r++) {
    m[r] = NEG_INF, l[r] = 0;
    UNROLL for (int i = 0; i < 4; i++) acc[r][i] = 0;
}

int held = -1; // which queries are in `queries`: 1 q_cold, 0 q
const int old_tiles = n_pages * (PAGE / TOKENS), first_tile = oldest < n_old ? oldest / TOKENS : old_tiles + (oldest - n_old) / TOKENS;
const int tiles = old_tiles + (last - n_old) / TOKENS + 1;
for (int n = first_tile; n < tiles; n++) {
    const bool old = n < old_tiles;
    const int page = n / (PAGE / TOKENS), tier = page < n_cold ? COLD : page < n_cold + n_warm ? WARM : HOT;
    const int t0 = old ? n % (PAGE / TOKENS) * TOKENS : (n - old_tiles) * TOKENS;
    const int position = old ? n * TOKENS : n_old + t0; // of the tile's first token
    const int valid = min(TOKENS, (old ? n_old : n_old + chunk) - position);
    if (valid <= 0) continue; // the empty end of a hot page
    auto data = fresh;
    if (old) data = (tier == COLD ? cold : tier == WARM ? warm : hot) + (ulong)(pages[params[TABLE] + page] * n_kv + kv) * (ulong)page_bytes(tier, D);

    const int wanted = old && tier == COLD;
    BARRIER(); // the last tile is done with
    if (wanted != held) {
        for (int i = thread_at; i < TILE_ROWS * D; i += 32 * SIMDS) {
            const int row = i / D, t = (row0 + row) / group, h = (row0 + row) % group;
            const int from = (t * n_kv * group + kv * group + h) * D + i % D;
            float x = 0;
            if (row < rows) x = wanted ? q_cold[from] : q[from];
            queries[i] = x * scale;
        }
        held = wanted;
    }
    if (!old) fill_tile<HOT, D>(data, data + (ulong)(kv * 2) * (ulong)(chunk * D * 2), 0, t0, valid, tile, thread_at);
    else if (tier == HOT) fill_tile<HOT, D>(data, data, 0, t0, valid, tile, thread_at);
    else if (tier == WARM) fill_tile<WARM, D>(data, data, 0, t0, valid, tile, thread_at);
    else fill_tile<COLD, D>(data, data, 0, t0, valid, tile, thread_at);
    BARRIER();

    float x[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) x[r] = 0;
    for (int i = 0; i < D / 4; i++) {
        const float4 k = load_local_f32x4(tile, tile_at(D, lane, i));
        UNROLL for (int r = 0; r < ROWS; r++) {
            const float4 y = load_local_f32x4(queries, ((int)simd_at * ROWS + r) * D + 4 * i);
            x[r] = fma(k.x, y.x, fma(k.y, y.y, fma(k.z, y.z, fma(k.w, y.w, x[r]))));
        }
    }
    float shrink[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) {
        const int at = n_old + (row0 + (int)simd_at * ROWS + r) / group, token = position + (int)lane;
        const bool seen = (int)lane < valid && token <= at && (window == 0 || token > at - window);
        if (!seen) x[r] = NEG_INF;
        float top = x[r];
        UNROLL for (int w = 1; w < 32; w *= 2) top = fmax(top, shuffle_xor(top, w));
        const float m_new = fmax(m[r], top), base = m_new == NEG_INF ? 0.0f : m_new;
        shrink[r] = exp2(m[r] - base);
        x[r] = exp2(x[r] - base);
        m[r] = m_new, l[r] = fma(l[r], shrink[r], x[r]);
        UNROLL for (int i = 0; i < 4; i++) acc[r][i] *= shrink[r];
    }

    BARRIER(); // all have read the keys
    if (!old) fill_tile<HOT, D>(data, data + (ulong)(kv * 2 + 1) * (ulong)(chunk * D * 2), 1, t0, valid, tile, thread_at);
    else if (tier == HOT) fill_tile<HOT, D>(data, data + v_at(HOT, D), 1, t0, valid, tile, thread_at);
    else if (tier == WARM) fill_tile<WARM, D>(data, data + v_at(WARM, D), 1, t0, valid, tile, thread_at);
    else fill_tile<COLD, D>(data, data + v_at(COLD, D), 1, t0, valid, tile, thread_at);
    BARRIER();
    for (int t = 0; t < valid; t++) {
        const float4 v = load_local_f32x4(tile, tile_at(D, t, 4 * (int)lane < D ? lane : 0));
        UNROLL for (int r = 0; r < ROWS; r++) {
            const float p = shuffle(x[r], t);
            acc[r][0] = fma(p, v.x, acc[r][0]), acc[r][1] = fma(p, v.y, acc[r][1]);
            acc[r][2] = fma(p, v.z, acc[r][2]), acc[r][3] = fma(p, v.w, acc[r][3]);
        }
    }
}
UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int w = 1; w < 32; w *= 2) l[r] += shuffle_xor(l[r], w);
    const int row = (int)simd_at * ROWS + r;
    if (row < rows && 4 * (int)lane < D) {
        const int t = (row0 + row) / group, h = (row0 + row) % group, to = (t * n_kv * group + kv * group + h) * D + 4 * (int)lane;
        UNROLL for (int i = 0; i < 4; i++) o[to + i] = acc[r][i] / l[r];
    }
}
