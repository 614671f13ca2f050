"""This package holds the parts of learning that are off by default: changes of layers below the head, the
router, EWC, and the style loop.

Each part implements a protocol of the core (layer_part.py, weight_anchors.py), or a setting turns it on. In
the core, only `wiring.py` and `slow_loops.py` import this package.
"""
