"""A sample of the calls of neon/tests/fuzz.c; fuzz_c.py goes on for hours."""

import sys

import pytest

from .fuzz_c import sample


@pytest.mark.full("neon", "tests/campaigns/fuzz_c.py")  # it compiles for a minute
@pytest.mark.skipif(sys.platform == "darwin", reason="Apple's clang comes without libFuzzer")
def test_no_access_outside_an_array():
    assert sample(20_000) == 0
