"""This package has the GPU kernels. Each module of a kernel has a function that runs one or two files of
metal_kernels/ on the GPU, a twin (the same function in plain MLX), and a function that chooses one of these
two functions.

`pages` has the page formats that the kernels share. `source` makes Metal and CUDA code from a kernel's body.
Of these modules, only `selfcheck` imports modules of the MLX backend from outside this package. Start with
`append.py`, the shortest kernel.
"""
