"""conv2d by the vendor's library, with the ledger and other algorithms for some cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant.errors import ConfigError, ShapeError
from accelerant.ops._differentiable import CpuFastPath, DecomposedOp
from accelerant.ops._images import Pair, as_images, both, output_sizes, pair, to_channels_first, to_channels_last
from accelerant.ops._library import cast_for_autocast, check_dtype, check_matches
from accelerant.runtime.compilation.triton import refuses_triton
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation
from accelerant.runtime.dispatch.plan import rules
from accelerant.runtime.files import clipped

__all__ = ["conv2d"]

# --- algorithms besides torch's own call -----------------------------------------------------------------------------
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]

_MIN_ELEMENTS = 2**20  # elements of x or y per case; below, the launches of the extra kernels cost more than they save
_MIN_WIDTH = 8  # columns of a patch; below, the copy reads less than 16 contiguous bytes


def _refuses_copies(case: Case) -> str | None:
    if case.device.type != "cuda":
        return "is for NVIDIA GPUs"
    if case.dtype not in (torch.bfloat16, torch.float16):
        return "takes bfloat16 and float16"
    if "contiguous" not in case.options:
        return "takes contiguous x and weight"
    elements = min(math.prod(case.shape), math.prod(case.options[1]))
    return "is for larger images" if elements < _MIN_ELEMENTS else refuses_triton(case.device)


def refuses_patches(case: Case) -> str | None:
    """Return why a case (options as in _case) is not a product of patches, or is slower as one, or None."""
    weight, _, stride, padding, dilation, groups = case.options[:6]
    if groups != 1 or tuple(dilation) != (1, 1) or tuple(padding) != (0, 0) or tuple(stride) != tuple(weight[2:]):
        return "windows overlap, leave gaps or are padded, or there are groups"
    if weight[3] < _MIN_WIDTH:
        return f"patches of less than {_MIN_WIDTH} columns are left to the library"
    return _refuses_copies(case)


def refuses_channels_last(case: Case) -> str | None:
    """Return why a case (options as in _case) is slower, or not supported, with the channels last, or None."""
    weight, _, _, _, _, groups = case.options[:6]
    if groups != 1:
        return "groups are left to the library"
    if weight[0] % 8 or weight[1] % 8:
        return "channels are not multiples of 8"
    return _refuses_copies(case)


def _patches_of(x: Tensor, kernel: Sequence[int]) -> Tensor:
    """Return the patches of x, (B, P, C K L), without partial ones at the end of rows and columns."""
    (B, C, H, W), (K, L) = x.shape, kernel
    rows, columns = H // K, W // L
    whole = x[:, :, : rows * K, : columns * L].reshape(B, C, rows, K, columns, L)
    return whole.permute(0, 2, 4, 1, 3, 5).reshape(B, rows * columns, C * K * L)


def patches(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
    groups: int,
) -> Tensor:  # fmt: skip
    """Convolve by a product of patches, for cases that refuses_patches does not refuse."""
    B, (O, _, K, L) = x.shape[0], weight.shape  # noqa: E741 - channels of y
    with torch.no_grad():
        y = torch.nn.functional.linear(_patches_of(x, (K, L)), weight.reshape(O, -1), bias)
        permuted = y.view(B, x.shape[2] // K, x.shape[3] // L, O).permute(0, 3, 1, 2)
    return to_channels_first(permuted)


def patches_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int],
    dilation: list[int], groups: int, needs: Sequence[bool],
) -> Gradients:  # fmt: skip
    """Return the gradients of `patches`."""
    (B, C, H, W), (O, _, K, L) = x.shape, weight.shape  # noqa: E741
    rows, columns = H // K, W // L
    dx = dweight = dbias = None
    with torch.no_grad():
        permuted = to_channels_last(dy.contiguous()).permute(0, 2, 3, 1).reshape(-1, O)
        if needs[0]:
            tiles = (permuted @ weight.reshape(O, -1)).view(B, rows, columns, C, K, L).permute(0, 3, 1, 4, 2, 5)
            if (rows * K, columns * L) == (H, W):
                dx = tiles.reshape(x.shape)
            else:
                dx = torch.zeros_like(x)
                dx[:, :, : rows * K, : columns * L] = tiles.reshape(B, C, rows * K, columns * L)
        if needs[1]:
            dweight = (permuted.t() @ _patches_of(x, (K, L)).view(-1, C * K * L)).view(weight.shape)
        if needs[2]:
            dbias = permuted.sum(0)
    return dx, dweight, dbias


# --- channels last ---------------------------------------------------------------------------------------------------
def channels_last(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    """Convolve by cuDNN with the channels last; y is contiguous, as x is."""
    weight = weight.to(memory_format=torch.channels_last)
    return to_channels_first(torch.conv2d(to_channels_last(x), weight, bias, *settings))


def channels_last_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int],
    dilation: list[int], groups: int, needs: Sequence[bool],
) -> Gradients:  # fmt: skip
    """Return the gradients of `channels_last`, contiguous."""
    last = torch.channels_last
    dx, dweight, dbias = torch.ops.aten.convolution_backward(
        to_channels_last(dy.contiguous()), to_channels_last(x), weight.to(memory_format=last),
        None if bias is None else [weight.shape[0]], stride, padding, dilation, False, [0, 0], groups, list(needs),
    )  # fmt: skip
    return (
        to_channels_first(dx) if needs[0] else None,
        dweight.contiguous() if needs[1] else None,
        dbias if needs[2] else None,
    )


def conv2d_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0, dilation: int | Sequence[int] = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Return for each output channel the sum of products of the weight and each window of x."""
    if x.dim() == 3:
        options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        return conv2d_reference(x.unsqueeze(0), weight, bias, **options).squeeze(0)
    kernel, step, spread = weight.shape[2:], both(stride), both(dilation)
    totals = [0, 0]
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(spread, kernel, strict=True)]
    elif not isinstance(padding, str):
        totals = [2 * p for p in both(padding)]
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
    dx, dweight, dbias = torch.ops.aten.convolution_backward(
        dy, x, weight, bias_sizes, stride, padding, dilation, False, [0, 0], groups, list(needs)
    )
    return dx, dweight, dbias


