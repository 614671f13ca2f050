"""What 4 bits per weight cost a base LoRA of the starter model, in error and in replies.

    python -m tests.research.four_bits --replies 8

The base LoRAs are the directions of the shipped style basis, each scaled to an expected KL of --kl. Each is
read with 32 and with 4 bits by the native backend, or by --backend mlx. The table has, for each direction:

    error   the Frobenius norm of the error of all lora_a lora_b, relative to that of lora_a lora_b
    moved   the mean of |log p(reply; 32 bits) - log p(reply; original)|, nats per token
    change  the mean of |log p(reply; 4 bits) - log p(reply; 32 bits)|, nats per token
    agrees  of the pairs of replies whose gains (log p - log p of the original) differ with 32 bits by more
            than 0.001 nats per token, the share that 4 bits put in the same order

The replies are the untouched starter's (tests/data/starter_replies.json.gz). four_bits_wins.py measures how
often users prefer replies of either form. How often they prefer what they taught needs ratings, and hours:
`RUVMLX_ADAPTER_BITS=4 ruvmlx prove --user brevity --learn style`, beside the same command with 32 bits.
"""

import argparse
import gzip
import json
from pathlib import Path

import numpy as np

from ruvmlx.backends.base import Backend, with_lora
from ruvmlx.backends.select import open_backend
from ruvmlx.lora.base_lora import BaseLoRA
from ruvmlx.models.find.starter import starter_path
from ruvmlx.models.load import load_model
from ruvmlx.sona.kl_probe import log_softmax_rows
from ruvmlx.sona.optional.style_basis import StyleBasis
from ruvmlx.sona.reference_text import encode_pair
from ruvmlx.sona.shipped import shipped_bytes

REPLIES = Path(__file__).parents[1] / "data" / "starter_replies.json.gz"
LEAST = 0.001  # nats per token: gains that are closer have no order


def weight_error(base: BaseLoRA) -> float:
    """Return the relative error of all products lora_a lora_b with 4 bits. ||A B||^2 = tr(A^T A B B^T), so
    no product [in, out] is made."""
    packed, off, whole = base.to_4_bits(), 0.0, 0.0
    for place, (a, b) in base.pairs.items():
        a4, b4 = packed.pairs[place]
        both = np.hstack([a4, -a]).astype(np.float64), np.vstack([b4, b]).astype(np.float64)
        off += np.trace(both[0].T @ both[0] @ both[1] @ both[1].T)
        whole += np.trace((a.T @ a).astype(np.float64) @ (b @ b.T))
    return float(np.sqrt(max(off, 0) / whole))


def mean_logprobs(backend: Backend, texts: list[tuple[list[int], int]], base: BaseLoRA | None) -> np.ndarray:
    """Return the mean log-probability of each reply's tokens [n]. texts: (tokens, index of the reply's first
    token)."""
    found = []
    with with_lora(backend, base):
        for tokens, first in texts:
            logits = backend.head(backend.hidden_states(tokens[:-1])[first - 1 :])
            rows = log_softmax_rows(logits)
            found.append(rows[np.arange(len(rows)), tokens[first:]].mean())
    return np.array(found)


def agreement(gain: np.ndarray, other: np.ndarray) -> float:
    """Return the share of the pairs that `gain` orders which `other` orders in the same way; NaN if `gain`
    orders none. gain, other: [n]."""
    i, j = np.triu_indices(len(gain), 1)
    far = np.abs(gain[i] - gain[j]) > LEAST
    same = np.sign(gain[i] - gain[j]) == np.sign(other[i] - other[j])
    return float(same[far].mean()) if far.any() else float("nan")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--replies", type=int, default=24)
    options.add_argument("--directions", type=int, default=None, help="by default all")
    options.add_argument("--kl", type=float, default=0.08, help="nats per token")
    options.add_argument("--backend", default="native")
    given = options.parse_args()
    model = load_model(str(starter_path()))
    backend = open_backend(given.backend, model, None)
    basis = StyleBasis.from_bytes(shipped_bytes("style_bases", model.fingerprint) or b"")
    assert basis is not None, "the starter's style basis is not in this package"
    replies = json.loads(gzip.decompress(REPLIES.read_bytes()))[: given.replies]
    texts = [encode_pair(model.tokenizer, question, text, 512) for question, text, _ in replies]
    plain, rows = mean_logprobs(backend, texts, None), []
    print(f"{len(texts)} replies, KL {given.kl} expected, {backend.kernels}", flush=True)
    for i, unit in enumerate(np.eye(len(basis.directions))[: given.directions]):
        base = basis.lora(unit * np.sqrt(given.kl / basis.kl(unit)))
        full, four = (mean_logprobs(backend, texts, b) for b in (base, base.to_4_bits()))
        rows.append((weight_error(base), np.abs(full - plain).mean(), np.abs(four - full).mean(),
                     agreement(full - plain, four - plain)))  # fmt: skip
        print("direction {}: error {:.1%}, moved {:.4f}, change {:.4f}, agrees {:.1%}".format(i, *rows[-1]),
              flush=True)  # fmt: skip
    bits = base.nbytes, base.to_4_bits().nbytes
    print("mean: error {:.1%}, moved {:.4f}, change {:.4f}, agrees {:.1%}".format(*np.nanmean(rows, axis=0)))
    print(f"bytes of the base LoRA (rank {base.rank}): {bits[0]:,} with 32 bits, {bits[1]:,} with 4 bits")


if __name__ == "__main__":
    main()
