"""This package gives access to the machine: MLX, BLAS, CPU, GPU, memory, sensors and files. The package is
the lowest layer of ruvmlx: of ruvmlx's other modules it imports only `errors`."""
