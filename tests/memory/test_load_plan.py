"""What a model needs, said before its weights are read; and how progress reads."""

import ctypes
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.backends.select import Choice
from ruvmlx.engine import GenerationRequest
from ruvmlx.errors import Interrupted, UsageError
from ruvmlx.memory import load_plan as planning
from ruvmlx.memory.draft_plan import open_draft_model
from ruvmlx.memory.load_plan import Fit, MachineMemory, Need, NotEnoughMemory, Plan
from ruvmlx.models.config.header_facts import Facts
from ruvmlx.models.find import local
from ruvmlx.models.load import load_model
from ruvmlx.models.weights.load_progress import watched_weights
from ruvmlx.progress import QUIET, Count, Progress, Told, Watch, Worker, duration, parameters
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from tests.models.make_models import make_safetensors_model

NATIVE = Choice("native", "cpu", "native avx2, 2 threads", "MLX finds no GPU")
METAL = Choice("mlx", "metal", "metal", "MLX finds Metal")


@pytest.fixture
def facts(tiny):
    return Facts.of(tiny)


def memory_of(monkeypatch, total, available):
    monkeypatch.setattr(planning.cpu, "total_memory", lambda: total)
    monkeypatch.setattr(planning.cpu, "available_memory", lambda: available)


def test_need_counts_weights_context_and_program(facts):
    """Weights as they are held, keys and values of the context, and the program."""
    need = Need.of(facts, NATIVE)
    c = facts.shape
    assert need.weights == facts.bytes
    assert need.cache == 2 * 2 * c.n_layers * c.n_kv_heads * c.head_dim * c.max_context
    assert Need.of(facts, Choice("reference", "cpu", "numpy", "")).weights == 4 * facts.parameters
    assert need.total == need.weights + need.cache + need.work


def test_a_rank_holds_its_share(facts):
    """Half of the layers and of the keys and values; but the embedding and the head whole."""
    many = Choice("mlx", "metal", "metal, over 2 machines", "", ranks=2)
    need, whole, c = Need.of(facts, many), Need.of(facts, METAL), facts.shape
    tables = 2 * c.vocab_size * c.hidden_size * facts.bytes / facts.parameters
    assert need.weights == pytest.approx((whole.weights - tables) / 2 + tables, rel=0.01)
    assert need.cache == whole.cache / 2 and Fit.of(facts, many).kv_per_token == planning.token_bytes(c) / 2


def test_the_starter_models_estimate_is_not_below_what_was_seen(starter):
    """365 MB at most, on the first opening, with a short chat (native backend)."""
    assert 365e6 < Need.of(Facts.of(starter), NATIVE).total < 600e6


def test_a_model_that_does_not_fit_is_refused_before_loading(monkeypatch, tiny_folder, tiny):
    """One line with what would fit; no weight is read."""
    memory_of(monkeypatch, 8e9, 1000)
    monkeypatch.setattr(local, "list_local_models", lambda: [])

    def read(self):
        raise AssertionError("weights were read")

    monkeypatch.setattr("ruvmlx.models.weights.safetensors_model.FolderWeights.__getitem__", read)
    told = []

    class PlanWatch(Watch):
        def note_plan(self, plan):
            told.append(plan)

    with pytest.raises(NotEnoughMemory, match=r"needs about 1\d\d MB.*8\.0 GB are free.*close other") as e:
        Runtime.open(Settings(model=str(tiny_folder), backend="reference"), watch=PlanWatch())
    assert "\n" not in str(e.value) and not told[0].fits


@pytest.mark.parametrize(
    ("free", "limit", "refused"),
    [(300, 0, ""), (230, 0, "room for 196 MB"), (4000, 300, ""), (4000, 225, "memory_limit is 236 MB")],
)
def test_a_draft_model_fits_beside_weights_that_were_read(monkeypatch, tmp_path, free, limit, refused):
    """Free memory does not include the large model's weights: they count once. So does the program."""
    monkeypatch.setattr(local, "readable_models", lambda: [])
    heads = {"n_heads": 8, "n_kv_heads": 8, "head_dim": 128, "max_context": 4096}  # a cache of 34 MB
    folder = str(make_safetensors_model(tmp_path / "m", **heads))
    large = load_model(folder)
    backend, plan = NativeBackend(large, threads=1), Plan.of(Facts.of(large), NATIVE, "m")
    memory_of(monkeypatch, 8e9, free << 20)
    settings = Settings(model=folder, draft_model=folder, backend="native", memory_limit=limit or None)
    if not refused:
        assert open_draft_model(settings, large, backend, plan, QUIET)
        return
    with pytest.raises(NotEnoughMemory, match=refused):
        open_draft_model(settings, large, backend, plan, QUIET)


