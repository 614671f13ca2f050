"""Which part of the suite a test belongs to.  Every test has exactly one kind, and this file gives it.

    unit     no compiler, and no model runs: all of them in less than a minute
    model    a model runs, the starter or a tiny random one, or files of models are read for seconds
    kernels  the C library, the GPU kernels and the wheels: most of them compile
    app      apps/: the chat, the command line, bench and prove

`slow` comes on top: a test that takes more than 5 s, or that --full makes longer.

    pytest -m unit -n 2        pytest -m "model and not slow"
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ruvmlx.models.find.starter import starter_path

TESTS = Path(__file__).parent
KINDS = ("unit", "model", "kernels", "app")
FOLDERS = {
    "kernels": "kernels", "metal": "kernels", "wheels": "kernels",
    "chat": "app", "cli": "app", "bench": "app", "prove": "app", "docs": "app", "server": "app",
    "research": "app", "campaigns": "app",
    "backends": "model",
}  # fmt: skip
# Fixtures with a model: the real one, and whatever runs.
STARTER = {"starter", "starter_file", "starter_backend"}
RUNNING = STARTER | {"tiny_backend", "open_tiny", "engine"}
# Files, or single tests, of other folders that are of the kind `model` for what they do themselves.
FILES = dict.fromkeys(
    [
        "api/test_api.py::test_errors_are_one_line", "engine/test_batch.py", "engine/test_constraint.py",
        "engine/test_stream.py", "engine/test_stream_trace.py", "kv/test_damaged_disk.py", "kv/test_disk.py",
        "kv/test_mlx_memory.py", "kv/test_walk.py", "lora/test_fuse.py", "models/test_gguf_fuzz.py",
        "models/test_tekken.py", "models/test_tokenizer_families.py",
        "models/test_resolve.py::test_list_local_models",
        "models/test_resolve.py::test_an_absent_name_is_one_line_and_exit_code_3",  # it may mean the starter
        "models/test_resolve.py::test_errors_are_of_one_tree",
        "sona/test_background.py", "sona/test_background_stops.py", "sona/test_bases.py",
        "sona/test_layer_gradients.py", "sona/test_layer_lora.py", "sona/test_layer_ratings.py",
        "sona/test_deep.py", "sona/test_ewc_sweep.py", "kv_tuning/test_tier_measurement.py",
        "store/test_kill.py", "store/test_kill_anywhere.py", "store/test_kill_training.py",
        "chats/test_chats.py", "chats/test_resume.py", "memory/test_memory.py",
        "memory/test_load_plan.py::test_a_model_that_does_not_fit_is_refused_before_loading",
        "memory/test_load_plan.py::test_room_that_is_made_counts", "test_runtime_mlx.py",
    ],
    "model",
)  # fmt: skip
# Files, or single tests, of more than 5 s on one core.
SLOW = {
    "cli/test_stopped.py", "cli/test_ended_by_signal.py", "docs/test_docs.py::test_the_site_builds",
    "backends/test_gguf_formats.py", "backends/test_matrix_types.py",
    "backends/test_native_starter.py", "backends/test_verdict.py", "bench/test_bench.py",
    "bench/test_compare.py", "kernels/test_c_arm.py", "kernels/test_c_compilers.py",
    "kernels/test_c_sanitizers.py", "kernels/test_macos_syntax.py",
    "kv/test_quality.py", "metal/test_cuda.py", "metal/test_front_end.py",
    "metal/test_ladder.py", "prove/test_prove.py", "sona/test_background_starter.py",
    "server/test_instructor.py", "server/test_langchain.py", "server/test_limits.py",
    "server/test_litellm.py", "server/test_llm.py", "server/test_openapi.py::test_schemathesis",
    "sona/test_ewc_sweep.py",
    "wheels/test_wheels.py",
}  # fmt: skip
COMPILERS = {
    "gcc", "g++", "clang", "clang++", "cc", "c++", "cmake", "ninja", "make", "nvcc", "zig", "ziglang",
}  # fmt: skip


def mark(item: pytest.Item) -> None:
    """Give a collected test its kind, and `slow` where it is."""
    item.add_marker(kind(item))
    if is_slow(item):
        item.add_marker("slow")


def kind(item: pytest.Item) -> str:
    folder = FOLDERS.get(place(item).split("/")[0])
    if fixtures(item) & (STARTER if folder else RUNNING):
        return "model"
    return folder or next((FILES[name] for name in names(item) if name in FILES), "unit")


def is_slow(item: pytest.Item) -> bool:
    return "full" in fixtures(item) or not SLOW.isdisjoint(names(item))


def names(item: pytest.Item) -> tuple[str, str]:
    """Its file, and the test itself without its parameters."""
    return place(item), f"{place(item)}::{item.name.partition('[')[0]}"


def place(item: pytest.Item) -> str:
    """sona/test_signal.py"""
    return item.path.relative_to(TESTS).as_posix()


def fixtures(item: pytest.Item) -> set[str]:
    return set(getattr(item, "fixturenames", ()))


class _Guard:
    """Fails the unit test that is running as soon as it starts a compiler or opens the starter model."""

    def __init__(self) -> None:
        self.on, self.starter = False, str(starter_path())
        sys.addaudithook(self._heard)

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "subprocess.Popen" and (name := compiler(args[0], args[1])):
            pytest.fail(f"a unit test starts {name}; tests/kinds.py says which tests may")
        if event == "open" and str(args[0]) == self.starter:
            pytest.fail("a unit test opens the starter model; take the fixture starter or starter_file")


GUARD = _Guard()


@contextmanager
def set_guard(on: bool) -> Iterator[None]:
    """With the rules of unit tests, or without."""
    before, GUARD.on = GUARD.on, on
    try:
        yield
    finally:
        GUARD.on = before


def compiler(program: Any, command: Any) -> str:
    """The compiler that a command line starts, or nothing; `python -m ziglang` and `sh -c 'gcc x.c'`."""
    words = [str(program), *(map(str, command) if isinstance(command, (list, tuple)) else [str(command)])]
    names = [re.sub(r"-[0-9.]+$", "", Path(word).name) for word in " ".join(words[:4]).split()[:4]]
    return next((name for name in names if name in COMPILERS), "")
