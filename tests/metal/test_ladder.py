"""The whole GPU path on a simulated GPU, and what is left of it when something there is broken.

Our kernels, else MLX's own attention with a plain KV cache, else the native decoder: the reply is right, one
line says so, and `doctor` names what failed.
"""

import functools
import gc
import io
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
from ruvmlx.apps.chat.options import ChatOptions
from ruvmlx.apps.chat.plain import PlainChat
from ruvmlx.apps.cli import cli
from ruvmlx.apps.cli.output import run_plainly

from ruvmlx.backends.mlx import any_backend, gpu_check
from ruvmlx.backends.mlx.backend import MLXBackend
from ruvmlx.backends.mlx.check_results import GRAPH, Shapes
from ruvmlx.backends.mlx.gpu_memory import LEAST_SPARE, GPULimits, GPUMemory
from ruvmlx.backends.mlx.kernels import selfcheck, source
from ruvmlx.backends.select import open_backend
from ruvmlx.engine import Sampling
from ruvmlx.errors import GPUFailed
from ruvmlx.kv.policy import TierPolicy
from ruvmlx.models.load import load_model
from ruvmlx.platform.gpu import GPU, gpu
from ruvmlx.platform.mx import mx
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings, store_file
from ruvmlx.store import Store
from tests.backends.test_wired import Metal
from tests.models.make_models import make_safetensors_model
from tests.models.other_models import make_other_model

from .simulated_gpu import HANGS, MODES, SimulatedGPU

CASES = {  # kernel -> the cases that run it
    "append": ["append"],
    "rope_append": ["rope_append"],
    "demote": ["demote_warm", "demote_cold"],
    "attend_decode": ["attend_decode", "attend_decode_256"],
    "attend_merge": ["attend_decode", "attend_decode_256"],
    "gather": ["gather"],
}
NAMES = {GRAPH, *(name for names in CASES.values() for name in names)}
SOUND_NORM = mx.fast.rms_norm
SHAPES = Shapes(64, 4, 2, "float16")
WITH_ALIBI = Shapes(64, 4, 2, "float16", alibi=True)
QUESTION = "Why is the sky blue in the day, and red in the evening? " * 6  # some 350 tokens: all three tiers
TIERS = "64,128"


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    return tmp_path_factory.mktemp("simulated")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny random model whose heads have a size that the kernels are made for."""
    made = tmp_path_factory.mktemp("heads64") / "heads64"
    return make_safetensors_model(made, head_dim=64, n_heads=4, n_kv_heads=2, max_context=1024)


@pytest.fixture
def machine(compiled, monkeypatch):
    """machine(append="nan"): this is a machine with a GPU, on which that kernel is broken."""

    def install(**broken: str) -> SimulatedGPU:
        monkeypatch.setattr(gpu, "given_up", False)
        (compiled / HANGS).unlink(missing_ok=True)
        made = SimulatedGPU(compiled, broken)
        made.install(monkeypatch)
        return made

    return install


@pytest.fixture(scope="session")
def plain_tokens(folder, compiled, tmp_path_factory):
    """The reply of mlx-lm's own path on the simulated GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUVMLX_HOME", str(tmp_path_factory.mktemp("plain")))
        SimulatedGPU(compiled).install(patch)
        patch.setattr(gpu_check, "check", lambda *_, **__: pytest.fail("not wanted here"))
        return unchecked_chat(folder, kv="f16")


def chat(folder, **options) -> tuple[list[int], str, Runtime]:
    """-> (token ids of the reply, what stdout and stderr had, the runtime, closed)"""
    with Runtime.open(settings(folder, **options)) as runtime:
        return *reply_of(runtime), runtime


def unchecked_chat(folder, **options) -> list[int]:
    """The reply of a backend that was opened on the GPU without a self-check."""
    model = load_model(str(folder))
    backend = MLXBackend(model, "metal")
    with Runtime(Store(store_file()), model, backend, settings(folder, **options)) as runtime:
        return reply_of(runtime)[0]


def settings(folder, **options) -> Settings:
    given = {"backend": "auto", "adapter": "none", "temperature": 0.0, "kv_tiers": TIERS, "kv_disk": None}
    return Settings(model=str(folder), **given | options)


def reply_of(runtime) -> tuple[list[int], str]:
    """-> (token ids of the reply to QUESTION, what was written)"""
    written = io.StringIO()
    options = ChatOptions(sampling=Sampling(temperature=0.0), max_new_tokens=12)
    PlainChat(runtime, options, io.StringIO(f"{QUESTION}\n"), written).run()
    reply = runtime.store.replies.get(runtime.writer.last_reply_id)
    return list(reply.sampled_ids), written.getvalue()


