"""This package, SONA (Self-Optimizing Neural Architecture), turns a rating of a reply into changed weights of
a LoRA adapter.

The package decides how a rating changes an adapter, and when the slow loops (the background and the deep
loop) train. The package can import `training`, `backends`, `lora`, `store` and `models`, but no module of
chats, the server or the screen. The folder `optional/` holds the parts that are off by default. Read first
`learner.py`, which applies the rating of a reply, then `instant.py`, which computes the new weights, and
`wiring.py`, which makes a learner from the parts of this package.
"""

from .learner import Learner

__all__ = ["Learner"]
