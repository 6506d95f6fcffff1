"""conv2d: reference, validation, registration with torch and autograd; the vendor's libraries convolve.

A general convolution kernel would not beat cuDNN. This op adds the ledger, which counts forward and backward
convolutions with their bytes and operations, and other algorithms for some cases (algorithms.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant.errors import ConfigError, ShapeError
from accelerant.ops._differentiable import CpuFastPath, DifferentiableOp
from accelerant.ops._images import Pair, as_images, output_sizes, pair
from accelerant.ops._library import autocast_dtype, cast_for_autocast
from accelerant.ops._refusals import check_dtype, check_matches
from accelerant.ops.conv2d import algorithms
from accelerant.ops.conv2d.algorithms import Gradients
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation
from accelerant.runtime.dispatch.case import rules
from accelerant.runtime.files import clipped


def _two(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)


def conv2d_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0, dilation: int | Sequence[int] = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Return for each output channel the sum of products of the weight and each window of x."""
    if x.dim() == 3:
        options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        return conv2d_reference(x.unsqueeze(0), weight, bias, **options).squeeze(0)
    kernel, step, spread = weight.shape[2:], _two(stride), _two(dilation)
    totals = [0, 0]
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(spread, kernel, strict=True)]
    elif not isinstance(padding, str):
        totals = [2 * p for p in _two(padding)]
    (top, left), (height, width) = (total // 2 for total in totals), totals
    x = F.pad(x, (left, width - left, top, height - top))
    sizes = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(x.shape[2:], kernel, step, spread, strict=True)]
    rows, columns = (
        torch.arange(n, device=x.device)[:, None] * s + torch.arange(k, device=x.device) * d
        for n, k, s, d in zip(sizes, kernel, step, spread, strict=True)
    )
    windows = x[:, :, rows][..., columns].unflatten(1, (groups, -1))  # b g c h i w j
    y = torch.einsum("bgchiwj,gocij->bgohw", windows, weight.unflatten(0, (groups, -1))).flatten(1, 2)
    return y if bias is None else y + bias[:, None, None]


def _backward_of(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int],
    dilation: list[int], groups: int, needs: Sequence[bool],
) -> Gradients:  # fmt: skip
    bias_sizes = None if bias is None else [weight.shape[0]]
    return torch.ops.aten.convolution_backward(
        dy, x, weight, bias_sizes, stride, padding, dilation, False, [0, 0], groups, list(needs)
    )


