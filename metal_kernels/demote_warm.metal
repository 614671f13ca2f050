// demote_warm: hot pages -> warm pages, 8 bits with a scale per token.   Bytes: quantise.h, README.md
//   hot: pool   ids: int32 [n], pages of it   params: int32 [16], of which KV_HEADS   out: warm pages [n][n_kv_heads][bytes]
//   grid: (n, n_kv_heads, 1) threadgroups of 4 simdgroups; a simdgroup takes every fourth token
//   Template: D.   Twin: backends/mlx/kernels/demote.py::demote_warm_ops
KERNEL_START
constexpr int N = blocks_of(D);
const int n_kv = params[KV_HEADS], kv = group_at.y;
const auto from = hot + (ulong)(ids[group_at.x] * n_kv + kv) * (ulong)page_bytes(HOT, D);
const auto to = out + (ulong)((int)group_at.x * n_kv + kv) * (ulong)page_bytes(WARM, D);
for (int row = simd_at; row < 2 * PAGE; row += 4) { // 64 of K, 64 of V
    const int value = row / PAGE, t = row % PAGE;
    float x[N * 4], top = 0;
    UNROLL for (int n = 0; n < N; n++) load_values<HOT, D>(from, value, t, 128 * n + 4 * (int)lane, x + 4 * n);
    UNROLL for (int i = 0; i < 4 * N; i++) top = fmax(top, fabs(x[i]));
    const uint scale = f32_to_half(max_over_lanes(top) / 127.0f);
    const float s = half_to_f32(scale);
    if (lane == 0) store_u16(to, (value ? v_scale_at(WARM, D) : k_scale_at(WARM, D)) + 2 * t, scale);
    UNROLL for (int n = 0; n < N; n++) {
        const int d = 128 * n + 4 * (int)lane;
        uint w = 0;
        UNROLL for (int i = 0; i < 4; i++) w |= eight_bits(x[4 * n + i], s) << (8 * i);
        if (d < D) store_u32(to, (value ? v_at(WARM, D) : 0) + t * D + d, w);
    }
}
