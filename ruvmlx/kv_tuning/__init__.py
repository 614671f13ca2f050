"""This package chooses the lengths of the KV cache's tiers by measurements on the user's own long replies.

A measurement compares the logits of a reply with tiers with the logits of the same reply without tiers. The
package changes no adapter and no chat. Start with `tier_review.py` (when it measures), then read
`tier_choice.py` (which tiers it chooses).
"""
