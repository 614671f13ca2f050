"""This package is the key-value (KV) cache: it holds keys and values in pages of 64 tokens, and lowers the
precision of a page when enough newer tokens follow the page.

The package decides which tier (precision) a page has, which pages share memory, and which pages go to disk. A
backend (ruvmlx/backends) allocates the memory of the pages. The package imports `tiers` and `platform`, but
no backend, no engine and no model. Start with `cache.py`. README.md in this folder explains the tiers, the
file format and how the precision was chosen.
"""
