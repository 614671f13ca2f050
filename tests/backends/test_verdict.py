"""The self-check's verdict: what it depends on, how it is kept, and the child that makes it.

No GPU here, simulated or other: tests/metal/test_ladder.py has the whole path.
"""

import contextlib
import json
import os
import subprocess
import sys
import time

import pytest

from ruvmlx.backends.mlx import check_results, gpu_check, verdict
from ruvmlx.backends.mlx.check_results import GRAPH, SKIPPED, CheckResult, KernelVerdict, Shapes
from ruvmlx.backends.mlx.gpu_check import check
from ruvmlx.backends.mlx.kernels import source
from ruvmlx.errors import Interrupted
from ruvmlx.platform.gpu import GPU
from ruvmlx.progress import Watch

SHAPES = Shapes(64, 4, 2, "float16")
SOUND = KernelVerdict((CheckResult(GRAPH, True), CheckResult("append", True, "", 0.5)), 1.5)
BROKEN = KernelVerdict((CheckResult(GRAPH, True), CheckResult("append", False, "gives NaN")), 1.5)


@pytest.fixture(autouse=True)
def facts(monkeypatch):
    """What the key is made of, to be changed by tests."""
    told = {"kind": "metal", "name": "Apple M1", "system": "macOS 15.5 24F74"}
    for name in told:
        monkeypatch.setattr(GPU, name, property(lambda _, n=name: told[n]))
    return told


@pytest.fixture
def asked(monkeypatch):
    """The check is SOUND, or what a test puts there; how often it ran."""
    calls = []

    def ask(shapes, watch):
        calls.append(shapes)
        return found[0]

    found = [SOUND]
    monkeypatch.setattr(gpu_check, "ask", ask)
    calls_and_found = type("Asked", (), {"calls": calls, "found": found})
    return calls_and_found


# Kept ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", [SOUND, BROKEN], ids=["sound", "broken"])
def test_a_verdict_is_made_once(asked, found, home):
    """The second time it is read, and equal; no other file is left behind."""
    asked.found[0] = found
    assert check(SHAPES) == found
    assert check(SHAPES) == found
    assert len(asked.calls) == 1
    assert [f.name for f in home.iterdir()] == ["gpu_check.json"]


def test_it_can_be_made_afresh(asked):
    """As `doctor` does; the new one counts from then on."""
    asked.found[0] = BROKEN
    check(SHAPES)
    asked.found[0] = SOUND
    assert check(SHAPES, fresh=True) == SOUND
    assert check(SHAPES) == SOUND
    assert len(asked.calls) == 2


@pytest.mark.parametrize("what", ["name", "system", "kind"])
def test_another_gpu_or_system_is_checked(asked, facts, what):
    check(SHAPES)
    facts[what] += "x"
    check(SHAPES)
    assert len(asked.calls) == 2


@pytest.mark.parametrize(
    "shapes",
    [
        Shapes(128, 4, 2, "float16"),
        Shapes(64, 8, 2, "float16"),
        Shapes(64, 4, 4, "float16"),
        Shapes(64, 4, 2, "bfloat16"),
        Shapes(64, 4, 2, "float16", alibi=True),
    ],
    ids=str,
)
def test_other_shapes_are_checked_and_both_are_kept(asked, shapes):
    for _ in range(2):
        check(SHAPES)
        check(shapes)
    assert asked.calls == [SHAPES, shapes]


@pytest.mark.parametrize("package", ["mlx", "mlx-lm"])
def test_another_mlx_is_checked(asked, monkeypatch, package):
    check(SHAPES)
    real = verdict.version
    monkeypatch.setattr(verdict, "version", lambda name: "9.9" if name == package else real(name))
    check(SHAPES)
    assert len(asked.calls) == 2


@pytest.mark.parametrize("file", ["append.metal", "attend.h"])
def test_changed_kernels_are_checked(asked, monkeypatch, tmp_path, file):
    """A space in a body or a header is enough."""
    copy = tmp_path / "bodies"
    copy.mkdir()
    for path in source.folder().iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(source, "folder", lambda: copy)
    check(SHAPES)
    check(SHAPES)
    assert len(asked.calls) == 1
    (copy / file).write_text((copy / file).read_text() + " ")
    check(SHAPES)
    assert len(asked.calls) == 2


def test_a_verdict_on_a_check_that_could_not_run_is_not_kept(asked):
    """It says nothing of the machine: the next start tries again."""
    asked.found[0] = KernelVerdict((CheckResult("the check", False, "could not be started"),), told=False)
    check(SHAPES)
    check(SHAPES)
    assert len(asked.calls) == 2