def doctor(folder, monkeypatch, capsys) -> dict:
    """The row about the kernels."""
    monkeypatch.setenv("RUVMLX_MODEL", str(folder))
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["ruvmlx", "doctor", "--json"])
    run_plainly(cli)
    rows = json.loads(capsys.readouterr().out)["checks"]
    return next(row for row in rows if row["name"] == "GPU kernels")


# All is well --------------------------------------------------------------------------------------


def test_the_whole_path_with_sound_kernels(machine, folder, capsys, monkeypatch):
    """Every kernel runs, in all three tiers; the tokens are the twins'; nothing is said."""
    device = machine()
    tokens, _, runtime = chat(folder)
    assert set(CASES) <= set(device.ran)
    assert (runtime.backend.name, runtime.backend.kernels) == ("mlx", "metal")
    assert "Note" not in capsys.readouterr().err
    row = doctor(folder, monkeypatch, capsys)
    assert row["ok"] and all(f"{name} ok" in row["detail"] for name in NAMES)

    monkeypatch.setattr(source, "HEAD_DIMS", ())  # the twins from here
    device.ran.clear()
    assert unchecked_chat(folder) == tokens
    assert not device.ran


def test_logits_are_the_twins(machine, folder, monkeypatch):
    """Over 300 tokens in three tiers, token by token at the end."""
    machine()
    model = load_model(str(folder))
    backend, policy = open_backend("auto", model), TierPolicy("tiered", (64, 128))
    tokens = np.random.default_rng(2).integers(3, 300, 310).tolist()

    def logits() -> list[np.ndarray]:
        cache = backend.new_cache(policy)
        first = backend.prefill(tokens[:300], cache).logits
        assert all(cache.stats().tokens[:2])
        return [first, *(backend.decode(token, cache).logits for token in tokens[300:])]

    ours = logits()
    monkeypatch.setattr(source, "HEAD_DIMS", ())
    np.testing.assert_allclose(ours, logits(), atol=0.02)


# The check itself ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shapes", [SHAPES, Shapes(80, 3, 1, "bfloat16"), Shapes(128, 8, 1, "float32"), WITH_ALIBI], ids=str
)
def test_sound_kernels_pass(machine, shapes):
    """The kernel with slopes is checked for models with ALiBi, and for no others."""
    device = machine()
    results = {case.name: selfcheck.run_case(case) for case in selfcheck.cases(shapes)}
    assert set(results) == NAMES
    assert all(r.ok and not r.why for r in results.values()), results
    assert ("attend_decode_alibi" in device.ran, "attend_decode" in device.ran) == (
        shapes.alibi,
        not shapes.alibi,
    )


def test_a_broken_kernel_with_slopes_fails_its_case(machine):
    machine(attend_decode_alibi="wrong")
    failed = [r.name for r in map(selfcheck.run_case, selfcheck.cases(WITH_ALIBI)) if not r.ok]
    assert failed and set(failed) <= set(CASES["attend_decode"])


@pytest.mark.parametrize("mode", ["raise", "wrong", "nan", "slow"])
@pytest.mark.parametrize("kernel", CASES)
def test_a_broken_kernel_fails_its_case(machine, kernel, mode):
    """And no other's."""
    machine(**{kernel: mode})
    failed = [r for r in map(selfcheck.run_case, selfcheck.cases(SHAPES)) if not r.ok]
    # The second case of attention has one or two parts, whose merging tells less, and its time is only told.
    assert failed[0].name == CASES[kernel][0] and {r.name for r in failed} <= set(CASES[kernel])
    said = {"raise": "program scope variable", "wrong": "wrong", "nan": "NaN", "slow": "times as long"}
    assert said[mode] in failed[0].why
    assert "\n" not in failed[0].why


def test_one_number_off_is_seen():
    """A single wrong number fails a case without a step; with one, a few may be a rounding apart."""
    want = np.linspace(-1, 1, 5000, dtype=np.float32)
    exact = selfcheck.Case("x", list, list, 1e-3)
    coded = selfcheck.Case("x", list, list, 1e-3, step=0.1)
    off = want.copy()
    assert selfcheck.difference([off], [want], exact) == ""
    off[7] += 0.05
    assert "1 of 5000" in selfcheck.difference([off], [want], exact)
    assert selfcheck.difference([off], [want], coded) == ""
    off[8:20] += 0.05
    assert "13 of 5000" in selfcheck.difference([off], [want], coded)
    one = want.copy()
    one[7] += 0.5
    assert selfcheck.difference([one], [want], coded)
    assert "instead of" in selfcheck.difference([want[:-1]], [want], exact)


