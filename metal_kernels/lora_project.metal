// lora_project: u = [s1 x A1, s2 x A2], both tiers of adapters in one pass over x.
//   x: f32 [T][n]   a1: f32 [n][R1], a2: f32 [n][R2]   params: int32 [16]: [0] n, [1] [2] bits of the floats s1 and s2
//   u: f32 [T][R1 + R2]   grid: (T, 1, 1) threadgroups of 8 simdgroups   Templates: R1, R2 (1 to 64 each)
//   Twin: backends/mlx/kernels/lora.py::lora_add_ops
KERNEL_START
constexpr int SIMDS = 8, R = R1 + R2;
SHARED(float, sums, SIMDS * R);
const int n = params[0], row = group_at.x;
float acc[R];
UNROLL for (int r = 0; r < R; r++) acc[r] = 0;
for (int i = thread_at; i < n; i += 32 * SIMDS) {
    const float xi = x[row * n + i];
    UNROLL for (int r = 0; r < R1; r++) acc[r] = fma(xi, a1[i * R1 + r], acc[r]);
    UNROLL for (int r = 0; r < R2; r++) acc[R1 + r] = fma(xi, a2[i * R2 + r], acc[R1 + r]);
}
UNROLL for (int r = 0; r < R; r++) {
    UNROLL for (int w = 1; w < 32; w *= 2) acc[r] += shuffle_xor(acc[r], w);
    if (lane == 0) sums[(int)simd_at * R + r] = acc[r];
}
BARRIER();
for (int r = thread_at; r < R; r += 32 * SIMDS) {
    float sum = 0;
    UNROLL for (int k = 0; k < SIMDS; k++) sum += sums[k * R + r];
    u[row * R + r] = sum * as_f32(params[r < R1 ? 1 : 2]);
}
