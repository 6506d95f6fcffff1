import pytest


@pytest.fixture(autouse=True)
def _quick(one_thread):
    pass
