"""mlx-lm's graphs load without mlx-lm's start-up, and mlx-lm itself still works afterwards."""

import subprocess
import sys


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
