// attend_merge: join the splits (partial results) of attend_decode:  out = sum_s w_s o_s / sum_s w_s l_s,  w_s = 2^(m_s - max m)
//   o: f32 [rows][splits][D]   ml: f32 [rows][splits][2], the pairs (m, l)   params: the same as for attend_decode
//   out: T [rows][D]; a row that sees no token becomes 0.   A row is one query head of one sequence.
//   grid: (rows, 1, 1) threadgroups of 8 simdgroups; a simdgroup takes every eighth split s.
//   Templates: D, T.   The same in MLX operations: backends/mlx/kernels/decode.py::attend_ops
KERNEL_START
constexpr int SIMDS = 8, N = (D + 31) / 32;
SHARED(float, sums, SIMDS * D);
const int splits = params[SPLITS];
const int at = (int)group_at.x * splits;

float top = NEG_INF, total = 0, acc[N];
for (int i = lane; i < splits; i += 32) top = fmax(top, ml[(at + i) * 2]);
top = max_over_tokens<1>(top);
if (top == NEG_INF) top = 0;
for (int i = lane; i < splits; i += 32) total = fma(exp2(ml[(at + i) * 2] - top), ml[(at + i) * 2 + 1], total);
total = sum_over_tokens<1>(total);

UNROLL for (int n = 0; n < N; n++) acc[n] = 0;
for (int i = simd_at; i < splits; i += SIMDS) {
    const float weight = exp2(ml[(at + i) * 2] - top);
    UNROLL for (int n = 0; n < N; n++) {
        const int d = lane + 32 * n;
        if (d < D) acc[n] = fma(weight, o[(at + i) * D + d], acc[n]);
    }
}
UNROLL for (int n = 0; n < N; n++)
    if ((int)lane + 32 * n < D) sums[(int)simd_at * D + (int)lane + 32 * n] = acc[n];
BARRIER();
for (int d = thread_at; d < D; d += 32 * SIMDS) {
    float sum = 0;
    UNROLL for (int k = 0; k < SIMDS; k++) sum += sums[k * D + d];
    out[group_at.x * D + d] = (T)(total == 0 ? 0.0f : sum / total);
}
