"""From a model's name to its files: local folders, caches of other programs, and the Hugging Face Hub.

The Hub is asked only if a user asks for a download. Nothing here may read weights beyond their headers. Start
with `resolve.py`, then `local.py` and `hub.py`.
"""
