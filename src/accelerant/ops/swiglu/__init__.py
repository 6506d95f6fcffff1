"""swiglu: reference, launches, implementations, the public function, registration with torch and autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant.errors import ShapeError
from accelerant.ops import _launch
from accelerant.ops._differentiable import CpuFastPath, DecomposedOp
from accelerant.ops._launch import STREAM, Elementwise, accesses, ceil_div, triton_operation
from accelerant.ops._library import check_dtype, check_matches
from accelerant.runtime.dispatch import Case, case_of
from accelerant.runtime.dispatch.race import Tuned

__all__ = ["swiglu"]

_PACKED = ("packed",)


def swiglu_reference(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Return gate / (1 + exp(-gate)) times up; without up, both are halves of the first argument's last dimension."""
    if up is None:
        gate, up = gate.tensor_split(2, dim=-1)
    return gate / (1.0 + torch.exp(-gate)) * up


KERNELS = {
    name: _launch.StreamKernel("accelerant.ops.swiglu.triton_kernels", f"swiglu_{name}", usual, widths)
    for name, usual, widths in (("fwd", STREAM, (3, 4, 5)), ("bwd", _launch.SHORT, (5, 6, 7, 8)))
}


@functools.cache
def row_plan(N: int, usual: Elementwise = STREAM) -> Elementwise:
    """Return the plan for rows of N elements: the usual one, or a short row per program."""
    block = min(usual.block, max(128, _launch.next_power_of_2(N)))
    return Elementwise(block, max(1, block * usual.num_warps // usual.block))


PACKED: dict[str, Tuned[Elementwise]] = {
    name: Tuned(
        f"swiglu_packed_{name}",
        default=lambda M, N, usual=kernel.usual: row_plan(N, usual),
        candidates=lambda M, N: tuple(dict.fromkeys(row_plan(N, stream) for stream in _launch.STREAMS)),
    )
    for name, kernel in KERNELS.items()
}
"""Tuned plans for halves of rows, keyed by rows and columns."""


def _as_rows(gate: Tensor, up: Tensor | None, N: int) -> tuple[Tensor, Tensor, int]:
    """Return gate and up as rows of N elements, and the rows' stride; two tensors are one row."""
    if up is not None:
        return gate.contiguous(), up.contiguous(), N
    rows, stride = _launch.as_rows(gate, 2 * N)
    rows = rows.view(-1, 2 * N)
    return rows, rows[:, N:], stride


def launch_forward(gate: Tensor, up: Tensor | None, plan: Elementwise | None = None) -> Tensor:
    """Return swiglu of two tensors, or without up of the halves of each row; contiguous."""
    y = gate.new_empty(gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2))
    if n := y.numel():
        N = gate.shape[-1] // 2 if up is None else n
        if plan is None:
            tuned, sizes = (PACKED["fwd"], (n // N, N)) if up is None else (KERNELS["fwd"].plan, (n,))
            plan = tuned(gate.device, gate.dtype, sizes, lambda plan: launch_forward(gate, up, plan))
        gates, ups, stride = _as_rows(gate, up, N)
        grid = (n // N * ceil_div(N, plan.block),)
        args = (gates, ups, y, N, stride, stride)
        KERNELS["fwd"].launch(grid, args, {"BLOCK": plan.block}, num_warps=plan.num_warps)
    return y


def launch_backward(
    dy: Tensor, gate: Tensor, up: Tensor | None, plan: Elementwise | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of gate and up, contiguous; without up that of the halves, in one pass."""
    dgate, dup = gate.new_empty(gate.shape), None if up is None else up.new_empty(up.shape)
    if n := dy.numel():
        N = gate.shape[-1] // 2 if up is None else n
        if plan is None:
            tuned, sizes = (PACKED["bwd"], (n // N, N)) if up is None else (KERNELS["bwd"].plan, (n,))
            plan = tuned(gate.device, gate.dtype, sizes, lambda plan: launch_backward(dy, gate, up, plan))
        gates, ups, stride = _as_rows(gate, up, N)
        dgates, dups, gradient_stride = _as_rows(dgate, dup, N)
        grid = (n // N * ceil_div(N, plan.block),)
        args = (dy.contiguous(), gates, ups, dgates, dups, N, stride, stride, gradient_stride)
        KERNELS["bwd"].launch(grid, args, {"BLOCK": plan.block}, num_warps=plan.num_warps)
    return dgate, dup


def _torch_forward(gate: Tensor, up: Tensor | None) -> Tensor:
    """Return y, differentiable; without autograd the product reuses the memory of its factor."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    y = F.silu(gate)
    needs_grad = torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad)
    y = y * up if needs_grad else y.mul_(up)
    return y if y.is_contiguous() else y.contiguous()


def _torch_backward(dy: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the gradients; each function writes to its final memory, since allocating costs a CPU as much again."""
    dx, dup = gate.new_empty(gate.shape), None if up is None else gate.new_empty(gate.shape)
    gate_out, up_out = dx, dup
    if up is None or up_out is None:
        gate, up = gate.chunk(2, -1)
        gate_out, up_out = dx.chunk(2, -1)
    torch.mul(dy, up, out=gate_out)
    torch.ops.aten.silu_backward.grad_input(gate_out, gate, grad_input=gate_out)
    torch.ops.aten.silu.out(gate, out=up_out)
    up_out.mul_(dy)
    return dx, dup


swiglu_fwd = triton_operation("swiglu_fwd", launch_forward, _torch_forward, cost=accesses(3, 5), differentiable=True)
swiglu_bwd = triton_operation("swiglu_bwd", launch_backward, _torch_backward, cost=accesses(5, 12))


_cpu = CpuFastPath(lambda gate, up=None: _torch_forward(gate, up))


@_cpu
def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Multiply up by silu(gate).

    y = gate / (1 + exp(-gate)) * up

    Args:
        gate: any shape, float16, bfloat16, float32 or float64; fastest if contiguous. If `up` is None, (..., 2N): the
            first N columns are the gate, the others `up`. torch.autocast does not change the dtype.
        up: shape, dtype and device of gate; or None.

    Returns:
        shape of gate, or (..., N); dtype of gate, contiguous. Computed in float32 (float64 for float64), with one
        rounding at the end. Differentiable twice.

    Raises:
        ShapeError: up has another shape or device than gate; without up, an odd last dimension, or a scalar.
        UnsupportedDtype: a dtype not listed above, or several.
        TypeError: an argument is not a tensor.

    Saves its arguments for the backward pass; on a CPU, where torch's silu and product run, also the silu of the gate
    (recomputing it took a fifth of the backward pass). Under torch.compile torch's own silu and product run, so that
    the compiler can fuse them, and so they do under forward-mode differentiation and the transforms of torch.func. The
    ledger does not count those.

    Source: Shazeer 2020, arXiv:2002.05202, equation 5.
    """
    check_dtype("swiglu", gate, "gate")
    if up is None:
        if not gate.dim() or gate.shape[-1] % 2:
            raise ShapeError(f"without up, the last dimension of gate must be even, got shape {tuple(gate.shape)}")
    else:
        check_matches("swiglu", gate, "gate", up=up)
        if up.shape != gate.shape:
            raise ShapeError(f"up must have the shape of gate, {tuple(gate.shape)}, got {tuple(up.shape)}")
    return _swiglu(gate, up)


def _case(x: Tensor, up: Tensor | None) -> Case:
    if up is None:
        return case_of((x.device, x.dtype, (*x.shape[:-1], x.shape[-1] // 2), _PACKED))
    return case_of((x.device, x.dtype, x.shape, ()))


@_cpu.case
def _cpu_case(gate: Tensor, up: Tensor | None) -> Case | None:
    """Return None for halves of float16: torch concatenates their gradients, which CPU autocast lacks for float16."""
    return None if up is None and gate.dtype == torch.float16 else _case(gate, up)


def _composite(gate: Tensor, up: Tensor | None) -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, -1)
    return (F.silu(gate) * up).contiguous()


def _composite_backward(
    dy: Tensor, gate: Tensor, up: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients by functions that torch can differentiate in forward mode too, unlike silu_backward."""
    packed = up is None
    if up is None:
        gate, up = gate.chunk(2, -1)
    wide = gate if gate.dtype == torch.float64 else gate.float()
    s = torch.sigmoid(wide)
    dgate = (dy * up * (s * (1.0 + wide * (1.0 - s)))).to(gate.dtype)
    dup = (dy * (wide * s)).to(gate.dtype)
    return (torch.cat((dgate, dup), -1), None) if packed else (dgate, dup)


_swiglu: Callable[..., Tensor] = DecomposedOp(
    "swiglu(Tensor gate, Tensor? up) -> (Tensor y)",
    operation=swiglu_fwd,
    case=_case,
    backward=lambda dy, gate, up, needs: swiglu_bwd(_case(gate, up), dy, gate, up),
    composite_backward=_composite_backward,
    saves=("gate", "up"),
    gradients={"gate": "gate", "up": "up"},
    composite=_composite,
    fake=lambda gate, up: gate.new_empty(gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2)),
    cpu=_cpu,
)
