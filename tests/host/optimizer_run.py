"""A real run of the optimizer: the starter model, a squeeze of its KV cache, slow replies, and idle time.

    python -m tests.host.optimizer_run [--budget 12] [--beside-others]

It writes replies in a chat whose caches must fit into a small budget, simulates memory pressure for some of
them, lets idle time try what is faster, and prints the log's rows about it. --beside-others also counts
replies that came beside busy programs; without it, a busy machine leads to no trial.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

QUESTIONS = (
    "Name three rivers.",
    "Explain in one sentence why leaves fall.",
    "List four things to take on a walk.",
    "Write at most 40 words about the sea.",
    "What is bread made of?",
    "Give me two reasons to learn a language.",
    "Describe a quiet morning.",
    "Why is the sky blue?",
    "Name five animals of the forest.",
    "How does a kettle work?",
    "Explain in two sentences what a bridge is for.",
    "What can I cook with rice?",
    "Name three tools of a gardener.",
)


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as home, patch.dict(os.environ, RUVMLX_HOME=home):
        from ruvmlx.optimizer import monitor

        limit = 1e9 if options.beside_others else monitor.BUSY_CORES
        with patch.object(monitor, "BUSY_CORES", limit):
            _run(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=int, default=12, help="MiB for all KV caches")
    parser.add_argument("--tokens", type=int, default=48, help="the longest reply")
    parser.add_argument("--beside-others", action="store_true", help="count replies beside busy programs")
    return parser.parse_args()


def _run(options: argparse.Namespace) -> None:
    from ruvmlx.runtime import Runtime
    from ruvmlx.settings import Settings

    settings = Settings(adapter="none", kv_budget=options.budget, max_context=1024, kv_disk=0)
    with Runtime.open(settings) as runtime:
        print(f"{runtime.model.name}, {runtime.backend.kernels}, {options.budget} MiB for KV caches")
        chat = runtime.chats.new_chat()
        for number, question in enumerate(QUESTIONS):
            with _pressure(runtime, 0.95 if 3 <= number < 6 else 0.5):
                _ask(runtime, chat, question, options.tokens)
        while runtime.optimizer.due_when_idle():
            report = runtime.optimizer.work()
            print(f"idle time: {report['knob']}: {report['outcome']}; {report['reason']}")
            if report["outcome"] == "none":
                break
        store = runtime.store
        _print_rows(store)
    print("witness log:", "unbroken" if store_is_sound() else "BROKEN")


@contextmanager
def _pressure(runtime, value: float) -> Iterator[None]:
    with patch.object(runtime.backend.pool, "pressure", lambda: value):
        yield


def _ask(runtime, chat: str, question: str, tokens: int) -> None:
    import threading

    chunks = runtime.chats.say(
        chat, question, sampling=runtime.writer.sampling(seed=1), max_new_tokens=tokens,
        cancel=threading.Event(),
    )  # fmt: skip
    for chunk in chunks:
        last = chunk.response
    parts = ", ".join(f"{name} {part:.2f}" for name, part in last.quality_parts.items())
    level = runtime.backend.pool.level
    print(
        f"{last.generation_tps:5.1f} tokens/s, first after {last.ttft_ms:4.0f} ms, KV level {level}, "
        f"quality {last.quality:.2f} ({parts}): {question}"
    )


def _print_rows(store) -> None:
    print("\nruvmlx log show --kind optimizer")
    for row in store.witness.rows("optimizer"):
        body = row.body
        measured = ""
        if body["measured_before"]:
            measured = f", {body['measured_before']:.1f} to {body['measured_after']:.1f} tokens/s"
        undoes = f", undoes row {body['undoes']}" if body["undoes"] else ""
        print(
            f"{row.seq:3} {body['knob']}: {body['before']} to {body['after']}, {body['outcome']}{measured}"
            f"{undoes}: {body['why']}"
        )


def store_is_sound() -> bool:
    """Is the log unbroken, and do the tables agree with it?"""
    from ruvmlx import settings
    from ruvmlx.store import Store
    from ruvmlx.store.audit import disagreement

    store = Store(settings.store_file(), reading=True)
    try:
        return store.witness.check().broken is None and disagreement(store) == ""
    finally:
        store.close()


if __name__ == "__main__":
    main()
