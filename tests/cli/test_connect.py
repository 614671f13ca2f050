"""`connect`: clients' files are written with the server's context, and put back bit for bit."""

import json
import os
import socket
import subprocess
import sys
import threading
import tomllib

import pytest
from click.testing import CliRunner
from ruvmlx.apps.cli import cli
from ruvmlx.apps.cli.client_files import Served, client_of, names
from ruvmlx.apps.cli.written_files import put_back, write_over
from ruvmlx.apps.server.limits import ServerLimits

from ruvmlx.errors import NotFound, RuvmlxError, UsageError

from .verbs import one_line

SERVED = Served("http://127.0.0.1:8642", "none-needed", "starter", 8192)


@pytest.fixture
def house(tmp_path, monkeypatch):
    """The home of a user whose clients have no files yet."""
    for name in ("CLAUDE_CONFIG_DIR", "CODEX_HOME", "LLM_USER_PATH", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "house"))
    return tmp_path / "house"


def test_the_limits_leave_room_for_a_reply():
    """Whatever the context: the prompt at which a client shortens, and a reply, fit together."""
    for context in (512, 8192, 32_768, 131_072, 1_000_000):
        served = Served("u", "k", "m", context)
        assert 0 < served.prompt + served.reply <= context and served.reply <= 32_000


@pytest.mark.parametrize("name", [name for name in names() if name != "open-webui"])
@pytest.mark.parametrize("before", [None, "own"])
def test_a_file_is_written_and_put_back(house, tmp_path, name, before):
    """Twice, too; what the user had is in the new file, and the old file comes back."""
    made = client_of(name, SERVED)
    own = {"claude": '{"model": "x", "env": {"A": "1"}}', "zed": '{"theme": "One"}'}.get(
        name, "- model_id: mine\n"
    )
    if before:
        made.path.parent.mkdir(parents=True)
        made.path.write_text(own)
    record = tmp_path / "connected" / "x.json"
    write_over(made.path, made.merged_text(), record)
    text = made.path.read_text()
    assert "starter" in text and made.path.stat().st_mode & 0o077 == (0o044 if before else 0)
    if before and name in ("claude", "zed"):
        found = json.loads(text)
        assert found.get("theme") == "One" or (found["model"], found["env"]["A"]) == ("x", "1")
    if name != "llm":
        write_over(made.path, made.merged_text(), record)
    assert put_back(record) == made.path
    assert made.path.read_text() == own if before else not made.path.exists()
    with pytest.raises(NotFound):
        put_back(record)


@pytest.mark.parametrize(("platform", "folder"), [("linux", "moved"), ("darwin", "house/.config")])
def test_zeds_folder_follows_the_variable_where_zed_does(house, tmp_path, monkeypatch, platform, folder):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "moved"))
    monkeypatch.setattr(sys, "platform", platform)
    assert client_of("zed", SERVED).path == tmp_path / folder / "zed" / "settings.json"


@pytest.mark.parametrize(("name", "prompt"), [("claude", "20,000"), ("codex", "9,000")])
def test_a_context_that_is_too_short_is_told(house, name, prompt):
    """The first prompt of a coding agent does not fit into the starter's context."""
    said = client_of(name, SERVED).use
    assert f"`{name}` first sends about {prompt} tokens, but the model starter reads at most 8,192" in said
    assert said.endswith(f"Then start `{'codex --profile ruvmlx' if name == 'codex' else name}`.")
    long = client_of(name, Served("http://127.0.0.1:8642", "none-needed", "large", 32_768)).use
    assert long.startswith(f"Start `{name}") and "context" not in long


def test_a_file_that_changed_is_left_alone(house, tmp_path):
    made, record = client_of("claude", SERVED), tmp_path / "x.json"
    write_over(made.path, made.merged_text(), record)
    made.path.write_text("mine")
    with pytest.raises(RuvmlxError, match="has changed since"):
        put_back(record)
    assert made.path.read_text() == "mine"
    with pytest.raises(UsageError, match="not plain JSON"):
        made.merged_text()


@pytest.mark.parametrize(
    ("own", "is_there"),
    [
        ("- model_id: ruvmlx-old\n", False),
        ("- model_id: ruvmlx old\n", False),
        ("- model_id: mine\n# - model_id: ruvmlx\n", False),
        ("- my_model_id: ruvmlx\n", False),
        ("- model_name: x\n  model_id:   ruvmlx   # mine\n", True),
        ("- model_id: ruvmlx", True),
        ("- model_id: 'ruvmlx'\r\n", True),
        ('- {"model_id": "ruvmlx", model_name: x}\n', True),
        ("- {model_name: x, model_id: ruvmlx}\n", True),
    ],
)
def test_a_file_of_llm_that_has_the_model_is_left_alone(house, own, is_there):
    """A model whose name only begins so is another one."""
    made = client_of("llm", SERVED)
    made.path.parent.mkdir(parents=True)
    made.path.write_bytes(own.encode())
    if is_there:
        with pytest.raises(UsageError, match="has a model `ruvmlx` already"):
            made.merged_text()
    else:
        assert made.merged_text() == own + made.text


