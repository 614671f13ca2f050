"""Low-rank adapters."""

from .micro_lora import MicroLoRA

__all__ = ["MicroLoRA"]
