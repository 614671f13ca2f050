"""This module parses two settings: `learn_targets` (the matrices that a rating changes) and `base_targets`
(the matrices that the background loop trains). Examples: "head", "q_proj,v_proj:20-29", "ffn,top:8".

head (lm_head)   attention (q k v o)   ffn (gate up down)   all (all of these)
v_proj           a module in all layers; v_proj:20 in one layer, v_proj:20-29 in several
top:K            only the K matrices with the largest gradients, among those named (all, if none is named)
"""

from dataclasses import dataclass

from ..errors import UsageError
from ..models.config.model import ModelShape
from ..settings import TARGETS, TARGETS_EXPECTED
from .base_lora import MODULES, Place, missing_modules

_BODY = MODULES[:7]
_GROUPS = {"head": ("lm_head",), "attention": MODULES[:4], "ffn": MODULES[4:7], "all": ("lm_head", *_BODY)}
_GROUPS |= {name: (name,) for name in MODULES}


@dataclass(frozen=True)
class Targets:
    """The matrices that a rating changes.

    head: True if a rating changes the output head
    places: (module, layer) of each matrix in the layers, in the model's order
    top: the number of matrices with the largest gradients to which the change is limited; 0 for no limit
    """

    head: bool = True
    places: tuple[Place, ...] = ()
    top: int = 0


def parse(text: str, shape: ModelShape, name: str = "learn_targets") -> Targets:
    """Parse the setting of this name. Raises UsageError if the text is wrong or names a layer or a module
    that the model does not have."""
    if not TARGETS.fullmatch(text):
        raise UsageError(f"{name} = {text!r}: expected {TARGETS_EXPECTED}.")
    found, top, missing = set[Place](), 0, missing_modules(shape)
    for item in text.split(","):
        group, _, rest = item.partition(":")
        if group == "top":
            top = int(rest)
            continue
        if group in missing:
            raise UsageError(f"{name}: {item!r} is not among the matrices of a {shape.model_type} model.")
        layers = _layers(item, rest, shape.n_layers, name)
        found |= {(module, layer) for module in _GROUPS[group] for layer in layers if module not in missing}
    head = ("lm_head", 0) in found
    places = {place for place in found if place[0] != "lm_head"}
    if top and not places:
        every = [module for module in _BODY if module not in missing]
        places = {(module, layer) for module in every for layer in range(shape.n_layers)}
    return Targets(head, tuple(sorted(places, key=lambda p: (p[1], MODULES.index(p[0])))), top)


def _layers(item: str, rest: str, n_layers: int, name: str) -> range:
    if not rest:
        return range(n_layers)
    first, _, last = rest.partition("-")
    chosen = range(int(first), int(last or first) + 1)
    if not chosen or chosen[-1] >= n_layers:
        raise UsageError(f"{name}: {item!r} is not among the model's layers, 0 to {n_layers - 1}.")
    return chosen
