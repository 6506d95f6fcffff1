"""Host side of a launch on Hopper: tensor maps of the copy engine (TMA), prepared launches, tiles of product.h."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import math
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from accelerant.errors import LaunchError
from accelerant.ops._launch import ceil_div
from accelerant.runtime.compilation.background import NotCompiledError
from accelerant.runtime.compilation.kernel import Binary, Kernel, KernelSource
from accelerant.runtime.dispatch import Case
from accelerant.runtime.providers.cuda_launch import PackedLaunch, make_ready

# --- program text ----------------------------------------------------------------------------------------------------
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "f16"}  # value of the macro ELEMENT by dtype

_FOLDER = Path(__file__).parent


class Mma(NamedTuple):
    """A wgmma of 64 rows, n columns (a multiple of 8 up to 256) and 16 summed: float32 D = A B (+ D).

    Its wrapper is mma_{ss|rs}_n{n}_{n|t}{n|t}(float* d, a, u64 b, int accumulate): s is an operand in shared memory, by
    descriptor, r one in registers (const u32*, four words per thread), t an operand stored across the sum (`_across`).
    """

    n: int
    a_in_registers: bool = False
    a_across: bool = False
    b_across: bool = False

    @property
    def name(self) -> str:
        """Name of the wrapper."""
        letters = ("t" if self.a_across else "n") + ("t" if self.b_across else "n")
        return f"mma_{'rs' if self.a_in_registers else 'ss'}_n{self.n}_{letters}"

    def text(self) -> str:
        """Return the wrapper's text. Source: PTX ISA 8.7, section 9.7.15.5.1."""
        count = self.n // 2
        after = count + (4 if self.a_in_registers else 1)
        a = "{" + _operands(count, 4) + "}" if self.a_in_registers else f"%{count}"
        flags = f"{self.b_across:d}" if self.a_in_registers else f"{self.a_across:d}, {self.b_across:d}"
        inputs = ", ".join(f'"r"(a[{i}])' for i in range(4)) if self.a_in_registers else '"l"(a)'
        outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
        return (
            f"__device__ __forceinline__ void {self.name}"
            f"(float* d, {'const u32*' if self.a_in_registers else 'u64'} a, u64 b, int accumulate) {{\n"
            f'    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{after + 1}, 0;\\n"\n'
            f'        "wgmma.mma_async.sync.aligned.m64n{self.n}k16.f32." ELEMENT "." ELEMENT "\\n"\n'
            f'        "{{{_operands(0, count)}}},\\n{a}, %{after}, p, 1, 1, {flags};\\n}}"\n'
            f'        : {outputs}\n        : {inputs}, "l"(b), "r"(accumulate));\n}}\n'
        )


def _operands(first: int, count: int) -> str:
    return ", ".join(f"%{i}" for i in range(first, first + count))


@functools.cache
def _text(path: Path) -> str:
    return path.read_text()


def hopper_program(
    path: Path, element: str, mmas: Sequence[Mma], constants: Mapping[str, int | str], headers: Sequence[str] = ()
) -> str:
    """Return NVRTC's text of a kernel's file, with wrappers of its matrix products; `constants` are macros."""
    macros = [f'#define ELEMENT "{element}"', *(f"#define {name} {value}" for name, value in constants.items())]
    shared = [_text(_FOLDER / "primitives.h"), *(mma.text() for mma in mmas)]
    shared += [_text(_FOLDER / name) for name in headers]
    return "\n".join([*macros, *shared, f'#line 1 "{path.name}"', _text(path)])


