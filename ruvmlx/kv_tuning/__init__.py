"""Chooses the lengths of the KV cache's tiers by measurements on the user's own long replies.

It compares the logits of a reply with tiers against those without. Nothing here may change an adapter or a
chat. Start with `tier_review.py` (when it measures), then `tier_choice.py` (what it takes).
"""
