"""Memory that a program has freed goes back to the system (ruvmlx/platform/memory.py)."""

import ctypes
import subprocess
import sys

import pytest
from ruvmlx.apps.cli import serve

from ruvmlx.platform import memory

# The program makes large blocks of one size. After each large block, the program makes a small block. The
# small blocks stay in use. The first block of 30 MB makes glibc take blocks of 1 MB from its heap. In the
# heap, a block in use keeps all memory below the block.
FREES = """
import sys
from ruvmlx.platform.memory import limit_unused_memory, resident
size, is_limited = int(sys.argv[1]), sys.argv[2:] == ["limited"]
if is_limited:
    limit_unused_memory()
bytearray(30_000_000)
before, large, small = resident(), [], []
for _ in range(100_000_000 // size):
    large.append(bytearray(b"x") * size)
    small.append(bytearray(600))
most = resident()
del large
print((resident() - before) / (most - before))
"""


def share_not_returned(size: int, *arguments: str) -> float:
    command = [sys.executable, "-c", FREES, str(size), *arguments]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="the allocator of glibc"
)
@pytest.mark.parametrize("size", [20_000, 1_000_000])
def test_freed_memory_returns_although_small_blocks_stay(size):
    assert share_not_returned(size, "limited") < 0.1 < 0.25 < share_not_returned(size)


def test_the_server_limits_its_unused_memory(monkeypatch, home):
    calls = []

    async def begin(*_):
        calls.append("begins")

    monkeypatch.setattr(serve, "limit_unused_memory", lambda: calls.append("limits"))
    monkeypatch.setattr(serve, "_serve", begin)
    serve.serve.main(["--port", "0"], standalone_mode=False)
    assert calls == ["limits", "begins"]


def test_the_footprint_of_a_process_on_macos(monkeypatch):
    """The struct rusage_info_v0 has the footprint after 72 bytes."""

    class System:
        def proc_pid_rusage(self, process, flavor, info):
            info[72:80] = (5_000_000_000 + process).to_bytes(8, "little")
            return 0 if process == 7 and flavor == 0 else -1

    monkeypatch.setattr(ctypes, "CDLL", lambda _: System())
    assert memory.darwin_footprint(7) == 5_000_000_007 and memory.darwin_footprint(8) == 0
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert memory.darwin_footprint(7) == 0