def test_a_file_of_windows_comes_back_with_its_line_ends(house, tmp_path):
    made, record, own = client_of("llm", SERVED), tmp_path / "x.json", b"- model_id: mine\r\n"
    made.path.parent.mkdir(parents=True)
    made.path.write_bytes(own)
    write_over(made.path, made.merged_text(), record)
    assert made.path.read_bytes().startswith(own)
    assert put_back(record) == made.path and made.path.read_bytes() == own


@pytest.mark.parametrize("name", ["claude", "codex"])
def test_a_file_that_is_not_utf_8_is_left_alone(house, tmp_path, name):
    made = client_of(name, SERVED)
    made.path.parent.mkdir(parents=True)
    made.path.write_bytes(b'{"theme": "caf\xe9"}')
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        write_over(made.path, made.merged_text(), tmp_path / "x.json")
    assert made.path.read_bytes() == b'{"theme": "caf\xe9"}'


def test_codex_reads_its_file(house):
    """As TOML, with the limits of its auto-compaction."""
    found = tomllib.loads(client_of("codex", SERVED).text)
    assert found["model_context_window"] == 8192
    assert found["model_auto_compact_token_limit"] == SERVED.prompt < 8192 - SERVED.reply
    provider = found["model_providers"][found["model_provider"]]
    assert provider["wire_api"] == "responses"
    # A long prompt takes longer than Codex's default of five minutes without an event.
    assert provider["stream_idle_timeout_ms"] == 1000 * ServerLimits().reply_seconds


@pytest.mark.parametrize("client", ["codex", "continue", "llm"])
def test_a_model_can_have_any_name(house, client):
    """Also characters that JSON writes as two escapes, which neither TOML nor YAML joins again."""
    name = 'modèle "😀" \\ 2'
    text = client_of(client, Served(SERVED.url, SERVED.key, name, 8192)).text
    if client == "codex":
        assert tomllib.loads(text)["model"] == name
    else:
        yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
        found = yaml.safe_load(text)
        assert name == (found["models"][0]["model"] if client == "continue" else found[0]["model_name"])


