"""DTensors: each op is left to torch, whose operations have rules of sharding, with gradients and without."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from accelerant import ops

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")

INDICES = torch.tensor([1, 0, 3, 2])
CALLS = {
    "add": (ops.add, (4, 8), (4, 8)),
    "relu": (ops.relu, (4, 8)),
    "gelu": (ops.gelu, (4, 8)),
    "softmax": (ops.softmax, (4, 8)),
    "layer_norm": (ops.layer_norm, (4, 8), (8,), (8,)),
    "add_rms_norm": (ops.add_rms_norm, (4, 8), (4, 8), (8,)),
    "linear_gelu": (ops.linear_gelu, (4, 8), (6, 8), (6,)),
    "swiglu": (ops.swiglu, (4, 8), (4, 8)),
    "matmul": (ops.matmul, (4, 8), (8, 4)),
    "embedding": (ops.embedding, INDICES, (9, 8)),
    "cross_entropy": (ops.cross_entropy, (4, 8), INDICES),
    "linear_cross_entropy": (ops.linear_cross_entropy, (4, 8), (9, 8), INDICES),
    "conv2d": (ops.conv2d, (1, 2, 8, 8), (3, 2, 3, 3)),
    "quantize_int8": (ops.quantize_int8, (4, 8)),
    "attention": (ops.attention, (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)),
}


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.sample(5, 3)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CALLS)
def test_ops_take_distributed_tensors(mesh, name, mode):
    call, *shapes = CALLS[name]
    placement = [Replicate() if name == "attention" else Shard(0)]  # torch does not join the sharded heads
    plain = [s.clone() if isinstance(s, torch.Tensor) else torch.randn(s, requires_grad=True) for s in shapes]
    shared = [distribute_tensor(x.detach(), mesh, placement).requires_grad_(x.requires_grad) for x in plain]
    with mode():
        ours, wanted = (y if isinstance(y, tuple) else (y,) for y in (call(*shared), call(*plain)))
        for y, reference in zip(ours, wanted, strict=True):
            assert isinstance(y, DTensor)
            torch.testing.assert_close(y.full_tensor(), reference)
        if wanted[0].requires_grad:
            ours[0].sum().backward()
            wanted[0].sum().backward()
            for x, reference in zip(shared, plain, strict=True):
                if reference.grad is not None:
                    torch.testing.assert_close(x.grad.full_tensor(), reference.grad)