def test_the_longest_context_that_fits(monkeypatch, facts):
    """Weights and learning first; the rest of the memory is the cache's, up to what the model reads."""
    per_token = 2 * 2 * facts.shape.n_layers * facts.shape.n_kv_heads * facts.shape.head_dim
    need = Need.of(facts, NATIVE)
    for room, expected in ((100, 100), (10**6, facts.shape.max_context), (0, 0), (-5, 0)):
        available = (need.weights + need.work + (room + 0.5) * per_token) / planning.cpu.SPARE
        memory_of(monkeypatch, 64e9, available)
        fit = Fit.of(facts, NATIVE)
        assert (fit.longest_context, fit.fits) == (expected, expected > 0) and fit.kv_per_token == per_token
        assert ("does not fit" in fit.words()) == (expected == 0)
        assert ("limit of the model" in fit.words()) == (expected == facts.shape.max_context)
        assert ("limit of this machine's memory" in fit.words()) == (expected == 100)


def test_a_window_bounds_the_cache_and_not_the_context(monkeypatch, facts):
    shape = replace(facts.shape, sliding_window=64, max_context=100_000)
    slides = replace(facts, shape=shape)
    need = Need.of(slides, NATIVE)
    memory_of(monkeypatch, 64e9, (need.total + 10) / planning.cpu.SPARE)
    assert Fit.of(slides, NATIVE).longest_context == 100_000
    assert need.cache == Need.of(slides, NATIVE, 50_000).cache


def test_the_nearest_context_that_fits_is_proposed_and_then_opens(monkeypatch, tiny_folder, facts):
    need = Need.of(facts, Choice("reference", "cpu", "numpy", ""))
    per_token = need.cache / facts.shape.max_context
    memory_of(monkeypatch, 64e9, (need.weights + need.work + 300 * per_token) / planning.cpu.SPARE)
    monkeypatch.setattr(local, "readable_models", lambda: [])
    settings = Settings(model=str(tiny_folder), backend="reference", kv_disk=0)
    with pytest.raises(NotEnoughMemory, match="With --max-context 256 it fits"):
        Runtime.open(settings)
    with Runtime.open(replace(settings, max_context=256)) as runtime:
        assert runtime.model.context == 256 and runtime.model.shape.max_context == 512
        with pytest.raises(UsageError, match="at most 255"):
            runtime.writer.prepare_request(GenerationRequest(prompt="a" * 300))


def test_what_would_fit_is_named(monkeypatch, facts, starter_file):
    """The larger ones of those that are here."""
    memory_of(monkeypatch, 2e9, 1e9)
    huge = Facts("huge", facts.path, "safetensors", facts.shape, 7_000_000_000, 4_000_000_000)
    monkeypatch.setenv("HF_HUB_CACHE", "/nowhere")
    with pytest.raises(NotEnoughMemory, match=r"huge needs about 4\.2 GB.*These fit: starter \(4\d\d MB\)"):
        Plan.of(huge, NATIVE, "huge").check()


def test_macos_makes_room_by_itself(monkeypatch, facts):
    """There the GPU's share of the whole is the limit; what others hold is only said."""
    memory_of(monkeypatch, 16e9, 1e9)
    seven = Facts("seven", facts.path, "safetensors", facts.shape, 7_000_000_000, 4_000_000_000)
    made = Plan.of(seven, METAL, None)
    assert made.fits and "other programs will have to give way" in dict(made.rows())["memory"]
    assert not Plan.of(seven, NATIVE, None).fits


def test_room_that_is_made_counts(monkeypatch, facts):
    """What was freed between the plan and the check is looked at again."""
    memory_of(monkeypatch, 8e9, 1000)
    made = Plan.of(facts, NATIVE, None)
    with pytest.raises(NotEnoughMemory):
        made.check()
    made.check(held=10**9)
    memory_of(monkeypatch, 8e9, 7e9)
    made.check()


def test_rows_say_what_will_be_used_and_why(monkeypatch, facts, home):
    memory_of(monkeypatch, 16e9, 8e9)
    fetched = Facts("owner/name", facts.path, "safetensors", facts.shape, 1000, 562, 400)
    rows = dict(Plan.of(fetched, METAL, None).rows())
    assert "no other was chosen" in rows["model"] and "4.5 bits" in rows["size"]
    assert "400 B are to be fetched from Hugging Face" in rows["size"] and rows["your data"] == str(home)
    assert rows["runs on"] == "mlx on metal: MLX finds Metal" and "8.0 GB of 16.0 GB" in rows["memory"]
    assert dict(Plan.of(fetched, METAL, "owner/name").rows())["model"] == "owner/name"


