"""MLX through our door before any test module can import it directly."""

import pytest

from ruvmlx.platform import mx as _door  # noqa: F401


@pytest.fixture(scope="session")
def starter_backend(starter):
    """On the CPU everywhere: a GPU computes in float16, and the tests compare with float32."""
    from ruvmlx.backends.mlx.backend import MLXBackend

    return MLXBackend(starter, device="cpu")
