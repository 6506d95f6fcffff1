import pytest

from accelerant.runtime import registry


@pytest.fixture
def cpu():
    return registry.find_device("cpu")
