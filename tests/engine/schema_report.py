"""How constraints fare on the schemas of schemas.py:

    python -m tests.engine.schema_report tiny --tokens 700
    python -m tests.engine.schema_report starter --tokens 120 --minutes 20

Prints how many schemas are accepted, why the others are refused, how many replies finish and fit, and what
the masks cost. A reply that does not fit is printed with its schema.
"""

import argparse
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.engine import LLMInferenceEngine, Sampling
from ruvmlx.engine.batch import generate_many
from ruvmlx.engine.constraint import Matcher, matcher_for
from ruvmlx.engine.grammar import Constraint
from ruvmlx.engine.types import GenerationRequest, GenerationResponse
from ruvmlx.errors import UsageError
from ruvmlx.models.config.model import Model
from ruvmlx.models.find.starter import starter_path
from ruvmlx.models.load import load_model
from tests.models.make_models import make_safetensors_model

from .schemas import COUNT, every
from .test_constraint import closing

_WHY = re.compile(r"cannot be used: (Unimplemented keys: \[[^\]]*\]|[^:'\"(]+)")


def open_model(name: str, folder: Path) -> Model:
    if name == "starter":
        return load_model(str(starter_path()))
    return load_model(str(make_safetensors_model(folder / "m", max_context=2048, bits=4, group_size=32)))


def accepted_schemas(model: Model) -> tuple[list[tuple[str, Any]], Counter[str]]:
    """The first COUNT schemas that compile, and how often the others were refused for which reason."""
    found, refused = [], Counter[str]()
    for name, schema in every():
        try:
            if len(found) < COUNT:
                matcher_for(model, Constraint.json_schema(schema))
                found.append((name, schema))
        except UsageError as error:
            why = _WHY.search(str(error))
            refused[why[1].strip() if why else str(error)] += 1
    return found, refused


@contextmanager
def time_masks() -> Iterator[list[float]]:
    """Seconds of each mask."""
    seconds: list[float] = []
    restrict = Matcher.restrict

    def restrict_and_time(self: Matcher, logits: Any) -> None:
        began = time.perf_counter()
        restrict(self, logits)
        seconds.append(time.perf_counter() - began)

    Matcher.restrict = restrict_and_time  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        Matcher.restrict = restrict  # type: ignore[method-assign]


def failure(schema: Any, response: GenerationResponse) -> str:
    """Why a finished reply does not fit; "" if it fits."""
    try:
        jsonschema.validators.validator_for(schema)(schema).validate(json.loads(response.text))
    except (jsonschema.ValidationError, ValueError) as error:
        return str(error).partition("\n")[0][:300]
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", choices=["tiny", "starter"])
    parser.add_argument("--tokens", type=int, default=700, help="the most of a reply")
    parser.add_argument("--minutes", type=float, default=20, help="of processor time; then the run ends")
    parser.add_argument("--seed", type=int, default=0, help="of the first reply")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = open_model(asked.model, Path(folder))
        suite, refused = accepted_schemas(model)
        print(f"{len(suite)} schemas accepted; {refused.total()} refused before that:")
        for why, count in refused.most_common():
            print(f"  {count:4}  {why[:150]}")
        run(model, suite, asked.tokens, asked.minutes, asked.seed)


def run(model: Model, suite: list[tuple[str, Any]], tokens: int, minutes: float, seed: int) -> None:
    bias = closing(model.tokenizer)
    started, cpu = time.perf_counter(), time.process_time()
    requests = (
        GenerationRequest(
            prompt="JSON:", max_new_tokens=tokens, sampling=Sampling(0.7, seed=seed + i, logit_bias=bias),
            constraint=Constraint.json_schema(schema), request_id=str(i),
        )
        for i, (_, schema) in enumerate(suite)
        if time.process_time() - cpu < 60 * minutes
    )  # fmt: skip
    engine = LLMInferenceEngine(model, NativeBackend(model, threads=1, chunk=32))
    ends, wrong, count = Counter[str](), 0, 0
    with time_masks() as masks:
        for response in generate_many(engine, requests):
            ends[response.finish_reason] += 1
            count += response.generation_tokens
            name, schema = suite[int(response.request_id)]
            why = failure(schema, response) if response.finish_reason == "stop" else ""
            if why:
                wrong += 1
                print(f"DOES NOT FIT: {name}: {why}\n  {response.text}\n  {json.dumps(schema)[:2000]}")
    whole = time.perf_counter() - started
    print(
        f"{ends.total()} replies: {ends['stop']} finished, {wrong} of them do not fit, {ends['length']} cut"
    )
    per, step = 1e3 * sum(masks) / len(masks), 1e3 * whole / count
    print(f"{count} tokens; a mask {per:.3f} ms, a token {step:.2f} ms: {100 * per / step:.1f} %")
    print(f"slowest mask {1e3 * max(masks):.1f} ms; {time.process_time() - cpu:.0f} s of processor time")


if __name__ == "__main__":
    main()
