"""The interface between the engine and the hardware: one protocol, several backends.

A backend computes logits and hidden states from token ids and a KV cache. It may import `kernels`, `kv`,
`lora` and `models`, but nothing of requests (`engine`), ratings (`sona`) or the store. Start with `base.py`
(the protocol) and `reference.py` (the simplest backend); `select.py` chooses one.
"""
