"""The machine: MLX, BLAS, CPU, GPU, memory, sensors. The lowest layer."""
