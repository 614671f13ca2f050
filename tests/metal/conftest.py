"""The simulated kernels, compiled when first asked for."""

import pytest

from .simulator import Simulated


@pytest.fixture(scope="session")
def simulated(tmp_path_factory):
    """simulated(kernel, templates) -> Simulated, once a session."""
    made: dict = {}

    def get(kernel, templates) -> Simulated:
        if kernel.name not in made:
            made[kernel.name] = Simulated(kernel, templates, tmp_path_factory.mktemp(kernel.name))
        return made[kernel.name]

    return get
