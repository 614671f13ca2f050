"""This package holds LoRA adapters: a small adapter that a rating changes (MicroLoRA), and a larger adapter
that training changes (BaseLoRA).

The package defines their arrays, files and arithmetic. It may import `kernels`, `models` and `platform`, but
no backend and nothing that decides what to learn (`sona`). Read `micro_lora.py` first, then `base_lora.py`
and `merge.py`. `interchange.py` reads and writes the files of other tools.
"""

from .micro_lora import MicroLoRA

__all__ = ["MicroLoRA"]
