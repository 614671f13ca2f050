"""The command `ruvmlx launch` runs another verb over several machines or processes (ranks), which share one
model. Rank 0 runs the verb; each other rank computes its shard of the model."""

import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from ruvmlx import settings as config
from ruvmlx.backends.sharded import place
from ruvmlx.errors import RuvmlxError, UsageError

from .number_types import WholeNumber
from .output import log
from .text_output import is_terminal
from .verb import Verb

VERBS_OVER_RANKS = ("chat", "generate", "serve", "bench")
MOST_RANKS = 64
# These control sequences restore the terminal after a chat. They show the usual screen and the cursor. The
# terminal then stops its reports of the mouse and of pasted text.
LEAVE_SCREEN = "\x1b[?1049l\x1b[?25h\x1b[?1000l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b[<u"
HEAD = "head"  # the value of learn_targets with which ratings need no gradient of other layers
END = 2.0  # seconds in which the other ranks must end by themselves after rank 0
ENDS = (signal.SIGTERM, signal.SIGHUP)
# Linux and macOS give an outgoing connection a port above these ports. So no connection of another program
# takes one of these ports before a rank opens the port.
PORTS = range(20_000, 32_000)
Started = tuple[subprocess.Popen[bytes], Path]  # a rank above 0, and the file of its errors
STDIO = "RUVMLX_LAUNCH_STDIO"  # the path of the socket from which rank 0 takes the launcher's terminal


@click.command(cls=Verb, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--hosts", metavar="A,B", help="Addresses of the machines, this one first; or a hostfile of MLX."
)
@click.option("-n", "processes", type=WholeNumber(2, MOST_RANKS), help="So many processes on this machine.")
@click.option(
    "--backend", type=click.Choice(["ring", "jaccl", "mpi"]), default="ring", show_default=True,
    help="MLX's connection between the machines.",
)  # fmt: skip
@click.option(
    "--python", metavar="PATH", help="Python with ruvmlx on the other machines, if it is elsewhere."
)
@click.option("--as-rank", is_flag=True, hidden=True)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def launch(
    hosts: str | None,
    processes: int | None,
    backend: str,
    python: str | None,
    as_rank: bool,
    command: tuple[str, ...],
) -> None:
    """Run chat, generate, serve or bench with one model that is divided over several machines.

    First, a line says how many tokens per second all machines and one machine are expected to write.
    """
    if command and command[0].startswith("-"):
        raise UsageError(
            f"launch has no option {command[0]!r}; an option of the command stands after the command, as in "
            "`ruvmlx launch -n 2 -- generate PROMPT --json`."
        )
    if not command or command[0] not in VERBS_OVER_RANKS:
        got = f"got {command[0]!r}" if command else "got none"
        raise UsageError(
            f"launch needs a command after --, one of {', '.join(VERBS_OVER_RANKS)}; {got}. "
            "Try `ruvmlx launch -n 2 -- chat`."
        )
    if as_rank:
        raise click.exceptions.Exit(_run_rank(command))
    if (hosts is None) == (processes is None):
        raise UsageError(
            "give either --hosts A,B or -n N, as in `ruvmlx launch --hosts 10.0.0.1,10.0.0.2 -- chat`."
        )
    of_hosts = f"--backend {backend}" if backend != "ring" else f"--python {python}" if python else ""
    if processes is not None and of_hosts:
        raise UsageError(f"{of_hosts} goes with --hosts; with -n, leave it out.")
    _require_head_alone()
    code = (
        _launch_here(processes, command)
        if processes
        else _launch_hosts(_read_hosts(str(hosts)), backend, python, command)
    )
    raise click.exceptions.Exit(code)


def _require_head_alone() -> None:
    """Raise UsageError if ratings change layers below the output head, because their gradients need the whole
    model in one process."""
    setting = config.resolve()["learn_targets"]
    if setting.value != HEAD:
        raise UsageError(
            f"learn_targets is {setting.value} ({setting.origin}), which needs the whole model on one rank; "
            f"with launch it must be {HEAD}: `ruvmlx config set learn_targets {HEAD}`."
        )


# -- one rank -----------------------------------------------------------------------------------------


def _run_rank(command: Sequence[str]) -> int:
    """Run this process's rank: the verb itself, or the loop that computes a shard."""
    path, rank = os.environ.get(STDIO), place.RankPlace.of_environment().rank
    launcher = _take_stdio(path) if path and rank == 0 else None
    drop_library_lines()
    if rank:
        _follow()
    code = _run_verb(command)
    if launcher is not None:
        launcher.sendall(bytes([code]))
        launcher.close()
    return code


def _run_verb(command: Sequence[str]) -> int:
    from ruvmlx.backends.sharded import cluster

    from . import run

    cluster.PeerLinks.ends_when_idle = command[0] == "serve"
    cluster.reports.append(log)
    sys.argv[1:] = command
    return run()


