"""What tests of the C library share."""

import pytest


@pytest.fixture
def few(full):
    """Environment of the C programs. Where each step is slow, a third of all sizes will do; all of them with
    --full."""
    return {} if full else {"RVM_FEW": "1"}
