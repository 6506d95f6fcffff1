"""cross_entropy: reference, implementations, the public function, and the registration with torch and autograd."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional

from accelerant.errors import ConfigError, IndexOutOfRange, ShapeError, UnsupportedCase, UnsupportedDtype
from accelerant.ops._differentiable import CpuFastPath, DifferentiableOp
from accelerant.ops._launch import triton_operation
from accelerant.ops._library import autocast_dtype, check_dtype, is_plain, name_of, not_a_tensor, refuses_triton_kernel
from accelerant.ops.cross_entropy import launch
from accelerant.ops.cross_entropy.launch import COUNTS, bind_forward, launch_backward, launch_forward
from accelerant.runtime.compilation.triton import refuses_triton
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation, case_of
from accelerant.runtime.files import clipped

__all__ = ["cross_entropy"]


CHUNK = 2**19  # logits per chunk on a CPU: 2 MiB of float32; chunks of half that size take a sixth longer

_TINY = 1e-30  # smaller probabilities have lost digits in float32: their logarithm comes from the logits


def is_low(dtype: torch.dtype) -> bool:
    """Return whether a dtype is a 16-bit one, computed in float32."""
    return dtype in (torch.float16, torch.bfloat16)


def torch_composite(
    logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float, reduction: str, wide: bool, *_: object
) -> Tensor:
    """Return the loss by torch's own functions; 16-bit dtypes compute in float32."""
    dtype = torch.float32 if wide else logits.dtype
    if logits.numel() == 0:
        empty = logits.sum() if reduction != "none" else logits.sum(1)
        return (empty / 0 if reduction == "mean" else empty).to(dtype)
    logits = logits.float() if is_low(logits.dtype) else logits
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": smoothing, "reduction": reduction}
    return functional.cross_entropy(logits, targets.long(), **options).to(dtype)


