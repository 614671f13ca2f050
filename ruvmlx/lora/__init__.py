"""This package defines LoRA adapters: a small adapter of the output head that a rating changes (MicroLoRA), a
rank-1 adapter of other matrices that a rating can change (LayerLoRA), and a larger adapter that training
changes (BaseLoRA).

The package defines the arrays, the files and the arithmetic of adapters. The package can import `kernels`,
`models` and `platform`, but no backend, and not the package `sona`, which decides how adapters change. Read
`micro_lora.py` first, then `base_lora.py` and `merge.py`. `interchange.py` writes the adapter files of other
tools, and `interchange_reader.py` reads them.
"""

from .micro_lora import MicroLoRA

__all__ = ["MicroLoRA"]
