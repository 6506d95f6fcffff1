import pytest

from accelerant.ops.aten.device import TENSOR_DEVICES
from requirements import require_backend


@pytest.fixture(scope="session", params=sorted(TENSOR_DEVICES))
def device(request):
    """Each backend with tensors of its own that is present, its first device."""
    return require_backend(request.param)