def _follow() -> NoReturn:
    from ruvmlx.backends.sharded.follower import follow
    from ruvmlx.backends.sharded.peers import PeerLost, end_process

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        follow(place.RankPlace.of_environment())
    except PeerLost as error:
        end_process(str(error))
    os._exit(0)  # without the end of MLX's threads, which can wait for rank 0


def drop_library_lines() -> None:
    """Drop the lines that MLX's connections write to standard error. The program says the same in one line.
    Python's `sys.stderr` still writes to the terminal."""
    if sys.stderr is None:
        return
    own = open(os.dup(2), "w", buffering=1, encoding=sys.stderr.encoding, errors="replace")  # noqa: SIM115
    sys.stderr, sys.__stderr__ = own, own  # type: ignore[misc]  # Textual writes to sys.__stderr__
    library = os.open(os.devnull, os.O_WRONLY)
    os.dup2(library, 2)
    os.close(library)


def _take_stdio(path: str) -> socket.socket:
    """Use the launcher's standard input, output and error from now on, and tell the launcher this process's
    id. mlx.launch would pass them through pipes, in which a chat has no terminal."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    sock.sendall(str(os.getpid()).encode())
    _, files, _, _ = socket.recv_fds(sock, 1, 3)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return sock


# -- processes on this machine --------------------------------------------------------------------------


def _launch_here(n: int, command: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="ruvmlx-launch-") as folder:
        hostfile = Path(folder) / "hosts.json"
        hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in _free_ports(n)]))
        last = Path(folder) / "last"
        env = os.environ | _start_values("127.0.0.1", n, "ring")
        env |= {"MLX_HOSTFILE": str(hostfile), place.LAST_LINE: str(last)}
        env.setdefault("RUVMLX_THREADS", str(max(1, (os.cpu_count() or 1) // n)))
        words = [*_program(sys.executable), "launch", "--as-rank", "--", *command]
        with _restored_terminal(last), _followers(n, words, env, Path(folder)) as others:
            first = subprocess.Popen(words, env=env | {"MLX_RANK": "0"})
            return _wait(first, others)


@contextlib.contextmanager
def _followers(n: int, words: Sequence[str], env: Mapping[str, str], folder: Path) -> Iterator[list[Started]]:
    """Start the ranks above 0, and end them after the block."""
    started: list[Started] = []
    try:
        for rank in range(1, n):
            errors = folder / f"rank{rank}"
            with errors.open("wb") as out:
                own, no = {**env, "MLX_RANK": str(rank)}, subprocess.DEVNULL
                process = subprocess.Popen(
                    words, env=own, stdin=no, stdout=no, stderr=out, start_new_session=True
                )
            started.append((process, errors))
        yield started
    finally:
        for process, _ in started:
            _end(process)  # it has nothing to save


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait END seconds until a process ends by itself. Then end it."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END)
    process.kill()
    process.wait()


@contextlib.contextmanager
def _restored_terminal(last: Path) -> Iterator[None]:
    """After the block, if rank 0 ended itself or was ended, restore the terminal and raise an error with the
    last line of rank 0, or with the line of the block."""
    import termios

    shown = sys.stdin is not None and sys.stdin.isatty() and is_terminal()
    before = termios.tcgetattr(0) if shown else None
    line = ""
    try:
        yield
    except RuvmlxError as error:
        line = str(error)
    if last.exists():
        line = last.read_text()
    if not line:
        return
    if before is not None:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
        sys.stdout.write(LEAVE_SCREEN)
        sys.stdout.flush()
    raise RuvmlxError(line)


def _wait(first: subprocess.Popen[bytes], others: Sequence[Started]) -> int:
    """Wait for rank 0 and return its exit code. If another rank cannot start, end rank 0. Ctrl-C reaches rank
    0 from the terminal; other signals are passed on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in ENDS:
        signal.signal(number, lambda number, _: first.send_signal(number))
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = first.wait(0.2)
            break
        failed = [errors for process, errors in others if process.poll() not in (None, 0, place.LOST)]
        if lines := [line for errors in failed for line in errors.read_text(errors="replace").splitlines()]:
            first.terminate()
            _end(first)
            raise RuvmlxError(f"a rank did not start: {lines[-1].removeprefix('ruvmlx: ')}")
    if code < 0:
        raise RuvmlxError(
            f"rank 0 was ended by {signal.Signals(-code).name}. Your data are whole; start again."
        )
    return code


def _free_ports(n: int) -> list[int]:
    """Return ports of PORTS that no program uses now."""
    free: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            free.append(port)
        if len(free) == n:
            return free
    raise RuvmlxError(
        f"launch needs {n} free ports from {PORTS.start} to {PORTS.stop - 1}; {len(free)} are free."
    )


def _start_values(leader: str, n: int, backend: str) -> dict[str, str]:
    """Return the environment by which the ranks of this start find each other."""
    (port,) = _free_ports(1)
    values = {place.RANKS: str(n), place.LEADER: f"{leader}:{port}", place.KEY: secrets.token_hex(16)}
    return values | {place.BACKEND: backend}


