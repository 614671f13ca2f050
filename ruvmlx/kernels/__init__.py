"""Python wrappers of the C library (neon/), each kernel beside its twin: a simple version for tests.

The package may import only NumPy, `platform`, `tiers` and `errors`. It knows shapes and formulas, but nothing
of models, requests or ratings. Start with `library.py`, which finds and loads the library, then `micro.py`
(kernels of a MicroLoRA) and `decoder.py` (a whole decode step).
"""
