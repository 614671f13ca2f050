"""A store as after two years: 400 chats, 15,000 replies, 6,000 ratings, 20 trainings. Times and sizes.

    python -m tests.campaigns.two_years          makes such a store in a scratch folder, and measures

Chats, replies and ratings are written as the program writes them, with random words and weights; 200 real
replies and ratings come on top and are timed. `cpu` is the processor time of the process, `wall` that by the
clock, with what other programs take; a figure is over its limit if both are. test_two_years.py runs all of it
on a small store.
"""

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ruvmlx import settings
from ruvmlx.engine.types import GenerationRequest, Sampling
from ruvmlx.lora.base_lora import BaseLoRA, place_shape
from ruvmlx.lora.layer_lora import LayerLoRA, pack_adapter
from ruvmlx.lora.micro_lora import MicroLoRA
from ruvmlx.runtime import Runtime
from ruvmlx.store.audit import disagreement

from ..chat.large_store import Size, fill

Opener = Callable[[], Runtime]
WORDS = ("a", "riv", "river", "needle")
CHANGE = 0.003  # of each number that ratings move: a difference is then 15 KB, after 80 real ratings 11 KB
COMMITS, WRITTEN = 2, 80_000  # of a rating; bytes
LAYER_CHANGE = 0.2  # of each number below the head that ratings move: a difference is as large as a real one
RANK = 8  # of the bases, in all of attention
START, RATE, SEARCH, BYTES = 1000.0, 15.0, 50.0, 1_000_000_000  # limits: ms, ms (p99), ms, bytes


@dataclass(frozen=True)
class Use:
    chats: int = 400
    replies: int = 15_000
    ratings: int = 6_000
    trainings: int = 20
    timed: int = 300  # real ratings


@dataclass
class Figures:
    """times: name -> (limit in ms, [(ms of processor time, ms by the clock)]); a p99 has it in its name."""

    times: dict[str, tuple[float, list[tuple[float, float]]]] = field(default_factory=dict)
    bytes: int = 0

    def measure(self, name: str, limit: float, work: Callable[[], Any]) -> Any:
        cpu, wall = time.process_time(), time.perf_counter()
        found = work()
        took = 1e3 * (time.process_time() - cpu), 1e3 * (time.perf_counter() - wall)
        self.times.setdefault(name, (limit, []))[1].append(took)
        return found

    def lines(self) -> list[str]:
        said = [f"{'':44}{'cpu':>8}{'wall':>8}   limit, ms"]
        for name, (limit, took) in self.times.items():
            middle = _p99 if "p99" in name else statistics.median
            cpu, wall = (middle(column) for column in zip(*took, strict=True))
            mark = "  OVER" if min(cpu, wall) > limit else ""
            said.append(f"{name:44}{cpu:8.1f}{wall:8.1f}   {limit or '-'}{mark if limit else ''}")
        mark = "  OVER" if self.bytes > BYTES else ""
        return [*said, f"{'the store':44}{self.bytes / 1e6:13.0f} MB   {BYTES / 1e6:.0f}{mark}"]


def _p99(values: tuple[float, ...]) -> float:
    return float(np.percentile(values, 99))


def live(open_runtime: Opener, use: Use) -> tuple[int, bytes]:
    """Write the two years. Returns the version that the first rating made, and its weights."""
    with open_runtime() as runtime:
        assert runtime.learner is not None
        runtime.rate(write(runtime, 0), "up")
        first = runtime.learner.version
        state = runtime.store.versions.get(runtime.model.fingerprint, "default", first).state
        fill(
            runtime.store,
            Size(use.chats, use.replies, 0),
            runtime.model.fingerprint,
            runtime.model.name,
            None,
            runtime.model.config.hidden_size,
        )
        _rate_and_train(runtime, use)
    return first, state


