"""SONA learns from ratings: this package turns a rating of a reply into changed weights of an adapter.

The package decides how a rating moves an adapter, and when the slow loops train. The package may import
`training`, `backends`, `lora`, `store` and `models`, but nothing of chats, the server or the screen. Parts
that are off by default are in `optional/`. Read first `learner.py` (applies the rating of a reply), then
`instant.py` (the arithmetic of a rating) and `wiring.py` (puts the parts together).
"""

from .learner import Learner

__all__ = ["Learner"]
