"""The machine: MLX, BLAS, CPU, GPU, memory, sensors, files. The lowest layer."""
