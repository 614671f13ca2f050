"""Plain mode in its own process: pipes, exit codes, Ctrl-C, a terminal."""

import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from ruvmlx.apps.chat.plain import EMPTY

from .terminal import Terminal

RUN = """
import sys
from ruvmlx import errors
from ruvmlx.apps.chat import run_chat
from tests.chat.scripted import ScriptedRuntime

class Kept(ScriptedRuntime):
    def close(self):
        super().close()
        print("closed", file=sys.stderr)

runtime = Kept(*[{replies}], gate={gate})
{setup}
sys.exit(run_chat(lambda: runtime, plain=True, continue_={continue_}))
"""


def command(*replies, gate=False, setup="", continue_=False):
    parts = {"replies": ", ".join(map(repr, replies)), "gate": gate, "continue_": continue_}
    return [sys.executable, "-c", RUN.format(setup=textwrap.dedent(setup), **parts)]


def chat(lines, *replies, **options):
    return subprocess.run(
        command(*replies, **options),
        input=lines,
        capture_output=True,
        text=True,
        timeout=60,
        encoding="utf-8",
    )


def test_each_line_of_input_is_a_message_and_its_end_exits_with_0():
    """Each line is a message; answers are labelled; commands work; the end of input ends it with 0."""
    done = chat("Hi\n\n/up\n/undo\n//etc/hosts?\n", ["Hel", "lo."], ["A file."])
    assert done.stdout == (
        "Assistant: Hello.\n"
        "Rated good. Learned: more like this. /undo takes it back. /details has the figures.\n"
        "Rating taken back: “Hi”; 0 left, version 0.\n"
        "Assistant: A file.\n"
    )
    assert done.stderr == "closed\n"
    assert done.returncode == 0


def test_a_gpu_that_is_not_used_is_reported_once_on_stderr():
    """On stderr: stdout has replies alone."""
    done = chat("Hi\n", ["Hello."], setup="runtime.backend.caveat = 'Our GPU kernels are not used.'")
    assert done.stdout == "Assistant: Hello.\n"
    assert done.stderr == "Note: Our GPU kernels are not used.\nclosed\n"


def test_no_control_character_reaches_a_pipe():
    """No escape, no bell, no carriage return reaches a pipe, whatever the model says."""
    done = chat("Hi\n", ["\x1b[2J\x1b]0;t\x07red", "\x1b[", "31m", " \x9b1mtext\nnext\rline\u202e\b"])
    assert done.stdout == "Assistant: red text\nnext\nline\n"


def test_quit_leaves_the_rest_unread():
    """/quit ends it; /help and /status speak."""
    done = chat("/help\n/status\n/quit\nHi\n")
    assert "/rate up|down|1-5 [NOTE]" in done.stdout
    assert "SmolLM2-135M-Instruct" in done.stdout
    assert "ratings   none yet" in done.stdout and "Assistant" not in done.stdout
    assert done.returncode == 0


def test_errors_are_one_line_and_the_chat_goes_on():
    """The exit code is the first error's: 2 for a wrong command."""
    done = chat("/rate 9\n/nope\n/undo\n/up\nHi\n", ["ok"])
    errors = done.stderr.splitlines()
    assert [line.startswith("ruvmlx: ") for line in errors] == [True] * 4 + [False]
    assert "Traceback" not in done.stderr
    assert done.stdout == "Assistant: ok\n"
    assert done.returncode == 2


def test_a_line_without_end_takes_no_memory():
    """It is one line of error; the next line is a message."""
    setup = """
        from tests.limits import peak_memory
        before = peak_memory()
        Kept.close = lambda self: print((peak_memory() - before) >> 20, file=sys.stderr)
    """
    done = chat("x" * 50_000_000 + "\nHi\n", ["Hello."], setup=setup)
    assert done.stdout == "Assistant: Hello.\n"
    error, taken = done.stderr.splitlines()
    wanted = "ruvmlx: a line is over 1,048,576 characters, which is too long to read. Nothing was sent. "
    assert error == f"{wanted}Put the text into a file, and name it as @FILE." and int(taken) < 40
    assert done.returncode == 2


