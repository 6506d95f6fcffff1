"""linear_gelu: reference, implementations, the public function, and the registration with torch and autograd."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelerant.errors import ConfigError, ShapeError
from accelerant.ops import _hopper as hopper
from accelerant.ops import _launch, _library
from accelerant.ops._differentiable import CpuFastPath, DifferentiableOp
from accelerant.ops._hopper import HopperProgram, Mma, is_hopper, refuses_product
from accelerant.ops._launch import ceil_div, multiprocessors, product_cost
from accelerant.ops._library import refuses_triton_kernel
from accelerant.ops.gelu import gelu_reference
from accelerant.runtime.compilation.triton import TritonKernel, interpreting
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation, case_of
from accelerant.runtime.dispatch.race import Tuned, rounded
from accelerant.runtime.files import clipped
from accelerant.runtime.providers.cuda_launch import PackedLaunch

__all__ = ["linear_gelu"]

# --- the kernel for Hopper (hopper.cu) --------------------------------------------------------------------------------
CUDA_KINDS = ("struct", "struct", "struct", "struct", "*u32", "struct")
"""Kinds of the kernel's arguments: tensor maps of x, weight, y and z; bias; struct Shape."""

_FILE = Path(__file__).with_name("hopper.cu")
_STORED_ROWS = 16  # rows of the box that a warp stores


@dataclass(frozen=True, slots=True)
class GeluHopperTile:
    """A variant of the kernel: tiles of 64 `height` rows by `width` columns, `stages` steps of K in flight.

    `slots`: 2 KiB output buffers per warp, even, one each for z and y. `group`: tiles taken down a column before the
    next column, for reuse in the L2 cache.
    """

    height: int
    width: int
    stages: int
    slots: int = 2
    group: int = 8

    @property
    def tile_m(self) -> int:
        """Rows of a tile."""
        return 64 * self.height

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: operand tiles in flight, output buffers, two tiles' parts of the bias."""
        return hopper.ring_bytes(self.stages, self.tile_m, self.width) + 8 * 2048 * self.slots + 1024


CUDA_PLANS = (GeluHopperTile(2, 128, 6), GeluHopperTile(2, 192, 4, slots=4))
_NARROW_COST = 1.03  # time per column of a 128-wide tile relative to a 192-wide one: H200, bfloat16, K of 768 and 1024


@functools.lru_cache(maxsize=4096)
def cuda_plan(M: int, N: int, multiprocessors: int) -> GeluHopperTile:
    """Return the variant whose waves of tiles take the least time for a result of M x N."""
    narrow, wide = CUDA_PLANS
    waves = {plan: ceil_div(ceil_div(M, plan.tile_m) * ceil_div(N, plan.width), multiprocessors) for plan in CUDA_PLANS}
    return narrow if waves[narrow] * narrow.width * _NARROW_COST < waves[wide] * wide.width else wide


@functools.cache
def cuda_program(plan: GeluHopperTile, dtype: torch.dtype, tanh: bool, keep: bool) -> HopperProgram:
    """Return the program text of a variant."""
    return hopper.product_program(
        "linear_gelu", _FILE, dtype, Mma(plan.width), plan.height, plan.stages, plan.shared_bytes, SLOTS=plan.slots,
        TANH=int(tanh), KEEP=int(keep), IS_BF16=int(dtype == torch.bfloat16), GIVE=40, TAKE=232,
    )  # fmt: skip


_launches: hopper.LaunchCache[PackedLaunch] = hopper.LaunchCache()