def _coefficients(
    dy: Tensor | None, targets: Tensor, counts: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    c = (targets != ignore_index).to(dtype)
    if counts is not None:
        c = c / counts.sum().clamp_min(1)
    return (c if dy is None else c * dy.to(dtype))[:, None]


def torch_rows(
    logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float, dx: Tensor | None,
    counts: Tensor | None = None, dy: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return each row's loss, in float32 or float64, and write its gradient times dy / sum(counts) to dx.

    logits (M, V) have any row stride; dx, of any dtype, may be the logits, or None for no gradient; counts and dy (a
    scalar or (M,)) are None for 1.
    """
    exact = torch.float32 if is_low(logits.dtype) else logits.dtype
    (M, V), counted = logits.shape, targets != ignore_index
    at = targets.long().where(counted, 0)[:, None]
    losses = torch.empty(M, dtype=exact, device=logits.device)
    c = None if dx is None else _coefficients(dy, targets, counts, ignore_index, exact)
    R = max(1, CHUNK // V) if logits.device.type == "cpu" else max(1, M)
    direct = dx is not None and dx.dtype == exact and dx.is_contiguous() and dx.data_ptr() != logits.data_ptr()
    buffer = None if direct else torch.empty(min(R, M), V, dtype=exact, device=logits.device)
    for start in range(0, M, R):
        rows = slice(start, min(start + R, M))
        x = logits[rows]
        out = dx[rows] if buffer is None and dx is not None else x.new_empty(0) if buffer is None else buffer[: len(x)]
        losses[rows] = _chunk(x, at[rows], smoothing, out, None if c is None else c[rows])
        if dx is not None and buffer is not None:
            dx[rows] = out
    return losses.masked_fill_(~counted, 0.0)


def _chunk(x: Tensor, at: Tensor, smoothing: float, out: Tensor, c: Tensor | None) -> Tensor:
    """Return the rows' losses, and write their gradients times c to out, which has the dtype to compute in."""
    wide = x if x.dtype == out.dtype else out.copy_(x)  # torch's row-wise functions may overwrite their input
    if c is None:
        return _from_logarithms(torch.log_softmax(wide, 1, out=out), at, smoothing)
    more = smoothing * (wide.gather(1, at)[:, 0] - wide.mean(1)) if smoothing else 0.0
    if x.device.type == "cpu":
        torch.softmax(wide, 1, out=out)
        p = out.gather(1, at)[:, 0]
        losses = more - p.log()
        if not bool((p >= _TINY).all()):  # or NaN
            losses = _from_logarithms(torch.log_softmax(x.to(out.dtype), 1), at, smoothing)
    else:  # without the check of p, which would synchronize with the device
        losses = _from_logarithms(torch.log_softmax(wide, 1, out=out), at, smoothing)
        out.exp_()
    out.mul_(c)
    if smoothing:
        out.sub_(c * (smoothing / out.shape[1]))
    out.scatter_add_(1, at, c * (smoothing - 1.0))
    return losses


def _from_logarithms(log_p: Tensor, at: Tensor, smoothing: float) -> Tensor:
    chosen = log_p.gather(1, at)[:, 0]
    return -((1.0 - smoothing) * chosen + smoothing * log_p.mean(1) if smoothing else chosen)


def torch_forward(
    logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float, reduction: str, wide: bool,
    inplace: bool = False, gradient: bool = False, statistics: bool = True,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return loss, statistics, counts, and the gradient if asked; without statistics the differentiable loss only."""
    if not statistics:
        return (torch_composite(logits, targets, ignore_index, smoothing, reduction, wide),)
    mean = reduction == "mean"
    counts = torch.zeros(COUNTS if mean else 0, dtype=torch.int32, device=logits.device)
    if mean:
        counts[0] = (targets != ignore_index).sum()
    kept = torch.zeros(2, logits.shape[0], dtype=torch.float32, device=logits.device)
    if refuses_triton(logits.device) is None:  # only the Triton backward kernel reads them
        kept[0] = logits.amax(1)
        kept[1] = 1.0 / torch.exp(logits.float() - kept[0][:, None]).sum(1)
    dx = None
    if gradient:
        over = inplace and logits.is_contiguous()
        dx = logits if over else torch.empty_like(logits, memory_format=torch.contiguous_format)
    losses = torch_rows(logits, targets, ignore_index, smoothing, dx, counts if mean else None)
    loss = losses if reduction == "none" else losses.sum() / counts[0] if mean else losses.sum()
    loss = loss.to(torch.float32 if wide else logits.dtype)
    return (loss, kept, counts) if dx is None else (loss, kept, counts, dx)


def torch_backward(
    dy: Tensor, logits: Tensor, targets: Tensor, statistics: Tensor, counts: Tensor, ignore_index: int,
    smoothing: float, reduction: str, unscaled: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the gradient of the logits; `unscaled` is that gradient for dy = 1, scaled in place."""
    if unscaled is not None:
        return unscaled if dy.device.type == "cpu" and dy.item() == 1.0 else unscaled.mul_(dy)
    dx = torch.empty_like(logits, memory_format=torch.contiguous_format)
    torch_rows(logits, targets, ignore_index, smoothing, dx, counts if reduction == "mean" else None, dy)
    return dx


REDUCTIONS = ("mean", "sum", "none")
_EAGER = (torch.bfloat16, torch.float32)  # dtypes whose gradient may be computed together with the loss; see _ahead
_MANY = 2**18  # number of logits from which on that saves more on a CPU than an autograd function in Python costs


def cross_entropy_reference(
    logits: Tensor, targets: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "mean",
    inplace_backward: bool = False,
) -> Tensor:  # fmt: skip
    """Return log sum exp of each row minus its expected logit under the smoothed class distribution."""
    rows = logits.reshape(-1, logits.shape[-1])
    classes = targets.reshape(-1).long()
    counted = classes != ignore_index
    expected = rows.gather(1, classes.where(counted, 0)[:, None])[:, 0]
    expected = (1.0 - label_smoothing) * expected + label_smoothing * rows.mean(1)
    losses = torch.where(counted, torch.logsumexp(rows, 1) - expected, 0.0)
    if reduction == "none":
        return losses.reshape(targets.shape)
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


def _cost(case: Case) -> Cost:
    n = math.prod(case.shape)
    accesses = 2 if "gradient" in case.options or "backward" in case.options else 1
    return Cost(accesses * n * case.dtype.itemsize + 16 * case.shape[0], 6 * accesses * n)


_FORWARD = (
    Implementation("hopper", launch.launch_hopper, refuses=launch.refuses_shared_rows, own=True),
    Implementation("triton", launch_forward, refuses=refuses_triton_kernel, own=True, bind=bind_forward),
    Implementation("torch", torch_forward, differentiable=True),
)
cross_entropy_fwd = Operation("cross_entropy_fwd", _FORWARD, cost=_cost)
cross_entropy_fwd_inplace = Operation(
    "cross_entropy_fwd_inplace",
    tuple(Implementation(impl.name, impl.run, impl.refuses, impl.own, mutates=True) for impl in _FORWARD),
    cost=_cost,
)
cross_entropy_bwd = triton_operation("cross_entropy_bwd", launch_backward, torch_backward, cost=_cost, mutates=True)


torch_cross_entropy_fwd = Operation(
    "torch_cross_entropy_fwd",
    (Implementation("torch", functional.cross_entropy, differentiable=True),),
    cost=_cost,
)


def mean_by_torch(logits: Tensor, targets: Tensor) -> Tensor:
    """Return torch's cross_entropy, recorded by torch's autograd; the ledger counts calls with plain CPU tensors."""
    loss: Tensor
    if logits.is_cpu and not is_compiling() and is_plain(logits):
        loss = torch_cross_entropy_fwd(_case(logits), logits, targets)
    else:
        loss = functional.cross_entropy(logits, targets)
    return loss


def _torch_equivalent(logits: Tensor, targets: Tensor, *, inplace_backward: bool = False, **options: Any) -> Tensor:
    if is_low(logits.dtype):
        return functional.cross_entropy(logits.float(), targets, **options).to(logits.dtype)
    return functional.cross_entropy(logits, targets, **options)


def _torch_serves(logits: Tensor, targets: Tensor, **_: object) -> bool:
    """Return whether torch's functions give the same: with rows, and targets of their type."""
    return logits.dim() == 2 and logits.numel() > 0 and targets.dtype == torch.int64


def _mean(logits: Tensor, targets: Tensor) -> Tensor:
    kernel: Any = torch._C._nn.cross_entropy_loss
    loss: Tensor = kernel(logits, targets, None, 1)  # 1: the mean, which is not its default
    return loss


def _low_mean(logits: Tensor, targets: Tensor) -> Tensor:
    return _mean(logits.float(), targets).to(logits.dtype)


def _bound(logits: Tensor, *targets: Tensor, **options: Any) -> Callable[..., Tensor] | None:
    if not options:
        return _low_mean if is_low(logits.dtype) else _mean
    own = is_low(logits.dtype) or not options.keys().isdisjoint(("targets", "inplace_backward"))
    return None if own else functional.cross_entropy


_cpu = CpuFastPath(
    _torch_equivalent,
    bind=_bound,
    serves=_torch_serves,
    pure=True,
    args=(False, False),
)


@_cpu
def cross_entropy(
    logits: Tensor, targets: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "mean",
    inplace_backward: bool = False,
) -> Tensor:  # fmt: skip
    """Return the cross entropy of logits and class indices.

    loss = (1 - s) (L - x_t) + s (L - mean x), with L = log sum exp x, t the class and s the label smoothing

    Args:
        logits: (..., V), float16, bfloat16, float32 or float64, V at least 1.
        targets: (...), int64 or int32, classes in [0, V) or ignore_index.
        ignore_index: rows of this class have loss and gradient 0 and are not counted in the mean.
        label_smoothing: s, in [0, 1].
        reduction: "mean" over the counted rows, "sum", or "none".
        inplace_backward: write the gradient over the logits, which saves memory of their size. It applies to eager
            calls with a gradient, reduction "mean" or "sum", and contiguous bfloat16 or float32 logits; other calls
            ignore it. Nothing else may use the logits (autograd raises otherwise), and only one backward pass is
            possible.

    Returns:
        a scalar, or (...) for "none"; the dtype of the logits, or float32 under torch.autocast, as in torch. Computed
        in float32 (float64 for float64). The mean of no rows is NaN. Differentiable twice.

    Raises:
        ShapeError: the logits are a scalar or have no class, targets are not (...), or several devices.
        UnsupportedDtype: a dtype not listed above.
        ConfigError: label_smoothing or reduction is out of range.
        IndexOutOfRange: on the CPU, a target out of [0, V).
        UnsupportedCase: a second backward pass after inplace_backward.
        TypeError: an argument is not a tensor.

    On other devices a target out of range makes the loss NaN (torch's kernel asserts, which ends the CUDA context).
    If a gradient is needed, bfloat16 and float32 logits of a "mean" or "sum" are read once: the gradient is computed
    with the loss, and occupies memory of the size of the logits until the backward pass.

    Source: Szegedy et al. 2016, arXiv:1512.00567, section 7.
    """
    check_dtype("cross_entropy", logits, "logits")
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ShapeError(f"logits must be (..., V), V at least 1, got {tuple(logits.shape)}")
    check_loss("cross_entropy", targets, logits.shape[:-1], label_smoothing, reduction)
    if targets.device != logits.device:
        raise ShapeError(f"targets must be on {logits.device}, where logits is; they are on {targets.device}")
    wide = logits.dtype.itemsize == 2 and autocast_dtype(logits.device.type) is not None
    shape = targets.shape
    if logits.dim() != 2:
        logits, targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    try:
        loss: Tensor = _cross_entropy(
            logits, targets, ignore_index, float(label_smoothing), reduction, wide, inplace_backward
        )
    except IndexError:  # raised by torch's function on a CPU; other implementations check the targets first
        check_targets(targets, logits.shape[-1], ignore_index)
        raise
    return loss.reshape(shape) if reduction == "none" and len(shape) != 1 else loss


def check_loss(op: str, targets: Tensor, shape: Sequence[int], label_smoothing: float, reduction: str) -> None:
    """Check the arguments that cross_entropy and linear_cross_entropy share."""
    if not isinstance(targets, Tensor):
        raise not_a_tensor(op, "targets", targets)
    if targets.shape != shape:
        raise ShapeError(f"targets must be {tuple(shape)}, got {tuple(targets.shape)}")
    if targets.dtype not in (torch.int64, torch.int32):
        raise UnsupportedDtype(f"targets must be int64 or int32, got {name_of(targets.dtype)}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ConfigError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if reduction not in REDUCTIONS:
        raise ConfigError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {clipped(reduction)}")


def check_targets(targets: Tensor, V: int, ignore_index: int) -> None:
    """Raise IndexOutOfRange for a target out of range if the check is cheap: on the CPU, not while tracing."""
    if targets.device.type != "cpu" or is_compiling() or not is_plain(targets):
        return
    if targets.numel():
        low, high = (int(bound) for bound in torch.aminmax(targets))  # one pass, enough for most calls
        if low >= 0 and high < V:
            return
    wrong = targets[(targets != ignore_index) & ((targets < 0) | (targets >= V))]
    if wrong.numel():
        raise IndexOutOfRange(f"targets must be in [0, {V}) or ignore_index ({ignore_index}), got {int(wrong[0])}")


def _case(logits: Tensor, *options: str) -> Case:
    return case_of((logits.device, logits.dtype, logits.shape, options))


@_cpu.case
def _cpu_case(logits: Tensor, *args: object) -> Case | None:
    """Return None if chunks of rows are faster, or the gradient is to overwrite the logits.

    Chunks are, if the gradient can be computed with the loss, and in low precision, where torch's function needs all
    logits in float32. (torch's own bfloat16 loss returns 0 where 0.004 is right.)
    """
    needs_grad, many = logits.requires_grad and torch.is_grad_enabled(), logits.numel() >= _MANY
    reduction, inplace = args[3], args[5]
    if needs_grad and (inplace or (many and reduction != "none" and logits.dtype in _EAGER)):
        return None
    return None if many and is_low(logits.dtype) else _case(logits)


def _forward(logits: Tensor, targets: Tensor, ignore_index: int, *settings: Any) -> Any:
    check_targets(targets, logits.shape[1], ignore_index)
    *settings_only, _ = settings  # nothing is written over the logits without their gradient
    return cross_entropy_fwd(_case(logits), logits, targets, ignore_index, *settings_only, False)


def _eager_gradient(
    needs: Sequence[bool], logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float, reduction: str,
    wide: bool, inplace: bool,
) -> tuple[tuple[Tensor | None, ...], Any, bool] | None:  # fmt: skip
    """Compute loss and gradient together, but not in float16, where it would underflow, or float64, for checks."""
    if reduction == "none" or logits.dtype not in _EAGER:
        return None
    check_targets(targets, logits.shape[1], ignore_index)
    args = (logits, targets, ignore_index, smoothing, reduction, wide, inplace, True)
    run = cross_entropy_fwd_inplace if inplace else cross_entropy_fwd
    *results, dx = run(_case(logits, "gradient"), *args)
    if over := inplace and dx.numel() > 0 and dx.data_ptr() == logits.data_ptr():
        torch.autograd.graph.increment_version(logits)
        dx = dx.detach()
    return tuple(results), (dx, targets, *results[1:]), over


def _finish_gradient(
    dy: Tensor, ahead: tuple[Tensor, ...], ignore_index: int, smoothing: float, reduction: str, *_: object
) -> tuple[Tensor]:
    dx = ahead[0]
    return (cross_entropy_bwd(_case(dx, "scale"), dy, *ahead, ignore_index, smoothing, reduction, dx),)


def _backward(
    dy: Tensor, logits: Tensor, targets: Tensor, statistics: Tensor, counts: Tensor, *settings: Any
) -> tuple[Tensor]:
    if statistics.shape[1] != logits.shape[0]:  # of few logits, whose gradient came with the loss
        _, statistics, counts = _forward(logits, targets, *settings[:5])
    args = (dy, logits, targets, statistics, counts, *settings[:3])
    return (cross_entropy_bwd(_case(logits, "backward"), *args),)


def _fake(
    logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float, reduction: str, wide: bool, inplace: bool
) -> tuple[Tensor, Tensor, Tensor]:
    M = logits.shape[0]
    return (
        logits.new_empty((M,) if reduction == "none" else (), dtype=torch.float32 if wide else logits.dtype),
        logits.new_empty(2, M, dtype=torch.float32),
        logits.new_empty(COUNTS if reduction == "mean" else 0, dtype=torch.int32),
    )


class LossOp(DifferentiableOp):
    """A loss whose gradient is computed with its value, in one pass over the input: dy is nearly always 1.

    `eager_gradient`: (needs, the arguments) -> None where this call does not; else all results, the state that
    `finish_gradient` takes, and whether saved arguments were overwritten, so that there can be only one backward pass.
    The first pass gives the state away; others, and traced calls, use `backward`.
    """

    eager_gradient: Callable[..., tuple[tuple[Tensor | None, ...], Any, bool] | None]
    finish_gradient: Callable[..., Sequence[Tensor | None]]

    def autograd_function(
        self, shown: int, forward: Callable[..., Any] | None = None, backward: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """Return the call of an autograd function; forward and backward replace eager_gradient and finish_gradient."""
        eager_gradient, finish = forward or self.eager_gradient, backward or self.finish_gradient

        def eager_forward(ctx: Any, *args: Any) -> Any:
            ctx.eager, ctx.overwritten = None, False
            if (made := eager_gradient(self._needs(ctx), *args)) is None:
                return self._save(ctx, args, self.forward(*args), shown)
            results, ctx.eager, ctx.overwritten = made
            return self._save(ctx, args, results, shown)

        def eager_backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
            dy, state = dys[0], ctx.eager
            if state is None or dy is None or torch.is_grad_enabled() or not is_plain(dy):
                if ctx.overwritten:
                    raise UnsupportedCase(
                        f"{self.name} wrote its gradient over its input: there can be one backward pass, and none that "
                        "is differentiated itself (create_graph=True) or transformed; call it without the in-place "
                        "option for more"
                    )
                return self._gradients(ctx, dys[:1])
            ctx.eager = None  # the caller may keep or change the gradients
            needs = self._needs(ctx)
            return self._placed(finish(dy, state, *ctx.options, needs), needs)

        return self._applied(eager_forward, eager_backward)


class _CrossEntropy(LossOp):
    forward = staticmethod(_forward)
    eager_gradient = staticmethod(_eager_gradient)
    finish_gradient = staticmethod(_finish_gradient)

    def bound(self, args: tuple[Any, ...], results: Any, first: bool) -> Callable[..., Any]:
        """Return how to make and finish the gradient of more logits like these, where it comes with the loss."""
        logits, _, ignore_index, smoothing, reduction, wide, inplace = args
        if reduction == "none" or inplace or logits.dtype not in _EAGER or logits.is_cpu:  # there targets are checked
            return super().bound(args, results, first)
        settings = ignore_index, smoothing, reduction
        forward = cross_entropy_fwd.bound(_case(logits, "gradient"))
        scale = cross_entropy_bwd.bound(_case(logits, "scale"))

        def eager(needs: Sequence[bool], logits: Tensor, targets: Tensor, *_: object) -> Any:
            *results, dx = forward(logits, targets, *settings, wide, False, True)
            return tuple(results), (dx, targets, *results[1:]), False

        def finish(dy: Tensor, ahead: tuple[Tensor, ...], *_: object) -> tuple[Tensor]:
            return (scale(dy, *ahead, *settings, ahead[0]),)

        return self.autograd_function(1, eager, finish)

    def bound_inference(self, args: tuple[Any, ...], results: Any, first: bool) -> Callable[..., Any] | None:
        """Return the loss of more logits like these, but on a CPU, where targets are checked."""
        logits, *_ = args
        run = cross_entropy_fwd.bound(_case(logits))
        return None if logits.is_cpu else lambda *args: run(*args[:-1], False, False)[0]


_cross_entropy = _CrossEntropy(
    "cross_entropy(Tensor logits, Tensor targets, int ignore_index, float smoothing, str reduction, bool wide, "
    "bool inplace) -> (Tensor loss, Tensor statistics, Tensor counts)",
    case=_cpu_case,
    backward=_backward,
    saves=("logits", "targets", "statistics", "counts"),
    gradients={"logits": "logits"},
    composite=torch_composite,
    fake=_fake,
    operation=cross_entropy_fwd,
    cpu=_cpu,
)
