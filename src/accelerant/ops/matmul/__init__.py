"""matmul and linear: the product is a library's; this adds the checks, the ledger, and oneDNN where it is faster."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from accelerant.errors import ShapeError
from accelerant.ops import _library
from accelerant.ops._differentiable import CpuFastPath
from accelerant.ops._library import cast_for_autocast, check_dtype, check_matches, define, is_plain
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation
from accelerant.runtime.host import processor_family

__all__ = ["matmul"]


def matmul_reference(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum over the last dimension of a and the second to last of b (the only one of a vector)."""
    left = a.unsqueeze(0) if a.dim() == 1 else a
    right = b.unsqueeze(1) if b.dim() == 1 else b
    y = torch.einsum("...mk,...kn->...mn", left, right)
    if a.dim() == 1:
        y = y.squeeze(-2)
    return y.squeeze(-1) if b.dim() == 1 else y


def _cost(case: Case) -> Cost:
    *batch, M, N, K = case.shape
    count = batch[0] if batch else 1
    batch_a, batch_b = case.options[0] if case.options else (count, count)
    elements = batch_a * M * K + batch_b * K * N + count * M * N
    return Cost(elements * case.dtype.itemsize, 2 * count * M * N * K)


# --- oneDNN's products in float32 -------------------------------------------------------------------------------------
_onednn: Callable[..., Tensor] | None
try:
    _onednn = torch.ops.mkldnn._linear_pointwise
except AttributeError:  # a build without oneDNN
    _onednn = None

ONEDNN_LEAST = 2**23
"""Multiplications below which a training step loses more by the autograd function, 50 us, than its products save."""


_ZEN_5 = 26  # AMD's family of processors; Zen 4 runs AVX-512 in two halves, where both libraries are as fast


@functools.cache
def _refuses_processor() -> str | None:
    """Return why MKL multiplies as fast as oneDNN here, or None: MKL keeps AVX-512 to Intel's processors."""
    if _onednn is None or not torch.backends.mkldnn.is_available() or not torch.backends.mkl.is_available():
        return "this torch lacks MKL, or oneDNN's operator"
    maker, family = processor_family()
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or maker != "AuthenticAMD" or family < _ZEN_5:
        return "torch's library uses all of this processor's vectors"
    return None


def may_use_onednn(dtype: torch.dtype, multiplications: int) -> bool:
    """Return whether oneDNN may take products on a CPU."""
    return dtype == torch.float32 and multiplications >= ONEDNN_LEAST and _refuses_processor() is None


def _refuses_onednn(case: Case) -> str | None:
    if case.device.type != "cpu" or case.dtype != torch.float32:
        return "serves float32 on a CPU"
    if len(case.shape) != 3 or math.prod(case.shape) < ONEDNN_LEAST:
        return f"serves products of two matrices from {ONEDNN_LEAST} multiplications on"
    return _refuses_processor()


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.shape[0] * weight.numel() < ONEDNN_LEAST:
        return functional.linear(x, weight, bias)
    y: Tensor = cast(Any, _onednn)(x, weight, bias, "none", [], "")
    return y


