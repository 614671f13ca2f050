"""This package is the interface between the engine and the hardware: it has a protocol (base.Backend) and
several backends, which are classes that implement the protocol.

A backend computes logits and hidden states from token ids and a KV cache. The package imports `kernels`,
`kv`, `lora` and `models`, but neither `engine` (requests), `sona` (ratings) nor the store. Start with
`base.py` (the protocol) and `reference.py` (the simplest backend); `select.py` chooses a backend.
"""
