"""linear_int8: reference, implementations, the public function, and the registration with torch and autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from accelerant.errors import LaunchError, ShapeError, UnsupportedDtype
from accelerant.ops import _hopper, _library, _rows
from accelerant.ops._differentiable import DifferentiableOp
from accelerant.ops._launch import ceil_div, multiprocessors, next_power_of_2, triton_operation
from accelerant.ops.quantize_int8 import quantize_int8_reference, quantize_rows, torch_quantize
from accelerant.runtime.compilation.kernel import CUDA_TARGETS, Kernel
from accelerant.runtime.compilation.triton import TritonKernel, interpreting
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation
from accelerant.runtime.host import multiplies_bfloat16

# --- the kernel for Hopper (hopper.cu), for one row of x: bound by reading the weight ---------------------------------
UNALIGNED = "unaligned"
"""Option of a case whose x or weight the kernel cannot read, see is_aligned."""

ROW_KINDS = ("*bf16", "*i8", "*f32", "*f32", "*bf16", "i32", "i32")
"""Kinds of the kernel's arguments: x, weight, scale, bias, y; N, K."""

_FILE = Path(__file__).with_name("hopper.cu")


@dataclass(frozen=True, slots=True)
class Int8RowConfig:
    """A variant of the kernel: `rows` of the weight per warp, `unroll` steps of 512 columns in flight.

    `prefetch`: bytes of each row prefetched before the preceding kernel ends (programmatic dependent launch).
    """

    rows: int
    unroll: int
    warps: int
    prefetch: int


ROW_CONFIGS = (Int8RowConfig(4, 2, 4, 512), Int8RowConfig(1, 4, 4, 1024))
"""The second is for weights with few rows, see row_config."""

_MIN_BLOCKS = 3
"""Blocks per multiprocessor; with fewer, one row per warp keeps more warps busy."""


def refuses_row(case: Case) -> str | None:
    """Return why the kernel cannot serve a case of shape (M, N, K), or None."""
    M, _, K = case.shape
    if reason := _hopper.refuses_device(case, tuple(_hopper.ELEMENTS)):
        return reason
    if M != 1:
        return f"takes one row, not {M}"
    if "dynamic" in case.options:
        return "does not quantize x"
    if UNALIGNED in case.options:
        return "x or weight does not begin on a 16-byte boundary"
    return f"rows of {K} integers do not begin on 16-byte boundaries" if K % 16 else None


def is_aligned(x: Tensor, weight: Tensor) -> bool:
    """Return whether x and weight begin on 16-byte boundaries, or are copied before the launch."""
    return not any(tensor.data_ptr() % 16 and tensor.is_contiguous() for tensor in (x, weight))


@functools.cache
def row_program(plan: Int8RowConfig, dtype: torch.dtype, scale_bytes: int, bias_bytes: int) -> _hopper.HopperProgram:
    """Return the row_program text; scale_bytes and bias_bytes are 2 for the dtype of x, 4 for float32, 0 for None."""
    constants = {
        "ROWS": plan.rows, "UNROLL": plan.unroll, "WARPS": plan.warps, "PREFETCH": plan.prefetch,
        "SCALE_BYTES": scale_bytes, "BIAS_BYTES": bias_bytes,
    }  # fmt: skip
    text = _hopper.hopper_program(_FILE, _hopper.ELEMENTS[dtype], (), constants)
    return _hopper.HopperProgram("linear_int8_row", text, 32 * plan.warps, 0, overlaps=True)


@functools.cache
def _row_kernel(plan: Int8RowConfig, dtype: torch.dtype, scale_bytes: int, bias_bytes: int, device: int) -> Kernel:
    return _hopper.load(row_program(plan, dtype, scale_bytes, bias_bytes), ROW_KINDS, device)


@functools.cache
def row_config(N: int, device: torch.device) -> Int8RowConfig:
    """Return the variant for N rows of weight (H200, 4096 x 14336, float16: the first 18.2 us, the second 16.7)."""
    plan = ROW_CONFIGS[0]
    return plan if ceil_div(N, plan.rows * plan.warps) >= _MIN_BLOCKS * multiprocessors(device) else ROW_CONFIGS[1]


def launch_hopper(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool = False,
    plan: Int8RowConfig | None = None,
) -> Tensor:  # fmt: skip
    """Return y (1, N) of x (1, K) and weight (N, K) for a case that `refuses_row` does not refuse.

    LaunchError: x or weight is contiguous and does not begin on a 16-byte boundary.
    """
    N, K = weight.shape
    if not is_aligned(x, weight):
        raise LaunchError(f"x at {x.data_ptr():#x} and weight at {weight.data_ptr():#x} must be multiples of 16")
    x, weight, scale = x.contiguous(), weight.contiguous(), scale.contiguous()
    y = torch.empty(1, N, dtype=x.dtype, device=x.device)
    if not N:
        return y
    plan = plan or row_config(N, x.device)
    bias = None if bias is None else bias.contiguous()
    device = x.get_device()
    kernel = _row_kernel(plan, x.dtype, scale.element_size(), 0 if bias is None else bias.element_size(), device)
    grid = (ceil_div(N, plan.rows * plan.warps),)
    args = (x, weight, scale, scale if bias is None else bias, y, N, K)
    with torch.cuda.device(device):
        kernel.handle.start(grid, (32 * plan.warps,), args, torch._C._cuda_getCurrentRawStream(device))
    return y