@dataclass(frozen=True, slots=True)
class HopperProgram:
    """A kernel's text, from hopper_program, and its launch parameters; a Builder of runtime/compilation/kernel.py."""

    name: str
    text: str
    threads: int
    shared_bytes: int
    overlaps: bool = False

    @property
    def key(self) -> str:
        """All that the code depends on except the target."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        return f"{self.name} {digest} {self.threads} {self.shared_bytes} {self.overlaps}"

    def build(self, target: str) -> Binary:
        """Compile with NVRTC; raises CompileError with its log."""
        from accelerant.runtime.compilation.cuda import compile_cuda

        binary = compile_cuda(KernelSource(self.name, {"cuda": self.text}, {self.name: ()}), target)
        needs = {"threads": self.threads, "shared_bytes": self.shared_bytes, "overlaps": self.overlaps}
        return dataclasses.replace(binary, metadata=needs)

    def source(self, kinds: tuple[str, ...]) -> KernelSource:
        """Return the source for the provider; kinds as in KernelSource.entries."""
        return KernelSource(self.name, {"cuda": self}, {self.name: kinds}, targets=("sm_90a",))


@functools.cache
def load(program: HopperProgram, kinds: tuple[str, ...], device: int) -> Kernel:
    """Return the kernel on a device, from the disk cache or compiled; raises CompileError with NVRTC's log."""
    from accelerant.runtime import registry

    return registry.create("cuda").compile(program.source(kinds), device=device)


def load_all(programs: Iterable[HopperProgram], kinds: tuple[str, ...], device: int) -> None:
    """Load kernels; where some are not compiled yet, all are asked for before NotCompiledError is raised."""
    missing = None
    for program in programs:
        try:
            load(program, kinds, device)
        except NotCompiledError as error:
            missing = error
    if missing is not None:
        raise missing


T = TypeVar("T")


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Return whether a device is an NVIDIA GPU of compute capability 9.x."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def starts_early(device: torch.device) -> bool:
    """Return whether a device's kernels may begin before the preceding one ends: see start_early."""
    return is_hopper(device) and torch.version.hip is None


def refuses_device(case: Case, dtypes: Sequence[torch.dtype]) -> str | None:
    """Return why a Hopper kernel for these dtypes cannot serve the case's device, dtype or emptiness, or None."""
    if case.device.type != "cuda" or torch.cuda.get_device_capability(case.device) != (9, 0):
        return "is for sm_90"
    if case.dtype not in dtypes:
        *names, wrong = (str(dtype).removeprefix("torch.") for dtype in (*dtypes, case.dtype))
        return f"takes {' and '.join(names)}, not {wrong}"
    return None if math.prod(case.shape) else "takes no empty tensor"


class LaunchCache(dict[tuple[Hashable, ...], T]):
    """Prepared launches (tensor maps, 2 us each), by all that their arguments depend on, addresses included."""

    def __init__(self, limit: int = 4096) -> None:
        super().__init__()
        self._limit = limit

    def keep(self, key: tuple[Hashable, ...], launch: T) -> T:
        """Store a launch, and return it."""
        if len(self) >= self._limit:
            self.clear()
        self[key] = launch
        return launch


def pack(
    program: HopperProgram, kinds: tuple[str, ...], grid: int, args: Sequence[Any], device: int, together: bool = False
) -> PackedLaunch:
    """Prepare a launch of `grid` blocks; `together` and errors as in LoadedKernel.pack."""
    launch: PackedLaunch = load(program, kinds, device).handle.pack((grid, 1, 1), args, device, together)
    return launch


_BOX_COLUMNS = 64  # 128 bytes, the width of the swizzle
_RANK = 4
_DATA_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_...
# CU_TENSOR_MAP_INTERLEAVE_NONE, _SWIZZLE_128B, _L2_PROMOTION_L2_256B, _FLOAT_OOB_FILL_NONE
_BOX_LAYOUT = (0, 3, 3, 0)


def readable(x: Tensor) -> Tensor:
    """Return x if the copy engine can read it, else a contiguous copy.

    The last dimension must be contiguous, the address and the other strides multiples of 16 bytes (16-bit dtypes).
    """
    if x.data_ptr() % 16 == 0 and _strides_fit(x.shape, x.stride()):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=4096)
