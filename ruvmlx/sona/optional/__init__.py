"""Learning that is off by default: layers below the head, the router, EWC, self-measured tiers; and the style
basis, which only `python -m ruvmlx.apps.prove.style_study` uses so far."""