# --- the kernel for Hopper (planes.cu), for one row of x in 24-bit integers -------------------------------------------
PLANES_ROW_KINDS = ("*i8", "*f32", "*i8", "*f32", "*bf16", "*bf16", "*bf16", "i32", "i32", "i32", "f32")
"""Kinds of the kernel's arguments: planes and unit, or x and the norm's gain; weight, scale, bias, residual, y; N, K,
fours of rows per block, eps."""

TO_PLANES_KINDS = ("*bf16", "*bf16", "*i8", "*f32", "f32")
"""Kinds of the arguments of the kernel that only converts: x, norm, planes, units, eps."""

_PLANES_FILE = Path(__file__).with_name("planes.cu")
_PLANES_WARPS = 8
_PLANES_BLOCKS = {8: 3, 4: 2}  # per multiprocessor, by bits
_SHARED_STEP = 2**14  # sizes of shared memory that programs are compiled for
_MOST_SHARED = 13 * _SHARED_STEP


@functools.cache
def planes_program(
    bits: int, dtype: torch.dtype, gated: bool, residual: bool, bias_bytes: int, shared_bytes: int, columns: int = 0,
    norm: bool = False,
) -> _hopper.HopperProgram:  # fmt: skip
    """Return the program for a weight of 8 or 4 bits; bias_bytes: of an element, 0 for None.

    columns: of x, which the kernel converts itself, after an RMS norm if `norm`; 0 if it takes planes.
    """
    constants = {
        "BITS": bits, "GATED": int(gated), "RESIDUAL": int(residual), "DEPTH": 2, "BIAS_BYTES": bias_bytes,
        "WARPS": _PLANES_WARPS, "COLUMNS": columns, "NORM": int(norm), "ALONE": 0,
    }  # fmt: skip
    text = _hopper.hopper_program(_PLANES_FILE, _hopper.ELEMENTS[dtype], (), constants)
    return _hopper.HopperProgram("linear_planes_row", text, 32 * _PLANES_WARPS, shared_bytes, overlaps=True)


@functools.cache
def to_planes_program(dtype: torch.dtype, columns: int, norm: bool) -> _hopper.HopperProgram:
    """Return the program that only converts rows."""
    constants = {"WARPS": _PLANES_WARPS, "BITS": 8, "GATED": 0, "COLUMNS": columns, "NORM": int(norm), "ALONE": 1}
    text = _hopper.hopper_program(_PLANES_FILE, _hopper.ELEMENTS[dtype], (), constants)
    return _hopper.HopperProgram("linear_planes", text, 32 * _PLANES_WARPS, 0, overlaps=True)


@functools.cache
def _planes_kernel(device: int, *options: Any) -> Kernel:
    return _hopper.load(planes_program(*options), PLANES_ROW_KINDS, device)


@functools.cache
def _to_planes_kernel(device: int, *options: Any) -> Kernel:
    return _hopper.load(to_planes_program(*options), TO_PLANES_KINDS, device)


MOST_COLUMNS = 2**15
"""Columns of x that planes.cu converts: a row is in the registers of a block."""

FEW_COLUMNS = 2**12
"""Up to this many, each block of a product converts x itself: that takes less time than another kernel."""


def _converts(x: Tensor, norm: Tensor | None) -> bool:
    """Return whether planes.cu converts rows x (M, K), to the same planes in each of its kernels."""
    if x.dtype not in _hopper.ELEMENTS or not _hopper.is_hopper(x.device) or torch.version.hip is not None:
        return False
    K = x.shape[1]
    return 0 < K <= MOST_COLUMNS and K % 16 == 0 and (norm is None or norm.dtype == x.dtype)


def takes_planes_row(planes: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Return whether launch_planes_row serves."""
    M, _, K = planes.shape
    if M != 1 or dtype not in _hopper.ELEMENTS or not _hopper.is_hopper(planes.device) or torch.version.hip is not None:
        return False
    return K % _columns_of(weight) == 0 < K and not weight.data_ptr() % 16


def _columns_of(weight: Tensor) -> int:
    """Return of how many columns the kernel takes a multiple: 16 bytes of a row, or a group of 4 bits."""
    return 128 if weight.dtype == torch.uint8 else 16


def takes_row(x: Tensor, norm: Tensor | None, weight: Tensor) -> bool:
    """Return whether launch_row serves x (M, K)."""
    M, K = x.shape
    aligned = K % _columns_of(weight) == 0 and not weight.data_ptr() % 16
    return M == 1 and K <= FEW_COLUMNS and aligned and _converts(x, norm)


def _aligned(x: Tensor) -> Tensor:
    """Return a tensor that begins on a 16-byte boundary."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def launch_planes_row(
    planes: Tensor, units: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None,
    dtype: torch.dtype, gated: bool,
) -> Tensor:  # fmt: skip
    """Return y (1, N) of launch_planes, with the same bits; or of linear_int4's, whose weight is uint8."""
    return _launch_row(planes, units, weight, scale, bias, residual, dtype, gated)


