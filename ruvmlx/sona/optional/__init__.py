"""Learning that is off by default: layers below the head, the router, EWC, self-measured tiers, and the
style loop."""
