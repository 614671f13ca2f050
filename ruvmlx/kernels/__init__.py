"""This package has Python wrappers of the C library (neon/). Most kernels have a twin: a simple version in
NumPy, with which the tests compare the kernel.

Of ruvmlx's packages, this package imports only `platform`, `tiers` and `errors`. The package knows only
arrays and formulas, not models, requests or ratings. Start with `library.py`, which finds and loads the
library. Then read `micro.py` (the kernels of a MicroLoRA) and `decoder.py` (a whole decode step).
"""
