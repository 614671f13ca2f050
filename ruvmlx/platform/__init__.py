"""This package gives access to the machine: MLX, BLAS, CPU, GPU, memory, sensors and files. It is the lowest
layer of ruvmlx: beside its own modules it imports only `errors`."""
