"""How exactly a few contexts of the reference text measure a base LoRA, beside all of its tokens.

    python -m tests.research.base_measure --styles 16

Each style is a sum of directions of the starter's style basis with random coefficients. A line has its KL in
answers and the rise of prose's negative log-likelihood (nats per token), by the contexts of the KL probe and
by all tokens (ruvmlx/sona/whole_text.py).
"""

import argparse
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from ruvmlx.backends.select import open_backend
from ruvmlx.lora.micro_lora import RANK
from ruvmlx.models.find.starter import starter_path
from ruvmlx.models.load import load_model
from ruvmlx.sona import calibration
from ruvmlx.sona.base_probe import probe_under
from ruvmlx.sona.kl_probe import KLProbe
from ruvmlx.sona.optional.style_file import StyleFiles
from ruvmlx.sona.whole_text import WholeTextReader
from ruvmlx.store import Store


def by_contexts(frozen: KLProbe, probe: KLProbe) -> tuple[float, float]:
    """Return (KL in answers, rise of prose) by the probe's contexts alone."""
    n = frozen.answers
    assert probe.packed_ratio is not None
    kl = float(np.mean(np.sum(probe.packed_probs[:n] * probe.packed_ratio[:n], axis=1)))
    y = frozen._following_indices
    change = np.log(frozen.packed_probs[np.arange(len(y)), y] / probe.packed_probs[np.arange(len(y)), y])
    return kl, sum(share * float(np.mean(change[part])) for part, share in frozen.groups.in_prose)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--styles", type=int, default=16)
    ask.add_argument("--threads", type=int)
    given = ask.parse_args()
    model = load_model(str(starter_path()))
    backend, context = open_backend("native", model, given.threads), model.shape.max_context
    basis = StyleFiles(model.fingerprint).basis()
    assert basis is not None, "the starter has a style basis"
    frozen = calibration.measure(backend, model.tokenizer, RANK, context)
    frozen.look()
    rng, rows = np.random.default_rng(3), []
    with TemporaryDirectory() as folder, closing(Store(Path(folder, "ruvmlx.db"))) as store:
        whole = WholeTextReader(store, model, backend).read(frozen)
        for number in range(given.styles):
            coefficients = rng.normal(size=len(basis.response)) * (rng.random(len(basis.response)) < 0.1)
            kl = rng.choice([0.01, 0.02, 0.03])
            scale = np.sqrt(kl / max(basis.kl(coefficients), 1e-12))
            backend.set_lora(basis.lora(coefficients * scale))
            probe = probe_under(frozen, whole, backend, model.tokenizer, context)
            rows.append((*by_contexts(frozen, probe), probe.floor, probe.rise))
            backend.set_lora(None)
            few_kl, few_rise, kl, rise = rows[-1]
            print(
                f"{number}: KL {few_kl:.4f}, all {kl:.4f}; rise {few_rise:+.4f}, all {rise:+.4f}", flush=True
            )
    few_kl, few_rise, kl, rise = np.array(rows).T
    ratio = np.log(few_kl / kl)
    print(
        f"{frozen.answers} contexts in answers, {len(whole.states)} tokens: the KL of contexts is "
        f"{np.exp(ratio.mean()):.2f} times that of all, standard deviation {np.exp(ratio.std()):.2f} times\n"
        f"{len(frozen.contexts) - frozen.answers} contexts in prose, {len(whole.losses)} tokens: the rise "
        f"differs by {np.sqrt(np.mean((few_rise - rise) ** 2)):.4f} (root mean square); the rise of all is "
        f"{np.sqrt(np.mean(rise**2)):.4f}"
    )


if __name__ == "__main__":
    main()