def _program(python: str) -> list[str]:
    return [python, "-m", "ruvmlx"]


# -- several machines -----------------------------------------------------------------------------------


def _read_hosts(text: str) -> list[dict[str, Any]]:
    """Return the machines in the form of MLX's hostfile. Rank 0 is this machine, and needs no ssh."""
    if text.endswith(".json"):
        try:
            data = json.loads(Path(text).read_text())
            hosts = data["hosts"] if isinstance(data, dict) else data
            assert all(isinstance(host["ips"][0], str) and host["ssh"] for host in hosts)
        except (OSError, ValueError, KeyError, TypeError, IndexError, AssertionError):
            raise UsageError(
                f"--hosts {text}: expected a hostfile of MLX with ssh and ips of each machine, as "
                "`mlx.distributed_config` writes it."
            ) from None
    else:
        names = [name.strip() for name in text.split(",") if name.strip()]
        hosts = [{"ssh": name} for name in names]
    if len(hosts) < 2:
        raise UsageError(
            f"--hosts needs two or more machines, got {len(hosts)}: {text}. Name this computer first, as in "
            "--hosts 10.0.0.1,10.0.0.2; `-n 2` tries it with two processes of this computer."
        )
    found = [{"ips": [_address(host["ssh"])]} | host if "ips" not in host else host for host in hosts]
    return [found[0] | {"ssh": "127.0.0.1"}, *found[1:]]


def _address(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError:
        raise UsageError(
            f"--hosts: no machine is called {name!r}; give its address, such as 10.0.0.2."
        ) from None


def _launch_hosts(
    hosts: Sequence[Mapping[str, Any]], backend: str, python: str | None, command: Sequence[str]
) -> int:
    """Start all ranks with mlx.launch, which uses ssh for the other machines."""
    program = shutil.which("mlx.launch", path=str(Path(sys.executable).parent)) or shutil.which("mlx.launch")
    if program is None:
        raise RuvmlxError("mlx.launch is missing beside this Python; install MLX again: `pip install mlx`.")
    with tempfile.TemporaryDirectory(prefix="ruvmlx-launch-") as folder:
        hostfile, stdio = Path(folder) / "hosts.json", Path(folder) / "stdio"
        hostfile.write_text(json.dumps(hosts))
        values = _start_values(hosts[0]["ips"][0], len(hosts), backend) | {
            STDIO: str(stdio),
            place.LAST_LINE: f"{folder}/last",
        }
        kept = {name: value for name, value in os.environ.items() if name.startswith("RUVMLX_")}
        env = [word for name, value in (kept | values).items() for word in ("--env", f"{name}={value}")]
        words = [program, "--backend", backend, "--hostfile", str(hostfile), *env]
        if backend == "ring":
            words += ["--starting-port", str(_free_ports(1)[0])]
        words += ["--", *_program(python or sys.executable), "launch", "--as-rank", "--", *command]
        with _restored_terminal(Path(folder) / "last"):
            return _run_mlx_launch(words, stdio, Path(folder) / "errors")


def _run_mlx_launch(words: Sequence[str], stdio: Path, errors: Path) -> int:
    """Run mlx.launch, lend rank 0 this process's standard input, output and error, and return rank 0's exit
    code."""
    with socket.socket(socket.AF_UNIX) as server, errors.open("wb") as out:
        server.bind(str(stdio))
        server.listen(1)
        server.settimeout(0.2)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 answers Ctrl-C, and the others end with it
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=out)
        for number in ENDS:
            signal.signal(number, lambda number, _: process.send_signal(number))
        try:
            code = _exit_code(server, process)
        finally:
            _end(process)
    if code is None:
        lines = errors.read_text(errors="replace").strip().splitlines()
        why = lines[-1] if lines else f"it ended with exit code {process.returncode}"
        raise RuvmlxError(f"mlx.launch could not start ruvmlx on all machines: {why}. See docs/launch.md.")
    return code


def _exit_code(server: socket.socket, process: subprocess.Popen[bytes]) -> int | None:
    """Wait for rank 0, and return its exit code; None if rank 0 did not start. Signals go to rank 0, because
    mlx.launch would end and leave the ranks."""
    sent = list[int]()

    def send(number: int, _: object) -> None:
        sent.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(first, number)

    while process.poll() is None:
        with contextlib.suppress(TimeoutError):
            sock, _ = server.accept()
            with sock:
                sock.settimeout(None)
                first = int(sock.recv(20))
                for number in ENDS:
                    signal.signal(number, send)
                socket.send_fds(sock, [b"0"], [0, 1, 2])
                if said := sock.recv(1):
                    return said[0]
                if sent:
                    return 128 + sent[-1]
                raise RuvmlxError("rank 0 has ended without an exit code. Your data are whole; start again.")
    return None


VERBS = [launch]
