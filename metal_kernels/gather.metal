// gather: copy keys and values as halves into one array for scaled_dot_product_attention: first those of older pages, then those of a
// prompt's new tokens.
//   The kernel rotates rotated keys back.
//   params: int32 [PARAMS], see pages.h. FIRST: out leaves out the pages before the page of this token; N_NEW: the number of new tokens;
//   HEAD, HEADS: the KV heads in out   pages: int32 page ids   cold, warm ..: the pool of each tier   fresh: the rows of the new tokens from `append`
//   out: pairs of halves [2][HEADS][tokens][D / 2]: K, then V. tokens: the tokens of the pages, then the new tokens
//   grid: (pages in out + ceil(N_NEW / 64), HEADS, 1) threadgroups of 4 simdgroups; a simdgroup takes every fourth row
//   Template: D.   The same in MLX operations: backends/mlx/kernels/gather.py::gather_ops
KERNEL_START
constexpr int BLOCKS = blocks_of(D);
int n[N_TIERS];
load_counts(params, n);
const int n_pages = count_pages(n);
const int n_kv = params[KV_HEADS], heads = params[HEADS], kv = params[HEAD] + (int)group_at.y, chunk = params[N_NEW];
const int skipped = params[FIRST] / PAGE, page = skipped + (int)group_at.x;
const int n_old = params[N_TOKENS] - skipped * PAGE, n_out = n_old + chunk;
const bool old = page < n_pages;
const int tier = old ? tier_of(page, n) : HOT, bits = bits_of(tier);
const int first = old ? (page - skipped) * PAGE : n_old + (page - n_pages) * PAGE; // the row of out for the first token of this block
const int rows = min(PAGE, (old ? n_old : n_out) - first);
const auto data = POOL_OF(tier) + (ulong)(old ? pages[params[TABLE] + page] * n_kv + kv : 0) * (ulong)page_bytes(tier, D);
for (int row = simd_at; row < 2 * rows; row += 4) {
    const int value = row >= rows, t = value ? row - rows : row;
    const auto block = fresh + (ulong)((kv * 2 + value) * chunk + (page - n_pages) * PAGE + t) * (ulong)(2 * D);
    UNROLL for (int b = 0; b < BLOCKS; b++) {
        const int d = 128 * b + 4 * (int)lane;
        float x[4] = {0, 0, 0, 0};
        if (!old) {
            if (d < D) {
                const uint2 w = load_u32x2(block, 2 * d);
                halves_to_f32(w.x, x), halves_to_f32(w.y, x + 2);
            }
        } else if (bits == 16) {
            load_values<16, D>(data, value, t, d, x);
        } else if (bits == 8) {
            load_values<8, D>(data, value, t, d, x);
        } else {
            load_values<4, D>(data, value, t, d, x);
        }
        if (is_rotated(tier) && !value) hadamard<D>(x, lane);
        const ulong to = ((ulong)((value * heads + (int)group_at.y) * (ulong)n_out + first + t) * D + d) / 2;
        if (d < D) {
            out[to] = f32_to_half(x[0]) | f32_to_half(x[1]) << 16;
            out[to + 1] = f32_to_half(x[2]) | f32_to_half(x[3]) << 16;
        }
    }
}
