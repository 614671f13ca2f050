// rope_append: prepare the decode attention for one new token of each sequence. The kernel turns the token's queries by RoPE, and also
// multiplies them
//   by the matrix that rotates keys. The kernel also copies the open page (the page that new tokens fill) and writes the token's turned key and its
//   value as a new row.
//   q: T [sequences][n_heads][D]   k, v: T [sequences][n_kv_heads][D]   turn: f32 [sequences][D], the same as for append
//   open: hot pages [sequences][n_kv_heads][256 D bytes]   params: int32 [sequences][PARAMS], see pages.h; the new token has position N_TOKENS - 1
//   q_out, q_rotated: f32 [sequences][n_heads][D]   open_out: the shape of open; the rows after the new row are zeros
//   grid: (ceil(n_heads * blocks_of(D) / 8) + n_kv_heads, sequences, 1) threadgroups of 8 simdgroups. In the first threadgroups, each
//   simdgroup takes one block (quantise.h) of a head's query. Each later threadgroup takes one KV head.
//   An MLX kernel writes only new arrays. A copy of the open page is 64 rows, but a change of the pool would make MLX copy the whole pool while an
//   earlier step still reads it. The kernel reads no empty rows. The loads of a thread do not wait for each other.
//   Templates: D, TRADITIONAL, T.   The same in MLX operations: backends/mlx/kernels/rope_append.py::rope_append_ops
KERNEL_START
constexpr int SIMDS = 8, N = blocks_of(D), WORDS = D / 8; // N: the blocks of a query; WORDS: the words of 16 bytes in a row
const int b = group_at.y, n_kv = params[b * PARAMS + KV_HEADS], n_heads = n_kv * params[b * PARAMS + GROUP];
const int q_groups = (n_heads * N + SIMDS - 1) / SIMDS;
if ((int)group_at.x < q_groups) {
    const int block = (int)group_at.x * SIMDS + (int)simd_at, from = (b * n_heads + block / N) * D;
    const int d = block < n_heads * N ? 128 * (block % N) + 4 * (int)lane : D;
    float x[4] = {0, 0, 0, 0};
    if (d < D)
        UNROLL for (int i = 0; i < 4; i++) {
            x[i] = turned<D, TRADITIONAL>(q, from, turn, b * D, d + i);
            q_out[from + d + i] = x[i];
        }
    hadamard<D>(x, lane);
    if (d < D) UNROLL for (int i = 0; i < 4; i++) q_rotated[from + d + i] = x[i];
} else {
    const int kv = b * n_kv + (int)group_at.x - q_groups, from = kv * D, row = (params[b * PARAMS + N_TOKENS] - 1) % PAGE;
    const auto old_page = open + (ulong)kv * (ulong)page_bytes(HOT, D);
    const auto new_page = open_out + (ulong)kv * (ulong)page_bytes(HOT, D);
    UNROLL for (int n = 0; n < 2 * PAGE * WORDS / (32 * SIMDS); n++) { // the loop takes the rows of K, then the rows of V
        const int i = 32 * SIMDS * n + (int)thread_at, t = i / WORDS % PAGE;
        uint4 w;
        w.x = 0, w.y = 0, w.z = 0, w.w = 0;
        if (t < row) w = load_u32x4(old_page, 16 * i);
        if (t != row) store_u32x4(new_page, 16 * i, w);
    }
    if (thread_at < D) { // each thread writes two numbers of the new row: one of K, then one of V
        const int value = (int)thread_at / (D / 2), d = (int)thread_at % (D / 2) * 2;
        const float low = value ? (float)v[from + d] : turned<D, TRADITIONAL>(k, from, turn, b * D, d);
        const float high = value ? (float)v[from + d + 1] : turned<D, TRADITIONAL>(k, from, turn, b * D, d + 1);
        store_u32(new_page, (value ? v_at(16, D) : 0) + 2 * (row * D + d), f32_to_half(low) | f32_to_half(high) << 16);
    }
}