def _strides_fit(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    used = [stride for size, stride in zip(shape[:-1], strides, strict=False) if size > 1]
    return strides[-1] == 1 and all(stride and stride % 8 == 0 for stride in used)


def tensor_map(x: Tensor, rows: int) -> bytes:
    """Encode a tensor map of x, as `readable` returns it: boxes of `rows` (up to 256) x 64 elements, swizzled."""
    x = x[None, None] if x.dim() == 2 else x
    buffer = (ctypes.c_char * 192)()
    address = (ctypes.addressof(buffer) + 63) & -64  # the driver requires a multiple of 64
    make_ready()  # cuTensorMapEncodeTiled fails in a thread without a context
    dtype, *sizes = _map_arguments(x.dtype, x.shape, x.stride(), rows)
    code = _encode()(address, dtype, _RANK, ctypes.c_void_p(x.data_ptr()), *sizes, *_BOX_LAYOUT)
    if code:
        raise LaunchError(f"no tensor map of {tuple(x.shape)} with strides {x.stride()}: driver error {code}")
    return ctypes.string_at(address, 128)


@functools.lru_cache(maxsize=4096)
def _map_arguments(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], rows: int) -> tuple[Any, ...]:
    """Return cuTensorMapEncodeTiled's arguments but the address: innermost dimension first, strides in bytes."""
    batch, heads, length, width = shape
    # The stride of a dimension of size 1 is never used, but the driver may refuse its value.
    byte_strides = [2 * strides[dim] if shape[dim] > 1 else 16 * width for dim in (2, 1, 0)]
    return (
        _DATA_TYPES[dtype],
        (ctypes.c_uint64 * 4)(width, length, heads, batch),
        (ctypes.c_uint64 * 3)(*byte_strides),
        (ctypes.c_uint32 * 4)(_BOX_COLUMNS, rows, 1, 1),
        (ctypes.c_uint32 * 4)(1, 1, 1, 1),
    )


@functools.cache
def _encode() -> Any:
    """Return the driver's cuTensorMapEncodeTiled through ctypes: 2 us a map, where cuda.bindings takes 8."""
    encode = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1").cuTensorMapEncodeTiled
    encode.argtypes = (
        ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int,
    )  # fmt: skip
    return encode


# --- kernels built on product.h: x W^T, or x^T W of a batch, each with its own epilogue -------------------------------
_PRODUCT_HEADER = "product.h"
_PRODUCT_THREADS = 384  # threads of a block: one producer warpgroup and two that multiply


def refuses_product(case: Case) -> str | None:
    """Return why no such kernel can serve a case of shape (M, N, K), or None."""
    M, N, K = case.shape
    if reason := refuses_device(case, (torch.bfloat16,)):  # float16 compiles, but has not been run on a GPU yet
        return reason
    if N % 8 or K % 8:
        return f"rows of {K if K % 8 else N} elements do not begin on 16-byte boundaries"
    if max(M, N, K) >= 2**30 or ceil_div(M, 64) * ceil_div(N, 64) >= 2**30:
        return "counts tiles in 32 bits"
    return None


def ring_bytes(stages: int, tile_m: int, tile_n: int) -> int:
    """Return the shared memory of the ring of operand tiles in flight, barriers included."""
    return stages * (128 * (tile_m + tile_n) + 16)


def product_program(
    name: str, path: Path, dtype: torch.dtype, mma: Mma, height: int, stages: int, shared_bytes: int,
    **constants: int | str,
) -> HopperProgram:  # fmt: skip
    """Return the program text of a kernel whose tiles are 64 `height` rows by mma.n columns."""
    constants |= {"HEIGHT": height, "WIDTH": mma.n, "STAGES": stages, "MMA": mma.name}
    text = hopper_program(path, ELEMENTS[dtype], (mma,), constants, (_PRODUCT_HEADER,))
    return HopperProgram(name, text, _PRODUCT_THREADS, shared_bytes)


def product_tiles(M: int, N: int, K: int, tile_m: int, tile_n: int, group: int) -> tuple[int, int, int, int, int]:
    """Return the fields of struct Tiles: steps of K, tiles down, tiles across, `group`, and the number of tiles."""
    down, across = ceil_div(M, tile_m), ceil_div(N, tile_n)
    return ceil_div(K, 64), down, across, group, down * across