# Something is broken ------------------------------------------------------------------------------


def _some(kernel: str, mode: str) -> bool:
    """Each kernel once, and each way once: the whole table takes a minute and a half, with --full."""
    return list(CASES).index(kernel) == MODES.index(mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kernel", CASES)
def test_a_chat_without_the_kernels(
    machine, folder, plain_tokens, kernel, mode, full, monkeypatch, capsys, compiled
):
    """The reply is the plain cache's, one line tells, `doctor` names the kernel, none of ours ran here."""
    if not (full or _some(kernel, mode)):
        pytest.skip("the whole table runs with --full")
    device = machine(**{kernel: mode})
    if mode == "hang":
        _impatient(monkeypatch, compiled)
    row = doctor(folder, monkeypatch, capsys)
    assert not row["ok"] and f"{CASES[kernel][0]}: " in row["detail"]

    tokens, written, runtime = chat(folder)
    assert tokens == plain_tokens
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("Note: Our GPU kernels are not used")
    assert CASES[kernel][0] in err and "Note" not in written and "Traceback" not in err + written
    assert (runtime.backend.name, runtime.backend.kernels) == ("mlx", "metal, plain KV cache")
    assert not device.ran


def _impatient(monkeypatch, compiled) -> None:
    """The time limit is over as soon as something hangs."""
    late = lambda: time.monotonic() + 1000 * (compiled / HANGS).exists()  # noqa: E731
    monkeypatch.setattr(gpu_check, "time", SimpleNamespace(monotonic=late))


def test_a_kernel_that_breaks_after_the_check(machine, folder, plain_tokens, capsys):
    """The child found all sound; in this process a kernel raises when it is warmed up."""
    device = machine()
    device.broken["demote"] = "raise"
    tokens, _, runtime = chat(folder)
    assert tokens == plain_tokens and runtime.backend.kernels == "metal, plain KV cache"
    assert capsys.readouterr().err.count("Note: ") == 1


def test_a_graph_that_fails_in_the_check(machine, folder, capsys, monkeypatch):
    """auto: the native decoder, with one line. mlx: one line that says what to do."""
    machine(**{GRAPH: "raise"})
    tokens, _, runtime = chat(folder)
    assert runtime.backend.name == "native" and len(tokens) == 12
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "MLX cannot compute on this machine's GPU (program_source" in err
    assert gpu.kind == ""  # nobody else in this process tries it, training least of all

    monkeypatch.setattr(gpu, "given_up", False)
    with pytest.raises(GPUFailed, match="--backend native") as failed:
        chat(folder, backend="mlx")
    assert "\n" not in str(failed.value)
    row = doctor(folder, monkeypatch, capsys)
    assert not row["ok"] and row["detail"].startswith("mlx: program_source")


@pytest.mark.parametrize("mode", ["abort", "hang"])
def test_a_graph_that_kills_or_hangs_the_check(machine, folder, capsys, monkeypatch, compiled, mode):
    """Then it is not tried in the user's own process."""
    sound = mx.fast.rms_norm
    machine(**{GRAPH: mode})
    monkeypatch.setattr(mx.fast, "rms_norm", sound)  # here: so that only the verdict can keep it off the GPU
    if mode == "hang":
        _impatient(monkeypatch, compiled)
    _, _, runtime = chat(folder)
    assert runtime.backend.name == "native"
    assert {"abort": "SIGABRT", "hang": "did not end"}[mode] in capsys.readouterr().err


def test_a_graph_that_fails_only_here(machine, folder, capsys, monkeypatch):
    """The check was good, but this model's first evaluation raises."""
    machine()

    def fails(*_):
        raise RuntimeError("[malloc] Unable to allocate 123 bytes.")

    monkeypatch.setattr(mx.fast, "rms_norm", fails)
    _, _, runtime = chat(folder)
    assert runtime.backend.name == "native" and "123 bytes" in runtime.backend.caveat
    monkeypatch.setattr(gpu, "given_up", False)
    with pytest.raises(GPUFailed, match="123 bytes"):
        chat(folder, backend="mlx")


def test_without_the_native_library(machine, folder, monkeypatch):
    """The last rung is MLX on the CPU."""
    from ruvmlx.backends.native import backend as native
    from ruvmlx.kernels.library import LibraryError

    def missing(*_):
        raise LibraryError("librvm.so is not installed")

    machine(**{GRAPH: "raise"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "NativeBackend", missing)
        backend = open_backend("auto", load_model(str(folder)))
    assert (backend.name, backend.kernels[:4]) == (
        "mlx",
        "cpu+",
    ) and "replies come from the CPU" in backend.caveat


def test_heads_that_no_kernel_is_made_for(machine, tmp_path, capsys, monkeypatch):
    """The plain cache, not slow twins; it is nobody's fault, so the chat says nothing."""
    device = machine()
    folder = make_safetensors_model(tmp_path / "m", head_dim=32)
    _, _, runtime = chat(folder, kv_tiers=None)
    assert runtime.backend.kernels == "metal, plain KV cache" and not device.ran
    assert capsys.readouterr().err == ""
    assert "no kernel of ours for this head size" in doctor(folder, monkeypatch, capsys)["detail"]


def test_doctor_without_a_gpu(folder, monkeypatch, capsys):
    monkeypatch.setattr(GPU, "kind", property(lambda _: ""))
    row = doctor(folder, monkeypatch, capsys)
    assert row["ok"] and row["detail"] == "no GPU: kernels not checked here"


def test_generate_says_what_ran(machine, folder, monkeypatch, capsys):
    """`kernels` in --json; the line is on stderr."""
    machine(attend_decode="nan")
    argv = ["ruvmlx", "generate", "hello", "--json", "--model", str(folder), "--adapter", "none"]
    monkeypatch.setattr("sys.argv", [*argv, "--max-tokens", "3"])
    assert run_plainly(cli) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["kernels"] == "metal, plain KV cache"
    assert json.loads(out)["kv"]["policy"] == "f16"
    assert err.count("\n") == 1 and err.startswith("note: Our GPU kernels")


# Models that only mlx-lm runs -----------------------------------------------------------------------


@pytest.fixture
def mixtral(tmp_path):
    """Its context has room for QUESTION."""
    made = make_other_model(tmp_path / "mixtral", "mixtral")
    data = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(data | {"max_position_embeddings": 1024}))
    return made


def test_mlx_lms_model_on_a_sound_gpu(machine, mixtral, capsys):
    """Its memory is wired while it is open, like that of the models that are ours."""
    machine()
    tokens, _, runtime = chat(mixtral)
    assert len(tokens) == 12 and runtime.backend.kernels == "metal, mlx-lm"
    assert runtime.backend.gpu_memory is not None and runtime.backend.gpu_memory.why_not == ""
    assert "GPU" not in capsys.readouterr().err


def test_memory_that_mlx_lms_model_cannot_wire(machine, mixtral, monkeypatch):
    """Set for its life, restored afterwards; what cannot be set is said in the one line."""
    machine()
    metal = Metal(8 << 30, old_macos=True)
    monkeypatch.setattr(any_backend, "GPUMemory", functools.partial(GPUMemory, limits=GPULimits(metal)))
    backend = open_backend("auto", load_model(str(mixtral)))
    assert "paged out" in backend.caveat and "mixtral" in backend.caveat and "\n" not in backend.caveat
    assert metal.limits["cache"] == LEAST_SPARE
    del backend
    gc.collect()
    assert metal.limits["cache"] == 1 << 40


def test_mlx_lms_model_where_the_check_of_the_gpu_fails(machine, mixtral, capsys, monkeypatch):
    """auto: MLX on the CPU, with one line. mlx: one line that says what to do."""
    machine(**{GRAPH: "abort"})
    monkeypatch.setattr(mx.fast, "rms_norm", SOUND_NORM)  # only the verdict can keep it off the GPU
    tokens, _, runtime = chat(mixtral)
    assert len(tokens) == 12 and runtime.backend.kernels.startswith("cpu+")
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "MLX cannot compute on this machine's GPU (the process died" in err
    assert "mixtral models run on mlx-lm's own code" in err and gpu.kind == ""

    monkeypatch.setattr(gpu, "given_up", False)
    with pytest.raises(GPUFailed, match="--backend auto") as failed:
        chat(mixtral, backend="mlx")
    assert "\n" not in str(failed.value)


def test_mlx_lms_model_that_fails_only_here(machine, mixtral, monkeypatch):
    """The check was good, but this model's first evaluation on the GPU raises."""
    machine()

    def fails(*arguments):
        if gpu.kind == "metal":
            raise RuntimeError("[malloc] Unable to allocate 123 bytes.")
        return SOUND_NORM(*arguments)

    monkeypatch.setattr(mx.fast, "rms_norm", fails)
    tokens, _, runtime = chat(mixtral)
    assert len(tokens) == 12 and runtime.backend.kernels.startswith("cpu+")
    assert "123 bytes" in runtime.backend.caveat
    monkeypatch.setattr(gpu, "given_up", False)
    with pytest.raises(GPUFailed, match="123 bytes"):
        chat(mixtral, backend="mlx")
