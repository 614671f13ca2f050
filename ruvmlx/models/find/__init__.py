"""This package finds a model's files by the model's name: in local folders, in the stores of other programs,
in the Hugging Face cache and on the Hugging Face Hub.

The package uses the network only if a user names a repository, or a file of a repository, that is not in the
cache. To describe a model, the package reads only the headers of weight files; after a download it reads each
whole file once to check its SHA-256. Start with `resolve.py`, then read `local.py` and `hub.py`.
"""
