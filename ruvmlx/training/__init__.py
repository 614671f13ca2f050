"""Training of LoRA factors on MLX: gradients, losses and the optimiser.

The package computes with a model's graph and arrays. It may import the MLX backend, `lora` and `models`, but
knows nothing of ratings or of the store: `sona` decides what to train on. Start with `trainer.py`;
`slices.py` explains how a pass can be paused.
"""
