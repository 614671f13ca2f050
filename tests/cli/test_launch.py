"""`ruvmlx launch`: the real command over two processes, and what it refuses."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from apps.cli import launch
from apps.cli.launch import _free_ports, _read_hosts
from ruvmlx.errors import RuvmlxError, UsageError

from .verbs import one_line

WAIT = 120.0  # seconds; only a process that hangs takes so long
HOW = pytest.mark.parametrize(
    "how", [["-n", "2"], ["--hosts", "127.0.0.1,127.0.0.1"]], ids=["processes", "hosts"]
)


@pytest.fixture
def prompt_words(tiny_folder):
    """The words of a short reply of the tiny model."""
    return ["generate", "hello", "--model", str(tiny_folder), "--max-tokens", "6", "--temp", "0", "--json"]


@HOW
def test_the_same_reply_as_alone(process, prompt_words, how):
    """Over two processes, started by ruvmlx or by mlx.launch; first comes the forecast, in one line."""
    many = process("launch", *how, "--", *prompt_words)
    one = process(*prompt_words, "--backend", "mlx")
    assert many.returncode == 0, many.stderr
    assert json.loads(many.stdout)["token_ids"] == json.loads(one.stdout)["token_ids"]
    assert json.loads(many.stdout)["kernels"].endswith("over 2 machines")
    assert many.stderr.decode().startswith("2 machines: about ") and many.stderr.count(b"\n") == 1


def test_standard_input_and_the_exit_code_are_those_of_the_command(process, tiny_folder):
    words = ["generate", "-", "--model", str(tiny_folder), "--max-tokens", "3"]
    for how in (["-n", "2"], ["--hosts", "127.0.0.1,127.0.0.1"]):
        done = process("launch", *how, "--", *words, stdin="  ")
        assert done.returncode == 2
        assert done.stderr.decode() == "ruvmlx: the prompt is empty; give some text.\n"


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "launch needs a command after --, one of chat, generate, serve, bench; got none."),
        (["-n", "2", "--", "models"], "got 'models'"),
        (["--", "chat"], "give either --hosts A,B or -n N"),
        (["-n", "2", "--hosts", "a,b", "--", "chat"], "give either --hosts A,B or -n N"),
        (["-n", "2", "--backend", "jaccl", "--", "chat"], "--backend jaccl goes with --hosts"),
        (["-n", "2", "--python", "/bin/python3", "--", "chat"], "goes with --hosts; with -n, leave it out"),
        (
            ["--hosts", "127.0.0.1", "--", "chat"],
            "needs two or more machines, got 1",
        ),
        (["--hosts", "127.0.0.1,no.such.invalid", "--", "chat"], "no machine is called 'no.such.invalid'"),
        (["--hosts", "missing.json", "--", "chat"], "expected a hostfile of MLX"),
        (["-n", "1", "--", "chat"], "1 is not in the range"),
    ],
)
def test_wrong_words_are_refused_in_one_line(run, words, said):
    code, out, err = run("launch", *words)
    assert (code, out) == (2, "") and one_line(err) and said in err


def test_ratings_of_layers_below_the_head_are_refused(run, monkeypatch):
    """Their gradients would need the whole model on rank 0."""
    monkeypatch.setenv("RUVMLX_LEARN_TARGETS", "attention")
    code, out, err = run("launch", "-n", "2", "--", "generate", "hi")
    assert (code, out) == (2, "") and one_line(err)
    assert "learn_targets is attention (environment)" in err


def test_a_model_that_cannot_be_divided(process, prompt_words):
    """The tiny model has 2 key-value heads. The other ranks end, too."""
    done = process("launch", "-n", "3", "--", *prompt_words)
    assert done.returncode == 1 and one_line(done.stderr.decode())
    assert b"cannot be divided evenly over 3 machines" in done.stderr


def test_bench_measures_the_divided_model(process, tiny_folder):
    words = ["bench", "--quick", "--rounds", "3", "--context", "64", "--model", str(tiny_folder), "--json"]
    done = process("launch", "-n", "2", "--", *words)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {row["suite"] for row in rows} == {"model"}
    assert next(row["value"] for row in rows if row["name"] == "decode at 64: ours") > 0


def test_other_suites_of_bench_are_refused(run, monkeypatch):
    """They would wait for ranks that another process has."""
    monkeypatch.setenv("RUVMLX_RANKS", "2")
    code, out, err = run("bench", "kv")
    assert (code, out) == (2, "") and one_line(err) and "`bench model` measures" in err


@pytest.mark.parametrize(
    "broken, said",
    [
        (
            "print('ruvmlx: this rank is broken', file=sys.stderr); os._exit(1)",
            "a rank did not start: this rank is broken",
        ),
        (
            "import mlx.core as mx; mx.distributed.init = fail",
            "a rank did not start: rank 1 cannot connect: no port. Check the firewall of each machine, and "
            "start `ruvmlx launch` again.",
        ),
        (
            "import mlx.core as mx; mx.distributed.init = lambda **_: os._exit(75)",
            "the machines did not connect within 10 s. Check the firewall of each machine, and start "
            "`ruvmlx launch` again.",
        ),
    ],
    ids=["start", "port", "end"],
)
def test_a_rank_that_cannot_start_ends_the_command(process, prompt_words, tmp_path, broken, said):
    """MLX of rank 0 waits for rank 1 for ever, and meanwhile no Python of rank 0 runs."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n\ndef fail(**_):\n    raise RuntimeError('no port')\n\n"
        f"if os.environ.get('MLX_RANK') == '1':\n    {broken}\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = process("launch", "-n", "2", "--", *prompt_words, PYTHONPATH=path)
    assert done.returncode == 1
    assert done.stderr.decode() == f"ruvmlx: {said}\n"


