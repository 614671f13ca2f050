// demote_warm: hot pages -> warm pages, 8 bits with a scale per token.   Bytes: quantise.h, README.md
//   hot: pool   ids: int32 [n], pages of it   params: int32 [16], of which KV_HEADS   out: warm pages [n][n_kv_heads][bytes]
//   grid: (n, n_kv_heads, 1) threadgroups of 4 simdgroups; a simdgroup takes every fourth token, a lane 4 numbers
//   Template: D.   Twin: kernels/metal/demote.py::demote_warm_ops
KERNEL_START
const int n_kv = params[KV_HEADS], kv = group_at.y;
const auto from = hot + (ulong)(ids[group_at.x] * n_kv + kv) * (ulong)page_bytes(HOT, D);
const auto to = out + (ulong)((int)group_at.x * n_kv + kv) * (ulong)page_bytes(WARM, D);
for (int row = simd_at; row < 2 * PAGE; row += 4) { // 64 of K, 64 of V
    const int value = row / PAGE, t = row % PAGE;
    float x[4], top = 0;
    load_values<HOT, D>(from, value, t, lane, x);
    UNROLL for (int i = 0; i < 4; i++) top = fmax(top, fabs(x[i]));
    const uint scale = f32_to_half(max_over_lanes(top) / 127.0f);
    const float s = half_to_f32(scale);
    if (lane == 0) store_u16(to, (value ? v_scale_at(WARM, D) : k_scale_at(WARM, D)) + 2 * t, scale);
    if (4 * (int)lane < D) {
        const uint w = eight_bits(x[0], s) | eight_bits(x[1], s) << 8 | eight_bits(x[2], s) << 16 | eight_bits(x[3], s) << 24;
        store_u32(to, (value ? v_at(WARM, D) : 0) + t * D + 4 * (int)lane, w);
    }
}
