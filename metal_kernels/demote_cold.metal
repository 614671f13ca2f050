// demote_cold: warm (or hot) pages -> cold pages, 4 bits: K with scale and bias per channel over the page, V per token.
//   pool: of the SOURCE tier   ids, params, out, grid: as demote_warm's, out in cold pages
//   Templates: D, SOURCE (WARM 1, HOT 2), ROTATE (1: K times a block Hadamard matrix first)
//   K is read twice, for the channels' range and to be quantised: it stays in the cache meanwhile.
//   Threadgroup memory: 8 * 4 D bytes.   Twin: kernels/metal/demote.py::demote_cold_ops
KERNEL_START
constexpr int SIMDS = 4;
SHARED(float, low, SIMDS * D);
SHARED(float, high, SIMDS * D);
const int n_kv = params[KV_HEADS], kv = group_at.y, d = 4 * (int)lane;
const bool live = d < D;
const auto from = pool + (ulong)(ids[group_at.x] * n_kv + kv) * (ulong)page_bytes(SOURCE, D);
const auto to = out + (ulong)((int)group_at.x * n_kv + kv) * (ulong)page_bytes(COLD, D);

float x[4], s[4], b[4];
UNROLL for (int i = 0; i < 4; i++) s[i] = as_f32(0x7f800000u), b[i] = NEG_INF; // least and greatest so far
for (int t = simd_at; t < PAGE; t += SIMDS) {
    load_values<SOURCE, D>(from, 0, t, lane, x);
    if (ROTATE) hadamard<D>(x, lane);
    UNROLL for (int i = 0; i < 4; i++) s[i] = fmin(s[i], x[i]), b[i] = fmax(b[i], x[i]);
}
if (live) UNROLL for (int i = 0; i < 4; i++) low[(int)simd_at * D + d + i] = s[i], high[(int)simd_at * D + d + i] = b[i];
BARRIER();
UNROLL for (int i = 0; i < 4; i++) {
    float least = 0, most = 0;
    if (live) least = low[d + i], most = high[d + i];
    for (int k = 1; live && k < SIMDS; k++) least = fmin(least, low[k * D + d + i]), most = fmax(most, high[k * D + d + i]);
    const uint scale = stored_half((most - least) / 15.0f), bias = stored_half(least);
    s[i] = half_to_f32(scale), b[i] = half_to_f32(bias);
    if (simd_at == 0 && live) {
        store_u16(to, k_scale_at(COLD, D) + 2 * (d + i), scale);
        store_u16(to, k_bias_at(D) + 2 * (d + i), bias);
    }
}
for (int t = simd_at; t < PAGE; t += SIMDS) {
    load_values<SOURCE, D>(from, 0, t, lane, x);
    if (ROTATE) hadamard<D>(x, lane);
    uint w = 0;
    UNROLL for (int i = 0; i < 4; i++) w |= four_bits(x[i], s[i], b[i]) << (4 * i);
    if (live) store_u16(to, (t * D + d) / 2, w);
}
for (int t = simd_at; t < PAGE; t += SIMDS) {
    load_values<SOURCE, D>(from, 1, t, lane, x);
    float least = as_f32(0x7f800000u), most = NEG_INF;
    if (live) UNROLL for (int i = 0; i < 4; i++) least = fmin(least, x[i]), most = fmax(most, x[i]);
    least = min_over_lanes(least), most = max_over_lanes(most);
    const uint scale = stored_half((most - least) / 15.0f), bias = stored_half(least);
    uint w = 0;
    UNROLL for (int i = 0; i < 4; i++) w |= four_bits(x[i], half_to_f32(scale), half_to_f32(bias)) << (4 * i);
    if (live) store_u16(to, v_at(COLD, D) + (t * D + d) / 2, w);
    if (lane == 0) {
        store_u16(to, v_scale_at(COLD, D) + 2 * t, scale);
        store_u16(to, v_bias_at(D) + 2 * t, bias);
    }
}
