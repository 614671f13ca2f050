"""This module is the KL guard of the layer LoRA. A layer LoRA is the part of the adapter that changes layers
below the output head. While the user reads a reply, the guard measures the KL divergence of the adapter from
the frozen model if the layer LoRA has changed. The guard scales the layer LoRA down if its KL exceeds its
limit. The cap on the KL of the whole adapter is KL_CAP of instant.py.

At a rating, the learner only estimates the KL of a layer LoRA (layer_update.py). The guard measures the KL:
the model reads the reference text (reference_text.py) with the layer LoRA.
"""

from contextlib import suppress

from ...lora.layer_lora import LayerLoRA, pack_adapter
from ...pausing import Pause
from ...store import HeadMoved
from .. import instant
from ..active_adapter import ActiveAdapter
from .layer_adapter import LayerAdapter

# the maximum number of measurements; if the last measured KL exceeds the limit times SLACK, the layer LoRA
# becomes 0
LOOKS = 3
SLACK = 1.05  # the layer LoRA is scaled down if its KL exceeds its limit times SLACK


def limit_layer_kl(layers: LayerAdapter, active: ActiveAdapter, pause: Pause | None = None) -> None:
    """Measure the KL under the layer LoRA in use if it has changed since the last measurement. Scale the
    layer LoRA down until its KL is within its limit times SLACK.

    Each smaller layer LoRA is stored as a new adapter version that belongs to no rating. `pause` can raise an
    exception to stop.
    """
    for refusals in range(LOOKS):
        layer_lora = active.layer_lora
        if layer_lora is None or layers.knows(layer_lora):
            return
        lora = active.combined_lora
        assert lora is not None
        with active.install_for(lora):
            probe = active.probe_base(lora, pause).probe
        known, used = layers.note(layer_lora, active.probed_base.probe, probe)
        if used > SLACK:
            share = used ** (-(2**refusals) / 2) if refusals < LOOKS - 1 else 0.0
            _commit_scaled(active, layers, known.shrunk(share).rounded_copy())


def _commit_scaled(active: ActiveAdapter, layers: LayerAdapter, layer_lora: LayerLoRA) -> None:
    """Commit a smaller layer LoRA as a new adapter version. The version's MicroLoRA is scaled so that both
    LoRAs together are within the caps."""
    state, probe = active.state, active.probe
    micro = instant.rescale_to_caps(state.micro, probe).adapter if layers.targets.head else state.micro
    kl = max(0.0, probe.kl(micro) + layers.added_kl(layer_lora))
    # If another process commits first, the next measurement uses the version of that process.
    with suppress(HeadMoved):
        active.history.adjust(state.version, pack_adapter(micro, layer_lora), kl, micro.norm)
    active.catch_up()
    active.install()
