"""What all tests of the chat share."""

import sys

import pytest
from ruvmlx.apps.chat.gc_policy import Garbage

OF_GARBAGE = ("test_gc_policy.py", "test_windowed.py")


@pytest.fixture(autouse=True)
def _few_full_collections(request, monkeypatch):
    """A full collection visits all objects of the tests' process: a fifth of the tests' time."""

    def search(self):
        self.set_aside()
        self._left = sys.getallocatedblocks()

    if request.path.name not in OF_GARBAGE:
        monkeypatch.setattr(Garbage, "search", search)
