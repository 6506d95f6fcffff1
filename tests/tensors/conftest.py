import pytest

from accelerant.tensors.tensor import TENSOR_DEVICES
from requirements import require_backend


@pytest.fixture(
    scope="session",
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name == "opencl")) for name in sorted(TENSOR_DEVICES)],
)
def device(request):
    """Each backend with tensors of its own that is present; PoCL takes half a second to compile a kernel."""
    return require_backend(request.param)
