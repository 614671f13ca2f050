// demote: quantise pages of the next higher tier to tier TO. If the keys of only one of the two tiers are rotated, the kernel rotates the keys.
// README.md has the byte layout.
//   pool: the pool of the higher tier   ids: int32 [n], the ids of the pages in this pool   params: int32 [PARAMS], of which only KV_HEADS is read
//   out: [n][n_kv_heads][bytes of a page]
//   grid: (n, n_kv_heads, 1) threadgroups of 4 simdgroups; a simdgroup takes every fourth row (the key or the value of a token)
//   Templates: D, TO.   The same in MLX operations: backends/mlx/kernels/demote.py::demote_ops
KERNEL_START
constexpr int N = blocks_of(D), FROM = TO + 1, BITS = bits_of(TO);
constexpr float STEPS = BITS == 8 ? 127.0f : 15.0f;
const int n_kv = params[KV_HEADS], kv = group_at.y;
const auto from = pool + (ulong)(ids[group_at.x] * n_kv + kv) * (ulong)page_bytes(FROM, D);
const auto to = out + (ulong)((int)group_at.x * n_kv + kv) * (ulong)page_bytes(TO, D);
for (int row = simd_at; row < 2 * PAGE; row += 4) { // a page has 64 rows of K, then 64 rows of V
    const int value = row / PAGE, t = row % PAGE;
    float x[N * 4], least = as_f32(0x7f800000u), most = NEG_INF;
    UNROLL for (int n = 0; n < N; n++) {
        const int d = 128 * n + 4 * (int)lane;
        load_values<bits_of(FROM), D>(from, value, t, d, x + 4 * n);
        if (!value && is_rotated(TO) != is_rotated(FROM)) hadamard<D>(x + 4 * n, lane);
        if (d < D) UNROLL for (int i = 0; i < 4; i++) least = fmin(least, x[4 * n + i]), most = fmax(most, x[4 * n + i]);
    }
    if (has_bias(BITS)) least = min_over_lanes(least), most = max_over_lanes(most);
    else most = max_over_lanes(fmax(-least, most)), least = 0;
    const uint scale = stored_half((most - least) / STEPS), bias = stored_half(least);
    UNROLL for (int n = 0; n < N; n++) {
        const int d = 128 * n + 4 * (int)lane, at = (value ? v_at(BITS, D) : 0) + (t * D + d) * BITS / 8;
        uint w = 0;
        UNROLL for (int i = 0; i < 4; i++)
            w |= code_of<BITS>(x[4 * n + i], half_to_f32(scale), half_to_f32(bias)) << (BITS * i);
        if (d < D && BITS == 8) store_u32(to, at, w);
        if (d < D && BITS == 4) store_u16(to, at, w);
    }
    if (lane == 0) {
        store_u16(to, (value ? v_scale_at(BITS, D) : k_scale_at(BITS, D)) + 2 * t, scale);
        if (has_bias(BITS)) store_u16(to, (value ? v_bias_at(BITS, D) : k_bias_at(BITS, D)) + 2 * t, bias);
    }
}
