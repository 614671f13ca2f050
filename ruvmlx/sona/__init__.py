"""SONA: learning from ratings, from one rating to changed weights.

The package decides how a rating moves an adapter, and when slow loops train. It may import `training`,
`backends`, `lora`, `store` and `models`, but nothing of chats, the server or the screen; parts that are off
by default are in `optional/`. Start with `learner.py` (rate a reply), then `instant.py` (the arithmetic of a
rating) and `wiring.py` (how the parts are put together).
"""

from .learner import Learner

__all__ = ["Learner"]
