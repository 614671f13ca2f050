"""The key-value (KV) cache of one sequence: pages of 64 tokens whose precision falls with age.

The package decides which tier a page has, which pages share memory, and what goes to disk; a backend owns the
bytes. It may import `tiers` and `platform`, but no backend, no engine and no model. Start with `cache.py`;
README.md explains the tiers, the file format and how the precision was chosen.
"""
