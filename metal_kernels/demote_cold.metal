// demote_cold: warm (or hot) pages -> cold pages: K rotated, then 4 bits with a scale and a bias per token.   Bytes: quantise.h
//   pool: of the SOURCE tier   ids, params, out, grid: as demote_warm's, out in cold pages
//   Templates: D, SOURCE (WARM 1, HOT 2).   Twin: kernels/metal/demote.py::demote_cold_ops
KERNEL_START
const int n_kv = params[KV_HEADS], kv = group_at.y;
const auto from = pool + (ulong)(ids[group_at.x] * n_kv + kv) * (ulong)page_bytes(SOURCE, D);
const auto to = out + (ulong)((int)group_at.x * n_kv + kv) * (ulong)page_bytes(COLD, D);
for (int row = simd_at; row < 2 * PAGE; row += 4) { // 64 of K, 64 of V
    const int value = row / PAGE, t = row % PAGE;
    const bool live = 4 * (int)lane < D;
    float x[4], least = as_f32(0x7f800000u), most = NEG_INF;
    load_values<SOURCE, D>(from, value, t, lane, x);
    if (!value) hadamard<D>(x, lane);
    if (live) UNROLL for (int i = 0; i < 4; i++) least = fmin(least, x[i]), most = fmax(most, x[i]);
    least = min_over_lanes(least), most = max_over_lanes(most);
    const uint scale = stored_half((most - least) / 15.0f), bias = stored_half(least);
    uint w = 0;
    UNROLL for (int i = 0; i < 4; i++) w |= four_bits(x[i], half_to_f32(scale), half_to_f32(bias)) << (4 * i);
    if (live) store_u16(to, (value ? v_at(COLD, D) : 0) + (t * D + 4 * (int)lane) / 2, w);
    if (lane == 0) {
        store_u16(to, (value ? v_scale_at(COLD, D) : k_scale_at(COLD, D)) + 2 * t, scale);
        store_u16(to, (value ? v_bias_at(D) : k_bias_at(D)) + 2 * t, bias);
    }
}
