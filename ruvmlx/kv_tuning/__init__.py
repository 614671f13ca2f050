"""This package chooses the tier policy of new KV caches by measurements on the long replies in the user's
store. A policy says at which age a KV page moves to the next tier; a tier is a precision of KV pages.

In a measurement the model reads a reply with a tiered KV cache and with an f16 cache, and the package
compares the logits. The package changes no adapter and no chat. Start with `tier_review.py`, which decides
when to measure, then read `tier_choice.py`, which chooses the policy.
"""
