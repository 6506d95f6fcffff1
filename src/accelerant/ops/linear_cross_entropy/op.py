"""linear_cross_entropy: the public function, its implementations, and the registration with torch and autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelerant.errors import ShapeError, UnsupportedDtype
from accelerant.ops._ahead import AheadOp
from accelerant.ops._differentiable import ByTorch
from accelerant.ops._library import autocast_dtype, name_of
from accelerant.ops._refusals import check_dtype, refuses_triton_kernel
from accelerant.ops._straight import straight
from accelerant.ops.cross_entropy import launch
from accelerant.ops.cross_entropy.op import check_loss, check_targets
from accelerant.ops.cross_entropy.torch_ops import torch_composite
from accelerant.ops.linear_cross_entropy.chunks import run_torch, run_triton
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation

__all__ = ["linear_cross_entropy", "linear_cross_entropy_bwd", "linear_cross_entropy_fwd"]

_WHOLE = 2**20
"""Logits that may exist whole on a CPU, where torch's functions are then quicker: 4 MiB of float32."""


# --- implementations -------------------------------------------------------------------------------------------------


class _Chunked:
    """Both passes with the logits of some rows at a time; by our kernel or by torch's functions."""

    def __init__(self, own: bool) -> None:
        self._run = run_triton if own else run_torch
        self._own = own

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        ignore_index: int,
        smoothing: float,
        reduction: str,
        dtype: str,
        wide: bool,
        gradient_hidden: bool,
        gradient_weight: bool,
        whole: bool = False,
        narrow: bool = False,
    ) -> tuple[Tensor, ...]:
        """The loss; and of "mean" and "sum" the gradients that are wanted, empty tensors otherwise.

        In float16 they are those of the sum: over the count they would vanish before a loss scale lifts them. If
        `whole`, the loss alone, with the logits at once, from torch's functions and with their own gradient. If
        `narrow`, the weight's gradient may be of its dtype rather than float32, where that rounds once.
        """
        if whole:
            return (_composite(hidden, weight, targets, ignore_index, smoothing, reduction, dtype, wide),)
        low = getattr(torch, dtype)
        narrow = narrow and weight.dtype == low == torch.bfloat16  # the sum of all rows may be too large for float16
        needs = (gradient_hidden, gradient_weight) if reduction != "none" else (False, False)
        hidden, weight, targets = hidden.to(low).contiguous(), weight.to(low).contiguous(), targets.contiguous()
        exact = torch.float64 if low == torch.float64 else torch.float32
        losses = torch.empty(hidden.shape[0], dtype=exact, device=hidden.device)
        counts = self._counts(targets, ignore_index) if reduction == "mean" else None
        inner = None if low == torch.float16 else counts
        dhidden, dweight = self._run(
            hidden, weight, targets, ignore_index, smoothing, needs, losses=losses, counts=inner, narrow=narrow
        )  # fmt: skip
        result = torch.float32 if wide else low
        if reduction == "none":
            loss = losses.to(result)
        elif self._own:
            loss = launch.reduce(losses, counts, result)
        else:
            loss = (losses.sum() if counts is None else losses.sum() / counts.sum()).to(result)
        return (
            loss,
            hidden.new_empty(0) if dhidden is None else dhidden,
            hidden.new_empty(0, dtype=exact) if dweight is None else dweight,
        )

    def backward(
        self,
        dy: Tensor,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        dhidden: Tensor | None,
        dweight: Tensor | None,
        ignore_index: int,
        smoothing: float,
        reduction: str,
        dtype: str,
        needs: Sequence[bool],
        given: bool = False,
    ) -> list[Tensor | None]:
        """The gradients: those that forward made, times dy (in place if `given`); made here where it did not."""
        low = getattr(torch, dtype)
        made = (dhidden, dweight)
        likes = (hidden, weight)
        targets = targets.contiguous()
        counts = self._counts(targets, ignore_index) if reduction == "mean" else None
        if not all(
            each is not None and each.shape == like.shape
            for need, each, like in zip(needs, made, likes, strict=True)
            if need
        ):
            args = (hidden.to(low).contiguous(), weight.to(low).contiguous(), targets, ignore_index, smoothing, needs)
            found = self._run(*args, counts=counts, dy=dy.contiguous())
            return [None if each is None else each.to(like.dtype) for each, like in zip(found, likes, strict=True)]
        late = counts if low == torch.float16 else None
        scaled: list[Tensor | None] = [None, None]
        # What needs new memory comes first: an error for want of it must not find the other one scaled already.
        for i in sorted(range(2), key=lambda i: getattr(made[i], "dtype", None) == likes[i].dtype):
            each = made[i]
            if needs[i] and each is not None:
                scaled[i] = self._scaled(each, dy, late, likes[i].dtype, given)
        return scaled

    def _scaled(self, x: Tensor, dy: Tensor, counts: Tensor | None, dtype: torch.dtype, given: bool) -> Tensor:
        if given and self._own and x.dtype == dtype:
            return launch.scale_(x, dy, counts)
        if given and self._own:  # torch's product of float32 in another dtype took 2.1 of 35 ms at 128256 x 4096
            y = x.new_empty(x.shape, dtype=dtype)
            return y.copy_(launch.scale_(x, dy, counts))
        if given and x.dtype == dtype and counts is None and x.device.type == "cpu" and dy.item() == 1.0:
            return x
        factor = dy if counts is None else dy.float() / counts.sum()
        return torch.mul(
            x, factor.to(torch.promote_types(x.dtype, torch.float32)), out=x.new_empty(x.shape, dtype=dtype)
        )

    def _counts(self, targets: Tensor, ignore_index: int) -> Tensor:
        return launch.count(targets, ignore_index) if self._own else (targets != ignore_index).sum()


