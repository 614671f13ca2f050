"""This package trains LoRA factors with MLX: it has the gradients, the losses and the optimiser.

The package may import the MLX backend, `lora` and `models`, but it knows nothing of ratings or of the store,
because `sona` chooses the training data. Read `trainer.py` first. `slices.py` explains how a forward and
backward pass can be paused.
"""