@HOW
@pytest.mark.parametrize(
    "number, code, said",
    [(signal.SIGTERM, 0, ""), (signal.SIGKILL, 1, "Your data are whole; start again.\n")],
    ids=["term", "kill"],
)
def test_a_signal_ends_all_ranks(tiny_folder, how, number, code, said):
    """The launcher passes on SIGTERM. The system sends SIGKILL to rank 0 if the memory is full."""
    words = ["launch", *how, "--", "serve", "--port", "0", "--model", str(tiny_folder), "--json"]
    pipe = subprocess.PIPE
    started = subprocess.Popen([sys.executable, "-m", "ruvmlx", *words], stdout=pipe, stderr=pipe)
    with started:
        pid = json.loads(started.stdout.readline())["pid"]
        assert pid != started.pid
        os.kill(started.pid if number == signal.SIGTERM else pid, number)
        assert started.wait(WAIT) == code
        lines = started.stderr.read().decode().splitlines(keepends=True)[1:]  # the first is the forecast
    assert "".join(lines).endswith(said) and len(lines) == bool(said)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_lost_rank_ends_an_idle_server(tiny_folder):
    """Another program can then start the server again. Else each request would get an error for ever."""
    words = ["launch", "-n", "2", "--", "serve", "--port", "0", "--model", str(tiny_folder), "--json"]
    pipe = subprocess.PIPE
    started = subprocess.Popen([sys.executable, "-m", "ruvmlx", *words], stdout=pipe, stderr=pipe)
    try:
        pid = json.loads(started.stdout.readline())["pid"]
        ranks = subprocess.check_output(["pgrep", "-P", str(started.pid)], text=True).split()
        (other,) = {int(rank) for rank in ranks} - {pid}
        os.kill(other, signal.SIGKILL)
        assert started.wait(30) == 1
        lines = started.stderr.read().decode().splitlines()[1:]  # the first is the forecast
        assert len(lines) == 1 and lines[0].startswith("ruvmlx: rank 1 ")
        assert lines[0].endswith("Start `ruvmlx launch` again.")
    finally:
        started.terminate()
        started.communicate(timeout=WAIT)


def test_hosts_of_a_file(tmp_path):
    """The first machine is this one, and needs no ssh."""
    hosts = [{"ssh": f"mac{i}", "ips": [f"10.0.0.{i}"], "rdma": [None, None]} for i in (1, 2)]
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps({"hosts": hosts}))
    found = _read_hosts(str(file))
    assert [host["ssh"] for host in found] == ["127.0.0.1", "mac2"] and found[1] == hosts[1]
    file.write_text('{"hosts": [{"ssh": "mac1"}]}')
    with pytest.raises(UsageError, match="expected a hostfile"):
        _read_hosts(str(file))


def test_ports_are_free_and_differ(monkeypatch):
    """No port is one that a system gives to an outgoing connection, which could take it first."""
    ports = _free_ports(5)
    assert len(set(ports)) == 5 and max(ports) < 32_768
    with socket.create_server(("127.0.0.1", ports[0])):
        monkeypatch.setattr(launch, "PORTS", range(ports[0], ports[0] + 1))
        with pytest.raises(RuvmlxError, match="0 are free"):
            _free_ports(1)
