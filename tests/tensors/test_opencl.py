"""What is particular to OpenCL's kernels: the tiled product of GPUs, and vendors' drivers of GPUs."""

import copy
import subprocess
import sys

import pytest
import torch

import accelerant as acl
from accelerant.runtime import registry
from accelerant.tensors.opencl import OpenclTensors
from accelerant.tensors.tensor import tensor_device
from requirements import require_backend


def moved(x, place):
    """Return a tensor on the device with the strides of the host's."""
    whole = place.upload(torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()))
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "rows", "inner", "columns"), [(1, 5, 3, 7), (3, 150, 33, 130)])
def test_the_product_of_gpus_takes_any_strides(batch, rows, inner, columns):
    require_backend("opencl")
    place = OpenclTensors(registry.create("opencl"), 0)
    place.is_cpu = False
    a, b = torch.randn(batch, rows, inner), torch.randn(batch, inner, columns)
    wide = torch.randn(batch, rows, 3 * inner)[:, :, ::3]
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (a, b)]
    for left, right in ((a, b), turned, (wide, b)):
        found = place.empty((batch, rows, columns), torch.float32)
        place.matmul(found, moved(left, place), moved(right, place))
        torch.testing.assert_close(found.cpu(), left @ right, rtol=1e-5, atol=1e-5)  # sums of 33 products


@pytest.mark.slow
def test_long_products_of_gpus_lose_no_digits():
    require_backend("opencl")
    place = OpenclTensors(registry.create("opencl"), 0)
    place.is_cpu = False
    found = place.empty((1, 2, 3), torch.float32)
    a, b = torch.full((1, 2, 100_001), 0.1), torch.full((1, 100_001, 3), 0.1)
    place.matmul(found, moved(a, place), moved(b, place))  # terms one after the other: 8e-4
    torch.testing.assert_close(found.cpu().double(), a.double() @ b.double(), rtol=3e-5, atol=0)


@pytest.mark.slow
def test_a_process_ends_without_messages_of_the_driver(monkeypatch):
    """PoCL's compiler in a thread that outlives its folder, and its remarks on vectors of 16, are not for users."""
    require_backend("opencl")
    monkeypatch.delenv("POCL_CACHE_DIR", raising=False)
    program = "import torch, accelerant as acl; x = acl.to(torch.ones(32, 32), 'opencl'); (x @ x).add_(1)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stderr == ""


@pytest.mark.gpu
def test_a_driver_of_a_gpu_computes_and_trains():
    require_backend("opencl")
    found = next((one for one in registry.create("opencl").devices() if one.properties["kind"] == "gpu"), None)
    if found is None:
        pytest.skip("no OpenCL driver shows a GPU; set OCL_ICD_VENDORS to a file that names its library")
    place = tensor_device(found)
    assert not place.is_cpu
    torch.manual_seed(0)
    a, b = torch.randn(517, 1030), torch.randn(1030, 770)
    product = acl.to(a, found) @ acl.to(b, found)
    torch.testing.assert_close(product.double().cpu(), a.double() @ b.double(), rtol=1e-4, atol=1e-3)  # float32 sums
    torch.testing.assert_close(acl.to(a, found).softmax(1).cpu(), a.softmax(1))
    model = torch.nn.Sequential(
        torch.nn.Linear(1030, 64), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Linear(64, 8)
    )
    for one, x in ((copy.deepcopy(model), a), (acl.to(model, found), acl.to(a, found))):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        for _ in range(20):
            optimizer.zero_grad()
            loss = one(x).square().mean()
            loss.backward()
            optimizer.step()
        if one is not model:
            expected = loss.item()
    assert loss.item() == pytest.approx(expected, rel=1e-3)
