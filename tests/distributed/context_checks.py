"""What each process of the tests of context parallelism does; apart, so that a fresh interpreter can import it."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import accelerant as acl
from accelerant import ops
from accelerant.distributed import context_parallel, context_parallel_attention, join_sequence, split_sequence
from accelerant.errors import ConfigError, ShapeError, UnsupportedCase

LLAMA = acl.nn.LlamaConfig(
    vocab_size=96, context=64, layers=2, heads=4, kv_heads=2, width=32, hidden=48, rope_scaling=None
)
GPT = acl.nn.GPTConfig(vocab_size=97, context=64, layers=2, heads=4, width=32)


def attention_equals_one_process():
    """Results and gradients, causal and not, with shared heads of keys, in three dtypes."""
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        for causal in (False, True):
            for kv_heads, scale in ((4, None), (2, 0.3), (1, None))[: 3 if dtype == torch.float64 else 2]:
                whole = [torch.randn(2, heads, 16, 8, dtype=dtype) for heads in (4, kv_heads, kv_heads, 4)]
                q, k, v = (x.clone().requires_grad_() for x in whole[:3])
                ops.attention(q, k, v, causal, scale).backward(whole[3])
                parts = [split_sequence(x, dim=2, causal=causal).requires_grad_() for x in whole[:3]]
                o = context_parallel_attention(*parts, causal=causal, scale=scale)
                o.backward(split_sequence(whole[3], dim=2, causal=causal))
                near = {"rtol": tolerance, "atol": tolerance}
                expected = ops.attention(*(x.detach() for x in (q, k, v)), causal, scale)
                torch.testing.assert_close(join_sequence(o, dim=2, causal=causal), expected, **near)
                for mine, one in zip(parts, (q, k, v), strict=True):
                    torch.testing.assert_close(join_sequence(mine.grad, dim=2, causal=causal), one.grad, **near)


def attention_takes_any_layout_and_large_scores():
    """Heads next to rows, as the layers give them, and scores whose exponentials overflow."""
    whole = [100 * torch.randn(1, 16, 2, 8, dtype=torch.float64).transpose(1, 2) for _ in range(3)]
    o = context_parallel_attention(*(split_sequence(x, dim=2) for x in whole), causal=True)
    torch.testing.assert_close(join_sequence(o, dim=2), ops.attention(*whole, causal=True))


def bad_input_is_refused():
    size = dist.get_world_size()
    with pytest.raises(ShapeError, match=rf"over {size} processes must be a multiple of {2 * size} long, got 7"):
        split_sequence(torch.zeros(1, 7))
    with pytest.raises(ShapeError, match=rf"multiple of {size} long, got 0"):
        split_sequence(torch.zeros(1, 0), causal=False)
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ShapeError, match="two chunks of one length, got 3 positions"):
        context_parallel_attention(x, x, x, causal=True)
    with pytest.raises(ShapeError, match=r"the heads of k must divide those of q, got 2 and 3"):
        context_parallel_attention(torch.zeros(1, 3, 3, 4), x, x)
    with pytest.raises(ShapeError, match=r"got \(1, 2, 3, 4\) and \(1, 2, 5, 4\)"):
        context_parallel_attention(x, torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4))
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("data", "context"))
    with pytest.raises(ConfigError, match=r"one dimension, got \('data', 'context'\)"):
        context_parallel_attention(x, x, x, group=mesh)
    with pytest.raises(UnsupportedCase, match="got Linear"):
        context_parallel(torch.nn.Linear(2, 2), mesh["context"])
    model = context_parallel(acl.nn.GPT(GPT), mesh["context"])
    with pytest.raises(ShapeError, match=rf"multiple of {2 * size} long, got 6"):
        model.loss(torch.zeros(1, 6, dtype=torch.long), torch.zeros(1, 6, dtype=torch.long))
    with pytest.raises(ShapeError, match="at most 64 tokens fit the context, got 128"):
        model(torch.zeros(1, 128, dtype=torch.long))
    with pytest.raises(UnsupportedCase, match="does not generate"):
        model.generate(torch.zeros(1, 2, dtype=torch.long), 2)
    with pytest.raises(UnsupportedCase, match="got ContextParallelGPT"):
        context_parallel(model, mesh["context"])


def models_equal_one_process():
    """Loss, logits and gradients, where some processes have few counted targets or none; and a second backward pass."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for kind, config in ((acl.nn.Llama, LLAMA), (acl.nn.GPT, GPT)):
        torch.manual_seed(1)
        one = kind(config)
        model = context_parallel(copy.deepcopy(one), mesh)
        idx, targets = torch.randint(0, 96, (2, 2, 16)).unbind()
        targets[:, 3:] = -100
        expected, loss = one.loss(idx, targets), model.loss(idx, targets)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
        for _ in range(2):
            expected.backward()
            loss.backward()
            expected, loss = one.loss(idx, targets), model.loss(idx, targets)
        for (name, mine), (_, theirs) in zip(model.named_parameters(), one.named_parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: n + text)
        torch.testing.assert_close(join_sequence(model(idx), mesh), one(idx), rtol=1e-5, atol=1e-5)


def recomputed_blocks_give_the_same_gradients():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = context_parallel(acl.nn.Llama(LLAMA), mesh)
    idx, targets = torch.randint(0, 96, (2, 1, 16)).unbind()
    model.loss(idx, targets).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with acl.nn.train.step.recomputed(model, ["blocks.*"]):
        model.loss(idx, targets).backward()
    for parameter, grad in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=0, atol=0)


def steps_equal_one_process():
    """TrainStep sums gradients of its processes itself; averaged ones are not counted twice."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    idx, targets = torch.randint(0, 96, (2, 2, 16)).unbind()
    one = acl.nn.Llama(LLAMA).double()
    models = [context_parallel(copy.deepcopy(one), mesh, average_gradients=average) for average in (True, False)]
    results = []
    for model in (one, *models):
        optimizer = acl.nn.optim.AdamW(model.parameters())
        step = acl.nn.train.TrainStep(model, optimizer, model.loss, max_grad_norm=0.5)
        results.append(torch.stack([torch.stack(step([(idx, targets)], 1e-2)) for _ in range(3)]))
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])
    config = acl.nn.train.TrainConfig(steps=1, batch_size=2)
    with pytest.raises(UnsupportedCase, match="compute the same rows: use TrainStep"):
        acl.nn.train.fit(models[0], (idx, targets), config=config)


CHECKS = [
    attention_equals_one_process, attention_takes_any_layout_and_large_scores, bad_input_is_refused,
    models_equal_one_process, recomputed_blocks_give_the_same_gradients, steps_equal_one_process,
]  # fmt: skip
"""For two processes."""

OF_FOUR = [attention_equals_one_process, models_equal_one_process]
