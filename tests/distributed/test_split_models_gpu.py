"""Split models on GPUs: in a group of one process over NCCL, and decoding over two.

One process shows the kernels, fused blocks and captured graphs; two, the exchanges.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from accelerant import distributed, ops
from accelerant.nn import Llama, LlamaConfig
from accelerant.nn.optim import AdamW
from accelerant.nn.train import TrainStep

pytestmark = pytest.mark.gpu

CONFIG = LlamaConfig(
    vocab_size=512, context=256, layers=2, heads=8, kv_heads=4, width=256, hidden=512, rope_scaling=None
)


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("causal", [False, True])
def test_ring_attention_equals_the_op(mesh, causal):
    q, k, v = (torch.randn(2, heads, 256, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 4, 4))
    results = []
    for attend in (
        ops.attention,
        lambda *x, causal: distributed.context_parallel_attention(*x, group=mesh, causal=causal),
    ):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        o = attend(*inputs, causal=causal)
        o.sum().backward()
        results.append([o, *(x.grad for x in inputs)])
    # one atomic sum in no fixed order in a library's backward pass: bfloat16 rounds it once
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("split", [distributed.tensor_parallel, distributed.shard, distributed.context_parallel])
def test_steps_equal_those_of_the_whole_model(mesh, split):
    one = Llama(CONFIG).cuda()
    results = []
    for model in (one, split(copy.deepcopy(one), mesh)):
        step = TrainStep(model, AdamW(model.parameters()), model.loss, max_grad_norm=0.5, graph=False)
        tokens = torch.arange(129, device="cuda").remainder(97).expand(2, -1)
        batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        results.append(torch.stack([step([batch], 1e-3).loss for _ in range(4)]))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)  # other kernels; TF32 where a user allows it


def test_decoding_captures_the_exchanges(mesh):
    one = Llama(CONFIG).cuda()
    split = distributed.tensor_parallel(copy.deepcopy(one), mesh)
    assert split.can_cache()
    prompt = torch.arange(7, device="cuda")[None]
    assert torch.equal(split.generate(prompt, 40, temperature=0), one.generate(prompt, 40, temperature=0))


def decode_on_two(rank, store):
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=2, device_id=torch.device("cuda", rank)
    )
    torch.manual_seed(0)
    one = Llama(CONFIG).cuda()
    split = distributed.tensor_parallel(copy.deepcopy(one), init_device_mesh("cuda", (2,)))
    for batch in (1, 3):
        prompt = torch.arange(7 * batch, device="cuda").view(batch, 7)
        assert torch.equal(split.generate(prompt, 40, temperature=0), one.generate(prompt, 40, temperature=0))
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs decode together")
def test_decoding_on_two_gpus(tmp_path):
    torch.multiprocessing.spawn(decode_on_two, (str(tmp_path / "store"),), nprocs=2)
