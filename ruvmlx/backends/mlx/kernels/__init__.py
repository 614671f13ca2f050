"""GPU kernels, one module each: a factory for metal_kernels/NAME.metal, a plain-MLX twin, a dispatcher.

`pages` holds the page formats that they share. `source` makes Metal and CUDA code from a kernel's body. No
module here may import the backend; start with `demote.py`, the shortest kernel.
"""
