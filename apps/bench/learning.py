"""This module is the learning suite of `ruvmlx bench`. The suite measures the time of a rating, from the call
to the write on disk, on real replies of the user's model. The suite also measures parts of the work at a
rating."""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ruvmlx.backends.select import open_backend
from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.kernels import micro
from ruvmlx.models.config.model import Message
from ruvmlx.models.load import load_model
from ruvmlx.pausing import stop_when
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.sona import embedding, instant, signal, taste_features
from ruvmlx.sona.reasoning_bank import CAPACITY, ReasoningBank
from ruvmlx.sona.taste import RatedFeatures, TasteModel
from ruvmlx.store import Store

from ..prove import trial
from ..prove.prompts import own
from ..prove.report import Point, join_trials
from ..prove.trial import Arm, Bench, TrialSetup
from ..prove.users import brevity
from .rows import Row, at_most, median_row, round_digits

REPLY_TOKENS = 8  # the maximum number of tokens of each rated reply
TRACED = 64  # the number of tokens of the reply whose trace (gradient, sona/trace.py) is measured
GROUPS = 8  # the maximum number of samples of a row
QUESTIONS = ["Name a river.", "What is a fjord?", "Say hello.", "Why does ice float?", "Name three birds."]


RATINGS_GIVEN = {"quick": 100, "whole": 1000}
PROVED = 30, 24  # the numbers of ratings and of held-out prompts in the short `ruvmlx prove`


def run(model: str, backend: str, threads: int, quick: bool, log: Callable[[str], None]) -> list[Row]:
    """Run the suite, and return its rows of the report. The suite rates new replies in a temporary store, so
    it never touches the user's adapter."""
    model_ = load_model(model)
    opened = open_backend(backend, model_, threads)
    with tempfile.TemporaryDirectory(prefix="ruvmlx-bench-") as scratch:
        store = Store(Path(scratch) / "bench.db")
        with Runtime(store, model_, opened, Settings(adapter="bench", kv_disk=None)) as runtime:
            rows = [
                *_ratings(runtime, RATINGS_GIVEN["quick" if quick else "whole"]),
                *_trace(runtime),
                _direction(runtime),
                *_square_update(),
                _extraction(),
                _bookkeeping(),
                *_bank(runtime.model.shape.hidden_size),
                _question(runtime),
                *_taste(),
            ]
    log("ratings: measured")
    return [*rows, *([] if quick else _proof_rows(model_, opened, log))]


def _proof_rows(model: Any, backend: Any, log: Callable[[str], None]) -> list[Row]:
    """Run a short form of the command `ruvmlx prove` with one simulated user and few questions, and return
    the rows. `ruvmlx prove --suite` runs all simulated users."""
    ratings, judged = PROVED
    asked = own("train"), own("heldout")[:judged]
    setting = TrialSetup(brevity, *asked, ratings, (10, ratings))
    points = [join_trials([[c]])[0] for c in trial.run(Bench(model, backend), setting, Arm(), 0, log)]
    return [_point(point, judged) for point in points]


def _point(point: Point, judged: int) -> Row:
    low, high = point.win_ci
    note = (
        f"{low:.0%} to {high:.0%}, {judged} questions; KL {point.kl:.3f}, perplexity {point.ppl_change:+.1%}"
    )
    name = f"prove: better than the untouched model after {point.ratings} ratings"
    target = 0.65 if point.ratings >= PROVED[0] else None
    off = (high - low) / 2 / point.win_rate if point.win_rate else 0.0
    return Row(name, point.win_rate, "", target, note=note, condition="a simulated user", spread=off)


def _ratings(runtime: Any, ratings: int) -> list[Row]:
    """Measure the time of ratings, and return the rows. Replies are rated down and up in turn. Every fifth
    rating is taken back, so that the adapter does not learn from all of them."""
    results = []
    for i in range(ratings):
        _reply(runtime, i)
        results.append(runtime.rate("last", "up" if i % 2 else "down"))
        if i % 5 == 4:
            runtime.undo()
    apply = [r.apply_us for r in results]
    total = [r.total_us / 1e3 for r in results]
    note = f"{ratings} ratings, {sum(r.applied for r in results)} changed weights"
    return [
        _median("rating: weights updated, median", apply, "us", 1000, note),
        at_most("rating: weights updated, p99", float(np.percentile(apply, 99)), "us", 1000, note),
        _median("rating: applied and on disk, median", total, "ms", 20, note),
        _single("rating: applied and on disk, p99", float(np.percentile(total, 99)), "ms"),
    ]


def _reply(runtime: Any, i: int) -> None:
    request = GenerationRequest(
        messages=[Message("user", QUESTIONS[i % len(QUESTIONS)])],
        max_new_tokens=REPLY_TOKENS,
        sampling=Sampling(0.8, seed=i),
        session_id="bench",
    )
    for _ in runtime.writer.generate(request):
        pass
    runtime.learner.settle(stop_when(None))


