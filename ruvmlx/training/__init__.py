"""Training of LoRA factors on MLX: gradients, losses, optimiser."""
