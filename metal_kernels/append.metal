// append: write the new keys (turned by RoPE) and the new values of a prompt as rows of hot (16-bit) pages. For one new token, use rope_append.
//   k, v: T [tokens][n_kv_heads][D]   turn: f32 [tokens][D], the cosines of a position's D/2 angles, then their sines
//   params: int32 [PARAMS], of which only KV_HEADS and N_NEW = tokens are read
//   out: bytes of halves [n_kv_heads][2][tokens][D]: the rows of K, then the rows of V
//   grid: (tokens, n_kv_heads, 1) threadgroups of 2 simdgroups; thread i takes the numbers i, i + 64 .. of a row
//   Templates: D, TRADITIONAL, T.   The same in MLX operations: backends/mlx/kernels/append.py::append_ops
KERNEL_START
const int t = group_at.x, kv = group_at.y, n = params[N_NEW], n_kv = params[KV_HEADS];
const int from = (t * n_kv + kv) * D;
const auto k_row = out + ((kv * 2 + 0) * n + t) * D * 2, v_row = out + ((kv * 2 + 1) * n + t) * D * 2;
for (int d = thread_at; d < D; d += 64) {
    store_u16(k_row, 2 * d, f32_to_half(turned<D, TRADITIONAL>(k, from, turn, t * D, d)));
    store_u16(v_row, 2 * d, f32_to_half((float)v[from + d]));
}
