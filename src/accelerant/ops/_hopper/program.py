"""Program text of a Hopper kernel in CUDA C++, and its compilation.

The text is joined of constants, primitives.h, the wgmma wrappers that the kernel needs, other headers and the kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from accelerant.runtime.compilation.kernel import Binary, Kernel, KernelSource

ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "f16"}
"""Value of the macro ELEMENT by dtype."""

_FOLDER = Path(__file__).parent


class Mma(NamedTuple):
    """A wgmma of 64 rows, n columns and 16 summed: D (float32, registers) = A B + (accumulate ? D : 0).

    Its wrapper is mma_{ss|rs}_n{n}_{n|t}{n|t}(float* d, a, u64 b, int accumulate): s is an operand in shared memory, by
    descriptor, r one in registers (const u32*, four words per thread), t an operand stored across the sum.

    Attributes:
        n: columns, a multiple of 8 up to 256.
        a_in_registers: whether A is in registers instead of shared memory.
        a_across, b_across: whether the 16 summed elements are in different rows of the stored tile.
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
    """Return the text for NVRTC of the kernel in a file, with wrappers of the matrix products that it calls.

    `element` is of ELEMENTS, `constants` are macros; `headers` are files of this folder besides the primitives.
    """
    macros = [f'#define ELEMENT "{element}"', *(f"#define {name} {value}" for name, value in constants.items())]
    shared = [_text(_FOLDER / "primitives.h"), *(mma.text() for mma in mmas)]
    shared += [_text(_FOLDER / name) for name in headers]
    return "\n".join([*macros, *shared, f'#line 1 "{path.name}"', _text(path)])


@dataclass(frozen=True, slots=True)
class HopperProgram:
    """A kernel's text and launch parameters; a Builder of runtime/compilation/kernel.py.

    Attributes:
        text: from hopper_program.
        threads, shared_bytes: of a block; the memory is dynamic.
        overlaps: see LoadedKernel.
    """

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
