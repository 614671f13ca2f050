"""mlx-lm's graphs load without mlx-lm's start-up, and mlx-lm itself still works afterwards."""

import json
import subprocess
import sys
import threading

import pytest

from ruvmlx.backends.select import open_backend
from ruvmlx.models.load import load_model
from ruvmlx.platform.mx import mx
from tests.models.other_models import make_other_model


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_mlx_backend_does_not_import_transformers():
    """Our MLX backend imports neither transformers nor mlx-lm's own __init__."""
    found = "print({'transformers', 'mlx_lm.generate'} & set(sys.modules))"
    assert run(f"import sys, ruvmlx.backends.mlx.backend; {found}") == "set()"


def test_mlx_lm_works_afterwards():
    """`import mlx_lm`, its names and its submodules as attributes, with the very classes that we use."""
    code = """
import ruvmlx.backends.mlx.graph as ours
import mlx_lm
assert callable(mlx_lm.load) and mlx_lm.__version__
from mlx_lm import stream_generate
import mlx_lm.models.cache
assert mlx_lm.models.llama.Model is ours._llama.Model
assert mlx_lm.models.cache.KVCache
import mlx_lm.tuner.lora
print("ok")
"""
    assert run(code) == "ok"


def test_mlx_lm_imported_first():
    """Whoever imported mlx-lm before us keeps it."""
    assert (
        run("import mlx_lm, ruvmlx.backends.mlx.graph as g; print(g._llama is mlx_lm.models.llama)") == "True"
    )


def test_other_models_are_loaded_without_transformers(tmp_path):
    """By mlx-lm's own loader, which finds the model's module under another name; the plain import of that
    loader still works afterwards."""
    folder = make_other_model(tmp_path / "m", "mamba")
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data | {"model_type": "falcon_mamba"}))
    code = f"""
import sys
from ruvmlx.backends.select import open_backend
from ruvmlx.models.load import load_model
backend = open_backend("auto", load_model({str(folder)!r}))
print(backend.prefill([1, 2], backend.new_cache()).logits.shape)
print({{"transformers", "huggingface_hub"}} & set(sys.modules))
from mlx_lm.utils import load, load_model
print(load_model.__module__, callable(load))
"""
    assert run(code).splitlines() == ["(320,)", "set()", "mlx_lm.utils True"]


def test_a_loader_that_needs_more_is_imported_whole():
    """Another version of mlx-lm might use at once what loading did without until now."""
    code = """
import sys
from ruvmlx.platform import mlxlm
mlxlm._NOT_FOR_LOADING["mlx.utils"] = ()
assert mlxlm.utils() is sys.modules["mlx_lm.utils"]
print(callable(mlxlm.utils().load_model))
"""
    assert run(code) == "True"


@pytest.mark.parametrize("kind", ["ours", "mamba"])
def test_a_thread_that_builds_a_graph_gets_no_random_state(tiny, tmp_path, monkeypatch, kind):
    """MLX frees a thread's random state after Python has forgotten the thread; a process that ends meanwhile
    was ended by SIGABRT. MLX makes no state for a draw with a key."""
    model = tiny if kind == "ours" else load_model(str(make_other_model(tmp_path / "m", kind)))
    keys = []

    def note(draw):
        return lambda *args, **options: keys.append(options.get("key")) or draw(*args, **options)

    for name in ("uniform", "normal"):
        monkeypatch.setattr(mx.random, name, note(getattr(mx.random, name)))
    noting = mx.random.uniform, mx.random.normal
    thread = threading.Thread(target=open_backend, args=("mlx", model))
    thread.start()
    thread.join()
    assert keys and all(key is not None for key in keys)
    assert (mx.random.uniform, mx.random.normal) == noting
