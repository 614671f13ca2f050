"""This package runs one model over several processes (ranks), which can be on several machines."""
