"""This package has Python wrappers of the C library (neon/). Beside each kernel stands its twin, a simple
version for tests.

The package imports only NumPy, `platform`, `tiers` and `errors`. The code of the package deals with shapes
and formulas, not with models, requests or ratings. Start with `library.py`, which finds and loads the
library. Then read `micro.py` (the kernels of a MicroLoRA) and `decoder.py` (a whole decode step).
"""
