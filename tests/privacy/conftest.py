import os
import random

import pytest
import torch

from accelerant.runtime import registry
from requirements import require_backend


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """One thread: the tensors are small, and the machine is shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return (yield)
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def fixed_entropy(monkeypatch):
    """The operating system's entropy, the same each time: keys, seeds and draws of the test are fixed."""
    monkeypatch.setattr(os, "urandom", random.Random(0).randbytes)


@pytest.fixture
def opencl():
    """The portable kernels' provider; where CI=true it must be there."""
    return registry.create(require_backend("opencl"))
