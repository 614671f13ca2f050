"""This package chooses the policy of new KV caches by measurements on the user's own long replies. A policy
says at which age a KV page moves to the next tier; a tier is a precision of KV pages.

A measurement reads a reply with a tiered KV cache and with an f16 cache, and compares the logits. The package
changes no adapter and no chat. Start with `tier_review.py`, which decides when to measure, then read
`tier_choice.py`, which chooses the policy.
"""
