"""Low-rank adapters."""

from .micro import MicroLoRA

__all__ = ["MicroLoRA"]
