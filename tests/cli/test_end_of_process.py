"""The end of the process `ruvmlx`: what happens after the command has returned."""

import subprocess
import sys

# After main(), Python calls the functions that `atexit` has registered. Then it collects garbage for the last
# time.
PROGRAM = """
import atexit, gc, sys
from ruvmlx.apps.main import main
from ruvmlx.apps.server.bodies import ReplyBody

collected = lambda: any(found is ReplyBody for found in gc.get_objects())
assert collected()
atexit.register(lambda: print("collected" if collected() else "left alone"))
sys.argv = ["ruvmlx", "--version"]
main()
"""


def test_the_last_collection_leaves_the_server_s_structs_alone():
    """msgspec can crash while it frees them: one end of `ruvmlx serve` in three was a segmentation fault."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] == ["left alone"], done.stdout
