"""Split models on GPUs: in a group of one process over NCCL, and decoding over two."""

import copy
import multiprocessing

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from accelerant import distributed, ledger, ops
from accelerant.distributed.tensor_parallel import _summed
from accelerant.errors import LaunchError
from accelerant.nn import Llama, LlamaConfig
from accelerant.nn.optim import AdamW
from accelerant.nn.train import TrainStep
from accelerant.runtime import processes as peers
from accelerant.runtime.processes import PeerMemory, PeerSum, PeerSums
from accelerant.runtime.streams.graphs import Graph
from refusals import assert_raises

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


def check_peer_sums(mesh):
    """Sums in each other's memory: of small arrays by one kernel, of parts of large ones by copy engines."""
    rank, size = mesh.get_local_rank(), mesh.size()
    sums = PeerSum(mesh)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for elements in (2, 254, 4096, 1 << 14):
            parts = torch.randn(size, elements, generator=torch.Generator().manual_seed(elements)).to(dtype).cuda()
            x = parts[rank].clone()
            assert sums.takes(x)
            wanted = torch.zeros(elements, device="cuda")
            for part in parts:  # in the kernel's order: equal bits
                wanted += part.float()
            assert torch.equal(sums(x), wanted.to(dtype))
    assert not sums.takes(torch.zeros(1 << 17, device="cuda"))
    x, graph = torch.full((4096,), float(rank + 1), device="cuda"), Graph("sums")
    graph.capture(lambda: [sums(x) for _ in range(3)], warm_up=1)
    x.fill_(rank + 1.0)
    graph.replay()
    assert torch.equal(x, torch.full_like(x, size * (size + 1) / 2 * size**2))

    memory = PeerMemory(5000 * 64, torch.float32, torch.device("cuda", rank))
    large, first = PeerSums(memory, 4000 * 64), 64 * 7
    whole = torch.arange(5000 * 64, device="cuda", dtype=torch.float32).remainder(251)
    for _ in range(3):
        memory.own.copy_(whole + rank)
        large.start(first, 3000 * 64)
        large.start(first + 3000 * 64, 64)
        large.finish()
        inside = slice(first, first + 3001 * 64)
        assert torch.equal(memory.own[inside], whole[inside] * size + size * (size - 1) / 2)
        assert torch.equal(memory.own[:first], whole[:first] + rank)
        torch.cuda.synchronize()


def check_summed_products(mesh):
    """Products that one kernel sums: equal bits in each process, and layers with other tilings in turn."""
    rank, sums = mesh.get_local_rank(), PeerSum(mesh)
    for dtype, near in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        for N, K in 2 * ((4096, 512), (48, 96), (8192, 256)):
            torch.manual_seed(N)
            x, weight = torch.randn(mesh.size(), 1, K).to(dtype), torch.randn(mesh.size(), N, K).to(dtype)
            residual = torch.randn(1, N).to(dtype)
            assert sums.takes_outputs(N, dtype)
            y = _summed(x[rank].cuda(), weight[rank].cuda(), residual.cuda(), sums)
            wanted = residual.double() + (x.double() @ weight.double().mT).sum(0)
            torch.testing.assert_close(y.cpu().double(), wanted, rtol=near, atol=near)
            others = [torch.empty_like(y) for _ in range(mesh.size())]
            dist.all_gather(others, y)
            assert all(torch.equal(y, other) for other in others)
    assert not sums.takes_outputs(1 << 15, torch.float32)


def check_decoding(mesh):
    torch.manual_seed(0)
    one = Llama(CONFIG).cuda()
    split = distributed.tensor_parallel(copy.deepcopy(one), mesh)
    for batch in (1, 3):
        prompt = torch.arange(7 * batch, device="cuda").view(batch, 7)
        assert torch.equal(split.generate(prompt, 40, temperature=0), one.generate(prompt, 40, temperature=0))


def check_captured_sharded_steps(mesh):
    """A sharded step is captured by default, and does what it does without a graph."""
    results = []
    for graph, free in ((False, True), (None, True), (None, False)):
        torch.manual_seed(0)
        model = distributed.shard(
            Llama(CONFIG).cuda(), mesh, precision=torch.bfloat16, reshard_after_forward=free
        )  # fmt: skip
        step = TrainStep(
            model, AdamW(model.parameters()), model.loss, max_grad_norm=0.5, precision=torch.bfloat16, graph=graph
        )
        tokens = torch.arange(129, device="cuda").remainder(97).expand(2, -1) + mesh.get_local_rank()
        batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        results.append(torch.stack([step([batch], 1e-3).loss for _ in range(8)]))
        assert step.captured == (graph is None)
    for result in results[1:]:  # sums of atomics, which bfloat16 rounds
        torch.testing.assert_close(result, results[0], rtol=5e-3, atol=0)


def on_several(rank, size, store):
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=size, device_id=torch.device("cuda", rank)
    )
    mesh = init_device_mesh("cuda", (size,))
    for check in (check_peer_sums, check_summed_products, check_decoding, check_captured_sharded_steps):
        check(mesh)
    assert not [entry for entry in ledger().to_dict()["fallbacks"] if entry["ran"] in ("NCCL", "eager")]
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_several_gpus(tmp_path):
    size = 4 if torch.cuda.device_count() >= 4 else 2
    torch.multiprocessing.spawn(on_several, (size, str(tmp_path / "store")), nprocs=size)


def wait_in_vain():
    """Sum with a process that never sends; its memory is this one's."""
    memory = torch.zeros(4 * peers._ROOM, dtype=torch.int64, device="cuda")
    numbers = torch.zeros(peers._ROOM // peers._BLOCK, dtype=torch.int32, device="cuda")
    addresses = peers._for_kernel([memory.data_ptr()] * 2, [4, 7], 0.05, memory.device)
    x = torch.ones(4096, device="cuda")
    peers._launch_sum(x, addresses, numbers, 0, 2)
    assert_raises(RuntimeError, "CUDA error", x.tolist)
    assert peers.silent_peer() == (7, "has sent nothing for a sum within 0.05 s: it has ended, or hangs")
    assert_raises(LaunchError, "rank 7 has sent nothing for a sum", peers._launch_sum, x, addresses, numbers, 0, 2)


def test_a_sum_does_not_wait_for_ever():
    """In a process of its own, whose GPU is lost afterwards."""
    process = multiprocessing.get_context("spawn").Process(target=wait_in_vain)
    process.start()
    process.join(120)
    assert process.exitcode == 0
