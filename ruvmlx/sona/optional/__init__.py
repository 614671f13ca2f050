"""This package holds the parts of learning that a user can turn off or on. Off by default are the changes of
layers below the output head, the router, and EWC (elastic weight consolidation). The style loop is on by
default for a model that has a style basis.

Some parts implement a protocol of the package `sona` (layer_part.py, weight_anchors.py). Every other part
of this package has a setting that turns it on. In `sona`, only `wiring.py` and `slow_loops.py`
import this package.
"""
