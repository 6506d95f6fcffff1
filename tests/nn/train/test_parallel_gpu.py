"""Two GPUs: the captured step, whose graph contains NCCL's sums, does what the eager one does."""

import datetime
import os

import pytest
import torch
import torch.distributed as dist

from accelerant.nn.models.gpt import GPT, GPTConfig
from accelerant.nn.optim import AdamW
from accelerant.nn.train.step import TrainStep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs train together")]


def trained(rank, graph, accumulate, reduce_dtype=torch.float32, steps=12):
    torch.manual_seed(rank)
    model = GPT(GPTConfig(vocab_size=512, context=64, layers=2, heads=4, width=128)).cuda()
    step = TrainStep(
        model, AdamW(model.parameters(), lr=1e-3), model.loss, max_grad_norm=1.0, precision=torch.bfloat16,
        accumulate=accumulate, graph=graph, reduce_dtype=reduce_dtype, bucket_bytes=1 << 18,
    )  # fmt: skip
    tokens = torch.randint(512, (steps, 8, 65), generator=torch.Generator().manual_seed(1)).cuda()
    losses = []
    for batch in tokens:
        mine = batch[4 * rank : 4 * rank + 4]
        parts = [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in mine.chunk(accumulate)]
        losses.append(step(parts, 1e-3).loss)
    assert step.captured == graph
    assert step._reduction._sums is not None  # copy engines sum, not NCCL
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    both = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(both, weights)
    assert torch.equal(*both)
    return torch.stack(losses)


def check(rank, store):
    torch.cuda.set_device(rank)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=120),
    )  # fmt: skip
    for accumulate in (1, 2):
        eager, captured = (trained(rank, graph, accumulate) for graph in (False, True))
        # Sums of atomics vary in their last bits, which bfloat16 rounds.
        torch.testing.assert_close(captured, eager, rtol=2e-3, atol=0)
        low = trained(rank, True, accumulate, torch.bfloat16)
        torch.testing.assert_close(low, eager, rtol=1e-2, atol=0)
    dist.destroy_process_group()


def test_the_captured_step_of_two_gpus(tmp_path):
    torch.multiprocessing.spawn(check, (str(tmp_path / "store"),), nprocs=2)
