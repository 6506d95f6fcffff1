import pytest

from accelerant.runtime import registry
from requirements import require_backend


@pytest.fixture
def opencl():
    """The portable kernels' provider; where CI=true it must be there."""
    return registry.create(require_backend("opencl"))