def test_only_the_newest_are_kept(asked):
    for heads in range(1, verdict.MAX_VERDICTS + 5):
        check(Shapes(64, heads, 1, "float16"))
    entries = json.loads(verdict.path().read_text())["verdicts"]
    assert [e["key"]["n_heads"] for e in entries] == list(range(5, verdict.MAX_VERDICTS + 5))


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: '{"format": 1}',
        lambda text: text.replace('"format": 1', '"format": 2'),
        lambda text: text.replace('"ok": true', '"ok": "yes"'),
        lambda text: text.replace('"ok"', '"okay"'),
        lambda text: text.replace('"seconds"', '"second"'),
        lambda text: '{"format": 1, "verdicts": [1, null, {"key": 3}]}',
        lambda text: "\x00\xff" * 40,
    ],
)
def test_a_damaged_file_costs_another_check_and_is_mended(asked, damage):
    check(SHAPES)
    verdict.path().write_text(damage(verdict.path().read_text()), encoding="latin-1")
    assert check(SHAPES) == SOUND
    assert check(SHAPES) == SOUND
    assert len(asked.calls) == 2


def test_a_folder_that_cannot_be_written(asked, home):
    """Each time it is checked; it works all the same. (A file is where the folder should be.)"""
    home.write_text("")
    assert check(SHAPES) == SOUND and check(SHAPES) == SOUND
    assert len(asked.calls) == 2


def test_a_write_that_fails_leaves_the_old_file(asked, monkeypatch, home):
    check(SHAPES)
    old = verdict.path().read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    check(Shapes(80, 4, 2, "float16"))
    assert verdict.path().read_bytes() == old and len(list(home.iterdir())) == 1


def test_the_gpu_s_own_facts(monkeypatch, tmp_path):
    """The build is read from where macOS writes it."""
    import plistlib

    from ruvmlx.platform import gpu

    file = tmp_path / "SystemVersion.plist"
    file.write_bytes(plistlib.dumps({"ProductBuildVersion": "24F74"}))
    monkeypatch.setattr(gpu, "_MACOS", file)
    monkeypatch.setattr(gpu.platform, "mac_ver", lambda: ("15.5", ("", "", ""), "arm64"))
    assert gpu._macos_build() == "macOS 15.5 24F74"
    file.write_bytes(b"bplist00 junk")
    assert gpu._macos_build() == "macOS 15.5"
    file.write_bytes(b"<plist><dict>")
    assert gpu._macos_build() == "macOS 15.5"
    assert gpu._driver_version()


# The child ----------------------------------------------------------------------------------------


def child(monkeypatch, code: str) -> None:
    """A check that does this."""
    monkeypatch.setattr(gpu_check, "COMMAND", [sys.executable, "-c", f"import os, sys, time\n{code}"])


BEGIN = 'print(\'{"cases": ["mlx", "append", "demote"]}\\n{"begun": "mlx"}\', flush=True)\n'
MLX_OK = 'print(\'{"result": {"name": "mlx", "ok": true}}\\n{"begun": "append"}\', flush=True)\n'


def test_a_death_is_the_running_kernel_s(monkeypatch):
    """With the signal's name and the first line that was said; those after it were not checked."""
    child(monkeypatch, BEGIN + MLX_OK + "os.write(2, b'\\nboom: here\\nmore\\n'); os.abort()")
    found = gpu_check.ask(SHAPES)
    assert found.results == (
        CheckResult("mlx", True),
        CheckResult.of_error("append", "the process died of SIGABRT: boom: here\nmore"),
        CheckResult("demote", False, SKIPPED),
    )
    assert found.results[1].why == "the process died of SIGABRT: boom: here"
    assert found.told and not found.kernels_work and not found.graph_fails
    assert found.caveat.startswith("Our GPU kernels are not used on this machine (append: the process died")


def test_a_traceback_s_last_line_is_the_reason(monkeypatch):
    child(monkeypatch, BEGIN + "raise ValueError('no such thing')")
    assert gpu_check.ask(SHAPES).graph_fails == "the process ended with code 1: ValueError: no such thing"


COMPILER = (
    "[metal::Device] Unable to build metal library from source\n"
    + "program_source:7:3: warning: unused variable 'n'\n"
    + "".join(
        f"program_source:{i}:15: error: use of undeclared identifier 'x{i}'\n    x{i} = 1;\n    ^\n"
        for i in range(9, 14)
    )
)


