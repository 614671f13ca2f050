"""This package plans memory: whether a model fits this machine, how much memory each part of the process can
use, and which models to propose to the user.

The plan for a model is ready before the program reads the model's weights. Start with `load_plan.py` (before
a model is loaded), then read `memory_plan.py` (the process with an open model).
"""