def launch_hopper(
    x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, keep: bool = True,
    plan: GeluHopperTile | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the kernel on x (M, K), weight (N, K), bias (N,): y (M, N), and z (M, N) if kept, else an empty one."""
    x, weight = hopper.readable(x), hopper.readable(weight)
    if bias is not None and (bias.stride(0) != 1 or bias.data_ptr() % 4):
        bias = bias.clone(memory_format=torch.contiguous_format)
    M, N = x.shape[0], weight.shape[0]
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    z = torch.empty(M if keep else 0, N, dtype=x.dtype, device=x.device)
    key = (
        x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr(), z.data_ptr(), x.dtype,
        x.shape, x.stride(), N, weight.stride(), approximate, plan, x.get_device(),
    )  # fmt: skip
    if (launch := _launches.get(key)) is None:
        launch = _launches.keep(key, _prepare(x, weight, bias, approximate, y, z if keep else None, plan))
    launch.start()
    return y, z if keep else z.view(-1)


def _prepare(
    x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, y: Tensor, z: Tensor | None,
    plan: GeluHopperTile | None,
) -> PackedLaunch:  # fmt: skip
    (M, K), N = x.shape, weight.shape[0]
    device, processors = x.get_device(), multiprocessors(x.device)
    plan = plan or cuda_plan(M, N, processors)
    tiles = hopper.product_tiles(M, N, K, plan.tile_m, plan.width, plan.group)
    shape = (ctypes.c_int32 * 6)(0 if bias is None else N, *tiles)
    boxes = ((x, plan.tile_m), (weight, plan.width), (y, _STORED_ROWS), (y if z is None else z, _STORED_ROWS))
    args = (*(hopper.tensor_map(*box) for box in boxes), x if bias is None else bias, bytes(shape))
    variant = cuda_program(dataclasses.replace(plan, group=0), x.dtype, approximate == "tanh", z is not None)
    return hopper.pack(variant, CUDA_KINDS, min(tiles[-1], processors), args, device)


_NAMES = ("fwd", "fwd_persistent", "bwd", "join")
KERNELS = {name: TritonKernel("accelerant.ops.linear_gelu.triton_kernels", f"linear_gelu_{name}") for name in _NAMES}


@dataclass(frozen=True, slots=True)
class GeluTile:
    """The tiling of a product: tiles of block_m by block_n of the result, steps of block_k columns of x and weight.

    `persistent`: one program per multiprocessor loops over all tiles. `group`: tiles taken down a column before the
    next column, for reuse in the L2. `parts`: of a tile, that the epilogue processes one after the other: 1, 2 or 4.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    stages: int
    persistent: bool = False
    group: int = 8
    parts: int = 1

    def constants(self, K: int, *, tanh: bool, upcast: bool) -> dict[str, int | bool]:
        """Return the compile-time arguments of the forward kernels."""
        return {
            "TANH": tanh, "EVEN_K": K % self.block_k == 0, "UPCAST": upcast,
            "BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k, "GROUP": self.group,
            "PARTS": self.parts,
        }  # fmt: skip


SMALL_PLAN = GeluTile(128, 128, 32, 8, 3)  # for devices with less shared memory than Hopper: 48 KiB in 16-bit dtypes

HOPPER_PLANS = (
    GeluTile(128, 256, 64, 8, 4, parts=2),
    GeluTile(128, 256, 64, 8, 3, parts=2),
    GeluTile(128, 256, 64, 8, 3, persistent=True, parts=4),
    GeluTile(128, 256, 64, 8, 4, persistent=True, parts=4),
    GeluTile(256, 128, 64, 8, 3, persistent=True, parts=4),
    GeluTile(128, 128, 64, 4, 3, parts=2),
    GeluTile(128, 128, 64, 8, 3),
    GeluTile(128, 128, 64, 8, 4, persistent=True),
)

BACKWARD = (16, 128)
"""Rows and columns of a step of the backward kernel: 2048 elements, rows of 256 bytes in 16-bit dtypes."""

_BACKWARD_WARPS = 4
_MIN_SPAN = 128
_MAX_PARTS = 256
_MIN_PROGRAMS = 512
"""Programs of the backward kernel below which parts have fewer rows, at least 32, for which an H100 then takes less."""

BIAS = (32, 64)  # rows and columns of a step of the kernel that adds the partial sums of the bias gradient

JOINS = ((64, 16), (256, 16))
"""The same for other partial sums, for few rows and for more; narrow strips fill the device."""

_INTERPRETED, _FLOAT32, _SMALL, _HOPPER = range(4)  # kinds of plan

PLANS = {
    _INTERPRETED: (
        GeluTile(16, 16, 16, 4, 2),
        GeluTile(16, 16, 16, 4, 2, persistent=True),
        GeluTile(32, 16, 16, 4, 2),
    ),
    _FLOAT32: (GeluTile(64, 64, 32, 4, 2), GeluTile(128, 64, 32, 4, 2), GeluTile(64, 128, 32, 4, 2)),
    _SMALL: (
        SMALL_PLAN, GeluTile(128, 128, 32, 4, 3), GeluTile(128, 128, 32, 8, 2), GeluTile(64, 128, 32, 4, 3),
        GeluTile(128, 64, 32, 4, 3), GeluTile(64, 64, 32, 4, 4),
    ),
    _HOPPER: (*HOPPER_PLANS, SMALL_PLAN),
}  # fmt: skip
"""Candidates of the autotuner by kind; all but Hopper's need at most 64 KiB of shared memory."""


@functools.cache
def _kind(dtype: torch.dtype, device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED
    return _FLOAT32 if dtype == torch.float32 else _HOPPER if is_hopper(device) else _SMALL


def _usual(M: int, N: int, K: int, kind: int) -> GeluTile:
    if kind == _INTERPRETED:  # several tiles even for small samples
        return PLANS[kind][(M + N) % 2]
    if kind == _HOPPER and (M <= 64 or N <= 64):
        return SMALL_PLAN
    return HOPPER_PLANS[5] if kind == _HOPPER and N <= 128 else PLANS[kind][0]


TUNED: Tuned[GeluTile] = Tuned(
    "linear_gelu_fwd",
    default=_usual,
    candidates=lambda M, N, K, kind: PLANS[kind],
    bucket=lambda M, N, K, kind: rounded((M, N, K)),  # the key has device and dtype, which imply the kind
)
"""Tuned plans of the forward kernels, keyed by M, N, K and kind."""


def launch_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, keep: bool = True,
    plan: GeluTile | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y (M, N), and the pre-activation z (M, N) if kept, else an empty tensor."""
    (M, K), N = x.shape, weight.shape[0]
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    z = torch.empty_like(y) if keep else y.new_empty(0)
    if not M or not N:
        return y, z
    if plan is None:
        sizes = (M, N, K, _kind(x.dtype, x.device))
        plan = TUNED(x.device, x.dtype, sizes, lambda plan: launch_forward(x, weight, bias, approximate, keep, plan))
    tiles = ceil_div(M, plan.block_m) * ceil_div(N, plan.block_n)
    programs = min(tiles, multiprocessors(x.device)) if plan.persistent else tiles
    upcast = x.dtype == torch.bfloat16 and x.device.type != "cuda" and interpreting()
    KERNELS["fwd_persistent" if plan.persistent else "fwd"].launch(
        (programs,),
        (x, weight, None if bias is None else bias.contiguous(), y, z if keep else None, M, N, K),
        plan.constants(K, tanh=approximate == "tanh", upcast=upcast),
        num_warps=plan.num_warps,
        num_stages=plan.stages,
    )
    return y, z


def spans(M: int, max_parts: int) -> tuple[int, int]:
    """Return the rows of each part of M rows whose columns are summed apart, and the number of parts."""
    span = max(_MIN_SPAN, ceil_div(ceil_div(M, max_parts), BACKWARD[0]) * BACKWARD[0])
    return span, ceil_div(M, span)


_BACKWARD = _launch.Repeats()


def launch_dz(
    dy: Tensor, z: Tensor, approximate: str, sums: torch.dtype | None, *, activation: bool = False,
    join: tuple[int, int] | None = BIAS,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return dz (M, N), gelu(z) if `activation`, and the sums of dz's columns in a dtype unless None."""
    M, N = z.shape
    dz, a = torch.empty_like(z), torch.empty_like(z) if activation else None
    if not M or not N:
        return dz, a, None if sums is None else z.new_zeros(N, dtype=sums)
    rows, stride = _launch.as_rows(dy, N)
    span, parts, strips = _division(M, N)
    partial = total = None
    if sums is not None:
        partial = torch.empty(parts, N, dtype=torch.float32, device=z.device)
        total = torch.empty(N, dtype=sums, device=z.device)
    key: tuple[object, ...] | None = None
    pointers: list[int] = []
    if _launch.are_repeatable():
        described: list[object] = [approximate, join, M, N, stride, z.get_device()]
        for tensor in (rows, z, dz, a, partial, total):
            if tensor is None:
                described.append(None)
            else:
                pointer = tensor.data_ptr()
                pointers.append(pointer)
                described += (tensor.dtype, pointer & 15)
        key = tuple(described)
        if _BACKWARD.start(key, pointers):
            return dz, a, total
    with _BACKWARD.recorded(key, pointers):
        KERNELS["bwd"].launch(
            (parts * strips,),
            (rows, z, dz, a, partial, M, N, stride, span),
            {"TANH": approximate == "tanh", "BLOCK_M": BACKWARD[0], "BLOCK_N": BACKWARD[1]},
            num_warps=_BACKWARD_WARPS,
        )
        if partial is not None and total is not None:
            _join(partial, total, None if parts > _MAX_PARTS else join)
    return dz, a, total


@functools.lru_cache(maxsize=4096)
def _division(M: int, N: int) -> tuple[int, int, int]:
    """Return the rows of each part of dz's rows, the number of parts, and that of strips of columns."""
    span, parts = spans(M, _MAX_PARTS)
    strips = ceil_div(N, BACKWARD[1])
    if parts * strips < _MIN_PROGRAMS:
        span = max(2, ceil_div(ceil_div(M, ceil_div(_MIN_PROGRAMS, strips)), BACKWARD[0])) * BACKWARD[0]
        parts = ceil_div(M, span)
    return span, parts, strips


def launch_join(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of each column of partial sums, added in a fixed order."""
    sums = torch.empty(partial.shape[1], dtype=dtype, device=partial.device)
    _join(partial, sums, None)
    return sums


def _join(partial: Tensor, sums: Tensor, block: tuple[int, int] | None) -> None:
    """Write the sum of each column of partial sums; block None for one of JOINS."""
    parts, N = partial.shape
    block_p, block_n = block or JOINS[parts > JOINS[0][0]]
    fixed = {"BLOCK_P": block_p, "BLOCK_N": block_n}
    KERNELS["join"].launch((ceil_div(N, block_n),), (partial, sums, parts, N), fixed, num_warps=4)


_APPROXIMATIONS = ("none", "tanh")


def linear_gelu_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Return gelu(x weight^T + bias)."""
    z = x @ weight.T
    return gelu_reference(z if bias is None else z + bias, approximate)


def _one_row(case: Case) -> str | None:
    """Return why torch is preferred for one row, or None; between 1 and 128 rows nothing was measured."""
    one = case.device.type == "cuda" and case.shape[0] == 1
    return "one row leaves most of a tile idle: the library's matrix-vector product is faster" if one else None


def _refuses(case: Case) -> str | None:
    if reason := _one_row(case):
        return reason
    if case.device.type == "cuda":
        if case.dtype == torch.float32:
            return "float32 products are left to the library"
        if case.shape[-1] % 8:
            return f"rows of {case.shape[-1]} elements do not begin on 16-byte boundaries"
    return refuses_triton_kernel(case)


def _refuses_backward(case: Case) -> str | None:
    """Return why the kernel of dz is not used: rows of no multiple of 16 elements are read one by one."""
    if case.device.type == "cuda" and case.dtype != torch.float32 and case.shape[1] % 16:
        return f"is slow for rows of {case.shape[1]} elements, no multiple of 16"
    return refuses_triton_kernel(case)


def _refuses_epilogue(case: Case) -> str | None:
    if case.device.type != "cuda" or torch.version.hip is not None:
        return "cuBLASLt is NVIDIA's"
    if case.dtype not in (torch.float16, torch.bfloat16):
        return f"its gelu epilogue does not take {_library.name_of(case.dtype)}"
    if "none" in case.options:
        return "its gelu is the tanh approximation"
    if "bias" not in case.options:
        return "torch uses this epilogue only with a bias"
    if "keep" in case.options:
        return "torch does not use the epilogue that keeps the pre-activation"
    if not math.prod(case.shape):
        return "no elements"
    if case.shape[-1] % 8:  # 257x1111 by 999x1111, bfloat16, H200: 0.114 ms, torch's product and gelu 0.031
        return f"is slow for rows of {case.shape[-1]} elements, which do not begin on 16-byte boundaries"
    return None


def _epilogue_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, keep: bool = True
) -> tuple[Tensor, Tensor]:
    y: Tensor = torch.ops.aten._addmm_activation(bias, x, weight.t(), use_gelu=True)
    return y, y.new_empty(0)


def _torch_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, keep: bool = True
) -> tuple[Tensor, Tensor]:
    z = functional.linear(x, weight, bias)
    return (functional.gelu(z, approximate=approximate) if keep else _gelu(z, approximate)), z


def _gelu(z: Tensor, approximate: str) -> Tensor:
    apply: Callable[..., Tensor] = functional.gelu if z.requires_grad else torch.ops.aten.gelu_
    return apply(z, approximate=approximate)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return _matmul(case_of((a.device, a.dtype, (a.shape[0], b.shape[1], a.shape[1]), ())), a, b)


def _products(
    dz: Tensor, x: Tensor, weight: Tensor, dbias: Tensor | None, needs: Sequence[bool]
) -> list[Tensor | None]:
    return [_product(dz, weight) if needs[0] else None, _product(dz.t(), x) if needs[1] else None, dbias]


def _triton_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, approximate: str, needs: Sequence[bool]
) -> list[Tensor | None]:
    dz, _, dbias = launch_dz(dy, z, approximate, bias.dtype if bias is not None and needs[2] else None)
    return _products(dz, x, weight, dbias, needs)


