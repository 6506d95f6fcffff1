import os

import pytest

from accelerant.runtime import registry


@pytest.fixture
def opencl():
    """The portable kernels' provider; where CI=true it must be there."""
    reason = registry.reason_absent("opencl")
    if reason:
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    return registry.create("opencl")