@pytest.mark.parametrize(("total", "lent"), [(16, 10.67), (32, 21.33), (36, 27), (64, 48), (96, 72)])
def test_a_mac_lends_models_what_metal_recommends(monkeypatch, total, lent):
    """In GiB: recommendedMaxWorkingSetSize, as llama.cpp's users saw it."""
    memory_of(monkeypatch, total << 30, total << 29)
    monkeypatch.setattr(planning.cpu, "_darwin_number", lambda name, otherwise: otherwise)
    assert MachineMemory.now(METAL).limit / (1 << 30) == pytest.approx(lent, abs=0.01)


def test_a_mac_lends_models_what_its_user_chose(monkeypatch):
    """The user has run `sudo sysctl iogpu.wired_limit_mb=14336`. The backend proposes this command."""

    def sysctlbyname(name, value, size, *_):
        assert name == b"iogpu.wired_limit_mb" and size._obj.value == 8
        value._obj.value = 14336
        return 0

    memory_of(monkeypatch, 16 << 30, 8 << 30)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(sysctlbyname=sysctlbyname))
    assert MachineMemory.now(METAL).limit == 14 << 30


def test_available_memory_is_of_this_machine():
    """Less than there is, more than nothing."""
    from ruvmlx.platform import cpu

    assert 0 < cpu.available_memory() <= 2 * cpu.total_memory()
    assert MachineMemory.now(NATIVE).limit < MachineMemory.now(NATIVE).total * 2


# Progress ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("progress", "line"),
    [
        (Progress("Asking"), "Asking…"),
        (Progress("Loading m", 45_000_000, 97_000_000), "Loading m: 45 MB of 97 MB"),
        (
            Progress("Fetching m", 1_200_000_000, 4_100_000_000, 34e6),
            "Fetching m: 1.2 GB of 4.1 GB, 34 MB/s, 1 min 25 s left",
        ),
        (Progress("Reading", 6, 32, 2.0, "texts"), "Reading: 6 of 32 texts, 13 s left"),
        (Progress("Loading m", 97, 97, 5.0), "Loading m: 97 B of 97 B, 5 B/s"),
    ],
)
def test_lines_of_progress(progress, line):
    assert progress.line == line


def test_words_for_numbers():
    assert [duration(s) for s in (8, 60, 200, 3600, 7500)] == [
        "8 s",
        "1 min",
        "3 min 20 s",
        "1 h 0 min",
        "2 h 5 min",
    ]
    assert [parameters(n) for n in (92_000, 1.5e6, 134_515_008, 7.2e9)] == [
        "92 k",
        "1.5 M",
        "135 M",
        "7.2 B",
    ]


def test_the_rate_is_that_of_the_last_seconds(monkeypatch):
    """Over the last seconds alone: what was slow long ago does not count."""
    now = [100.0]
    monkeypatch.setattr("ruvmlx.progress.time.monotonic", lambda: now[0])
    count = Count("x", 1000)
    for step in (1, 1, 1, 1, 1, 1, 100, 100, 100, 100, 100, 100):
        now[0] += 1
        count.add(step)
        last = count.now()
    assert last.rate == 100 and last.done == 606 and last.seconds_left == pytest.approx(3.94)


def test_loading_is_told_and_ends_at_the_whole(tiny, monkeypatch):
    """Bytes of the weights, once each, whatever is looked at twice."""
    monkeypatch.setattr("ruvmlx.progress.TICK", 0.0)
    told = []

    class Listens(Watch):
        def progress(self, progress):
            told.append(progress)

    weights = watched_weights(tiny, Listens())
    for name in [*weights, *weights]:
        assert len(weights[name])
    done = [progress.done for progress in told]
    assert done[0] == 0 and done == sorted(done) and told[-1].total == tiny.bytes
    assert done[len(weights)] == done[-1] == pytest.approx(tiny.bytes, rel=0.001)


def test_an_opening_can_be_left(tiny_folder, home):
    """Whatever is being done: the store is closed again, and the next opening works."""

    class Leaves(Watch):
        def __init__(self, at):
            self.at = at

        def progress(self, progress):
            if progress.what.startswith(self.at):
                raise Interrupted("left")

    with pytest.raises(Interrupted):
        Runtime.open(Settings(model=str(tiny_folder), backend="reference"), watch=Leaves("Loading"))
    Runtime.open(Settings(model=str(tiny_folder), backend="reference")).close()


def test_a_worker_is_left_alone():
    """Whoever leaves does not wait; the work ends at its next count."""
    worker, ended = Worker("x"), []

    def work():
        try:
            while True:
                worker.add(1)
                time.sleep(0.001)
        finally:
            ended.append(worker.done)

    class Leaves(Watch):
        def progress(self, progress):
            if progress.done > 50:
                raise Interrupted("enough")

    with pytest.raises(Interrupted):
        worker.attend(work, Leaves())
    deadline = time.monotonic() + 10
    while not ended:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert Told(Watch(), "y", 3).now().total == 3
