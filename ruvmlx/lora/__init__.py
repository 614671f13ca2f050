"""LoRA adapters: a small one that a rating changes (MicroLoRA), a larger one that training changes
(BaseLoRA).

The package holds their arrays, files and arithmetic. It may import `kernels`, `models` and `platform`, but no
backend and nothing that decides what to learn (`sona`). Start with `micro_lora.py`, then `base_lora.py` and
`merge.py`; `interchange.py` reads and writes other tools' files.
"""

from .micro_lora import MicroLoRA

__all__ = ["MicroLoRA"]
