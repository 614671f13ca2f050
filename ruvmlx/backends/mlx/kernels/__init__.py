"""This package has the GPU kernels, one module each. A module has a factory for metal_kernels/NAME.metal, a
twin (the same function in plain MLX), and a function that chooses between them.

`pages` has the page formats that the kernels share. `source` makes Metal and CUDA code from a kernel's body.
Only the self-check imports the backend. Start with `append.py`, the shortest kernel.
"""
