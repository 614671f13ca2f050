"""How long a new model's first reply takes, beside its second: processor time, in an empty data folder.

    python -m tests.first_replies.first_token MODEL [--max-tokens 16]

MODEL: a name, a folder or a GGUF file, for example one of `tests.models.fetch_qwen` or of
`apps/bench/random_model.py`. Prints the time to the first token of two requests, of the first rating and of
its undo, and exits with 1 if the first token took over LIMIT times the second request's, or if the undo was
not exact.
"""

import argparse
import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from ruvmlx.engine.types import GenerationRequest, GenerationResponse
from ruvmlx.models.config.model import Message
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings

LIMIT = 2.0
QUESTIONS = ("What is the capital of France?", "Name three rivers in Spain.")


def processor_seconds() -> float:
    """User and system time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def first_token(runtime: Runtime, question: str, limit: int, salt: str) -> tuple[float, GenerationResponse]:
    """Processor seconds until the first token of a reply, and the whole reply. salt: requests with another
    one share no part of their prompts' caches."""
    request = GenerationRequest(
        messages=[Message("user", question)],
        max_new_tokens=limit,
        sampling=runtime.writer.sampling(seed=1),
        cache_salt=salt,
    )
    started, taken = processor_seconds(), 0.0
    for chunk in runtime.writer.generate(request):
        if chunk.generated and not taken:
            taken = processor_seconds() - started
    assert chunk.response is not None
    return taken, chunk.response


@contextmanager
def print_time(what: str) -> Iterator[None]:
    """Print the processor time of the block."""
    started = processor_seconds()
    yield
    print(f"{what}: {processor_seconds() - started:.2f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--max-tokens", type=int, default=16)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ["RUVMLX_HOME"] = home
        with print_time("opening"):
            runtime = Runtime.open(Settings(model=given.model))
        with runtime:
            return compare(runtime, given.max_tokens)


def compare(runtime: Runtime, limit: int) -> int:
    """Print the figures; 1 if one is not what it should be."""
    first, reply = first_token(runtime, QUESTIONS[0], limit, "")
    second, _ = first_token(runtime, QUESTIONS[1], limit, "other")
    shared, _ = first_token(runtime, QUESTIONS[1], limit, "")
    print(f"first token: {first:.2f} s, of the second request: {second:.2f} s ({first / second:.1f} times)")
    print(f"with what the prompts have in common read before: {shared:.2f} s")
    with print_time("the first rating, of the first reply, measures the model"):
        result = runtime.rate(reply.request_id, "up")
    again, _ = first_token(runtime, QUESTIONS[0], limit, "third")
    with print_time("undo"):
        runtime.undo()
        assert runtime.learner is not None
        runtime.learner.sync()
    exact = runtime.learner.version == 0 and not runtime.learner.micro.lora_b.any()
    print(f"rated: {result.applied}; undone exactly: {exact}; first token meanwhile: {again:.2f} s")
    return 0 if result.applied and exact and first <= LIMIT * second else 1


if __name__ == "__main__":
    sys.exit(main())