def _deterministic_backward_of(*args: Any) -> Gradients:
    """Return the gradients by cuDNN's deterministic algorithms."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        return _backward_of(*args)
    finally:
        torch.backends.cudnn.deterministic = before


def _sizes(case: Case) -> tuple[int, int, int, int]:
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
        Implementation("patches", patches, refuses=refuses_patches),
        Implementation("torch", torch.conv2d, differentiable=True),
        Implementation("channels-last", channels_last, refuses=refuses_channels_last),
    ),
    cost=_cost,
)
conv2d_bwd: Callable[..., tuple[Tensor | None, Tensor | None, Tensor | None]] = Operation(
    "conv2d_bwd",
    (
        Implementation("patches", patches_backward, refuses=refuses_patches),
        Implementation("torch", _backward_of, deterministic=False),
        Implementation("channels-last", channels_last_backward, refuses_channels_last, deterministic=False),
        Implementation("torch-deterministic", _deterministic_backward_of),
    ),
    cost=_backward_cost,
)


def _torch_serves(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> bool:  # fmt: skip
    """Return whether both sides are padded equally; torch warns if not."""
    return padding != "same" or all(total % 2 == 0 for total in _padding(weight, pair("dilation", dilation, 1)))


_cpu = CpuFastPath(lambda x, *args, **options: torch.conv2d(x, *args, **options), serves=_torch_serves)


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
    x, weight, bias = cast_for_autocast(x, weight, bias)
    steps, spread = pair("stride", stride, 1), pair("dilation", dilation, 1)
    check_matches("conv2d", x, weight=weight, bias=bias)
    images = as_images("conv2d", x)
    if weight.dim() != 4 or 0 in weight.shape:
        raise ShapeError(f"weight must be (O, C / groups, K, L), none of them 0, got {tuple(weight.shape)}")
    if groups < 1:
        raise ConfigError(f"groups must be at least 1, got {clipped(groups)}")
    channels, out = images.shape[1], weight.shape[0]
    if channels % groups or out % groups:
        raise ShapeError(f"groups must divide the channels, {channels} of x and {out} of y, got {clipped(groups)}")
    if (taken := weight.shape[1] * groups) != channels:
        raise ShapeError(f"x has {channels} channels, weight {tuple(weight.shape)} in {groups} groups takes {taken}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"bias must be ({out},), got {tuple(bias.shape)}")
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


@_cpu.case
def _cpu_case(*args: Any) -> Case | None:
    """Return None for deterministic sums: torch's choice of an algorithm for its gradient is not known."""
    return None if rules().deterministic else _case(*args)


def _channels_first(x: Tensor) -> bool:
    """Return whether torch treats x as contiguous; it treats a single channel of stride 1 as channels last."""
    return x.is_contiguous() and (x.shape[1] != 1 or x.stride(1) != 1)


_conv2d = DecomposedOp(
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
    cpu=_cpu,
)
