"""GPU kernels, one module each: a factory over metal_kernels/NAME.metal, a plain-MLX twin, a dispatcher.

`pages` holds the formats that they share, `source` makes Metal and CUDA of a body.
"""
