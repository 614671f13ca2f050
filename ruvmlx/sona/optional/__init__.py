"""Learning that users switch on: layers below the head, the router, EWC, self-measured tiers."""
