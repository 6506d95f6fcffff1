import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: threads that wait for one another cost more than they give where other tests run beside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
