"""Reference of the updates in plain PyTorch, one tensor at a time, in the dtype of the inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def adamw_reference(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int, *, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, maximize: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the parameter and its two moments after a step; `step` counts from 1.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2, with lr as the schedule multiplier of both terms
    and alpha = 1, as in torch.optim.AdamW.
    """
    g = -g if maximize else g
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    m_hat = m / (1 - beta1**step)
    v_hat = v / (1 - beta2**step)
    return p - lr * weight_decay * p - lr * m_hat / (v_hat.sqrt() + eps), m, v


def sgd_reference(
    p: Tensor, g: Tensor, b: Tensor | None, *, lr: float, momentum: float, dampening: float, weight_decay: float,
    nesterov: bool, maximize: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the parameter and its momentum buffer after a step; the buffer is None before the first step.

    Source: Sutskever, Martens, Dahl and Hinton 2013, "On the importance of initialization and momentum in deep
    learning", equations 1 to 4, in the form of torch.optim.SGD: the learning rate multiplies the buffer, and the first
    buffer is the gradient.
    """
    g = -g if maximize else g
    g = g + weight_decay * p
    if momentum == 0:
        return p - lr * g, None
    b = g if b is None else momentum * b + (1 - dampening) * g
    return p - lr * (g + momentum * b if nesterov else b), b


def global_norm_reference(tensors: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of all elements of all tensors."""
    if not tensors:
        return torch.zeros(())
    return torch.stack([x.square().sum() for x in tensors]).sum().sqrt()


def clip_reference(tensors: Sequence[Tensor], max_norm: float) -> list[Tensor]:
    """Return the tensors scaled so that their norm is at most max_norm.

    Source: Pascanu, Mikolov and Bengio 2013, arXiv:1211.5063, algorithm 1, with the 1e-6 of
    torch.nn.utils.clip_grad_norm_.
    """
    scale = (max_norm / (global_norm_reference(tensors) + 1e-6)).clamp(max=1.0)
    return [x * scale for x in tensors]
