"""Would a plain bias of the logits do what the MicroLoRA does? What each costs in prose.

    python -m tests.sona.bias_study          a minute on the starter model

The first direction of the MicroLoRA reads about 1 in replies and about 0 in prose, so a row of lora_b is a
bias in replies. A plain bias reads 1 everywhere. Both get the same change of logits, learned from ratings,
and are scaled to the same KL in answers (`KL`, nats per token). The rise of the negative log-likelihood of
prose is then the price; RISE_CAP of instant.py is its limit.
"""

import os
import tempfile

import numpy as np

from ruvmlx import settings
from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.kernels.rating import KLContexts
from ruvmlx.runtime import Runtime
from ruvmlx.sona import instant
from ruvmlx.sona.kl_probe import KLProbe

KL = 0.05
QUESTIONS = ("Name a river.", "Why is the sky blue?", "How do I boil an egg?", "What is a haiku?")


def learned_probe(ratings: int = 16, tokens: int = 24) -> tuple[KLProbe, np.ndarray]:
    """(the starter model's probe, lora_b's first row in its movable tokens after so many ratings)."""
    with Runtime.open(settings.Settings()) as runtime:
        for i in range(ratings):
            request = GenerationRequest(
                prompt=QUESTIONS[i % len(QUESTIONS)],
                max_new_tokens=tokens,
                sampling=Sampling(seed=i),
                ignore_eos=True,
            )
            for _ in runtime.writer.generate(request):
                pass
            runtime.rate(request.request_id, "up" if i % 3 == 0 else "down")
        probe = runtime.learner.probe
        probe.look()
        return probe, probe.coordinates.columns(runtime.learner.micro.lora_b)[:1]


def rise_at(text: KLContexts, row: np.ndarray, kl: float) -> tuple[float, float]:
    """(the scale at which the KL in answers is `kl`, the rise of prose there), by bisection."""
    low, high = 0.0, 1.0
    while text.distance(row, high)[0] < kl:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if text.distance(row, middle)[0] < kl else (low, middle)
    return high, text.distance(row, high)[1]


def kl_within(text: KLContexts, row: np.ndarray, most: float, scale: float) -> float:
    """The KL in answers at the largest scale, up to `scale`, at which prose rises by at most `most`."""
    if text.distance(row, scale)[1] <= most:
        return text.distance(row, scale)[0]
    low, high = 0.0, scale
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if text.distance(row, middle)[1] <= most else (low, middle)
    return text.distance(row, low)[0]


def study(probe: KLProbe, row: np.ndarray, kl: float = KL) -> dict[str, tuple[float, float]]:
    """{form of the change: (rise of prose at this KL in answers, KL in answers within RISE_CAP)}, in nats per
    token."""
    reads = {
        "MicroLoRA's first direction": np.ascontiguousarray(probe._projections[:, :1]),
        "a plain bias": np.ones((len(probe.contexts), 1), np.float32),
    }
    found = {}
    for name, u in reads.items():
        text = probe._read(u)
        scale, rise = rise_at(text, row, kl)
        found[name] = rise, kl_within(text, row, instant.RISE_CAP, scale)
    return found


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="ruvmlx-study-") as folder:
        os.environ["RUVMLX_HOME"] = folder
        probe, row = learned_probe()
        for name, (rise, within) in study(probe, row).items():
            share = 100 * rise / instant.RISE_CAP
            print(
                f"{name:30}{rise:9.5f} nats of prose ({share:.0f}% of the limit); within it, KL {within:.4f}"
            )


if __name__ == "__main__":
    main()
