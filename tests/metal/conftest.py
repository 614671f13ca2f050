"""`run(kernel, inputs, shapes, groups, templates, seed)`: in the simulator, and on a GPU if there is one."""

import pytest

from ruvmlx.platform.mx import GPU_ALLOWED, mx

from .kernels import CUDA_ONLY, KERNELS
from .simulator import Simulated, to_mx, to_numpy

GPU = GPU_ALLOWED and (mx.metal.is_available() or mx.cuda.is_available())


@pytest.fixture(autouse=True)
def twins_on_the_cpu():
    """Whatever the machine has: the twins are the oracle, and the GPU is asked for by name."""
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(device)


@pytest.fixture(scope="session")
def simulated():
    """simulated(kernel) -> Simulated, loaded once a session."""
    made: dict = {}

    def get(kernel) -> Simulated:
        if kernel not in made:
            made[kernel] = Simulated(kernel, KERNELS[kernel])
        return made[kernel]

    return get


@pytest.fixture(params=["simulator", "gpu"] if GPU else ["simulator"])
def run(request, simulated):
    def in_simulator(kernel, inputs, shapes, groups, templates, seed=0):
        return simulated(kernel)([to_numpy(x) for x in inputs], shapes, groups, templates, seed)

    def on_gpu(kernel, inputs, shapes, groups, templates, seed=0):
        if kernel in CUDA_ONLY and not mx.cuda.is_available():
            pytest.skip("matrix units are used on CUDA only")
        arrays = [x if isinstance(x, mx.array) else to_mx(x) for x in inputs]
        return [to_numpy(out) for out in kernel(arrays, shapes, groups, templates)]

    return in_simulator if request.param == "simulator" else on_gpu