def _deterministic_backward_of(*args: Any) -> Gradients:
    """Return the gradients by cuDNN's deterministic algorithms."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        return _backward_of(*args)
    finally:
        torch.backends.cudnn.deterministic = before


def _sizes(case: Case) -> tuple[int, int, int, int]:
    """Return the elements of x, weight and y, and the number of products."""
    weight, y = case.options[0], case.options[1]
    count = math.prod(y)
    return math.prod(case.shape), math.prod(weight), count, count * math.prod(weight[1:])


def _cost(case: Case) -> Cost:
    x, weight, y, products = _sizes(case)
    return Cost((x + weight + y) * case.dtype.itemsize, 2 * products)


def _backward_cost(case: Case) -> Cost:
    x, weight, y, products = _sizes(case)
    dx, dweight, _ = case.options[6]
    elements = y + dx * (x + weight) + dweight * (x + weight)
    return Cost(elements * case.dtype.itemsize, 2 * products * (dx + dweight))


conv2d_fwd = Operation(
    "conv2d_fwd",
    (
        Implementation("patches", algorithms.patches, refuses=algorithms.refuses_patches),
        Implementation("torch", torch.conv2d, differentiable=True),
        Implementation("channels-last", algorithms.channels_last, refuses=algorithms.refuses_channels_last),
    ),
    cost=_cost,
)
conv2d_bwd = Operation(
    "conv2d_bwd",
    (
        Implementation("patches", algorithms.patches_backward, refuses=algorithms.refuses_patches),
        Implementation("torch", _backward_of, deterministic=False),
        Implementation(
            "channels-last", algorithms.channels_last_backward, algorithms.refuses_channels_last, deterministic=False
        ),
        Implementation("torch-deterministic", _deterministic_backward_of),
    ),
    cost=_backward_cost,
)


def _torch_equivalent(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)


def _torch_serves(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> bool:  # fmt: skip
    """Return whether both sides are padded equally; torch warns if not."""
    return padding != "same" or all(total % 2 == 0 for total in _padding(weight, pair("dilation", dilation, 1)))


_cpu = CpuFastPath(_torch_equivalent, serves=_torch_serves)


@_cpu
def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Pair = 1,
    padding: Pair | Literal["valid", "same"] = 0, dilation: Pair = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Convolve images with kernels (a cross-correlation: the kernel is not flipped).

    y[b, o, h, w] = bias[o] + sum over c, i, j of weight[o, c, i, j] x[b, c', s h + d i - p, s w + d j - p]
    with c' the c-th channel of the group of o, x zero outside.

    Args:
        x: (B, C, H, W) or (C, H, W); float16, bfloat16, float32 or float64.
        weight: (O, C / groups, K, L), dtype and device of x.
        bias: (O,), dtype and device of x; or None.
        stride: s, one number or one for each dimension, at least 1.
        padding: p, zeros on each side, at least 0; "valid": none; "same": as many as preserve H and W (stride 1 only).
        dilation: d, at least 1.
        groups: divides C and O.

    Returns:
        (B, O, H', W') or (O, H', W'), H' = (H + 2 p - d (K - 1) - 1) // s + 1; dtype of x; torch's memory format.
        Under torch.autocast all tensors are cast to the autocast dtype. Differentiable twice.

    Raises:
        ShapeError: x or weight has other dimensions, channels do not match, the kernel is larger than the padded image,
            or several devices.
        UnsupportedDtype: a dtype not listed above, or several.
        ConfigError: stride, padding, dilation or groups out of range.
        TypeError: an argument is not a tensor.

    Under torch.compile, forward-mode differentiation and the transforms of torch.func (grad, jvp, vmap, ...) torch's
    own conv2d runs, which the ledger does not count. With the setting `deterministic` the backward pass uses
    deterministic algorithms only.
    """
    check_dtype("conv2d", x)
    low = autocast_dtype(x.device.type)
    if low is not None:
        x, weight = cast_for_autocast(x, low), cast_for_autocast(weight, low)
        bias = None if bias is None else cast_for_autocast(bias, low)
    steps, spread = pair("stride", stride, 1), pair("dilation", dilation, 1)
    images = _check(x, weight, bias, groups)
    edges = [0, 0]
    if isinstance(padding, str):
        if padding not in ("valid", "same"):
            raise ConfigError(f"padding must be numbers, 'valid' or 'same', got {padding!r}")
        if padding == "same":
            if steps != [1, 1]:
                raise ConfigError(f"padding 'same' takes stride 1, got {stride!r}")
            images, edges = _same(images, weight, spread)
    else:
        edges = pair("padding", padding, 0)
    output_sizes(images, list(weight.shape[2:]), steps, edges, spread)
    y: Tensor = _conv2d(images, weight, bias, steps, edges, spread, groups)
    return y if x.dim() == 4 else y.squeeze(0)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """Check the arguments, and return x with a batch dimension."""
    check_matches("conv2d", x, weight=weight, bias=bias)
    images = as_images("conv2d", x)
    if weight.dim() != 4 or 0 in weight.shape:
        raise ShapeError(f"weight must be (O, C / groups, K, L), none of them 0, got {tuple(weight.shape)}")
    if groups < 1:
        raise ConfigError(f"groups must be at least 1, got {clipped(groups)}")
    channels, out = images.shape[1], weight.shape[0]
    if channels % groups or out % groups:
        raise ShapeError(f"groups must divide the channels, {channels} of x and {out} of y, got {clipped(groups)}")
    taken = weight.shape[1] * groups
    if taken != channels:
        raise ShapeError(f"x has {channels} channels, weight {tuple(weight.shape)} in {groups} groups takes {taken}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"bias must be ({out},), got {tuple(bias.shape)}")
    return images


def _padding(weight: Tensor, dilation: list[int]) -> list[int]:
    """Return the total padding of rows and columns that preserves height and width."""
    return [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]


def _same(x: Tensor, weight: Tensor, dilation: list[int]) -> tuple[Tensor, list[int]]:
    """Return x and the padding that preserves height and width; x gets another row or column if the total is odd."""
    totals = _padding(weight, dilation)
    odd = [total % 2 for total in totals]
    return F.pad(x, (0, odd[1], 0, odd[0])) if any(odd) else x, [total // 2 for total in totals]


def _backward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Gradients:
    *settings_only, needs = settings
    case = _case(x, weight, bias, *settings_only, tuple(needs))
    return conv2d_bwd(case, dy, x, weight, bias, *settings)


def _case(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
    groups: int, *needs: tuple[bool, ...],
) -> Case:  # fmt: skip
    height, width = output_sizes(x, list(weight.shape[2:]), stride, padding, dilation)
    y = (x.shape[0], weight.shape[0], height, width)
    layout = "contiguous" if _channels_first(x) and _channels_first(weight) else "strided"
    options = (tuple(weight.shape), y, tuple(stride), tuple(padding), tuple(dilation), groups, *needs, layout)
    return Case(x.device, x.dtype, x.shape, options)


def _cpu_case(*args: Any) -> Case | None:
    """Return None for deterministic sums: torch's choice of an algorithm for its gradient is not known."""
    return None if rules().deterministic else _case(*args)


def _channels_first(x: Tensor) -> bool:
    """Return whether torch treats x as contiguous; it treats a single channel of stride 1 as channels last."""
    return x.is_contiguous() and (x.shape[1] != 1 or x.stride(1) != 1)


_conv2d = DifferentiableOp(
    "conv2d(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, int groups)"
    " -> (Tensor y)",
    operation=conv2d_fwd,
    case=_case,
    backward=_backward,
    composite_backward=_backward_of,
    saves=("x", "weight", "bias"),
    gradients={"x": "x", "weight": "weight", "bias": "bias"},
    composite=torch.conv2d,
    fake=torch.conv2d,
    keeps_layout=True,
    decomposes=True,
    cpu=_cpu,
    cpu_case=_cpu_case,
)
