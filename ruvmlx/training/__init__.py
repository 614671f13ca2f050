"""This package trains LoRA factors. MLX computes the losses and the gradients, and NumPy computes the steps
of the optimiser.

The package can import the MLX backend, `lora` and `models`. The package has no code for ratings or for the
store, because the package `sona` chooses the training data. Read `trainer.py` first. `slices.py` explains how
the forward and backward pass of a text can be paused.
"""