class OneDnnLinear(torch.autograd.Function):
    """x weight^T + bias of matrices by oneDNN, with its gradient, which is differentiable again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product; save both factors."""
        ctx.save_for_backward(x, weight)
        return _multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return dx = dy weight, dweight = dy^T x, and the sums of dy's columns."""
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        return (
            onednn_linear(dy, weight.t()) if needs[0] else None,
            onednn_linear(dy.t(), x.t()) if needs[1] else None,
            dy.sum(0) if needs[2] else None,
        )


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias in float32 on a CPU, for x (..., K) and weight (N, K), recorded by autograd."""
    rows = _library.rows_of(x)
    recorded = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, weight, bias))
    apply: Callable[..., Tensor] = OneDnnLinear.apply if recorded else _multiply
    y = apply(rows, weight, bias)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


def _products(name: str, torch_function: Callable[..., Tensor], onednn: Callable[..., Tensor]) -> Operation:
    implementations = (
        Implementation("onednn", onednn, refuses=_refuses_onednn),
        Implementation("torch", torch_function, differentiable=True),
    )
    return Operation(name, implementations, cost=_cost)


matmul_op = _products("matmul", torch.matmul, lambda a, b: onednn_linear(a, b.t()))
linear_op = _products("linear", functional.linear, onednn_linear)


def _torch_equivalent(a: Tensor, b: Tensor) -> Tensor:
    """Compute the product as matmul does, with vectors as matrices: torch has other kernels for vectors."""
    if a.dim() == 1:
        return _torch_equivalent(a.unsqueeze(0), b).squeeze(-2 if b.dim() > 1 else -1)
    if b.dim() == 1:
        return torch.matmul(a, b.unsqueeze(1)).squeeze(-1)
    return torch.matmul(a, b)


def _bound(a: Tensor, *bs: Tensor, **_: object) -> Callable[..., Tensor] | None:
    dims = (a.dim(), *(b.dim() for b in bs))
    if dims == (2, 2):
        return torch.mm
    if dims == (3, 3) and a.shape[0] == bs[0].shape[0]:
        return torch.bmm  # without matmul's look at the shapes
    return torch.matmul if len(dims) == 2 and min(dims) > 1 else None


_cpu = CpuFastPath(
    _torch_equivalent,
    bind=_bound,
    small=lambda *_, **__: True,
    any_size=True,
)


@_cpu
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices, or batches of them.

    y[..., m, n] = sum over k of a[..., m, k] b[..., k, n]

    Args:
        a: (..., M, K) or (K,); float16, bfloat16, float32 or float64.
        b: (..., K, N) or (K,), dtype and device of a; leading dimensions broadcast with those of a.

    Returns:
        (..., M, N), without the dimension that a vector lacks; dtype of a. float16 and bfloat16 accumulate in float32.
        Under torch.autocast a and b are cast to the autocast dtype, and the result has that dtype. Differentiable any
        number of times.

    Raises:
        ShapeError: the inner sizes differ, leading dimensions do not broadcast, a scalar, or several devices.
        UnsupportedDtype: a dtype not listed above, or several.
        TypeError: an argument is not a tensor.

    Under torch.compile torch's own matmul runs, so that the compiler can fuse its consumers into it; so it does under
    forward-mode differentiation and the transforms of torch.func (grad, jvp, vmap, ...). The ledger does not count
    those.
    """
    check_dtype("matmul", a, "a")
    a, b = cast_for_autocast(a, b)
    check_matches("matmul", a, "a", b=b)
    if not a.dim() or not b.dim():
        raise ShapeError(
            f"matmul takes vectors, matrices and batches of them, got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if a.shape[-1] != b.shape[-2 if b.dim() > 1 else 0]:
        raise ShapeError(f"a must have as many columns as b has rows, got {tuple(a.shape)} and {tuple(b.shape)}")
    if a.dim() > 2 and b.dim() > 2 and a.shape[:-2] != b.shape[:-2]:
        try:
            torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        except RuntimeError:
            raise ShapeError(f"leading dimensions of {tuple(a.shape)} and {tuple(b.shape)} do not broadcast") from None
    if torch.compiler.is_compiling():
        return torch.matmul(a, b)
    if a.dim() == 1:
        return matmul(a.unsqueeze(0), b).squeeze(-2 if b.dim() > 1 else -1)
    if b.dim() == 1:
        return matmul(a, b.unsqueeze(1)).squeeze(-1)
    if b.dim() == 2 and a.dim() > 2:  # one product over all rows, forward and backward
        return matmul(a.flatten(0, -2), b).view(*a.shape[:-1], b.shape[-1])
    if not is_plain(a) or not _library.is_ordinary(b):
        return _op(a, b)
    result = _cpu.run(matmul_op, _case(a, b), (a, b)) if a.is_cpu or _cpu.thread.small else NotImplemented
    return _product(a, b) if result is NotImplemented else result


_linear_cpu = CpuFastPath(
    functional.linear,
    any_layout=True,
    small=lambda *_, **__: True,
    any_size=True,
)


@_linear_cpu
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply the last dimension of a tensor by a transposed matrix, and add a bias, as torch's function does.

    y[..., n] = sum over k of input[..., k] weight[n, k] + bias[n]

    Args:
        input: (..., K); float16, bfloat16, float32 or float64.
        weight: (N, K), or (K,) for one output without its dimension; dtype and device of input.
        bias: (N,), dtype and device of input, for a weight of two dimensions; None for zeros.

    Returns:
        (..., N), dtype of input, or the autocast dtype. Differentiable any number of times.

    Raises:
        ShapeError: shapes that do not go together, or several devices.
        UnsupportedDtype: a dtype not listed above, or several.
        TypeError: an argument is not a tensor.
    """
    check_dtype("linear", input, "input")
    input, weight, bias = cast_for_autocast(input, weight, bias)
    check_matches("linear", input, "input", weight=weight, bias=bias)
    if weight.dim() not in (1, 2) or not input.dim() or input.shape[-1] != weight.shape[-1]:
        shapes = f"{tuple(input.shape)} and {tuple(weight.shape)}"
        raise ShapeError(f"linear takes input (..., K) and weight (N, K) or (K,), got {shapes}")
    if bias is not None and (weight.dim() == 1 or bias.shape != weight.shape[:1]):
        raise ShapeError(f"bias must be (N,) for weight (N, K), got {tuple(bias.shape)} for {tuple(weight.shape)}")
    if torch.compiler.is_compiling() or not all(is_plain(x) for x in (input, weight, bias) if x is not None):
        return functional.linear(input, weight, bias)
    args = input, weight, bias
    case = Case(input.device, input.dtype, (input.shape[:-1].numel(), weight.shape[:-1].numel(), weight.shape[-1]))
    result = _linear_cpu.run(linear_op, case, args) if input.is_cpu or _linear_cpu.thread.small else NotImplemented
    y: Tensor = linear_op(case, *args) if result is NotImplemented else result
    return y


class Matmul(torch.autograd.Function):
    """The registered op with its gradient, for modes and subclasses; plain tensors have torch's own autograd."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        """Return a b, and save both."""
        ctx.save_for_backward(a, b)
        with _library.below_autograd():
            return _op(a, b)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return da = dy b^T and db = a^T dy, summed over broadcast dimensions."""
        a, b = ctx.saved_tensors
        return (
            _in_layout_of(a, dy, b.mT) if ctx.needs_input_grad[0] else None,
            _in_layout_of(b, a.mT, dy) if ctx.needs_input_grad[1] else None,
        )


def _in_layout_of(x: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Return p q summed to the shape of x; stored transposed if x is, as transposed weights are."""
    if x.dim() == 2 and p.dim() == 2 and q.dim() == 2 and x.stride(0) == 1 and x.stride(1) == x.shape[0]:
        return torch.matmul(q.mT, p.mT).mT
    return torch.matmul(p, q).sum_to_size(x.shape)


def _product(a: Tensor, b: Tensor) -> Tensor:
    y: Tensor = matmul_op(_case(a, b), a, b)
    return y


def _case(a: Tensor, b: Tensor) -> Case:
    shape: tuple[int, ...] = (a.shape[-2], b.shape[-1], a.shape[-1])
    options: tuple[Any, ...] = ()
    if a.dim() > 2 or b.dim() > 2:
        batch_a, batch_b = a.shape[:-2], b.shape[:-2]
        same = batch_a == batch_b
        shape = ((batch_a if same else torch.broadcast_shapes(batch_a, batch_b)).numel(), *shape)
        options = () if same else ((batch_a.numel(), batch_b.numel()),)
    return Case(a.device, a.dtype, shape, options)


_op: Callable[..., Tensor] = define(
    "matmul(Tensor a, Tensor b) -> Tensor",
    kernel=_product,
    fake=torch.matmul,
    differentiable=Matmul.apply,
    composite=torch.matmul,
)