def _torch_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, approximate: str, needs: Sequence[bool]
) -> list[Tensor | None]:
    dz = torch.ops.aten.gelu_backward(dy, z, approximate=approximate)
    return _products(dz, x, weight, dz.sum(0) if bias is not None and needs[2] else None, needs)


def _forward_cost(case: Case) -> Cost:
    return product_cost(case, results=2 if "keep" in case.options else 1, operations=15)


def _backward_cost(case: Case) -> Cost:
    M, N, K = case.shape
    products = sum(option in ("x", "weight") for option in case.options)
    inner = products * (M * K + K * N + M * N)
    return Cost((3 * M * N + inner) * case.dtype.itemsize, products * 2 * M * N * K + 25 * M * N)


_matmul: Callable[..., Tensor] = Operation(
    "linear_gelu_matmul", (Implementation("torch", torch.mm),), cost=product_cost
)
linear_gelu_fwd = Operation(
    "linear_gelu_fwd",
    (
        Implementation("hopper", launch_hopper, refuses=lambda case: _one_row(case) or refuses_product(case), own=True),
        Implementation("triton", launch_forward, refuses=_refuses, own=True),
        Implementation("cublaslt", _epilogue_forward, refuses=_refuses_epilogue),
        Implementation("torch", _torch_forward, differentiable=True),
    ),
    cost=_forward_cost,
)
linear_gelu_bwd: Callable[..., Sequence[Tensor | None]] = _launch.triton_operation(
    "linear_gelu_bwd", _triton_backward, _torch_backward, cost=_backward_cost, refuses=_refuses_backward
)


