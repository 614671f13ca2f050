"""Counts the faults of a model's first replies to ordinary questions, for each way to ask it.

    python -m tests.first_replies choose                     # all candidates, on the half to choose by
    python -m tests.first_replies report --only 0 9          # two of them, on the other half

Each question is asked with several seeds, many at a time; replies are kept in a file by what they depend on,
so a run goes on where it was stopped. Prints a Markdown table.
"""

import argparse
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from apps.bench.machine import hardware
from ruvmlx.backends.select import open_backend
from ruvmlx.engine import GenerationRequest, LLMInferenceEngine, Sampling
from ruvmlx.engine.batch import generate_many
from ruvmlx.models.config.model import Message, Model
from ruvmlx.models.load import load_model
from ruvmlx.platform.cpu import physical_cores

from .candidates import CANDIDATES, Candidate
from .faults import FAULTS, faults
from .questions import HALVES, questions

KEPT = Path("build/first-replies.jsonl")
LIMIT, SEEDS, WIDTH = 512, 5, 32


@dataclass
class Replies:
    """The replies of one model, kept in a file."""

    model: Model
    kept: dict[str, dict[str, Any]] = field(default_factory=dict)
    engine: LLMInferenceEngine | None = None

    def __post_init__(self) -> None:
        if KEPT.exists():
            rows = map(json.loads, KEPT.read_text(encoding="utf-8").splitlines())
            self.kept = {row["key"]: row for row in rows}

    def of(self, candidate: Candidate, asked: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
        """A reply to each question with each seed: {"text", "finish_reason", "tokens"}."""
        keys = [self._key(candidate, question, seed) for question, seed in asked]
        missing = {key: at for key, at in zip(keys, asked, strict=True) if key not in self.kept}
        if missing:
            self._write(candidate, missing)
        return [self.kept[key] for key in keys]

    def _key(self, candidate: Candidate, question: str, seed: int) -> str:
        facts = [self.model.fingerprint, asdict(candidate), question, seed, LIMIT]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]

    def _write(self, candidate: Candidate, missing: dict[str, tuple[str, int]]) -> None:
        if self.engine is None:
            self.engine = LLMInferenceEngine(self.model, open_backend("native", self.model))
        requests = [
            GenerationRequest(
                request_id=key,
                messages=[Message("system", candidate.system), Message("user", question)],
                max_new_tokens=LIMIT,
                sampling=Sampling(seed=1000 + seed, **candidate.sampling),
            )
            for key, (question, seed) in missing.items()
        ]
        KEPT.parent.mkdir(exist_ok=True)
        with KEPT.open("a", encoding="utf-8") as file:
            for reply in generate_many(self.engine, requests, width=WIDTH):
                row = {"key": reply.request_id, "text": reply.text, "finish_reason": reply.finish_reason}
                row |= {"tokens": reply.generation_tokens, "noticed": reply.repeats}
                self.kept[reply.request_id] = row
                file.write(json.dumps(row) + "\n")


def row(replies: Replies, candidate: Candidate, half: str, seeds: int) -> str:
    """One line of the table: how many replies have each fault."""
    asked = [(question, seed) for seed in range(seeds) for question in questions(half)]
    got = replies.of(candidate, [(question.text, seed) for question, seed in asked])
    found = Counter(
        name
        for (question, _), reply in zip(asked, got, strict=True)
        for name in faults(question, reply["text"], reply["finish_reason"])
    )
    any_fault = sum(
        bool(faults(question, reply["text"], reply["finish_reason"]))
        for (question, _), reply in zip(asked, got, strict=True)
    )
    tokens = sum(reply["tokens"] for reply in got) / len(got)
    counts = " | ".join(str(found[name]) for name in FAULTS)
    return f"| {candidate.words} | {counts} | {any_fault} of {len(got)} | {tokens:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("half", choices=HALVES)
    parser.add_argument("--model", help="a name, a folder or a file; the starter by default")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of candidates, from 0")
    given = parser.parse_args()
    replies, started = Replies(load_model(given.model)), time.process_time()
    machine = hardware(physical_cores())
    print(f"Command: `python -m tests.first_replies {' '.join(sys.argv[1:])}`")
    print(f"Machine: {machine['chip']}, {machine['threads']} threads, {machine['system']}\n")
    print(f"| system prompt, sampling | {' | '.join(FAULTS)} | any | tokens |")
    print(f"|---|{'---|' * (len(FAULTS) + 2)}")
    for number in range(len(CANDIDATES)) if given.only is None else given.only:
        print(row(replies, CANDIDATES[number], given.half, given.seeds), flush=True)
    print(f"\n{time.process_time() - started:.0f} s of processor time.", file=sys.stderr)


if __name__ == "__main__":
    main()
