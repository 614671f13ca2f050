// micro_update: velocity' = mu * velocity + eta * g,  w' = w + velocity'   (neon/include/rvm.h, rvm_kernels.micro_update)
//   w, velocity, g, w_new, velocity_new: f32 [n]   params: int32 [16]: [0] n, [1] [2] bits of the floats eta and mu
//   bad: int32 [threadgroups]: how many new weights are not finite; if any is not 0, nothing may be kept
//   grid: (ceil(n / 1024), 1, 1) threadgroups of 256 threads; a thread makes up to 4 numbers
//   Twin: backends/mlx/kernels/micro.py::micro_update_ops
KERNEL_START
SHARED(float, counts, 8);
const int n = params[0];
const float eta = as_f32(params[1]), mu = as_f32(params[2]);
float not_finite = 0;
UNROLL for (int k = 0; k < 4; k++) {
    const int i = (int)group_at.x * 1024 + k * 256 + (int)thread_at;
    if (i < n) {
        const float v_new = fma(mu, velocity[i], eta * g[i]), moved = w[i] + v_new;
        velocity_new[i] = v_new, w_new[i] = moved;
        if ((as_u32(moved) & 0x7f800000u) == 0x7f800000u) not_finite += 1;
    }
}
UNROLL for (int s = 1; s < 32; s *= 2) not_finite += shuffle_xor(not_finite, s);
if (lane == 0) counts[simd_at] = not_finite;
BARRIER();
if (thread_at == 0) {
    float sum = 0;
    UNROLL for (int k = 0; k < 8; k++) sum += counts[k];
    bad[group_at.x] = (int)sum;
}
