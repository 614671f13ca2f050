// lora_add: out = y + u [B1; B2]: what lora_project left, through both tiers, in one pass over y.
//   y, out: f32 [T][n]   u: f32 [T][R1 + R2]   b1: f32 [R1][n], b2: f32 [R2][n]   params: int32 [16]: [0] n
//   grid: (ceil(n / 256), T, 1) threadgroups of 256 threads; a thread makes one number   Templates: R1, R2
//   Twin: backends/mlx/kernels/lora.py::lora_add_ops
KERNEL_START
const int n = params[0], row = group_at.y, i = (int)group_at.x * 256 + (int)thread_at;
if (i < n) {
    float sum = 0;
    for (int r = 0; r < R1; r++) sum = fma(u[row * (R1 + R2) + r], b1[r * n + i], sum);
    for (int r = 0; r < R2; r++) sum = fma(u[row * (R1 + R2) + R1 + r], b2[r * n + i], sum);
    out[row * n + i] = y[row * n + i] + sum;
}
