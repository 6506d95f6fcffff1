import pytest
import torch


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """One thread: the tensors are small, and the machine is shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return (yield)
    finally:
        torch.set_num_threads(threads)
