"""MLX through our door before any test module can import it directly."""

import pytest

from ruvmlx.platform import mx as _door  # noqa: F401


@pytest.fixture(scope="session")
def starter_backend(starter):
    from ruvmlx.backends.select import open_backend

    return open_backend("mlx", starter)
