"""What the tests of private training share: small problems, and the same update by microbatches of one."""

import torch
from torch import nn
from torch.nn import functional as F

from accelerant.nn import GPT, GPTConfig
from accelerant.privacy import dp


def mlp(inputs=6, classes=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, classes))


def points(count=40, inputs=6, classes=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, inputs, generator=generator)
    return x, torch.randint(classes, (count,), generator=generator)


def tiny_gpt(seed=0, **changes):
    torch.manual_seed(seed)
    return GPT(GPTConfig(**{"vocab_size": 11, "context": 8, "layers": 2, "heads": 2, "width": 16, **changes}))


def classify(model, x, y):
    return F.cross_entropy(model(x), y)


def private(model, rate=0.1, *, lr=1.0, optimizer=None, **options):
    """Without noise and at 40 rows unless told otherwise, so that updates can be compared."""
    inner = torch.optim.SGD(model.parameters(), lr=lr) if optimizer is None else optimizer
    given = {"noise_multiplier": 0.0, "delta": 1e-5, "max_grad_norm": 0.5, "sample_rate": rate, **options}
    if given.get("target_epsilon") is not None:
        del given["noise_multiplier"]
    return dp.make_private(model, inner, **given)


def train(training, data, steps=None, loss=classify, **options):
    """An ordinary loop."""
    for batch in training.batches(data, steps=steps, **options):
        loss(training.model, *batch.tensors).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()


def clipped_sums(model, loss, rows, bound):
    """Sum over examples of their clipped gradients, one backward pass each."""
    params = [p for p in model.parameters() if p.requires_grad]
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in params]
    for row in zip(*rows, strict=True):
        grads = torch.autograd.grad(loss(model, *(each[None] for each in row)), params)
        norm = torch.sqrt(sum((g.double() ** 2).sum() for g in grads))
        for total, grad in zip(sums, grads, strict=True):
            total += grad.double() * min(1.0, bound / float(norm))
    return sums


def parameters(model):
    return [p.detach().double().clone() for p in model.parameters()]
