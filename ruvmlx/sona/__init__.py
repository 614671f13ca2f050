"""SONA: from a rating to changed weights."""

from .learner import Learner

__all__ = ["Learner"]
