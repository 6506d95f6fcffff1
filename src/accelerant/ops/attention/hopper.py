"""Kernels for Hopper in CUDA C++: their text, how they are compiled, and the tensor maps that they take.

A program's text is joined of constants, primitives (hopper.h), the wgmma wrappers that it asks for, and itself.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelerant.errors import LaunchError
from accelerant.runtime.kernel import Binary, Kernel, KernelSource

__all__ = ["ELEMENTS", "HopperProgram", "Mma", "hopper_program", "load", "primitives", "tensor_map"]

ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "f16"}
"""What hopper.h's macro ELEMENT is for a dtype."""

_FOLDER = Path(__file__).parent


class Mma(NamedTuple):
    """A wgmma of 64 rows, n columns and 16 in the sum: D (float32, registers) = A B + (accumulate ? D : 0).

    Its wrapper is mma_{ss|rs}_n{n}_{n|t}{n|t}(float* d, a, u64 b, int accumulate): s an operand in shared memory, by
    descriptor, r one in registers (const u32*, four words a thread); t an operand whose rows are stored across the sum.

    Attributes:
        n: columns, a multiple of 8 up to 256.
        a_in_registers: else in shared memory.
        a_across, b_across: whether the 16 elements of the sum are in different rows of the stored tile.
    """

    n: int
    a_in_registers: bool = False
    a_across: bool = False
    b_across: bool = False

    @property
    def name(self) -> str:
        """Of the wrapper."""
        letters = ("t" if self.a_across else "n") + ("t" if self.b_across else "n")
        return f"mma_{'rs' if self.a_in_registers else 'ss'}_n{self.n}_{letters}"

    def text(self) -> str:
        """The wrapper. Source: PTX ISA 8.7, section 9.7.15.5.1."""
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
def _file(name: str) -> str:
    return (_FOLDER / name).read_text()


def primitives() -> str:
    """Hopper's instructions as functions; what includes them defines ELEMENT first."""
    return _file("hopper.h")


def hopper_program(file: str, element: str, mmas: Sequence[Mma], constants: Mapping[str, int]) -> str:
    """The whole text for NVRTC.

    Args:
        file: in this folder; the kernel.
        element: "bf16" or "f16", what the tensors hold.
        mmas: the wrappers that the kernel calls.
        constants: macro -> value.
    """
    macros = [f'#define ELEMENT "{element}"', *(f"#define {name} {value}" for name, value in constants.items())]
    parts = ["\n".join(macros), _file("hopper.h"), *(mma.text() for mma in mmas), f'#line 1 "{file}"', _file(file)]
    return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class HopperProgram:
    """A Builder (see runtime/kernel.py): a kernel's text, and what its launches need.

    Attributes:
        name: entry point.
        text: from hopper_program.
        threads: a block.
        shared_bytes: dynamic shared memory of a block.
        overlaps: as LoadedKernel has it.
    """

    name: str
    text: str
    threads: int
    shared_bytes: int
    overlaps: bool = False

    @property
    def key(self) -> str:
        """Everything that the code depends on besides the target."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        return f"{self.name} {digest} {self.threads} {self.shared_bytes} {self.overlaps}"

    def build(self, target: str) -> Binary:
        """Compile with NVRTC.

        Raises:
            CompileError: with its log.
        """
        from accelerant.runtime.providers.cuda_compile import compile_cuda

        binary = compile_cuda(KernelSource(self.name, {"cuda": self.text}, {self.name: ()}), target)
        needs = {"threads": self.threads, "shared_bytes": self.shared_bytes, "overlaps": self.overlaps}
        return dataclasses.replace(binary, metadata=needs)

    def source(self, kinds: tuple[str, ...]) -> KernelSource:
        """As the provider takes it; kinds as KernelSource.entries has them."""
        return KernelSource(self.name, {"cuda": self}, {self.name: kinds}, targets=("sm_90a",))


def load(program: HopperProgram, kinds: tuple[str, ...], device: int) -> Kernel:
    """The kernel on a device, from the disk cache or compiled.

    Raises:
        CompileError: with NVRTC's log.
    """
    from accelerant.runtime import registry

    kernel: Kernel = registry.create("cuda").compile(program.source(kinds), device=device)
    return kernel


_CHUNK = 64
"""Elements of a row that a box takes: 128 bytes, the width of the swizzle."""


def tensor_map(x: Tensor, rows: int) -> bytes:
    """Describe x to the copy engine, in boxes of 64 columns and some rows under the 128-byte swizzle.

    Args:
        x: (B, H, S, D) of bfloat16 or float16; last dimension contiguous, its address and the other strides multiples
            of 16 bytes.
        rows: of S that a box holds, up to 256.

    Raises:
        LaunchError: the driver takes no such tensor.
    """
    room = (ctypes.c_char * 192)()
    to = (ctypes.addressof(room) + 63) & -64  # the driver asks for a multiple of 64
    fixed = _map_arguments(x.dtype, x.shape, x.stride(), rows)
    code = _encode()(to, fixed[0], _RANK, ctypes.c_void_p(x.data_ptr()), *fixed[1:], *_BOX_LAYOUT)
    if code:
        raise LaunchError(f"no tensor map of {tuple(x.shape)} with strides {x.stride()}: driver error {code}")
    return ctypes.string_at(to, 128)


_RANK = 4
_DATA_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_...
_BOX_LAYOUT = (0, 3, 3, 0)
"""CU_TENSOR_MAP_INTERLEAVE_NONE, _SWIZZLE_128B, _L2_PROMOTION_L2_256B, _FLOAT_OOB_FILL_NONE."""


@functools.lru_cache(maxsize=4096)
def _map_arguments(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], rows: int) -> tuple[Any, ...]:
    """What cuTensorMapEncodeTiled takes besides the address: innermost dimension first, strides in bytes.

    Source: CUDA driver API 13.0, cuTensorMapEncodeTiled.
    """
    batch, heads, length, width = shape
    # A dimension of one element is never stepped over, and may have a stride that the driver would not take.
    steps = [2 * strides[dim] if shape[dim] > 1 else 16 * width for dim in (2, 1, 0)]
    return (
        _DATA_TYPES[dtype],
        (ctypes.c_uint64 * 4)(width, length, heads, batch),
        (ctypes.c_uint64 * 3)(*steps),
        (ctypes.c_uint32 * 4)(_CHUNK, rows, 1, 1),
        (ctypes.c_uint32 * 4)(1, 1, 1, 1),
    )


@functools.cache
def _encode() -> Any:
    """The driver's cuTensorMapEncodeTiled; through ctypes, at 2 us a map, where cuda.bindings takes 8."""
    encode = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1").cuTensorMapEncodeTiled
    encode.argtypes = (
        ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int,
    )  # fmt: skip
    return encode
