"""Tensor maps of Hopper's copy engine."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from accelerant.ops._hopper.maps import tensor_map


@pytest.mark.gpu
def test_a_thread_without_a_context_makes_the_same_map() -> None:
    """A backward pass runs in a thread of autograd's own, and a map may be the first that it asks of the driver."""
    x = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16, device="cuda")
    with ThreadPoolExecutor(1) as other:
        assert other.submit(tensor_map, x, 64).result() == tensor_map(x, 64)