def _trace(runtime: Any) -> list[Row]:
    """Measure the time of a trace as a share of the time of decoding, token by token. Also measure the time
    of all work for learning in a reply of TRACED tokens. Return the rows."""
    backend, learner = runtime.backend, runtime.learner
    cache, begun = backend.new_cache(), time.perf_counter()
    trace = learner.trace()
    other = time.perf_counter() - begun
    step = backend.prefill(list(range(100, 164)), cache)
    decode, add = [], []
    for i in range(TRACED):
        started = time.perf_counter()
        step = backend.decode(100 + i, cache, learner.micro)
        between = time.perf_counter()
        trace.add(step.hidden, step.logits, 100 + i)
        decode.append(between - started)
        add.append(time.perf_counter() - between)
    shares = [100 * a / d for a, d in zip(add, decode, strict=True)]
    note = f"{1e6 * statistics.median(add):.0f} us of {1e3 * statistics.median(decode):.1f} ms a token"
    begun = time.perf_counter()
    learner.traces.keep("bench", trace)
    other += time.perf_counter() - begun
    learner.traces.held.pop("bench")
    added = [1e6 * (seconds * TRACED + other) for seconds in add]
    name = f"learning overhead of a reply of {TRACED} tokens"
    return [
        _median("trace: share of a decoded token", shares, "%", 5, note),
        _median(name, added, "us", 1000, "its trace, token by token; before a rating"),
    ]


def _direction(runtime: Any) -> Row:
    """Measure the time to compute the gradient of a rating, and return the row. The reply's statistics, from
    which the gradient is computed, are prepared while the user reads the reply."""
    learner = runtime.learner
    probe, trace = learner.probe, next(reversed(learner.traces.held.values()))
    stats, before = instant.prepare_stats(trace, probe), instant.stored_evidence(learner.micro, probe)
    times = _time_calls(lambda i: instant.gradient_of(stats, 1.0 if i % 2 else -1.0, before, probe))
    return _median("gradient direction of a rating, median", times, "us", 15)


def _bookkeeping() -> Row:
    """Measure the time of the small updates at a rating, and return the row. The small updates are the trend
    and the retention of earlier ratings (sona/instant.py), the moving mean of the time per token, and the
    data of the learning signal for the store (sona/signal.py). The times of the updates of the weights and of
    the index of ratings are in other rows."""
    counts, pace = np.arange(len(signal.LABELS)), signal.Pace()
    given = signal.extract("reply", "up", counts, None, 1.1, 1, 200)

    def update(i: int) -> None:
        instant.retention_factor(instant.next_trend(0.1, 1.0 if i % 2 else -1.0, 0.05))
        pace.ratio(100.0 + i % 7, 10)
        given.row()

    return _median("bookkeeping of a rating, median", _time_calls(update), "us", 10)