def test_llm_reads_its_file(house, monkeypatch):
    """llm itself lists the model, also where XDG_CONFIG_HOME moves its folder."""
    pytest.importorskip("llm", reason="the dependency group `clients` is not installed")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(house / "moved"))
    made = client_of("llm", SERVED)
    monkeypatch.setenv("LLM_LOAD_PLUGINS", "")  # the starter's package is one, and needs what is not here
    write_over(made.path, made.merged_text(), made.path.parent / "x.json")
    command = [sys.executable, "-m", "llm", "models", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    assert "ruvmlx" in listed.stdout
    with pytest.raises(UsageError, match="already"):
        made.merged_text()


def test_the_folder_of_llm_on_a_mac(house, monkeypatch):
    """There llm reads another folder than on Linux."""
    monkeypatch.setattr(sys, "platform", "darwin")
    folder = house / "Library/Application Support/io.datasette.llm"
    assert client_of("llm", SERVED).path == folder / "extra-openai-models.yaml"


def invoke(*words):
    return CliRunner().invoke(cli, ["connect", *words], catch_exceptions=True)


def test_the_command_asks_the_server(house, home, shared_url):
    """It prints the server's model and context; --write and --undo; what is wrong is one line."""
    url, model = shared_url
    printed = invoke("claude", "--server", url)
    assert printed.exit_code == 0, printed.output
    variables = json.loads(printed.stdout)["env"]
    kinds = ("HAIKU", "SONNET", "OPUS", "FABLE")
    assert {variables[f"ANTHROPIC_DEFAULT_{kind}_MODEL"] for kind in kinds} == {model}
    assert variables["ANTHROPIC_MODEL"] == model and variables["ANTHROPIC_BASE_URL"] == url
    assert int(variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"]) == 512 // 4
    assert invoke("claude", "--server", f"{url}/v1").stdout == printed.stdout  # as `serve` prints it
    assert invoke("codex", "--server", url, "--write").exit_code == 0
    path = house / ".codex" / "ruvmlx.config.toml"
    assert tomllib.loads(path.read_text())["model_context_window"] == 512
    assert invoke("codex", "--undo").exit_code == 0 and not path.exists()
    for words, message in (
        (("codex", "--undo"), "nothing to put back"),
        (("open-webui", "--server", url, "--write"), "no file"),
        (("claude", "--server", url, "--name", "x"), "no model 'x'"),
        (
            ("claude", "--server", "http://127.0.0.1:9"),
            "no server answers at http://127.0.0.1:9. Check the address, or start a server with",
        ),
        (
            ("claude", "--server", url.removeprefix("http://")),
            "is no server's address; give one like http://",
        ),
    ):
        failed = invoke(*words)
        assert failed.exit_code and message in str(failed.exception), failed.output


def test_each_name_of_the_server_can_be_given(house, home, open_tiny):
    """Also if a server has more names than a page of its list."""
    from ruvmlx.apps.server.access import Access
    from ruvmlx.apps.server.limits import ServerLimits

    from tests.server.conftest import run_server

    def open_with_adapters():
        runtime = open_tiny()
        for number in range(30):
            runtime.store.adapters.begin(runtime.model.fingerprint, f"a{number:02}")
        return runtime

    running = run_server(open_with_adapters, Access(), ServerLimits())
    try:
        name = f"{running.model}@a29"
        made = invoke("claude", "--server", f"http://127.0.0.1:{running.port}", "--name", name)
        assert made.exit_code == 0 and json.loads(made.stdout)["env"]["ANTHROPIC_MODEL"] == name, made.output
    finally:
        running.stop()


def test_scripts_get_the_client_and_its_settings(house, shared_url):
    printed = json.loads(invoke("codex", "--server", shared_url[0], "--json").stdout)
    assert printed["client"] == "codex" and printed["settings"] == printed["text"] and not printed["written"]
    assert shared_url[0] in printed["settings"]


def test_each_path_of_a_client_is_put_back(house, home, shared_url, monkeypatch):
    """A variable moves the client's file; a record of an older program counts, too."""
    url, _ = shared_url
    one, other = house / ".codex", house / "moved"
    assert invoke("codex", "--server", url, "--write").exit_code == 0
    monkeypatch.setenv("CODEX_HOME", str(other))
    assert invoke("codex", "--server", url, "--write").exit_code == 0
    monkeypatch.delenv("CODEX_HOME")
    path = one / "ruvmlx.config.toml"
    undone = json.loads(invoke("codex", "--undo", "--json").stdout)
    assert undone == {"client": "codex", "path": str(path), "put_back": True}
    assert not path.exists() and (other / "ruvmlx.config.toml").exists()
    write_over(path, "x", home / "connected" / "codex.json")
    assert invoke("codex", "--undo").exit_code == 0 and not path.exists()
    assert (other / "ruvmlx.config.toml").exists()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"220 mail.example ESMTP\r\n", "no server answers at"),
        (b'HTTP/1.0 200 OK\r\n\r\n{"data": [{"id": "llama"}]}', "is no `ruvmlx serve`"),
    ],
    ids=["no HTTP", "another program"],
)
def test_a_server_of_another_program_is_one_line(house, answer, message):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reply():
            other, _ = server.accept()
            with other:
                other.recv(1 << 16)
                other.sendall(answer)

        threading.Thread(target=reply, daemon=True).start()
        failed = invoke("claude", "--server", f"http://127.0.0.1:{server.getsockname()[1]}")
    assert isinstance(failed.exception, RuvmlxError) and message in str(failed.exception)


@pytest.mark.parametrize("key", ["schlüssel-zum-server", "a-key\nof-two-lines"])
def test_a_key_that_no_server_has_is_told(run, key):
    for verb in (("connect", "claude"), ("ps",), ("stop",)):
        code, _, err = run(*verb, "--api-key", key)
        assert code == 2 and one_line(err) and "not printable ASCII" in err


@pytest.fixture
def shared_url(open_tiny):
    from ruvmlx.apps.server.access import Access
    from ruvmlx.apps.server.limits import ServerLimits

    from tests.server.conftest import run_server

    running = run_server(open_tiny, Access(), ServerLimits())
    yield f"http://127.0.0.1:{running.port}", running.model
    running.stop()


@pytest.mark.slow
def test_claude_code_reads_its_file(house, tmp_path):
    """The command line itself, where it is installed: it asks the server that the file names."""
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    from tests.server.coding_agents import run

    asked = []

    class Refuse(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_error(400)

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Refuse)
    Thread(target=server.serve_forever, daemon=True).start()
    made = client_of("claude", Served(f"http://127.0.0.1:{server.server_port}", "k", "starter", 8192))
    write_over(made.path, made.merged_text(), tmp_path / "x.json")
    environment = {"CLAUDE_CONFIG_DIR": str(made.path.parent), "DISABLE_AUTOUPDATER": "1"}
    with pytest.raises(AssertionError):  # it fails: the server refuses
        run("claude", lambda path: [path, "-p", "hello"], tmp_path, **environment)
    server.shutdown()
    assert asked[0]["model"] == "starter" and asked[0]["max_tokens"] == 2048
    assert os.environ["HOME"] == str(house)
