// rope_append: what decode attention needs of one new token per sequence: its queries turned by RoPE, the same queries
//   rotated as rotated keys are, and the open page (the one that is being filled) with the token's turned key and its value as a new row.
//   q: T [sequences][n_heads][D]   k, v: T [sequences][n_kv_heads][D]   turn: f32 [sequences][D], as for append
//   open: hot pages [sequences][n_kv_heads][256 D bytes]   params: int32 [sequences][PARAMS], pages.h: the new token is N_TOKENS - 1
//   q_out, q_rotated: f32 [sequences][n_heads][D]   open_out: as open
//   grid: (n_heads + n_kv_heads, sequences, 1) threadgroups of 2 simdgroups: one for each head of q, then of k and v
//   MLX kernels write fresh arrays: a copied page is 64 rows, where a changed pool would be copied whole while a step that reads
//   it is still running.   Templates: D, TRADITIONAL, T.   Twin: backends/mlx/kernels/rope_append.py::rope_append_ops
KERNEL_START
const int b = group_at.y, n_kv = params[b * PARAMS + KV_HEADS], n_heads = n_kv * params[b * PARAMS + GROUP];
if ((int)group_at.x < n_heads) {
    const int from = (b * n_heads + (int)group_at.x) * D, d = 128 * (int)simd_at + 4 * (int)lane;
    float x[4] = {0, 0, 0, 0};
    if (d < D)
        UNROLL for (int i = 0; i < 4; i++) {
            x[i] = turned<D, TRADITIONAL>(q, from, turn, b * D, d + i);
            q_out[from + d + i] = x[i];
        }
    hadamard<D>(x, lane);
    if (d < D) UNROLL for (int i = 0; i < 4; i++) q_rotated[from + d + i] = x[i];
} else {
    const int kv = b * n_kv + (int)group_at.x - n_heads, from = kv * D, row = (params[b * PARAMS + N_TOKENS] - 1) % PAGE;
    const auto old_page = open + (ulong)kv * (ulong)page_bytes(HOT, D);
    const auto new_page = open_out + (ulong)kv * (ulong)page_bytes(HOT, D);
    for (int i = thread_at; i < 64 * D; i += 64) { // words of two numbers: K, then V
        const int t = i / (D / 2) % PAGE, d = i % (D / 2) * 2, value = i >= 32 * D;
        uint word = load_u32(old_page, 4 * i);
        if (t == row) {
            const float low = value ? (float)v[from + d] : turned<D, TRADITIONAL>(k, from, turn, b * D, d);
            const float high = value ? (float)v[from + d + 1] : turned<D, TRADITIONAL>(k, from, turn, b * D, d + 1);
            word = f32_to_half(low) | f32_to_half(high) << 16;
        }
        store_u32(new_page, 4 * i, word);
    }
}