def _cost(case: Case) -> Cost:
    M, V, K = case.shape
    products = 1 + sum(option in ("hidden", "weight") for option in case.options)
    if "scale" in case.options:
        return Cost(2 * (M + V) * K * case.dtype.itemsize, (M + V) * K)
    return Cost(products * (M + V) * K * case.dtype.itemsize, products * 2 * M * V * K)


_own, _library = _Chunked(own=True), _Chunked(own=False)
linear_cross_entropy_fwd = Operation(
    "linear_cross_entropy_fwd",
    (
        Implementation("triton", _own.forward, refuses=refuses_triton_kernel, own=True),
        Implementation("torch", _library.forward, differentiable=True),
    ),
    cost=_cost,
)
linear_cross_entropy_bwd = Operation(
    "linear_cross_entropy_bwd",
    (
        Implementation("triton", _own.backward, refuses=refuses_triton_kernel, own=True, mutates=True),
        Implementation("torch", _library.backward, mutates=True),
    ),
    cost=_cost,
)


def _composite(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    smoothing: float,
    reduction: str,
    dtype: str,
    wide: bool,
    *_: object,
) -> Tensor:
    low = getattr(torch, dtype)
    logits = functional.linear(hidden.to(low), weight.to(low))
    return torch_composite(logits, targets, ignore_index, smoothing, reduction, wide)


# --- the public function ---------------------------------------------------------------------------------------------


def _torchs(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight), targets, **options)


def _is_torchs(hidden: Tensor, weight: Tensor, targets: Tensor, **_: object) -> bool:
    """Whether torch's functions are ours: of rows that are there, in a dtype that the loss is computed in."""
    plain = hidden.dim() == 2 and hidden.numel() > 0 and targets.dtype == torch.int64
    return plain and hidden.dtype in (torch.float32, torch.float64)


@straight("linear_cross_entropy_fwd", _torchs, serves=_is_torchs, learns=True)
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """cross_entropy of the logits hidden W^T, which never exist whole.

    loss = (1 - s) (L - x_t) + s (L - mean x), with x = W h, L = log sum exp x, t the class, s the label smoothing

    Args:
        hidden: (..., K), float16, bfloat16, float32 or float64.
        weight: (V, K), V at least 1, as torch's linear has it; dtype of hidden (any of the first three under autocast).
        targets: (...), int64 or int32, classes in [0, V) or ignore_index.
        ignore_index: rows of this class have loss and gradient 0 and do not count in the mean.
        label_smoothing: s, in [0, 1].
        reduction: "mean" over the rows that count, "sum", or "none".

    Returns:
        a scalar, (...) for "none"; the dtype of hidden, or float32 under torch.autocast. Logits are rounded to the
        dtype of hidden (of autocast), the loss of them is computed in float32, and the gradient of the weight sums in
        float32 over all rows (on a CPU in bfloat16 each chunk's sum is rounded, and a chunk's logits take at least as
        much memory as that gradient in float32, if there are so many); float64 stays float64. Differentiable twice.

    Raises:
        ShapeError: weight is not (V, K), targets are not (...), or they are on several devices.
        UnsupportedDtype: a dtype not listed above.
        ConfigError: label_smoothing or reduction has no meaning; on the CPU, a target is no class.

    Memory above the inputs: 512 MiB of logits at a time (or as much as the weight takes in float32, if that is more),
    and where gradients are to come those of hidden, and of weight in float32. They are made with the loss ("none": in
    the backward pass, from new logits). On other devices than the CPU a target that is no class makes the loss NaN.
    Under forward-mode differentiation and the transforms of torch.func (grad, jvp, vmap, ...) this is torch's own
    linear and cross_entropy, with logits that exist whole, which the ledger does not count.

    Source: Hsu et al. 2024, arXiv:2410.10989, section 3.2.
    """
    low = autocast_dtype(hidden.device.type)
    wide = low is not None and hidden.dtype != torch.float64
    _check(hidden, weight, mixed=wide)
    check_loss(targets, hidden.shape[:-1], label_smoothing, reduction)
    for name, tensor in (("weight", weight), ("targets", targets)):
        if tensor.device != hidden.device:
            raise ShapeError(f"{name} must be on {hidden.device}, where hidden is; got {tensor.device}")
    dtype = low if wide and low is not None else hidden.dtype
    shape = targets.shape
    if hidden.dim() != 2:
        hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    learns = torch.is_grad_enabled()
    try:
        loss: Tensor = _linear_cross_entropy(
            hidden, weight, targets, ignore_index, float(label_smoothing), reduction, name_of(dtype), wide,
            learns and hidden.requires_grad, learns and weight.requires_grad,
        )  # fmt: skip
    except IndexError:  # as in cross_entropy
        check_targets(targets, weight.shape[0], ignore_index)
        raise
    return loss.reshape(shape) if reduction == "none" and len(shape) != 1 else loss