def test_an_error_while_opening_is_one_line_with_its_exit_code():
    """One line on stderr, the error's own exit code."""
    code = (
        "import sys\nfrom ruvmlx import errors\nfrom ruvmlx.apps.chat import run_chat\n"
        "def fail(): raise errors.ModelNotFound('no model here')\nsys.exit(run_chat(fail))"
    )
    done = subprocess.run([sys.executable, "-c", code], input="", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "ruvmlx: no model here\n")


def test_a_closed_pipe_ends_the_chat_without_a_traceback():
    """`| head -1`: no traceback, the runtime is closed."""
    setup = "runtime.replies = [['word ' * 50] * 200] * 5"
    process = subprocess.Popen(
        command(setup=setup), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdin.write("Hi\n" * 5)
    process.stdin.close()
    assert process.stdout.read(10) == "Assistant:"
    process.stdout.close()
    assert process.stderr.read() == "closed\n"
    assert process.wait(60) == 0


ON_CLOSE = """
close = runtime.close
def tell():
    turns = runtime.spoken["s1"]
    print([(t.content, t.finish_reason) for t in turns[1:]], file=sys.stderr)
    close()
runtime.close = tell
"""


def start_chat(*replies, **options):
    """A chat on pipes whose reply waits after two words."""
    process = subprocess.Popen(
        command(*replies, gate=True, **options),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdin.write("Hi\n")
    process.stdin.flush()
    return process


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_a_reply_keeps_its_words(signum):
    """Told to end in the middle of a reply: its words are committed, then it ends as a shell expects."""
    process = start_chat(["one ", "two ", "three "], setup=ON_CLOSE)
    assert process.stdout.read(19) == "Assistant: one two "
    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    assert out == "\n(stopped)\n"
    assert err == "[('one two ', 'cancelled')]\nclosed\n"
    assert process.returncode == 128 + signum


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_at_the_prompt_ends_quietly(signum):
    """It ends quietly, and the runtime is closed."""
    terminal = Terminal(command())
    terminal.expect("You: ")
    os.kill(terminal.pid, signum)
    terminal.expect("closed")
    assert terminal.wait() == 128 + signum


def test_a_signal_that_does_not_interrupt_the_read_ends_the_chat():
    """A signal that comes directly before the read has no handler call before the next key, and does not
    interrupt the read. A signal that another thread gets is like this, too."""
    setup = """
        import signal, threading
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    """
    terminal = Terminal(command(setup=setup))
    terminal.expect("You: ")
    time.sleep(0.3)  # no output says that the chat reads; an earlier signal is heard without the wait, too
    os.kill(terminal.pid, signal.SIGTERM)
    terminal.expect("closed", 30)
    assert terminal.wait() == 128 + signal.SIGTERM


def test_an_ignored_hangup_stays_ignored():
    """`nohup ruvmlx chat --plain` outlives its terminal."""
    setup = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); runtime.free = 9"
    process = start_chat(["one ", "two "], setup=setup)
    assert process.stdout.readline() == "Assistant: one two \n"
    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate("/status\n", timeout=60)
    assert "ratings" in out
    assert process.returncode == 0


def test_a_closed_terminal_keeps_the_words_of_the_reply(tmp_path):
    """Its window goes in the middle of a reply: the words are kept."""
    kept = tmp_path / "kept"
    setup = ON_CLOSE.replace("file=sys.stderr", f"file=open({str(kept)!r}, 'w')")
    setup = setup.replace("runtime.close\n", "lambda: None\n")  # its own would print to the terminal
    terminal = Terminal(command(["one ", "two ", "three "], gate=True, setup=setup))
    terminal.expect("You: ")
    terminal.send("Hi\n")
    terminal.expect("one two ")
    os.close(terminal.fd)
    status = os.waitstatus_to_exitcode(os.waitpid(terminal.pid, 0)[1])
    assert kept.read_text() == "[('one two ', 'cancelled')]\n"
    assert status == 128 + signal.SIGHUP


def test_a_pipe_closed_during_a_reply_keeps_its_words():
    """The reply is stopped there, not thrown away."""
    more_than_a_pipe_holds = "runtime.free = 10_000; runtime.replies = [['word ' * 50] * 10_000]"
    process = start_chat(setup=ON_CLOSE + more_than_a_pipe_holds)
    process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read()
    assert err.startswith("[('word word ")
    assert err.endswith(" ', 'cancelled')]\nclosed\n")
    assert process.wait(60) == 0


def test_a_full_disk_is_an_error():
    """Not to be able to write is an error, unlike a reader that leaves."""
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command(["ok"]), input="Hi\n", stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert "No space left" in done.stderr
    assert done.returncode == 1


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&-"])
def test_closed_streams_are_an_end_of_input_or_unread_output(closed):
    """A stream that was never there is an end of input, or output that nobody reads."""
    line = f"{shlex.join(command(['ok']))} {closed}"
    done = subprocess.run(["sh", "-c", line], input="Hi\n", capture_output=True, text=True, timeout=60)
    said = f"{EMPTY}\nclosed\n" if "<&-" in closed else "closed\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, "", said)


def test_an_empty_input_is_told():
    """A script sees that nothing was asked; the exit code stays 0."""
    done = chat("", ["ok"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", f"{EMPTY}\nclosed\n")


def test_a_dumb_terminal_gets_plain_mode():
    """An app would draw escape sequences that this terminal shows as text."""
    asked = command(["ok"])
    asked[2] = "import os; os.environ['TERM'] = 'dumb'\n" + asked[2].replace("plain=True, ", "")
    terminal = Terminal(asked)
    terminal.expect("TERM=dumb")
    terminal.expect("You: ")
    terminal.send("Hi\n")
    terminal.expect("Assistant: ok")
    terminal.send("\x04")
    assert terminal.wait() == 0 and b"\x1b" not in terminal.raw


def test_input_that_is_no_utf8_is_replaced():
    """Bytes that are no UTF-8 are replaced; the chat goes on."""
    done = subprocess.run(command(["ok"]), input=b"caf\xe9\n", capture_output=True, timeout=60)
    assert done.stdout == b"Assistant: ok\n"
    assert done.returncode == 0


def test_control_c_stops_a_reply_and_at_the_prompt_quits():
    """During a reply Ctrl-C keeps the words and asks again; at the prompt it ends with 0."""
    terminal = Terminal(command(["one ", "two ", "three "], ["Next."], gate=True))
    terminal.expect("You: ")
    terminal.send("Hi\n")
    terminal.expect("Assistant: one two ")
    terminal.send("\x03")
    terminal.expect(r"\(stopped\)\nYou: ")
    terminal.send("/status\n")
    terminal.expect("ratings   none yet")
    terminal.expect("You: ")
    terminal.send("\x03")
    terminal.expect("closed")
    assert terminal.wait() == 0


def test_control_c_between_replies_waits_for_the_commit():
    """A Ctrl-C while a rating is being committed does not break it."""
    setup = """
    import os, signal
    rate = runtime.rate
    def slow(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        return rate(*args, **kwargs)
    runtime.rate = slow
    """
    done = chat("Hi\n/up\nnever read\n", ["ok"], setup=setup)
    assert "Rated good" in done.stdout
    assert done.stdout.count("Assistant") == 1
    assert done.returncode == 0


def test_continue_prints_the_earlier_turns():
    """In a terminal -c prints the earlier turns; /up rates the newest of them."""
    setup = """
    from threading import Event
    list(runtime.chats.say(runtime.chats.new_chat(), "Who?", sampling=None, max_new_tokens=9, cancel=Event()))
    """
    terminal = Terminal(command(["Me."], setup=setup, continue_=True))
    terminal.expect("You: Who\\?\nAssistant: Me.\nYou: ")
    terminal.send("/up\n")
    terminal.expect("Rated good")
    terminal.send("\x04")
    terminal.expect("closed")
    assert terminal.wait() == 0


def test_the_handler_of_sigint_is_restored_at_the_end():
    """After the chat the process handles SIGINT as before."""
    setup = "import atexit, signal; atexit.register(lambda: print(signal.getsignal(signal.SIGINT).__name__))"
    assert chat("", setup=setup).stdout == signal.default_int_handler.__name__ + "\n"


def test_plain_mode_does_not_import_textual():
    """Textual is not imported: the linear mode starts without it."""
    code = "import sys, ruvmlx.apps.chat.plain; sys.exit('textual' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
