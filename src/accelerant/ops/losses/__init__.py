"""Losses of corresponding elements: references, launches, implementations, public functions, registration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant.errors import ConfigError, ShapeError, UnsupportedCase
from accelerant.ops._differentiable import CpuFastPath, DifferentiableOp
from accelerant.ops._launch import STREAM, ceil_div, triton_operation
from accelerant.ops._library import autocast_dtype, check_dtype, check_matches, is_plain
from accelerant.ops.elementwise import is_row
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.dispatch import Case, Cost, case_of
from accelerant.runtime.files import clipped

__all__ = ["binary_cross_entropy", "binary_cross_entropy_with_logits", "l1_loss", "mse_loss"]

REDUCTIONS = ("mean", "sum", "none")
KERNELS = {
    way: TritonKernel("accelerant.ops.losses.triton_kernels", f"losses_{way}") for way in ("fwd", "bwd", "total")
}

PARTS = 512
"""Largest number of programs of a sum; it does not depend on the device, and neither does the order of the sum."""


def _log(x: Tensor) -> Tensor:
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).log().clamp(min=-100.0), -100.0)


def _bce(x: Tensor, t: Tensor, p: Tensor | None) -> Tensor:
    return -t * _log(x) - (1.0 - t) * _log(1.0 - x)


def _bce_logits(x: Tensor, t: Tensor, p: Tensor | None) -> Tensor:
    above, below = (torch.logaddexp(each, torch.zeros_like(each)) for each in (x, -x))
    return (1.0 - t) * above + (t if p is None else p * t) * below


def _bce_logits_slopes(x: Tensor, t: Tensor, p: Tensor | None) -> tuple[Tensor, Tensor]:
    above, below = (torch.logaddexp(each, torch.zeros_like(each)) for each in (x, -x))
    positive = t if p is None else p * t
    return (1.0 - t) * torch.sigmoid(x) - positive * torch.sigmoid(-x), (below if p is None else p * below) - above


class _Loss(NamedTuple):
    """A loss of each element, of (x, t, pos_weight), and dl/dx and dl/dt of the same. Its name is torch's function."""

    each: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    slopes: Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


_LOSSES = {
    "mse_loss": _Loss(lambda x, t, p: (x - t).square(), lambda x, t, p: (2.0 * (x - t), 2.0 * (t - x))),
    "l1_loss": _Loss(lambda x, t, p: (x - t).abs(), lambda x, t, p: (torch.sign(x - t), torch.sign(t - x))),
    "binary_cross_entropy": _Loss(
        _bce, lambda x, t, p: ((x - t) / (x * (1.0 - x)).clamp(min=1e-12), -torch.logit(x).clamp(-100.0, 100.0))
    ),
    "binary_cross_entropy_with_logits": _Loss(_bce_logits, _bce_logits_slopes),
}


def _low(x: Tensor) -> bool:
    return x.dtype in (torch.float16, torch.bfloat16)


def _composite(
    name: str, input: Tensor, target: Tensor, weight: Tensor | None, pos_weight: Tensor | None, reduction: str,
    wide: bool = False,
) -> Tensor:  # fmt: skip
    x, t, w, p = (None if x is None else x.float() if _low(x) else x for x in (input, target, weight, pos_weight))
    assert x is not None and t is not None  # noqa: PT018  for the type checker
    losses = _LOSSES[name].each(x, t, p)
    losses = losses if w is None else losses * w
    losses = losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()
    return losses.to(torch.float32 if wide else input.dtype)