def _torch_equivalent(x: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    if x.dim() == 2:
        return _gelu(functional.linear(x, weight, bias), approximate)
    return _torch_equivalent(_library.rows_of(x), weight, bias, approximate).view(*x.shape[:-1], weight.shape[0])


_cpu = CpuFastPath(_torch_equivalent, small=lambda *_, **__: True, args=(False,))


@_cpu
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Apply a linear layer, then gelu.

    y = gelu(x W^T + b)

    Args:
        x: (..., K), float16, bfloat16, float32 or float64.
        weight: (N, K), as in torch.nn.functional.linear; dtype of x.
        bias: (N,), dtype of x, or None.
        approximate: "none", x times the distribution function of the standard normal; "tanh", its approximation.

    Returns:
        (..., N), dtype of x, contiguous. Products accumulate in float32; the kernel applies gelu to the sum before it
        is rounded. If a gradient is needed, the pre-activation is stored in the dtype of x. Under torch.autocast all
        tensors are cast to the autocast dtype. Differentiable twice.

    Raises:
        ShapeError: weight is not (N, K), bias not (N,), x is a scalar, or several devices.
        UnsupportedDtype: a dtype not listed above, or several.
        ConfigError: approximate is neither "none" nor "tanh".
        TypeError: an argument is not a tensor.

    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.
    """
    _library.check_dtype("linear_gelu", x)
    x, weight, bias = _library.cast_for_autocast(x, weight, bias)
    _library.check_matches("linear_gelu", x, weight=weight, bias=bias)
    if x.dim() == 0:
        raise ShapeError("x must be (..., K), got a scalar")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ShapeError(f"weight must be (N, {x.shape[-1]}), got {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"bias must be ({weight.shape[0]},), got {tuple(bias.shape)}")
    if approximate not in _APPROXIMATIONS:
        raise ConfigError(f"approximate must be 'none' or 'tanh', got {clipped(approximate)}")
    y: Tensor = _linear_gelu(_library.rows_of(x), weight, bias, approximate)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])


def _case(x: Tensor, weight: Tensor, *options: str) -> Case:
    return case_of((x.device, x.dtype, (x.shape[0], *weight.shape), options))


def _forward_case(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, keep: str = "keep") -> Case:
    return _case(x, weight, approximate, "" if bias is None else "bias", keep)


@_cpu.case
def _infer_case(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> Case:
    return _forward_case(x, weight, bias, approximate, "")


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, approximate: str, needs: Sequence[bool]
) -> Sequence[Tensor | None]:
    names = [name for name, need in zip(("x", "weight", "bias"), needs, strict=True) if need]
    args = (dy, x, weight, bias, z, approximate, needs)
    return linear_gelu_bwd(_case(x, weight, approximate, *names), *args)


def _composite(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    return functional.gelu(functional.linear(x, weight, bias), approximate=approximate)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], weight.shape[0])
    return x.new_empty(shape), x.new_empty(shape)


class _LinearGelu(DifferentiableOp):
    def infer(self, *args: Any) -> Any:
        """Return y alone."""
        return linear_gelu_fwd(_infer_case(*args), *args, False)[0]


_linear_gelu = _LinearGelu(
    "linear_gelu(Tensor x, Tensor weight, Tensor? bias, str approximate) -> (Tensor y, Tensor z)",
    operation=linear_gelu_fwd,
    case=_forward_case,
    backward=_backward,
    saves=("x", "weight", "bias", "z"),
    gradients={"x": "x", "weight": "weight", "bias": "bias"},
    composite=_composite,
    fake=_fake,
    cpu=_cpu,
)