@pytest.mark.parametrize("started", ["raise RuntimeError({!r})", "os.write(2, {!r}.encode()); os.abort()"])
def test_a_compiler_s_own_lines_are_the_reason_and_all_of_them_are_kept(monkeypatch, started):
    """Metal's first line says only that the library was not built."""
    child(monkeypatch, BEGIN + MLX_OK + started.format(COMPILER))
    result = gpu_check.ask(SHAPES).results[1]
    assert [f"'x{i}'" in result.why for i in range(9, 14)] == [True, True, True, False, False]
    assert "warning" not in result.why and "\n" not in result.why
    assert all(line in result.message for line in COMPILER.split("\n") if line.strip())


def test_a_torn_line_and_others_words_are_passed_over(monkeypatch):
    child(
        monkeypatch,
        "print('hello'); " + BEGIN + MLX_OK + 'print(\'{"result": {"na\', flush=True); os.abort()',
    )
    assert [r.ok for r in gpu_check.ask(SHAPES).results] == [True, False, False]


@pytest.mark.parametrize("code", ["os.abort()", "sys.exit(3)", "print('hm')", "pass"])
def test_an_unknown_machine_gets_no_kernels_and_no_verdict(monkeypatch, code):
    """Nothing is known of the machine: no kernels, and no verdict to keep."""
    child(monkeypatch, code)
    found = gpu_check.ask(SHAPES)
    assert not (found.told or found.kernels_work or found.graph_fails) and found.caveat


def test_a_program_that_is_not_there(monkeypatch):
    monkeypatch.setattr(gpu_check, "COMMAND", ["/nowhere/python"])
    found = gpu_check.ask(SHAPES)
    assert not found.told and "could not be started" in found.caveat


def test_a_hang_ends_at_the_limit(monkeypatch):
    """The child is gone then, and so is what it had started."""
    monkeypatch.setattr(gpu_check, "TIME_LIMIT", 1.5)
    sleeper = (
        "import subprocess; p = subprocess.Popen(['sleep', '600'])\n"
        "print('{\"pid\": %d}' % p.pid, flush=True)\n"
    )
    child(monkeypatch, sleeper + BEGIN + MLX_OK + "time.sleep(600)")
    seen = []
    real = gpu_check._events
    monkeypatch.setattr(gpu_check, "_events", lambda out: seen.extend(real(out)) or seen)
    found = gpu_check.ask(SHAPES)
    assert found.results[1] == CheckResult.of_error("append", "did not end within 1.5 s")
    assert found.seconds < 10
    _wait_until_gone(seen[0]["pid"])


def _wait_until_gone(pid: int) -> None:
    until = time.monotonic() + 5
    while time.monotonic() < until:
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
        if not state.strip() or state.startswith("Z"):
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} lives on")


def test_the_watch_is_told_and_may_leave(monkeypatch):
    """Ctrl-C while the check runs: the child ends, and nothing is kept."""
    lines, children = [], []
    real = subprocess.Popen

    def noted(*args, **options):
        children.append(real(*args, **options))
        return children[-1]

    class Leaving(Watch):
        def progress(self, progress):
            lines.append(progress.line)
            if len(lines) == 2:
                raise Interrupted("stopped")

    monkeypatch.setattr(subprocess, "Popen", noted)
    child(monkeypatch, BEGIN + "time.sleep(600)")
    with pytest.raises(Interrupted):
        check(SHAPES, Leaving())
    assert lines == ["Checking the GPU kernels (once)…"] * 2
    assert children[0].poll() is not None
    assert not verdict.path().exists()


def test_a_files_name_in_the_working_folder_is_no_module_of_ours(monkeypatch, tmp_path):
    """The check runs what is installed, wherever the user is."""
    (tmp_path / "json.py").write_text("raise SystemExit('not me')")
    monkeypatch.chdir(tmp_path)
    assert gpu_check.ask(SHAPES).told


def test_reasons_are_one_line():
    assert check_results.reason("\n\n  a\x1b[31m b\nsecond") == "a b"
    assert len(check_results.reason("x" * 1000)) == check_results.MAX_REASON_CHARACTERS
    assert check_results.reason("") == ""


def test_the_check_runs_the_kernels_and_not_their_twins(monkeypatch):
    """A page table takes the kernels if it is made on the GPU; the arrays of the check are the CPU's."""
    from ruvmlx.backends.mlx.kernels import pages, selfcheck
    from ruvmlx.platform.mx import mx

    device, asked = [mx.cpu], []

    @contextlib.contextmanager
    def stream(to):
        device.append(to)
        yield
        device.pop()

    monkeypatch.setattr(mx, "stream", stream)
    monkeypatch.setattr(GPU, "kind", property(lambda _: "cuda"))
    monkeypatch.setattr(pages, "on_gpu", lambda *_: asked.append(device[-1]) or False)
    selfcheck.cases(SHAPES)
    assert len(asked) >= 4 and all(where == mx.Device(mx.gpu) for where in asked)