def _check(hidden: Tensor, weight: Tensor, *, mixed: bool) -> None:
    if hidden.dim() == 0:
        raise ShapeError("hidden must be (..., K), got a scalar")
    if weight.dim() != 2 or weight.shape[0] == 0 or weight.shape[1] != hidden.shape[-1]:
        raise ShapeError(f"weight must be (V, {hidden.shape[-1]}), V at least 1, got {tuple(weight.shape)}")
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        check_dtype("linear_cross_entropy", tensor, name)
    if weight.dtype != hidden.dtype and (not mixed or weight.dtype == torch.float64):
        raise UnsupportedDtype(
            f"hidden and weight must have one dtype, got {name_of(hidden.dtype)} and {name_of(weight.dtype)}"
        )


def _case(hidden: Tensor, weight: Tensor, dtype: str, needs: Sequence[bool], *options: str) -> Case:
    wanted = tuple(name for name, need in zip(("hidden", "weight"), needs, strict=True) if need)
    shape = (hidden.shape[0], *weight.shape)
    return Case(hidden.device, getattr(torch, dtype), shape, (*wanted, *options))


def _case_by_torch(hidden: Tensor, weight: Tensor, *args: Any) -> Case | None:
    """None for logits that had better not exist whole."""
    few = hidden.shape[0] * weight.shape[0] <= _WHOLE
    return _case(hidden, weight, args[4], args[-2:]) if few else None


def _forward(hidden: Tensor, weight: Tensor, *args: Any, narrow: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    check_targets(args[0], weight.shape[0], args[1])
    found: tuple[Tensor, Tensor, Tensor] = linear_cross_entropy_fwd(
        _case(hidden, weight, args[4], args[-2:]), hidden, weight, *args, False, narrow
    )
    return found


def _infer(hidden: Tensor, weight: Tensor, *args: Any) -> Tensor:
    return _forward(hidden, weight, *args[:-2], False, False)[0]


def _ahead(needs: Sequence[bool], hidden: Tensor, weight: Tensor, *args: Any) -> Any:
    loss, dhidden, dweight = _forward(hidden, weight, *args[:-2], *needs, narrow=True)
    reduction = args[3]
    targets = args[0].clone() if args[4] == "float16" else args[0]  # there the backward pass counts them
    ahead = None if reduction == "none" else (hidden, weight, targets, dhidden, dweight)
    return (loss, None, None), ahead, False


def _finish(dy: Tensor, ahead: tuple[Tensor, ...], *options: Any) -> Sequence[Tensor | None]:
    hidden, weight, targets, dhidden, dweight = ahead
    return _scale_or_make(dy, hidden, weight, targets, dhidden, dweight, options, given=True)


def _backward(
    dy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    dhidden: Tensor | None,
    dweight: Tensor | None,
    *options: Any,
) -> Sequence[Tensor | None]:
    return _scale_or_make(dy, hidden, weight, targets, dhidden, dweight, options)


def _scale_or_make(
    dy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    dhidden: Tensor | None,
    dweight: Tensor | None,
    options: Sequence[Any],
    given: bool = False,
) -> Sequence[Tensor | None]:
    ignore_index, smoothing, reduction, dtype, *_, needs = options
    kind = "scale" if given else "backward"
    args = (dy, hidden, weight, targets, dhidden, dweight, ignore_index, smoothing, reduction, dtype, needs, given)
    found: Sequence[Tensor | None] = linear_cross_entropy_bwd(_case(hidden, weight, dtype, needs, kind), *args)
    return found


def _fake(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    smoothing: float,
    reduction: str,
    dtype: str,
    wide: bool,
    gradient_hidden: bool,
    gradient_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    low = getattr(torch, dtype)
    exact = torch.float64 if low == torch.float64 else torch.float32
    made = reduction != "none"
    return (
        hidden.new_empty(targets.shape if reduction == "none" else (), dtype=torch.float32 if wide else low),
        hidden.new_empty(hidden.shape if made and gradient_hidden else (0,), dtype=low),
        hidden.new_empty(weight.shape if made and gradient_weight else (0,), dtype=exact),
    )


_linear_cross_entropy = AheadOp(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor targets, int ignore_index, float smoothing, "
    "str reduction, str dtype, bool wide, bool gradient_hidden, bool gradient_weight) "
    "-> (Tensor loss, Tensor dhidden, Tensor dweight)",
    ahead=_ahead,
    finish=_finish,
    forward=_forward,
    infer=_infer,
    backward=_backward,
    saves=("hidden", "weight", "targets", "dhidden", "dweight"),
    gradients={"hidden": "hidden", "weight": "weight"},
    composite=_composite,
    fake=_fake,
    by_torch=ByTorch(linear_cross_entropy_fwd, _case_by_torch, more=(True,), cut=True),
)