def _rate_and_train(runtime: Runtime, use: Use) -> None:
    """Ratings of every so many replies, each with new weights; trainings in between."""
    rng, learner = random.Random(0), runtime.learner
    assert learner is not None
    history, micro, version = learner.history, learner.micro, learner.version
    layers = learner.state.layer_lora
    between = max(1, use.ratings // use.trainings)
    for n in range(use.ratings):
        micro, layers = _change_head(micro, n), _change_layers(layers, n)
        number = 1 + n * use.replies // use.ratings
        stars, state = str(rng.randint(1, 5)), pack_adapter(micro, layers)
        version = history.commit(version, [(f"{number:012x}", stars, "", 1.0)], state, 0.01, micro.norm)
        if n % between == between // 2:
            report = {"steps": 12, "matrices": 4 * runtime.model.config.n_layers}
            version = history.promote(version, _base(runtime, n), state, 0.01, micro.norm, report)


def _change_head(micro: MicroLoRA, seed: int) -> MicroLoRA:
    rng, names = np.random.default_rng(seed), ("lora_b", "evidence", "taste")
    noise = {name: 1 + CHANGE * rng.standard_normal(getattr(micro, name).shape) for name in names}
    numbers = {name: (getattr(micro, name) * noise[name]).astype(np.float32) for name in names}
    return replace(micro, **numbers).rounded_copy()


def _change_layers(layers: LayerLoRA | None, seed: int) -> LayerLoRA | None:
    """The layers below the head after one more rating; None if ratings change the head alone."""
    if layers is None:
        return None
    rng = np.random.default_rng(seed)
    noise = {
        n: 1 + LAYER_CHANGE * rng.standard_normal(getattr(layers, n).shape) for n in ("lora_b", "evidence")
    }
    numbers = {name: (getattr(layers, name) * noise[name]).astype(np.float32) for name in noise}
    return layers.replace_fields(**numbers).rounded_copy()


def _base(runtime: Runtime, seed: int) -> BaseLoRA:
    rng, config, pairs = np.random.default_rng(seed), runtime.model.config, {}
    for layer in range(config.n_layers):
        for module in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shape = place_shape(config, module, layer)
            assert shape is not None
            a = rng.standard_normal((shape[0], RANK)).astype(np.float32) / shape[0] ** 0.5
            pairs[module, layer] = a, 1e-4 * rng.standard_normal((RANK, shape[1])).astype(np.float32)
    return BaseLoRA(pairs, 2.0)


def write(runtime: Runtime, seed: int) -> str:
    """A short real reply, prepared for its rating. Returns its id."""
    request = GenerationRequest(
        prompt=f"Tell me about river {seed}.",
        max_new_tokens=12,
        sampling=Sampling(seed=seed),
        ignore_eos=True,
    )
    for _ in runtime.writer.generate(request):
        pass
    runtime.learning.require_learner().settle(lambda: None)  # as a chat does in a pause
    return request.request_id


def measure_parts(figures: Figures, runtime: Runtime) -> None:
    """Measure each part of the ratings that follow, by itself."""
    learner = runtime.learner
    assert learner is not None
    parts = {
        "the weights in use": (learner.active, "catch_up"),
        "the trace": (learner.traces, "of"),
        "its weight": (learner, "weigh"),
        "new weights": (learner, "apply_feedback"),
        "taste": (learner.taste_push, "of"),
        "the commit": (learner.history, "commit"),
        "the index of ratings": (learner.rating_index, "add_ratings"),
        "what it changed": (learner, "_logprobs"),
    }
    for name, (owner, method) in parts.items():
        work = partial(figures.measure, f"of it {name}: p99", 0.0)
        setattr(owner, method, partial(_call, work, getattr(owner, method)))


def _call(measured: Callable[[Callable[[], Any]], Any], work: Callable[..., Any], *a: Any, **k: Any) -> Any:
    return measured(lambda: work(*a, **k))


def sync_as_a_rating() -> None:
    """Write and sync what a rating's commits write, in a file beside the store."""
    with settings.store_file().with_name("synced").open("wb", buffering=0) as file:
        for _ in range(COMMITS):
            file.write(bytes(WRITTEN // COMMITS))
            os.fsync(file.fileno())


def measure(open_empty: Opener, open_full: Opener, use: Use, first: int, state: bytes) -> Figures:
    """open_empty: the same model over a store that has only what is measured of the model."""
    figures = Figures()
    for _ in range(5):
        for name, opener in (("an empty store", open_empty), ("two years", open_full)):
            figures.measure(f"start over {name}", 0.0, opener).close()
    # What the store adds to the model's load.
    added = zip(*(figures.times[f"start over {name}"][1] for name in ("an empty store", "two years")))  # noqa: B905
    figures.times["start beyond that"] = (START, [(b[0] - a[0], b[1] - a[1]) for a, b in added])
    with open_full() as runtime:
        # No program has measured the newest base, which is random: the first rating does it.
        figures.measure("the first rating", 0.0, lambda: runtime.rate(write(runtime, use.timed), "up"))
        measure_parts(figures, runtime)
        for n in range(use.timed):
            reply = figures.measure("a short reply, and its preparation", 0.0, lambda n=n: write(runtime, n))
            figures.measure(
                "rate: p99", RATE, lambda r=reply, n=n: runtime.rate(r, "up" if n % 3 else "down")
            )
            figures.measure("the disk alone, as many bytes: p99", 0.0, sync_as_a_rating)
            newest = reply
        for words in WORDS:
            for _ in range(7):
                figures.measure(f"search: {words}", SEARCH, lambda w=words: runtime.store.search.find(w))
        figures.measure("undo of the newest rating", 0.0, runtime.undo)
        runtime.rate(newest, "up")
        figures.measure("undo of the first rating", 0.0, lambda: runtime.rollback(first - 1))
        assert runtime.status().ratings == 0
        runtime.rollback(first)
        found = runtime.store.versions.get(runtime.model.fingerprint, "default", first)
        assert found.state == state  # bit for bit
        figures.measure("the check of the whole log", 0.0, lambda: _check(runtime))
    figures.bytes = sum(file.stat().st_size for file in settings.store_file().parent.glob("ruvmlx.db*"))
    return figures


def _check(runtime: Runtime) -> None:
    assert runtime.store.witness.check().broken is None and disagreement(runtime.store) == ""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="ruvmlx-campaign-") as folder:

        def opener(name: str) -> Opener:
            def open_it() -> Runtime:
                os.environ["RUVMLX_HOME"] = str(Path(folder, name))
                return Runtime.open(settings.Settings())

            return open_it

        with opener("empty")() as runtime:  # measures the model
            runtime.rate(write(runtime, 0), "up")
            runtime.undo()
        use, begun = Use(), time.monotonic()
        first, state = live(opener("full"), use)
        print(f"{use}: made in {time.monotonic() - begun:.0f} s", flush=True)
        figures = measure(opener("empty"), opener("full"), use, first, state)
        print("\n".join(figures.lines()))


if __name__ == "__main__":
    sys.exit(main())