def launch_row(
    x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, scale: Tensor, bias: Tensor | None,
    residual: Tensor | None, gated: bool,
) -> Tensor:  # fmt: skip
    """Return launch_planes_row's y of to_planes(x, norm, eps), by one kernel, for x (1, K) that takes_row."""
    x = _aligned(x)
    gain = x if norm is None else _aligned(norm)
    return _launch_row(x, gain, weight, scale, bias, residual, x.dtype, gated, eps, norm is not None)


def _launch_row(
    x: Tensor, units: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None,
    dtype: torch.dtype, gated: bool, eps: float = 0.0, norm: bool = False,
) -> Tensor:  # fmt: skip
    """Launch the kernel for planes (1, 3, K) and their unit, or for x (1, K) and the norm's gain."""
    K, N, bits = x.shape[-1], weight.shape[0] // (2 if gated else 1), 8 if weight.dtype == torch.int8 else 4
    y = torch.empty(1, N, dtype=dtype, device=x.device)
    if not N:
        return y
    fours, of_four = ceil_div(N, 2 if gated else 4), 48 if bits == 8 else 16 * (K // 128 + 1)
    own = ceil_div(fours, _PLANES_BLOCKS[bits] * multiprocessors(x.device))
    before = 3 * K + 4 * (_PLANES_WARPS + ceil_div(K, 256))
    own = min(own, (_MOST_SHARED - before) // of_four)
    shared = ceil_div(before + own * of_four, _SHARED_STEP) * _SHARED_STEP
    device, bias_bytes = x.get_device(), 0 if bias is None else bias.element_size()
    columns = K if x.dim() == 2 else 0
    kernel = _planes_kernel(device, bits, dtype, gated, residual is not None, bias_bytes, shared, columns, norm)
    others = (y if each is None else each.contiguous() for each in (bias, residual))
    args = (x, units, weight.contiguous(), scale.float().contiguous(), *others, y, N, K, own, eps)
    with torch.cuda.device(device):
        stream = torch._C._cuda_getCurrentRawStream(device)
        kernel.handle.start((ceil_div(fours, own),), (32 * _PLANES_WARPS,), args, stream)
    return y


# --- launches --------------------------------------------------------------------------------------------------------
_NAMES = ("row", "fwd", "dynamic", "planes", "bwd", "sum", "dequantize")
KERNELS = {  # planes: every tile rounds what it does with its sums in the same way
    name: TritonKernel(
        "accelerant.ops.linear_int8.triton_kernels", f"linear_int8_{name}", contracts=name != "planes",
        targets=CUDA_TARGETS[name == "planes" :],  # Turing's tensor cores have no integers in Triton
    )
    for name in _NAMES
}  # fmt: skip

TO_PLANES = TritonKernel("accelerant.ops.decode.triton_kernels", "decode_planes")

FEW_ROWS = 16
"""Up to this many rows of x, reading the weight bounds the kernel."""


@dataclass(frozen=True, slots=True)
class StripTile:
    """The tiling of linear_int8_row: blocks of `block_n` rows and `block_k` columns, 512 elements per warp.

    A thread processes `rows` rows (1, 2 or 4) with the same part of x; `unroll` blocks are loaded before the first is
    used, through `stages` of shared memory (1 for none).
    """

    rows: int
    block_n: int
    block_k: int
    num_warps: int
    unroll: int = 1
    stages: int = 1

    @property
    def constants(self) -> dict[str, int | bool]:
        """The compile-time arguments."""
        return {
            "ROWS": self.rows, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k,
            "UNROLL": self.unroll, "STAGES": self.stages,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Int8Tile:
    """The tiling of a product; `group`: tiles taken down a column before the next, for reuse in the L2 cache."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    stages: int
    group: int = 8

    @property
    def blocks(self) -> dict[str, int | bool]:
        """The compile-time arguments shared by the tiled kernels."""
        return {
            "BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k, "GROUP": self.group,
        }  # fmt: skip


STRIP_PLANS = tuple(StripTile(*sizes) for sizes in (
    (1, 1, 512, 1, 4), (2, 4, 512, 4, 2), (1, 4, 512, 4, 4), (1, 4, 512, 4, 2), (2, 4, 512, 4, 1),
    (4, 4, 512, 4, 1), (4, 4, 512, 4, 2), (2, 1, 2048, 4, 2), (4, 1, 2048, 4, 1), (2, 2, 1024, 4, 2),
    (4, 2, 1024, 4, 1), (1, 2, 512, 2, 4), (2, 2, 512, 2, 2), (4, 2, 512, 2, 1), (4, 1, 1024, 2, 1),
    (2, 1, 1024, 2, 2), (2, 1, 512, 1, 2), (4, 1, 512, 1, 1), (2, 8, 512, 8, 2), (1, 8, 512, 8, 4),
    (1, 4, 512, 4, 1, 4), (2, 4, 512, 4, 1, 3), (4, 2, 512, 2, 1, 3),
))  # fmt: skip
"""Candidates for linear_int8_row; the first is the default."""

FEW_PLANS = tuple(Int8Tile(*sizes) for sizes in (
    (16, 32, 256, 4, 4), (16, 32, 128, 4, 5), (16, 16, 256, 4, 5), (16, 64, 128, 4, 5), (16, 64, 256, 4, 3),
    (16, 32, 256, 2, 4),
))  # fmt: skip
"""Candidates for 2 to 16 rows: many programs with many bytes in flight in each."""

MATMUL_PLANS = tuple(Int8Tile(*sizes) for sizes in (
    (128, 128, 64, 8, 4), (128, 128, 64, 4, 4), (256, 128, 64, 8, 3), (128, 128, 128, 8, 3), (64, 128, 128, 4, 4),
    (64, 64, 128, 4, 4),
))  # fmt: skip
"""Candidates for more rows, on Hopper."""

DYNAMIC_PLANS = tuple(Int8Tile(*sizes) for sizes in (
    (128, 256, 128, 8, 4), (128, 256, 128, 8, 3), (256, 128, 128, 8, 3), (128, 256, 64, 8, 4),
    (128, 128, 128, 4, 4), (128, 128, 128, 8, 4), (64, 128, 128, 4, 4), (64, 256, 128, 4, 3),
))  # fmt: skip
"""Candidates for integer products, on Hopper."""

FEW_BACKWARD_PLANS = tuple(Int8Tile(*sizes) for sizes in (
    (16, 64, 256, 4, 3), (16, 64, 128, 4, 4), (16, 32, 256, 4, 4), (16, 128, 128, 4, 3), (16, 32, 128, 4, 5),
    (16, 64, 64, 2, 4),
))  # fmt: skip
"""Candidates for the gradient of up to 16 rows, with the sum split in parts."""

SPLIT_PLAN = FEW_BACKWARD_PLANS[1]
"""The plan of float32; the first and the third spill. The error is 6e-6 of the gradient's norm, torch's 4e-7."""

_MAX_PROGRAMS = 256
"""Limit of tiles times parts of such a sum."""

SMALL_PLANS = {
    "fwd": Int8Tile(64, 128, 64, 4, 3),
    "dynamic": Int8Tile(128, 128, 64, 8, 3),
    "bwd": Int8Tile(64, 64, 64, 4, 3),
}
"""For devices with less shared memory than Hopper: at most 99 KiB in 16-bit dtypes."""


@functools.cache
def integer_cores(device: torch.device) -> bool:
    """Return whether Triton multiplies int8 on tensor cores."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(device)[0] >= 8


@functools.cache
def strip_plan(N: int, K: int, device: torch.device) -> StripTile:
    """Return the default plan for one row of x."""
    if device.type != "cuda":  # interpreter: several programs and steps even for small samples
        return StripTile((1, 2, 4)[N % 3], 2, 16, 4, 1 + K % 2)
    return STRIP_PLANS[0]


@functools.cache
def tile_plan(kind: str, M: int, N: int, dtype: torch.dtype, device: torch.device) -> Int8Tile:
    """Return the default plan of a product; kind is "fwd", "dynamic" or "bwd"."""
    if device.type != "cuda":
        return Int8Tile(16, 32, 32, 4, 2)
    if kind == "fwd" and M <= FEW_ROWS:
        return FEW_PLANS[0]
    if kind == "bwd" and M <= FEW_ROWS:
        return SPLIT_PLAN if dtype == torch.float32 else FEW_BACKWARD_PLANS[0]
    if dtype == torch.float32 and kind != "dynamic":
        return Int8Tile(64, 64, 32, 4, 2)
    if not _hopper.is_hopper(device) or kind == "bwd":
        return SMALL_PLANS[kind]
    if kind == "dynamic":
        return DYNAMIC_PLANS[0] if M > 64 else DYNAMIC_PLANS[6]
    return MATMUL_PLANS[0] if M > 64 else MATMUL_PLANS[5]


def _upcast(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.device.type != "cuda" and interpreting()


@functools.cache
def splits(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the gradient in float32 is that of three products in bfloat16, on tensor cores that have it."""
    if dtype != torch.float32 or device.type != "cuda":
        return dtype == torch.float32
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def forward_constants(plan: Int8Tile, weight: Tensor, gated: bool = False) -> dict[str, int | bool]:
    """Return compile-time arguments of fwd."""
    bits = weight.dtype == torch.int8 and weight.is_cuda and converts_by_bits(weight.device)
    return {"BITS": bits, "GATED": gated, **plan.blocks}


@functools.cache
def converts_by_bits(device: torch.device) -> bool:
    """Return whether a GPU has the instructions by which fwd converts integers."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _dense(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.is_contiguous() else x.contiguous()


def launch_forward(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, *, wide: bool = False,
    residual: Tensor | None = None, gated: bool = False, plan: StripTile | Int8Tile | None = None,
) -> Tensor:  # fmt: skip
    """Return y (M, N) of x (M, K), without the factor and term of a scale and bias that are None; wide: in float32.

    residual (M, N) and gated, as in ops.decode.steps.linear, with an Int8Tile only; its weight may have the dtype of x.
    """
    (M, K), N = x.shape, weight.shape[0] // (2 if gated else 1)
    y = torch.empty(M, N, dtype=torch.float32 if wide else x.dtype, device=x.device)
    if not M or not N:
        return y
    x, weight = x.contiguous(), weight.contiguous()
    if plan is None:
        single = M == 1 or (x.dtype == torch.float32 and M <= FEW_ROWS and x.device.type == "cuda")
        plan = strip_plan(N, K, x.device) if single else tile_plan("fwd", M, N, x.dtype, x.device)
    args = (x, weight, _dense(scale), _dense(bias))
    if isinstance(plan, StripTile):
        grid = (ceil_div(N, plan.rows * plan.block_n), M)
        KERNELS["row"].launch(grid, (*args, y, N, K), plan.constants, num_warps=plan.num_warps)
        return y
    KERNELS["fwd"].launch(
        (ceil_div(M, plan.block_m) * ceil_div(N, plan.block_n),),
        (*args, _dense(residual), y, M, N, K),
        {"EVEN_K": K % plan.block_k == 0, "UPCAST": _upcast(x), **forward_constants(plan, weight, gated)},
        num_warps=plan.num_warps,
        num_stages=plan.stages,
    )
    return y


_PLANES_COLUMNS = 2**15
"""Of a row that one program converts to integers."""


def takes_planes(x: Tensor) -> bool:
    """Return whether integers of 24 bits represent rows x, and the device has tensor cores that multiply them."""
    if torch.version.hip is not None:
        return False  # untried
    return x.element_size() == 2 and x.shape[-1] <= _PLANES_COLUMNS and integer_cores(x.device)


def to_planes(x: Tensor, norm: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return rows x (M, K) as integers (M, 3, K) int8 and their units (M,), after an RMS norm if there is its gain."""
    M, K = x.shape
    planes = torch.empty(M, 3, K, dtype=torch.int8, device=x.device)
    units = torch.empty(M, dtype=torch.float32, device=x.device)
    block = next_power_of_2(K)
    if M and _converts(x, norm):
        x, device = _aligned(x), x.get_device()
        gain = x if norm is None else _aligned(norm)
        kernel = _to_planes_kernel(device, x.dtype, K, norm is not None)
        with torch.cuda.device(device):
            stream = torch._C._cuda_getCurrentRawStream(device)
            kernel.handle.start((M,), (32 * _PLANES_WARPS,), (x, gain, planes, units, eps), stream)
    elif M:
        TO_PLANES.launch(
            (M,),
            (x, norm, planes, units, K, eps),
            {"BLOCK": block, "EARLY": _hopper.starts_early(x.device)},
            num_warps=max(1, min(32, block // 256)),
        )
    return planes, units


def launch_planes(
    planes: Tensor, units: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None,
    dtype: torch.dtype, plan: Int8Tile, *, gated: bool = False,
) -> Tensor:  # fmt: skip
    """Return y (M, N) in a dtype, of x in planes (M, 3, K) int8 with units (M,) float32; the sums are exact."""
    if takes_planes_row(planes, weight, dtype):
        return launch_planes_row(planes, units, weight, scale, bias, residual, dtype, gated)
    (M, _, K), N = planes.shape, weight.shape[0] // (2 if gated else 1)
    y = torch.empty(M, N, dtype=dtype, device=planes.device)
    if M and N:
        KERNELS["planes"].launch(
            (ceil_div(M, plan.block_m) * ceil_div(N, plan.block_n),),
            (planes, units, weight.contiguous(), _dense(scale), _dense(bias), _dense(residual), y, M, N, K),
            {"EVEN_K": K % plan.block_k == 0, "GATED": gated, **plan.blocks},
            num_warps=plan.num_warps,
            num_stages=plan.stages,
        )
    return y


def launch_dynamic(
    q: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype,
    plan: Int8Tile | None = None,
) -> Tensor:  # fmt: skip
    """Return y (M, N) in a dtype, of q (M, K) int8 with row scales (M,) float32, both contiguous."""
    (M, K), N = q.shape, weight.shape[0]
    y = torch.empty(M, N, dtype=dtype, device=q.device)
    if not M or not N:
        return y
    plan = plan or tile_plan("dynamic", M, N, dtype, q.device)
    KERNELS["dynamic"].launch(
        (ceil_div(M, plan.block_m) * ceil_div(N, plan.block_n),),
        (q, x_scale, weight.contiguous(), _dense(scale), _dense(bias), y, M, N, K),
        {"EVEN_K": K % plan.block_k == 0, "INTEGERS": integer_cores(q.device), **plan.blocks},
        num_warps=plan.num_warps,
        num_stages=plan.stages,
    )
    return y


def launch_dx(
    dy: Tensor, weight: Tensor, scale: Tensor, plan: Int8Tile | None = None, parts: int | None = None
) -> Tensor:
    """Return dx (M, K) of dy (M, N); a second kernel adds the `parts` of the sum over N."""
    (M, N), K = dy.shape, weight.shape[1]
    dx = torch.empty(M, K, dtype=dy.dtype, device=dy.device)
    if not M or not K:
        return dx
    split = splits(dy.dtype, dy.device)
    plan = plan or tile_plan("bwd", M, K, dy.dtype, dy.device)
    tiles = ceil_div(M, plan.block_m) * ceil_div(K, plan.block_k)
    if parts is None:
        parts = _parts(M, N, tiles, plan)
    span = plan.block_n * max(1, ceil_div(N, plan.block_n * parts))
    parts = max(1, ceil_div(N, span))
    sums = dx if parts == 1 else torch.empty(parts, M, K, dtype=torch.float32, device=dy.device)
    KERNELS["bwd"].launch(
        (tiles, parts),
        (dy.contiguous(), weight.contiguous(), _dense(scale), sums, M, N, K, span),
        {"UPCAST": _upcast(dy) or (split and dy.device.type != "cuda"), "SPLIT": split, **plan.blocks},
        num_warps=plan.num_warps,
        num_stages=plan.stages,
    )
    if parts > 1:
        KERNELS["sum"].launch((ceil_div(M * K, 256),), (sums, dx, parts, M * K), {"BLOCK": 256}, num_warps=2)
    return dx


def _parts(M: int, N: int, tiles: int, plan: Int8Tile) -> int:
    """Return the parts of the sum over N: enough programs to keep the memory busy, with at least 4 steps each."""
    return 1 if M > FEW_ROWS else max(1, min(_MAX_PROGRAMS // tiles, N // (4 * plan.block_n)))


_MAX_PRODUCTS = (2**31 - 1) // (128 * 127)
"""Products of an int8 weight and q, at most 127 in magnitude, whose sum cannot overflow int32."""
_MAX_ROWS = 512
"""Above this many rows of x the library's product is faster, including the time to dequantize the weight."""
_MANY_ROWS = f"products of more than {_MAX_ROWS} rows are left to the library, with a dequantized weight"


def linear_int8_reference(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, dynamic: bool = False
) -> Tensor:
    """Return x times the scaled weight, plus bias; dynamic rounds x to integers with row scales first."""
    if dynamic:
        q, x_scale = quantize_int8_reference(x.detach())
        rounded = q * x_scale.unsqueeze(-1)
        x = x + (rounded - x).detach() if x.requires_grad else rounded
    y = x @ (weight.to(scale.dtype) * scale[:, None]).to(x.dtype).T
    return y if bias is None else y + bias


@_library.with_torch_keywords
def linear_int8(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, dynamic: bool = False
) -> Tensor:
    """Apply a linear layer whose weight is 8-bit integers with a scale for each output.

    y = (x W^T) scale + b

    Args:
        x: (..., K), float16, bfloat16, float32 or float64.
        weight: (N, K) int8, a linear layer's weight quantized by quantize_int8.
        scale: (N,), float32 or the dtype of x.
        bias: (N,), float32 or the dtype of x; or None.
        dynamic: also round each row of x to 8-bit integers, by quantize_int8, and sum integers: faster for many rows,
            and exact apart from that rounding.

    Returns:
        (..., N), dtype of x, contiguous. Products accumulate in float32 (float64 for float64), integers in int32.
        Differentiable twice in x, scale and bias. The weight gets no gradient; the gradient of the rounding is the
        identity (straight-through). x is saved for the backward pass only if scale requires a gradient.

    Raises:
        ShapeError: weight is not (N, K), scale or bias is not (N,), or several devices; or dynamic with K above 132104,
            where a sum could overflow int32.
        UnsupportedDtype: a dtype not listed above.
        TypeError: an argument is not a tensor.

    Under torch.autocast x is cast to the autocast dtype. Under forward-mode differentiation and the transforms of
    torch.func torch's linear of the dequantized weight runs, which the ledger does not count.

    Source: Dettmers, Lewis, Belkada and Zettlemoyer 2022, arXiv:2208.07339, section 2; the gradient past the rounding:
    Bengio, Leonard and Courville 2013, arXiv:1308.3432, section 3.
    """
    _library.check_dtype("linear_int8", x)
    low = _library.autocast_dtype(x.device.type)
    if low is not None and x.dtype != torch.float64:
        x = x.to(low)
    _check(x, weight, scale, bias, dynamic)
    y: Tensor = _linear_int8(_library.rows_of(x), weight, scale, bias, dynamic)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])


def _check(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> None:
    for name, tensor in (("weight", weight), ("scale", scale), ("bias", bias)):
        if not isinstance(tensor, Tensor) and (tensor is not None or name != "bias"):
            raise _library.not_a_tensor("linear_int8", name, tensor)
    if weight.dtype != torch.int8:
        raise UnsupportedDtype(f"weight must be int8, got {_library.name_of(weight.dtype)}: see quantize_int8")
    if x.dim() == 0:
        raise ShapeError("x must be (..., K), got a scalar")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ShapeError(f"weight must be (N, {x.shape[-1]}), got {tuple(weight.shape)}")
    if dynamic and weight.shape[1] > _MAX_PRODUCTS:
        raise ShapeError(f"dynamic=True sums at most {_MAX_PRODUCTS} products in int32, got {weight.shape[1]}")
    for name, vector in (("scale", scale), ("bias", bias)):
        if vector is None:
            continue
        if vector.shape != weight.shape[:1]:
            raise ShapeError(f"{name} must be ({weight.shape[0]},), got {tuple(vector.shape)}")
        if vector.dtype not in (torch.float32, x.dtype):
            dtypes = " or ".join(dict.fromkeys(("float32", _library.name_of(x.dtype))))
            raise UnsupportedDtype(f"{name} must be {dtypes}; got {_library.name_of(vector.dtype)}")
    for name, tensor in (("weight", weight), ("scale", scale), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise ShapeError(f"x and {name} must be on one device, got {x.device} and {tensor.device}")


# --- implementations -------------------------------------------------------------------------------------------------
def _refuses(case: Case) -> str | None:
    if case.device.type == "cuda":
        M, _, K = case.shape
        if K % 16:
            return f"rows of {K} integers do not begin on 16-byte boundaries"
        if "dynamic" not in case.options:
            if M > FEW_ROWS and case.dtype == torch.float32:
                return "float32 products of many rows are left to the library"
            if M > _MAX_ROWS:
                return _MANY_ROWS
    return _library.refuses_triton_kernel(case)


def _refuses_backward(case: Case) -> str | None:
    if case.device.type == "cuda":
        if case.dtype == torch.float32 and case.shape[0] > FEW_ROWS:
            return "float32 products of many rows are left to the library"
        if case.dtype == torch.float32 and not splits(case.dtype, case.device):
            return "splits float32 for tensor cores that take bfloat16: NVIDIA, from sm_80 on"
        if case.shape[0] > _MAX_ROWS:
            return _MANY_ROWS
    return _library.refuses_triton_kernel(case)


def _triton_forward(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Tensor:
    if not dynamic:
        return launch_forward(x, weight, scale, bias)
    q, x_scale = quantize_rows(x, 1)
    return launch_dynamic(q, x_scale, weight, scale, bias, x.dtype)


_FEW_ON_CPU = 32
"""Up to this many rows in bfloat16 the conversion of the weight takes more time than oneDNN's products save."""


_CONVERTED = 2**20
"""Weights that are converted at a time: a copy of all of them would be new pages of memory in each call."""


def _refuses_llvm(case: Case) -> str | None:
    if case.device.type != "cpu":
        return f"is for a CPU, not {case.device.type}"
    if case.dtype == torch.float64 or "dynamic" in case.options:
        return "multiplies in float32 only"
    if case.dtype == torch.bfloat16 and case.shape[0] > _FEW_ON_CPU and multiplies_bfloat16():
        return f"more than {_FEW_ON_CPU} rows of bfloat16 are left to oneDNN, with a converted weight"
    return None


def _llvm_forward(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Tensor:
    y = _rows.products(x, weight, scale)
    return (y if bias is None else y.add_(bias.detach())).to(x.dtype)


def _torch_forward(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Tensor:
    with torch.no_grad():
        if not dynamic and (x.dtype == torch.float16 or x.device.type != "cpu"):
            low_bias = None if bias is None else bias.to(x.dtype)
            return functional.linear(x, _dequantized(weight, scale, x.dtype), low_bias)
        wide = torch.promote_types(x.dtype, torch.float32)
        if dynamic:
            q, x_scale = quantize_rows(x, 1)
            y = _integer_product(q, weight).to(wide) * x_scale[:, None] * scale
        else:  # scaling y is cheaper than scaling the weight; not in float16, which could overflow before the scale
            parts = weight.split(max(1, _CONVERTED // (weight.shape[1] or 1)))
            products = [functional.linear(x, part.to(x.dtype)) for part in parts]
            y = (products[0] if len(parts) == 1 else torch.cat(products, -1)).to(wide) * scale
        return (y if bias is None else y + bias).to(x.dtype)


def _dequantized(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight times its scales in one pass, rounded once; `weight * scale` would write float32 first."""
    y = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    if not y.numel() or _library.refuses_triton_kernel(Case(y.device, dtype, tuple(y.shape))):
        return torch.mul(weight, scale[:, None], out=y)
    K = weight.shape[1]
    args = (weight.contiguous(), scale.contiguous(), y, K)
    KERNELS["dequantize"].launch((len(y),), args, {"BLOCK": min(4096, next_power_of_2(K))}, num_warps=4)
    return y


def _integer_product(q: Tensor, weight: Tensor) -> Tensor:
    """Return q times the transposed weight in int32, padded on CUDA to multiples of 8 and at least 17 rows."""
    if q.device.type != "cuda":
        return torch._int_mm(q, weight.t())
    (M, K), N = q.shape, weight.shape[0]
    if not (M and N and K):
        return q.new_zeros((M, N), dtype=torch.int32)
    pad_m, pad_n, pad_k = max(0, 17 - M), -N % 8, -K % 8
    if pad_m or pad_n or pad_k:
        q, weight = functional.pad(q, (0, pad_k, 0, pad_m)), functional.pad(weight, (0, pad_k, 0, pad_n))
    return torch._int_mm(q, weight.t())[:M, :N]


def _triton_backward(
    dy: Tensor, x: Tensor | None, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool,
    needs: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    dscale = None
    if needs[1] and x is not None:
        dscale = launch_forward(x, weight, None, None, wide=True).mul_(dy).sum(0).to(scale.dtype)
    return [launch_dx(dy, weight, scale) if needs[0] else None, dscale, _bias_gradient(dy, bias, needs[2])]


def _torch_backward(
    dy: Tensor, x: Tensor | None, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool,
    needs: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Compute the gradients by torch's differentiable functions, so that they can be differentiated again."""
    dx = dy @ (weight * scale[:, None]).to(dy.dtype) if needs[0] else None
    dscale = None
    if needs[1] and x is not None:
        wide = torch.promote_types(x.dtype, torch.float32)
        dscale = (functional.linear(x.to(wide), weight.to(wide)) * dy).sum(0).to(scale.dtype)
    return [dx, dscale, _bias_gradient(dy, bias, needs[2])]


def _library_backward(
    dy: Tensor, x: Tensor | None, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool,
    needs: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Compute _torch_backward with the weight dequantized in one pass; not differentiable."""
    with torch.no_grad():
        gradients = _torch_backward(dy, x, weight, scale, bias, dynamic, (False, *needs[1:]))
        if needs[0]:
            gradients[0] = dy @ _dequantized(weight, scale, dy.dtype)
    return gradients


def _bias_gradient(dy: Tensor, bias: Tensor | None, needed: bool) -> Tensor | None:
    if bias is None or not needed:
        return None
    return dy.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)).to(bias.dtype)


def _forward_cost(case: Case) -> Cost:
    M, N, K = case.shape
    return Cost(N * K + M * (N + K) * case.dtype.itemsize, 2 * M * N * K)


def _backward_cost(case: Case) -> Cost:
    M, N, K = case.shape
    products = sum(option in ("x", "scale") for option in case.options)
    return Cost(products * (N * K + M * (N + K) * case.dtype.itemsize), products * 2 * M * N * K)


_fwd = Operation(
    "linear_int8_fwd",
    (
        Implementation("hopper", launch_hopper, refuses=refuses_row, own=True),
        Implementation("triton", _triton_forward, refuses=_refuses, own=True),
        Implementation("llvm", _llvm_forward, refuses=_refuses_llvm, own=True),
        Implementation("torch", _torch_forward),
    ),
    cost=_forward_cost,
)
_bwd: Callable[..., Sequence[Tensor | None]] = triton_operation(
    "linear_int8_bwd", _triton_backward, _library_backward, cost=_backward_cost, refuses=_refuses_backward
)


def _case(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Case:
    options: tuple[str, ...] = ("dynamic" if dynamic else "", "" if bias is None else "bias")
    if x.shape[0] == 1 and not is_aligned(x, weight):
        options += (UNALIGNED,)
    return Case(x.device, x.dtype, (x.shape[0], *weight.shape), options)


def _backward(
    dy: Tensor, x: Tensor | None, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool,
    needs: Sequence[bool],
) -> Sequence[Tensor | None]:  # fmt: skip
    names = tuple(name for name, need in zip(("x", "scale", "bias"), needs, strict=True) if need)
    case = Case(dy.device, dy.dtype, (dy.shape[0], *weight.shape), names)
    return _bwd(case, dy, x, weight, scale, bias, dynamic, needs)


def _composite(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Tensor:
    if dynamic:
        q, x_scale = torch_quantize(x.detach(), x.dim() - 1)
        x = x + (q * x_scale.unsqueeze(-1) - x).detach().to(x.dtype)
    return functional.linear(x, (weight * scale[:, None]).to(x.dtype), None if bias is None else bias.to(x.dtype))


def _fake(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


class _LinearInt8(DifferentiableOp):
    """A DifferentiableOp whose dx may have the shape of no saved tensor, since x is saved only for scale's gradient."""

    needed_by: ClassVar = {"x": ("scale",)}

    def _fake_backward(self, *args: Any) -> Any:
        dy, _, weight, scale, bias, _, needs = args
        dx = dy.new_empty((dy.shape[0], weight.shape[1]) if needs[0] else 0)
        dscale = scale.new_empty(scale.shape if needs[1] else 0)
        like = dy if bias is None else bias
        return dx, dscale, like.new_empty(like.shape if needs[2] else 0)


_linear_int8 = _LinearInt8(
    "linear_int8(Tensor x, Tensor weight, Tensor scale, Tensor? bias, bool dynamic) -> (Tensor y)",
    operation=_fwd,
    case=_case,
    backward=_backward,
    saves=("x", "weight", "scale", "bias"),
    gradients={"x": "x", "scale": "scale", "bias": "bias"},
    composite=_composite,
    composite_backward=_torch_backward,
    fake=_fake,
)
