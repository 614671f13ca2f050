"""This module proposes models to the user: models that are installed on this machine, and models that are
worth a download.

The table `proposals.json` lists known models, the best model first. The machine's memory decides which models
fit, and the memory bandwidth gives the expected speed of a model. Neither depends on what other programs do
now: of the memory, a fixed share of the whole counts, and the bandwidth is measured once for each machine. So
the chat and `ruvmlx models` always propose the same. This module downloads nothing.
"""

import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ..backends.select import Choice, describe, for_model
from ..models.config.header_facts import Facts
from ..models.config.model import ModelConfig
from ..models.find.local import readable_models
from ..platform import cpu
from ..platform.bandwidth import memory_bandwidth
from ..platform.files import make_folder, replacing
from ..settings import home
from .load_plan import MachineMemory, Need, token_bytes

CONTEXT = 8192  # the number of tokens of context for which the proposals show the memory
USUAL = 512  # the number of tokens of context for which the proposals give the expected speed
SHARE = 0.6  # the assumed share of the memory bandwidth that decoding uses (docs/benchmarks.md: measured)
PLEASANT = 5.0  # tokens per second; a slower model is proposed only if no fitting model reaches this speed
BANDWIDTH = "bandwidth.json"  # the file that keeps the measured memory bandwidth
MAX_PROPOSALS = 3  # the maximum number of proposals


@dataclass(frozen=True)
class ModelOffer:
    """A model that is installed or proposed. size: bytes on the disk. memory_at_8k: bytes of memory with
    8,192 tokens of context. tps_expected: the expected tokens per second. licence: the name of the model's
    licence; "" if it is not known.
    installed: True if the model is on this machine."""

    name: str
    size: int
    memory_at_8k: int
    tps_expected: float
    licence: str
    installed: bool


@dataclass(frozen=True)
class Proposed:
    """One row of the table `proposals.json`."""

    facts: Facts
    licence: str


def table() -> list[Proposed]:
    """Return the rows of `proposals.json`, the best model first."""
    file = resources.files(__package__).joinpath("proposals.json")
    rows = json.loads(file.read_text(encoding="utf-8"))["models"]
    return [_parse_row(row) for row in rows]


def installed_offers() -> list[ModelOffer]:
    """Return the chat models on this machine. The models of ollama, of LM Studio and in the Hugging Face
    cache are included. The list leaves out models that only embed texts."""
    return [_offer(facts, "", True) for facts in readable_models() if not facts.embeds]


def proposals(few: int = MAX_PROPOSALS) -> list[ModelOffer]:
    """Return at most `few` models of the table that fit this machine and are not installed, the best model
    first.
    few: the maximum number of models in the result."""
    here = list(readable_models())
    rows = [row for row in table() if not any(_is_same(row.facts, facts) for facts in here)]
    fitting = [row for row in rows if _need(row.facts).total <= _limit()]
    offers = [_offer(row.facts, row.licence, False) for row in fitting]
    return choose_offers(offers, few)


def choose_offers(offers: Sequence[ModelOffer], few: int) -> list[ModelOffer]:
    """Return the first `few` offers with at least PLEASANT tokens per second. If no offer reaches PLEASANT
    tokens per second, return the fastest offer. The result is empty only if `offers` is empty. offers: the
    best model first."""
    pleasant = [offer for offer in offers if offer.tps_expected >= PLEASANT]
    return list(pleasant[:few]) or sorted(offers, key=lambda offer: -offer.tps_expected)[:1]


def best_proposal(in_use: Facts) -> ModelOffer | None:
    """Return the first of `proposals`. Return None if there is no proposal, or if it does not have more
    parameters than the model in use and than every installed chat model that fits."""
    here: Iterable[Facts] = [in_use, *(facts for facts in readable_models() if not facts.embeds)]
    largest = max(facts.parameters for facts in here if _need(facts).total <= _limit() or facts is in_use)
    found = proposals(1)
    size = {row.facts.name: row.facts.parameters for row in table()}
    return found[0] if found and size[found[0].name] > largest else None


def _parse_row(row: dict[str, Any]) -> Proposed:
    """Return a row of the table as Facts of the model and its licence. Fields of Facts that the table does
    not have get fixed values, because they do not change the memory or the speed."""
    shape = {key: row[key] for key in ("hidden_size", "n_layers", "n_heads", "n_kv_heads", "head_dim")}
    config = ModelConfig(
        model_type="", vocab_size=row["vocab_size"], max_context=row["max_context"],
        tie_word_embeddings=False, intermediate_size=0, rms_norm_eps=1e-6, rope_theta=1e4, **shape,
    )  # fmt: skip
    facts = Facts(row["name"], Path(), "gguf", config, row["parameters"], row["bytes"], row["bytes"])
    return Proposed(facts, row["licence"])


def _offer(facts: Facts, licence: str, is_here: bool) -> ModelOffer:
    # the number of bytes that the model reads from memory for each token: all weights, and the keys and
    # values of USUAL tokens
    read = facts.bytes + token_bytes(facts.shape) * USUAL
    speed = SHARE * _bandwidth() / read
    return ModelOffer(facts.name, facts.bytes, _need(facts).total, round(speed, 1), licence, is_here)


def _is_same(row: Facts, here: Facts) -> bool:
    """Return True if the two models are probably the same, perhaps in different formats or folders: their
    hidden sizes, numbers of layers and vocabulary sizes are equal, and their numbers of parameters differ by
    less than 5%."""
    a, b = row.shape, here.shape
    sizes = (a.hidden_size, a.n_layers, a.vocab_size) == (b.hidden_size, b.n_layers, b.vocab_size)
    return sizes and abs(row.parameters - here.parameters) < 0.05 * row.parameters


def _need(facts: Facts) -> Need:
    return Need.of(facts, for_model(_backend(), "auto", facts.shape), CONTEXT)


def _backend() -> Choice:
    return describe("auto")


def _limit() -> int:
    """Return the bytes that one model can take on this machine if other programs leave it room."""
    backend = _backend()
    return cpu.memory_of_models(MachineMemory.now(backend).total, backend.device == "metal")


def _bandwidth() -> float:
    """Return the memory bandwidth in bytes per second, from the data folder's file BANDWIDTH. If the file is
    not there, or is of another machine, measure the bandwidth and write the file."""
    file, machine = home() / BANDWIDTH, {"cores": cpu.physical_cores(), "memory": cpu.total_memory()}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(file.read_text(encoding="utf-8"))
        if {key: known[key] for key in machine} == machine and known["bytes_per_second"] > 0:
            return float(known["bytes_per_second"])
    measured = memory_bandwidth()
    with contextlib.suppress(OSError):
        make_folder(file.parent)
        with replacing(file) as written:
            written.write(json.dumps(machine | {"bytes_per_second": measured}).encode())
    return measured
