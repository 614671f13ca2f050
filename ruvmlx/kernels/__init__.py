"""This package has Python wrappers of the C library (neon/). Each kernel has a twin: a simple version in
NumPy, with which the tests compare the kernel.

The package imports only NumPy, `platform`, `tiers` and `errors`. The package knows only arrays and formulas,
not models, requests or ratings. Start with `library.py`, which finds and loads the library. Then read
`micro.py` (the kernels of a MicroLoRA) and `decoder.py` (a whole decode step).
"""
