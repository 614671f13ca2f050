"""This module parses two settings: `learn_targets` (the matrices that a rating changes) and `base_targets`
(the matrices that the background loop trains). Examples: "head", "q_proj,v_proj:20-29", "ffn,top:8".

head (lm_head)   attention (q k v o)   ffn (gate up down)   all (head, attention and ffn)
embedding (embed_tokens; no other word names it)
v_proj           the module v_proj in all layers; v_proj:20 in layer 20, v_proj:20-29 in layers 20 to 29
top:K            only the K matrices with the largest gradients, among the matrices of the layers that the
                 setting names (or among all matrices of the layers, if it names none)
"""

from dataclasses import dataclass

from ..errors import UsageError
from ..models.config.model import ModelShape
from ..settings import TARGETS, TARGETS_EXPECTED
from .base_lora import EMBEDDING, MODULES, Place, missing_modules

_BODY = MODULES[:7]
_GROUPS = {"head": ("lm_head",), "attention": MODULES[:4], "ffn": MODULES[4:7], "all": ("lm_head", *_BODY)}
_GROUPS |= {"embedding": ("embed_tokens",)} | {name: (name,) for name in MODULES}
_OUTSIDE = frozenset(MODULES[7:])  # the modules that are in no layer


@dataclass(frozen=True)
class Targets:
    """The matrices that one setting names. With `learn_targets`, a rating changes these matrices. With
    `base_targets`, the background loop trains these matrices.

    head: True if the setting names the output head
    places: (module, layer) of each changed matrix in the layers, in the model's order; first the embedding,
        if the setting names it
    top: the maximum number of places that are changed: the places with the largest gradients; 0 for no limit
    """

    head: bool = True
    places: tuple[Place, ...] = ()
    top: int = 0


def parse(text: str, shape: ModelShape, name: str = "learn_targets") -> Targets:
    """Parse the text of a setting. Raises UsageError if the text is wrong, or if it names a layer or a module
    that the model does not have.

    name: the name of the setting, for error messages
    """
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
        for module in _GROUPS[group]:
            if module not in missing:
                found |= {(module, layer) for layer in ([0] if module in _OUTSIDE else layers)}
    head = ("lm_head", 0) in found
    places = {place for place in found if place[0] != "lm_head"}
    if top and not places:
        every = [module for module in _BODY if module not in missing]
        places = {(module, layer) for module in every for layer in range(shape.n_layers)}
    return Targets(head, tuple(sorted(places, key=_position)), top)


def _position(place: Place) -> tuple[bool, int, int]:
    """Return a key that sorts places in the model's order."""
    return place != EMBEDDING, place[1], MODULES.index(place[0])


def _layers(item: str, rest: str, n_layers: int, name: str) -> range:
    if not rest:
        return range(n_layers)
    first, _, last = rest.partition("-")
    chosen = range(int(first), int(last or first) + 1)
    if not chosen or chosen[-1] >= n_layers:
        raise UsageError(f"{name}: {item!r} is not among the model's layers, 0 to {n_layers - 1}.")
    return chosen
