"""Tensor maps, readable tensors and prepared launches of the Hopper kernels."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from accelerant.ops._hopper import LaunchCache, readable, tensor_map


def test_a_full_cache_is_emptied():
    cache = LaunchCache(limit=2)
    assert cache.keep(("a", 1), "first") == "first"
    cache.keep(("b", 1), "second")
    assert cache.get(("a", 1)) == "first"
    assert cache.keep(("c", 1), "third") == "third"
    assert dict(cache) == {("c", 1): "third"}


def test_readable_copies_what_the_copy_engine_cannot_address():
    x = torch.zeros(2, 3, 16, 32, dtype=torch.bfloat16)
    assert readable(x) is x
    heads_last = x.transpose(1, 2)
    assert readable(heads_last) is heads_last
    for wrong in (x.transpose(2, 3), x[..., 1:9], x.flatten()[:-32].as_strided((2, 3, 4, 8), (96, 32, 9, 1)),
                  x[:, :1].expand(2, 3, 16, 32)):  # fmt: skip
        copy = readable(wrong)
        assert copy is not wrong
        assert copy.is_contiguous()
        assert torch.equal(copy, wrong)
    one_row = x.as_strided((1, 1, 1, 32), (5, 7, 3, 1))  # strides of dimensions of size 1 are never used
    assert readable(one_row) is one_row


@pytest.mark.gpu
def test_a_thread_without_a_context_makes_the_same_map() -> None:
    """A backward pass runs in a thread of autograd's own, and a map may be the first that it asks of the driver."""
    x = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16, device="cuda")
    with ThreadPoolExecutor(1) as other:
        assert other.submit(tensor_map, x, 64).result() == tensor_map(x, 64)
