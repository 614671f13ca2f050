"""`ruvmlx serve` as a process: what it prints, how it ends."""

import json
import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from types import SimpleNamespace

import pytest
from ruvmlx.apps.cli.serve import OPEN_FILES, PORT, _announce, _keys, _url
from ruvmlx.apps.server.limits import ServerLimits
from ruvmlx.apps.server.web import listening

from ruvmlx.errors import RuvmlxError, UsageError


@pytest.fixture
def start(tiny_folder, home, tmp_path):
    """start(*flags) -> the process, with the tiny model."""
    started = []

    def begin(*flags, model=None):
        command = [
            sys.executable,
            "-m",
            "ruvmlx",
            "serve",
            "--port",
            "0",
            "--model",
            model or str(tiny_folder),
        ]
        environment = {**os.environ, "RUVMLX_HOME": str(home)}
        process = subprocess.Popen(
            [*command, "--backend", "reference", *flags], text=True, env=environment, cwd=tmp_path,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ask(url, path, body=None, key=None):
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=60) as answer:
        return json.load(answer)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_json(start, number):
    """base_url comes first; the log is JSON without words; Ctrl-C and SIGTERM end it with 0."""
    process = start("--json")
    line = process.stdout.readline()
    facts = json.loads(line)
    assert line.startswith('{"base_url": ') and facts["api_key"] is None and facts["adapter"] == "default@0"
    body = {"model": facts["model"], "messages": [{"role": "user", "content": "secret"}], "max_tokens": 3}
    assert ask(facts["base_url"], "/chat/completions", body)["usage"]["completion_tokens"] <= 3
    process.send_signal(number)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0 and out == "" and "secret" not in err and "Traceback" not in err
    logged = [each for line in err.splitlines() if (each := json.loads(line))["event"] != "idle"]
    assert [(each["event"], each["path"], each["status"]) for each in logged] == [
        ("request", "/v1/chat/completions", "200")
    ]


def test_three_lines_to_paste(start, home):
    """A shell runs them as they are."""
    process = start("--api-key", "key-of-sixteen-characters")
    lines = [line.rstrip("\n") for line in iter(process.stdout.readline, "# A chat in another terminal:\n")]
    assert "is ready at http://127.0.0.1:" in lines[0] and lines[2].startswith("export OPENAI_BASE_URL=")
    assert [shlex.split(line)[0] for line in lines if line.startswith("#")] == ["#", "#"]  # zsh reads them
    script = "\n".join([*lines[1:4], "curl() { printf '%s\\n' \"$@\"; }", *lines[4:]])
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    sent = done.stdout.partition("\n-d\n")[2]
    assert words[0].endswith("/v1/chat/completions") and json.loads(sent)["messages"]
    assert "Authorization: Bearer key-of-sixteen-characters" in words
    url = lines[2].partition("=")[2]
    assert process.stdout.readline().strip() == f"ruvmlx chat --server {url.removesuffix('/v1')}"
    page = process.stdout.readline().strip()  # no key: this is no terminal
    assert page.startswith(f"Your chats in a browser: {url.removesuffix('v1')}#key=KEY, with an API key ")
    assert page.endswith(f"{home / 'api_keys'}.") and "key-of-sixteen-characters" not in page
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(url, "/models")
    assert ask(url, "/models", key="key-of-sixteen-characters")["data"]


def test_a_closed_output_does_not_end_the_server(monkeypatch):
    """As with `serve >&-`, which nobody can read."""
    monkeypatch.setattr(sys, "stdout", None)
    runtime = SimpleNamespace(backend=SimpleNamespace(caveat=""))
    serving = SimpleNamespace(model_name="tiny", runtime=runtime)
    access = SimpleNamespace(keys=[], chat_keys=["key-of-sixteen-characters"])
    for as_json in (False, True):
        _announce(serving, None, "http://127.0.0.1:8642/v1", access, as_json)


def test_a_signal_while_a_reply_is_written(start):
    """The reply ends, the process too, and the store is closed in order."""
    process = start("--json")
    facts = json.loads(process.stdout.readline())
    connection = socket.create_connection(
        ("127.0.0.1", int(facts["base_url"].split(":")[2][:-3])), timeout=30
    )
    body = {"model": facts["model"], "messages": [{"role": "user", "content": "hi"}], "stream": True, "n": 8}
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    assert b"200 OK" in connection.recv(100)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0 and "Traceback" not in err
    connection.close()


def test_a_port_in_use_is_one_line(start):
    with socket.create_server(("127.0.0.1", 0)) as used:
        process = start("--port", str(used.getsockname()[1]))
        out, err = process.communicate(timeout=600)
    assert process.returncode == 1 and out == "" and len(err.splitlines()) == 1 and "--port" in err


def test_a_port_of_a_program_on_all_addresses_is_in_use(monkeypatch):
    """macOS binds 127.0.0.1 beside it, as Linux does with SO_REUSEPORT."""
    monkeypatch.setattr(socket, "SO_REUSEADDR", socket.SO_REUSEPORT)
    with socket.create_server(("", 0), reuse_port=True) as used:
        port = used.getsockname()[1]
        with pytest.raises(RuvmlxError, match=f"port {port}: Address already in use"):
            listening("127.0.0.1", port)
    listening("127.0.0.1", port).close()


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="this system shows no limits of other processes")
def test_where_256_files_may_be_open_the_server_opens_more(start):
    """macOS starts programs with this limit; the server has up to 512 connections."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        process = start("--json")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert process.stdout.readline()
    assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (OPEN_FILES, limits[1])
    assert ServerLimits().connections < OPEN_FILES


def test_a_model_that_is_not_there(start, tmp_path):
    process = start(model=str(tmp_path / "nothing"))
    out, err = process.communicate(timeout=600)
    assert process.returncode == 3 and out == "" and len(err.splitlines()) == 1


def test_keys_beyond_this_machine(home):
    """One is made and kept; for this machine alone none is needed."""
    assert _keys("127.0.0.1", ()) == _keys("localhost", ()) == _keys("::1", ()) == []
    made = _keys("0.0.0.0", ())
    assert len(made) == 1 and _keys("192.168.1.5", ()) == _keys("::", ()) == made
    assert _keys("0.0.0.0", ["k" * 16]) == ["k" * 16] and _keys("127.0.0.1", ["k" * 16]) == ["k" * 16]
    for bad in ("short", "has a space in the key", "k\u00e9" * 10):
        with pytest.raises(UsageError):
            _keys("127.0.0.1", [bad])


def test_an_origin_has_a_scheme(start):
    process = start("--allow-origin", "chat.example")
    out, err = process.communicate(timeout=600)
    assert process.returncode == 2 and out == "" and "https://chat.example" in err


def test_addresses():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        assert _url("0.0.0.0", sock) == _url("127.0.0.1", sock) == f"http://127.0.0.1:{port}/v1"
        assert _url("::", sock) == _url("::1", sock) == f"http://[::1]:{port}/v1"
    assert 1024 < PORT < 49152
