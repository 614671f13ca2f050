"""`serve --install` and `--uninstall`: what they write, that they ask, that they leave nothing."""

import os
import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from ruvmlx.apps.cli import cli
from ruvmlx.apps.cli import service as services
from ruvmlx.apps.cli.service import LABEL

from ruvmlx.errors import UsageError


@pytest.fixture
def run(home, tmp_path, monkeypatch):
    """run(*flags, says=...) -> what the verb prints; the user's folders are the test's own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.chdir(tmp_path)

    def invoke(*flags, says="y\n"):
        done = CliRunner().invoke(cli, ["serve", *flags], input=says, standalone_mode=False)
        if done.exception is not None:
            raise done.exception
        return done.output

    return invoke


def unit():
    return Path.home() / ".config" / "systemd" / "user" / f"{LABEL}.service"


@pytest.fixture
def linux(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")


def test_a_unit_of_systemd(run, linux, monkeypatch):
    """The flags of the command line and RUVMLX_ variables are in it, a key from the environment is not."""
    monkeypatch.setenv("RUVMLX_TEMPERATURE", "0.5")
    monkeypatch.setenv("RUVMLX_API_KEY", "k" * 20)
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    monkeypatch.setenv("HF_TOKEN", "k" * 20)
    said = run("--install", "--port", "9000", "--allow-host", "a b", "--allow-host", "c", "--temp", "0.25")
    text = unit().read_text()
    command = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    assert command.endswith('serve" "--port" "9000" "--allow-host" "a b" "--allow-host" "c" "--temp" "0.25"')
    assert f'ExecStart="{sys.executable}" "-m" "ruvmlx"' in command
    assert 'Environment="RUVMLX_TEMPERATURE=0.5"' in text and f"WorkingDirectory={Path.cwd()}" in text
    assert 'Environment="HF_HOME=/models"' in text and 'Environment="XDG_DATA_HOME=/data"' in text
    assert "kkkk" not in text + said and "StandardOutput=null" in text
    assert text in said and "systemctl --user enable --now" in said
    assert unit().stat().st_mode & 0o777 == 0o600 and len(list(unit().parent.iterdir())) == 1


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(run, linux):
    run("--install", "--allow-host", '50% $HOME "x"')
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(unit())], capture_output=True, text=True, check=False
    )
    assert LABEL not in done.stderr, done.stderr


def test_words_are_quoted_for_systemd():
    assert services._quote('50% $HOME "x" \\') == '"50%% $$HOME \\"x\\" \\\\"'


def test_a_plist_of_launchd(run, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("RUVMLX_TEMPERATURE", "0.5")
    said = run("--install", "--json", "--port", "9000")
    path = Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    facts = plistlib.loads(path.read_bytes())
    assert facts["Label"] == LABEL and facts["RunAtLoad"] is True
    assert facts["ProgramArguments"] == [sys.executable, "-m", "ruvmlx", "serve", "--port", "9000", "--json"]
    assert facts["EnvironmentVariables"]["RUVMLX_TEMPERATURE"] == "0.5"
    assert facts["StandardOutPath"] == "/dev/null" and facts["WorkingDirectory"] == os.getcwd()
    assert f"launchctl bootstrap gui/{os.getuid()}" in said


def test_it_asks_first(run, linux):
    """No answer, or any other than yes, changes nothing."""
    assert "nothing was written" in run("--install", says="n\n") and not unit().exists()
    run("--install")
    assert "nothing was removed" in run("--uninstall", says="\n") and unit().exists()
    assert "systemctl --user disable --now" in run("--uninstall") and not unit().exists()
    assert "nothing to remove" in run("--uninstall")


def test_an_input_that_ends_before_the_answer_changes_nothing(run, linux):
    for flag in ("--install", "--uninstall"):
        with pytest.raises(UsageError, match=r"ended before the answer, so nothing was changed.*`echo y \|`"):
            run(flag, says="")
        assert unit().exists() == (flag == "--uninstall")
        unit().parent.mkdir(parents=True, exist_ok=True)
        unit().write_text("a service")
    assert unit().read_text() == "a service"


def test_what_is_refused(run, linux, monkeypatch):
    with pytest.raises(UsageError, match="API key does not go into"):
        run("--install", "--api-key", "k" * 20)
    with pytest.raises(UsageError, match="give one of them"):
        run("--install", "--uninstall")
    with pytest.raises(UsageError, match="line end"):
        run("--install", "--allow-host", "a\nb")
    assert not unit().exists()