def mse_loss_reference(input: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """Return (x - t)^2, reduced."""
    return _composite("mse_loss", input, target, None, None, reduction)


def l1_loss_reference(input: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """Return |x - t|, reduced."""
    return _composite("l1_loss", input, target, None, None, reduction)


def binary_cross_entropy_reference(
    input: Tensor, target: Tensor, weight: Tensor | None = None, *, reduction: str = "mean"
) -> Tensor:
    """Return -t log x - (1 - t) log(1 - x) with logarithms of at least -100, weighted and reduced."""
    return _composite("binary_cross_entropy", input, target, weight, None, reduction)


def binary_cross_entropy_with_logits_reference(
    input: Tensor, target: Tensor, weight: Tensor | None = None, *, pos_weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Return -p t log s - (1 - t) log(1 - s), s the logistic function of x, weighted and reduced."""
    return _composite("binary_cross_entropy_with_logits", input, target, weight, pos_weight, reduction)


def _repeated(weight: Tensor | None, like: Tensor) -> tuple[Tensor | None, int]:
    if weight is None:
        return None, 1
    if weight.numel() == 1 or is_row(like, weight):
        return weight.contiguous(), weight.numel()
    return weight.expand(like.shape).contiguous(), like.numel()


def _launch_forward(
    name: str, input: Tensor, target: Tensor, weight: Tensor | None, pos_weight: Tensor | None, reduction: str,
    wide: bool,
) -> Tensor:  # fmt: skip
    n, dtype = input.numel(), torch.float32 if wide else input.dtype
    total = reduction != "none"
    y = torch.empty(() if total else input.shape, dtype=dtype, device=input.device)
    if not n:
        return y.fill_(float("nan") if reduction == "mean" else 0.0)
    (w, w_n), (p, p_n) = _repeated(weight, input), _repeated(pos_weight, input)
    blocks, factor = ceil_div(n, STREAM.block), 1.0 / n if reduction == "mean" else 1.0
    programs = min(blocks, PARTS) if total else blocks
    parts = torch.empty(PARTS, dtype=torch.float32, device=input.device) if total and programs > 1 else None
    out = y if parts is None else parts
    args = (input, target, w, p, out, n, w_n, p_n, factor if parts is None else 1.0)
    fixed = {"KIND": name, "SUM": total, "BLOCK": STREAM.block}
    KERNELS["fwd"].launch((programs,), args, fixed, num_warps=STREAM.num_warps)
    if parts is not None:
        KERNELS["total"].launch((1,), (parts, y, programs, factor), {"PARTS": PARTS}, num_warps=4)
    return y


_Gradients = tuple[Tensor | None, Tensor | None]


def _launch_backward(
    name: str, dy: Tensor, input: Tensor, target: Tensor, weight: Tensor | None, pos_weight: Tensor | None,
    reduction: str, needs: Sequence[bool],
) -> _Gradients:  # fmt: skip
    n = input.numel()
    dx, dt = (torch.empty_like(each) if need else None for each, need in zip((input, target), needs, strict=True))
    if n:
        (w, w_n), (p, p_n) = _repeated(weight, input), _repeated(pos_weight, input)
        factor = 1.0 / n if reduction == "mean" else 1.0
        args = (dy.contiguous(), input, target, w, p, dx, dt, n, w_n, p_n, factor)
        fixed = {"KIND": name, "SCALAR": reduction != "none", "BLOCK": STREAM.block}
        grid = (ceil_div(n, STREAM.block),)
        KERNELS["bwd"].launch(grid, args, fixed, num_warps=STREAM.num_warps)
    return dx, dt


def _torch_forward(
    name: str, input: Tensor, target: Tensor, weight: Tensor | None, pos_weight: Tensor | None, reduction: str,
    wide: bool,
) -> Tensor:  # fmt: skip
    x, t = (x.float() if _low(x) else x for x in (input, target))
    weights = {"weight": weight, "pos_weight": pos_weight}
    given = {key: w.float() if _low(w) else w for key, w in weights.items() if w is not None}
    loss: Tensor = getattr(F, name)(x, t, reduction=reduction, **given)
    return loss.to(torch.float32 if wide else input.dtype)


def _torch_backward(
    name: str, dy: Tensor, input: Tensor, target: Tensor, weight: Tensor | None, pos_weight: Tensor | None,
    reduction: str, needs: Sequence[bool],
) -> _Gradients:  # fmt: skip
    exact = torch.float32 if _low(input) else input.dtype
    x, t, p = (None if each is None else each.to(exact) for each in (input, target, pos_weight))
    c = dy.to(exact) / input.numel() if reduction == "mean" else dy.to(exact)
    c = c if weight is None else c * weight
    assert x is not None and t is not None  # noqa: PT018  for the type checker
    slopes = _LOSSES[name].slopes(x, t, p)
    dx, dt = ((c * each).to(input.dtype) if need else None for each, need in zip(slopes, needs, strict=True))
    return dx, dt


def _case(input: Tensor, *options: str) -> Case:
    return case_of((input.device, input.dtype, input.shape, options))


def _cost(accesses: int, case: Case) -> Cost:
    n = case.shape.numel()  # type: ignore[attr-defined]  # a torch.Size
    count = accesses + len(case.options) - 1 + ("none" in case.options)
    return Cost(count * n * case.dtype.itemsize, 8 * n)


def _forward_case(
    input: Tensor, target: Tensor, weight: Tensor | None, pos_weight: Tensor | None, reduction: str, wide: bool
) -> Case:
    return _case(input, reduction, *(("weight",) if weight is not None else ()))


def _declared(name: str, cpu: CpuFastPath) -> DifferentiableOp:
    forward = triton_operation(
        f"{name}_fwd", partial(_launch_forward, name), partial(_torch_forward, name), cost=partial(_cost, 2),
        differentiable=True,
    )  # fmt: skip
    backward: Callable[..., _Gradients] = triton_operation(
        f"{name}_bwd", partial(_launch_backward, name), partial(_torch_backward, name), cost=partial(_cost, 3)
    )

    def run_backward(dy: Tensor, x: Tensor, t: Tensor, w: Tensor | None, p: Tensor | None, *rest: Any) -> _Gradients:
        reduction, _, needs = rest
        return backward(_case(x, reduction), dy, x, t, w, p, reduction, needs)

    return DifferentiableOp(
        f"{name}(Tensor input, Tensor target, Tensor? weight, Tensor? pos_weight, str reduction, bool wide) "
        "-> (Tensor loss)",
        operation=forward,
        case=_forward_case,
        backward=run_backward,
        saves=("input", "target", "weight", "pos_weight"),
        gradients={"input": "input", "target": "target"},
        composite=partial(_composite, name),
        composite_backward=lambda dy, x, t, w, p, reduction, wide, needs: _torch_backward(
            name, dy, x, t, w, p, reduction, needs
        ),
        fake=lambda x, t, w, p, reduction, wide: x.new_empty(
            x.shape if reduction == "none" else (), dtype=torch.float32 if wide else x.dtype
        ),
        cpu=cpu,
    )


def _serves(input: Tensor, target: Tensor, *_: object, **options: object) -> bool:
    """Return whether torch's function gives the same; in 16 bits the losses would be rounded before their sum."""
    return not _low(input) and target.shape == input.shape


_cpu = {name: CpuFastPath(getattr(F, name), serves=_serves) for name in _LOSSES}
_ops: dict[str, Callable[..., Tensor]] = {name: _declared(name, cpu) for name, cpu in _cpu.items()}


def _call(
    name: str, input: Tensor, target: Tensor, reduction: str, weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    check_dtype(name, input, "input")
    check_matches(name, input, "input", target=target, weight=weight, pos_weight=pos_weight)
    if target.shape != input.shape:
        raise ShapeError(f"target must be {tuple(input.shape)}, the shape of input, got {tuple(target.shape)}")
    for label, each in (("weight", weight), ("pos_weight", pos_weight)):
        if each is None:
            continue
        try:
            fits = torch.broadcast_shapes(each.shape, input.shape) == input.shape
        except RuntimeError:
            fits = False
        if not fits:
            raise ShapeError(f"{label} must broadcast to {tuple(input.shape)}, got {tuple(each.shape)}")
        if each.requires_grad:
            raise UnsupportedCase(
                f"{name} has no gradient for {label}: detach it, or multiply losses of reduction none"
            )
    if reduction not in REDUCTIONS:
        raise ConfigError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {clipped(reduction)}")
    wide = _low(input) and autocast_dtype(input.device.type) is not None
    return _ops[name](input.contiguous(), target.contiguous(), weight, pos_weight, reduction, wide)


@_cpu["mse_loss"]
def mse_loss(input: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """Return the squared differences of two tensors, their mean or their sum.

    Args:
        input: any shape; float16, bfloat16, float32 or float64.
        target: shape, dtype and device of input; nothing is broadcast.
        reduction: "mean" over all elements, "sum", or "none".

    Returns:
        a scalar, or the shape of input for "none"; the dtype of input, or float32 under torch.autocast, as in torch.
        Computed and summed in float32 (float64 for float64), in one fixed order. The mean of nothing is NaN.
        Differentiable twice in both tensors.

    Raises:
        ShapeError: another shape, several devices.
        UnsupportedDtype: a dtype not listed above, or several.
        ConfigError: reduction is out of range.
    """
    return _call("mse_loss", input, target, reduction)


@_cpu["l1_loss"]
def l1_loss(input: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """Return the absolute differences of two tensors, their mean or their sum.

    Args:
        input, target, reduction: as for mse_loss.

    Returns:
        as mse_loss. The gradient where the two are equal is 0.

    Raises:
        ShapeError, UnsupportedDtype, ConfigError: as mse_loss.
    """
    return _call("l1_loss", input, target, reduction)


@_cpu["binary_cross_entropy"]
def binary_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, *, reduction: str = "mean"
) -> Tensor:
    """Return the cross entropy of probabilities and targets between 0 and 1.

    loss = -t log x - (1 - t) log(1 - x), logarithms of at least -100

    Args:
        input: probabilities, otherwise as for mse_loss.
        target, reduction: as for mse_loss.
        weight: factor of each loss, broadcast to the shape of input, in its dtype; it gets no gradient.

    Returns:
        as mse_loss; the mean divides by the number of elements, whatever their weights.

    Raises:
        ShapeError, UnsupportedDtype, ConfigError: as mse_loss; ConfigError on the CPU for a probability out of [0, 1].
        UnsupportedCase: the weight requires a gradient.

    On other devices the loss of a probability out of [0, 1] is NaN. `binary_cross_entropy_with_logits` is more exact.
    """
    try:
        return _call("binary_cross_entropy", input, target, reduction, weight)
    except RuntimeError:  # of torch's function on a CPU
        if input.is_cpu and is_plain(input) and not bool(((input >= 0) & (input <= 1)).all()):
            low, high = (float(each) for each in torch.aminmax(input.detach()))
            raise ConfigError(f"input must be probabilities, 0 to 1; its range is {low:g} to {high:g}") from None
        raise


@_cpu["binary_cross_entropy_with_logits"]
def binary_cross_entropy_with_logits(
    input: Tensor, target: Tensor, weight: Tensor | None = None, *, pos_weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Return the cross entropy of the logistic function of logits and targets between 0 and 1.

    loss = (1 - t) log(1 + exp(x)) + p t log(1 + exp(-x))

    Args:
        input: logits, otherwise as for mse_loss.
        target, reduction: as for mse_loss.
        weight: as for binary_cross_entropy.
        pos_weight: p, the weight of positive targets; broadcast as weight is; None for 1.

    Returns:
        as binary_cross_entropy.

    Raises:
        ShapeError, UnsupportedDtype, ConfigError: as mse_loss.
        UnsupportedCase: a weight requires a gradient.
    """
    return _call("binary_cross_entropy_with_logits", input, target, reduction, weight, pos_weight)
