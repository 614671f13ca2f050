// demote_cold: warm (or hot) pages -> cold pages: K rotated, then 4 bits with a scale and a bias per token.   Bytes: quantise.h
//   pool: of the SOURCE tier   ids, params, out, grid: as demote_warm's, out in cold pages
//   Templates: D, SOURCE (WARM 1, HOT 2).   Twin: backends/mlx/kernels/demote.py::demote_cold_ops
KERNEL_START
constexpr int N = blocks_of(D);
const int n_kv = params[KV_HEADS], kv = group_at.y;
const auto from = pool + (ulong)(ids[group_at.x] * n_kv + kv) * (ulong)page_bytes(SOURCE, D);
const auto to = out + (ulong)((int)group_at.x * n_kv + kv) * (ulong)page_bytes(COLD, D);
for (int row = simd_at; row < 2 * PAGE; row += 4) { // 64 of K, 64 of V
    const int value = row / PAGE, t = row % PAGE;
    float x[N * 4], least = as_f32(0x7f800000u), most = NEG_INF;
    UNROLL for (int n = 0; n < N; n++) {
        const int d = 128 * n + 4 * (int)lane;
        load_values<SOURCE, D>(from, value, t, d, x + 4 * n);
        if (!value) hadamard<D>(x + 4 * n, lane);
        if (d < D) UNROLL for (int i = 0; i < 4; i++) least = fmin(least, x[4 * n + i]), most = fmax(most, x[4 * n + i]);
    }
    least = min_over_lanes(least), most = max_over_lanes(most);
    const uint scale = stored_half((most - least) / 15.0f), bias = stored_half(least);
    UNROLL for (int n = 0; n < N; n++) {
        const int d = 128 * n + 4 * (int)lane;
        uint w = 0;
        UNROLL for (int i = 0; i < 4; i++) w |= four_bits(x[4 * n + i], half_to_f32(scale), half_to_f32(bias)) << (4 * i);
        if (d < D) store_u16(to, (value ? v_at(COLD, D) : 0) + (t * D + d) / 2, w);
    }
    if (lane == 0) {
        store_u16(to, (value ? v_scale_at(COLD, D) : k_scale_at(COLD, D)) + 2 * t, scale);
        store_u16(to, (value ? v_bias_at(D) : k_bias_at(D)) + 2 * t, bias);
    }
}
