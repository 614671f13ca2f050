"""This package holds the parts of learning that are off by default. The parts that are off are the changes of
layers below the output head, the router, EWC (elastic weight consolidation), and the style loop.

Some parts implement a protocol of the package `sona` (layer_part.py, weight_anchors.py). Every other part
of this package has a setting that turns it on. In `sona`, only `wiring.py` and `slow_loops.py`
import this package.
"""
