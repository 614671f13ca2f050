"""GPU kernels, one module each: a factory for metal_kernels/NAME.metal, a plain-MLX twin, a dispatcher.

`pages` holds the page formats that they share. `source` makes Metal and CUDA code from a kernel's body. Only
the self-check may import the backend. Start with `append.py`, the shortest kernel.
"""
