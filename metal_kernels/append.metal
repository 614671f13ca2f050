// append: new keys, turned by RoPE, and new values as rows of a hot page.
//   k, v: f32 [T][n_kv_heads][D]   turn: f32 [T][D], the cosines of D/2 angles, then their sines
//   params: int32 [16], of which KV_HEADS and N_NEW = T   out: halves [n_kv_heads][2][T][D], as bytes: K rows, V rows
//   grid: (T, n_kv_heads, 1) threadgroups of 2 simdgroups; a thread takes the pairs i, i + 64 ..
//   Templates: D, TRADITIONAL (pairs (2i, 2i+1) instead of (i, i + D/2)).   Twin: kernels/metal/append.py::append_ops
KERNEL_START
const int t = group_at.x, kv = group_at.y, n = params[N_NEW], n_kv = params[KV_HEADS];
const int from = (t * n_kv + kv) * D;
const auto k_row = out + ((kv * 2 + 0) * n + t) * D * 2, v_row = out + ((kv * 2 + 1) * n + t) * D * 2;
for (int i = thread_at; i < D / 2; i += 64) {
    const int a = TRADITIONAL ? 2 * i : i, b = TRADITIONAL ? 2 * i + 1 : i + D / 2;
    const float cosine = turn[t * D + i], sine = turn[t * D + D / 2 + i], x = k[from + a], y = k[from + b];
    store_u16(k_row, 2 * a, f32_to_half(fma(x, cosine, -(y * sine))));
    store_u16(k_row, 2 * b, f32_to_half(fma(y, cosine, x * sine)));
    store_u16(v_row, 2 * a, f32_to_half(v[from + a]));
    store_u16(v_row, 2 * b, f32_to_half(v[from + b]));
}
