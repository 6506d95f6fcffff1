"""Self-attention of packed q, k and v, (B, T, 3, H, D), the result of one product, and its packed gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from accelerant.ops.attention import hopper_bwd
from accelerant.ops.attention.op import attention_bwd, attention_fwd, options_of
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation
from accelerant.runtime.dispatch.case import rules

__all__ = ["attend", "attend_backward"]


def _heads(qkv: Tensor) -> tuple[Tensor, ...]:
    """Return views of a packed (B, T, 3, H, D): q, k and v, (B, H, T, D) each."""
    return qkv.permute(2, 0, 3, 1, 4).unbind(0)


def _attention_case(qkv: Tensor, causal: bool, window: int) -> Case:
    B, T, _, H, D = qkv.shape
    return Case(qkv.device, qkv.dtype, (B, H, H, T, T, D), options_of(causal and T > 1, window))


def attend(qkv: Tensor, causal: bool = True, window: int = -1, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Return self-attention of a packed (B, T, 3, H, D): o (B, H, T, D) whose memory is (B, T, H, D), and lse.

    Args:
        window: how many positions back attention reaches; -1 for all.
        scale: of the scores; None for 1 / sqrt(D).
    """
    q, k, v = _heads(qkv)
    case = _attention_case(qkv, causal, window)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, lse = attention_fwd(case, q, k, v, "causal" in case.options, scale, window)
    return o, lse


def _hopper_packed(do: Tensor, qkv: Tensor, o: Tensor, lse: Tensor, causal: bool) -> Tensor:
    dqkv = torch.empty_like(qkv)
    q, k, v = _heads(qkv)
    out = _heads(dqkv)
    hopper_bwd.launch_hopper(
        do, q, k, v, o, lse, causal, q.shape[-1] ** -0.5, rules().deterministic, out=(out[0], out[1], out[2])
    )
    return dqkv


def _copied(
    do: Tensor, qkv: Tensor, o: Tensor, lse: Tensor, causal: bool, window: int = -1, scale: float | None = None
) -> Tensor:
    q, k, v = _heads(qkv)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    gradients = attention_bwd(_attention_case(qkv, causal, window), do, q, k, v, o, lse, causal, scale, window)
    dqkv = torch.empty_like(qkv)
    for out, gradient in zip(_heads(dqkv), gradients, strict=True):
        out.copy_(gradient)
    return dqkv


def _attention_cost(case: Case) -> Cost:
    B, H, _, T, _, D = case.shape
    elements = B * H * T * D
    flops = 10 * elements * (T + 1) // 2 if "causal" in case.options else 10 * elements * T
    return Cost(8 * elements * case.dtype.itemsize + 4 * B * H * T, flops)


_attend_backward = Operation(
    "attention_packed_bwd",
    (
        Implementation("hopper", _hopper_packed, refuses=hopper_bwd.refuses, own=True),
        Implementation("copied", _copied),
    ),
    cost=_attention_cost,
)


def attend_backward(
    do: Tensor, qkv: Tensor, o: Tensor, lse: Tensor, causal: bool = True, window: int = -1, scale: float | None = None
) -> Tensor:
    """Return the gradient of a packed (B, T, 3, H, D), packed the same way; the Hopper kernel writes it directly."""
    case = _attention_case(qkv, causal, window)
    if window >= 0 or (scale is not None and scale != qkv.shape[-1] ** -0.5):
        return _copied(do, qkv, o, lse, "causal" in case.options, window, scale)
    dqkv: Tensor = _attend_backward(case, do, qkv, o, lse, "causal" in case.options)
    return dqkv