def _square_update() -> list[Row]:
    """Measure a figure for which the project has a target: a rank-2 update of a 768 x 768 matrix with
    momentum and checks, and the time of the momentum alone. Return the rows. Ratings do not use this update,
    because they compute weights from all evidence (sona/instant.py)."""
    rng = np.random.default_rng(0)

    def array(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    pair = [(array(*shape), array(*shape), array(*shape)) for shape in ((768, 2), (2, 768))]
    bare = [(w, None, g) for w, _, g in pair]
    times = _time_calls(lambda _: micro.micro_step(pair, 1e-6, 0.9))
    without = _time_calls(lambda _: micro.micro_step(bare, 1e-6, 0.9))
    momentum = max(0.0, statistics.median(times) - statistics.median(without))
    return [
        _median("MicroLoRA update 768x768, rank 2", times, "us", 50, "called from Python"),
        at_most("momentum of that update", momentum, "us", 10, "with it less without it, medians"),
    ]


def _extraction() -> Row:
    """Measure the time to compute the reward of a rating from the rating and the user's earlier ratings.
    Return the row."""
    counts = np.arange(len(signal.LABELS))
    query = np.ones(576, np.float32)
    times = _time_calls(
        lambda i: signal.extract("reply", signal.RATINGS[i % 7], counts, query, 1.1, 1, 200).reward
    )
    return _median("signal extraction, median", times, "us", 10)


def _bank(hidden_size: int) -> list[Row]:
    """Measure a full reasoning bank (rated questions, found by similarity), and return the rows. The
    questions are random vectors: the sum of one of 200 topics (some are frequent), one of several intents of
    the topic, and noise."""
    width = min(hidden_size, embedding.DIMENSIONS)
    rng = np.random.default_rng(0)
    topic, intent = (_unit(rng.normal(size=(count, width))) for count in (200, 3000))
    at = np.minimum(rng.geometric(0.02, CAPACITY + 300), 200) - 1
    noise = _unit(rng.normal(size=(len(at), width)))
    vectors = _unit(0.5 * topic[at] + 0.5 * intent[15 * at + rng.integers(0, 15, len(at))] + 0.7 * noise)
    bank, queries = ReasoningBank(width), vectors[CAPACITY:]
    for i, vector in enumerate(vectors[:CAPACITY]):
        bank.put(str(i), signal.RATINGS[i % 7], vector)
    started = time.perf_counter()
    bank.tend()
    clustered = time.perf_counter() - started
    lookup = _time_calls(lambda i: bank.lookup(queries[i % 300]))
    value = _time_calls(lambda i: bank.value(queries[i % 300]))
    note = (
        f"{CAPACITY} entries of {width}, {len(bank.patterns())} patterns; recall {_recall(bank, vectors):.0%}"
    )
    return [
        _median("bank: lookup of the 32 nearest, median", lookup, "us", 100, note),
        _single("bank: lookup of the 32 nearest, p99", float(np.percentile(lookup, 99)), "us"),
        _median("bank: value of a question, median", value, "us", 100),
        _single("bank: clustering of all entries", 1e3 * clustered, "ms", "while the user reads"),
    ]


def _recall(bank: ReasoningBank, vectors: np.ndarray) -> float:
    """Return the recall of lookups in the bank: the share of the 8 nearest entries that a lookup finds."""
    shares = []
    for query in vectors[CAPACITY : CAPACITY + 100]:
        true = np.sort(vectors[:CAPACITY] @ query)[-8]
        shares.append(np.mean(bank.lookup(query, 8).similarity >= true - 1e-6))
    return float(np.mean(shares))


def _question(runtime: Any) -> Row:
    """Measure the time to embed a question for the reasoning bank, and return the row. With the option
    --examples, ruvmlx embeds the question before it writes the reply, else while the user reads the reply."""
    read = embedding.read_question
    times = [
        t / 1e3
        for t in _time_calls(lambda i: read(runtime.backend, runtime.model.tokenizer, QUESTIONS[i % 5]), 30)
    ]
    return _median("bank: reading a short question, median", times, "ms")


def _taste() -> list[Row]:
    """Measure the taste model, which predicts the user's stars, with 1,000 ratings. Return the rows. The
    replies are random texts of 30 to 200 words. The stars depend on the sum of four measured properties of
    the text, and on noise."""
    rng = np.random.default_rng(0)
    words = np.array(["".join(rng.choice(list("aeionrstlm"), n)) for n in rng.integers(2, 11, 3000)])
    texts = [
        ". ".join(" ".join(words[np.minimum(rng.zipf(1.3, 12), 3000) - 1]) for _ in range(sentences))
        for sentences in rng.integers(3, 18, 1000)
    ]
    replies = [taste_features.features_of(QUESTIONS[i % 5], text, i % 7 > 0) for i, text in enumerate(texts)]
    liked = np.stack([r.measures[:4] for r in replies]).sum(axis=1) + rng.normal(size=1000)
    stars = np.clip(np.round(3 + liked - liked.mean()), 1, 5)
    ratings = [RatedFeatures(reply, str(int(s))) for reply, s in zip(replies, stars, strict=True)]
    fitted = TasteModel.fit(ratings)
    fit = [t / 1e3 for t in _time_calls(lambda i: TasteModel.fit(ratings), 50)]
    predict = [t / 8e3 for t in _time_calls(lambda i: fitted.predict(replies[i : i + 8]), 900)]
    read = [t / 1e3 for t in _time_calls(lambda i: taste_features.features_of("Why?", texts[i], True), 1000)]
    size = statistics.mean(len(reply.data) for reply in replies)
    note = f"{statistics.mean(len(text.split()) for text in texts):.0f} words; {size:.0f} bytes are stored"
    return [
        _median("taste: fitted to 1,000 ratings, median", fit, "ms", 20, "when asked, not at the key"),
        _median("taste: a reply predicted, of 8 at once, median", predict, "ms", 1),
        _median("taste: features of a reply, median", read, "ms", note=note),
    ]


def _time_calls(work: Callable[[int], Any], times: int = 2000) -> list[float]:
    """Call `work` with 0, 1, ..., and return the microseconds of each call."""
    found = []
    for i in range(times):
        started = time.perf_counter()
        work(i)
        found.append(1e6 * (time.perf_counter() - started))
    return found


def _median(
    name: str, values: Sequence[float], unit: str, target: float | None = None, note: str = ""
) -> Row:
    """Return a row of measured values. The samples of the row are the medians of consecutive parts of the
    measured values."""
    parts = np.array_split(np.asarray(values), min(GROUPS, len(values)))
    samples = [float(np.median(part)) for part in parts]
    return median_row(name, samples, unit, target, note=note, better="lower")


def _single(name: str, value: float, unit: str, note: str = "") -> Row:
    return Row(name, round_digits(value), unit, note=note, better="lower")


def _unit(x: np.ndarray) -> np.ndarray:
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)
