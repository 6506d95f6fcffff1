"""dropout on the CPU as LLVM IR: the mask of triton_kernels.py recomputed, or read as the forward pass wrote it.

    DropoutKernel   y = x / (1 - p) where the element's word, without its lowest bit, is at least p 2^31, else 0 x;
                    dx from dy likewise
    MaskKernel      dx = dy / (1 - p) where the element's bit of the mask is set, else 0 dy

The words are most of the work where the tensors lie in cache. So a forward pass with a backward pass to come writes the
mask, a bit an element, and the backward pass reads it: 1/32 of what torch keeps of float32.

Source: Philox, runtime/compilation/llvm.py.
Layout: as triton_kernels.py: element i of run j of group t has word j of the counter (512 t + i, 0, 0). An index of
        DropoutKernel is 8 neighbouring counters, so 4 vectors of 8 elements, 512 elements apart. Byte i of the mask is
        of elements 8 i to 8 i + 7, the first in its lowest bit; it has bytes for whole groups. An index of MaskKernel
        is 32 elements. In the last group, and after the last whole index, loads and stores are masked.
Bound:  DropoutKernel with AVX-512: arithmetic, by little, against a copy in cache; memory beyond it. 16 or 32 counters
        at a time were no faster in float32, and do not fit the registers of AVX2 and NEON. MaskKernel: memory, 2
        accesses an element and a bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from accelerant.runtime.compilation.llvm import (
    ROUNDS,
    WEYL,
    FunctionBuilder,
    IndexKernel,
    Value,
    constant,
    lane_constants,
    philox,
    vector,
)

COUNTERS = 8  # counters of an index of DropoutKernel, which lie in the lanes of a vector
LANES = 32  # elements of an index of MaskKernel

_RUN = 512
_LOW = 0xFFFFFFFF

_IN_MEMORY = {torch.float32: "float", torch.float64: "double", torch.float16: "half", torch.bfloat16: "i16"}
"""How an element lies in memory; LLVM's bfloat takes a run-time library where the processor does not convert it."""


@functools.cache
def refuses_half() -> str | None:
    """Return why float16 cannot be served: without an instruction LLVM calls a function that is not linked here."""
    import llvmlite.binding as llvm

    if llvm.get_process_triple().startswith(("aarch64", "arm64")) or llvm.get_host_cpu_features().get("f16c"):
        return None
    return "this processor has no instruction that converts float16"


@dataclass(frozen=True, slots=True)
class _DropoutWriter(IndexKernel):
    """A Builder for tensors of one dtype."""

    dtype: torch.dtype
    sources = "ops/dropout"

    @property
    def _name(self) -> str:
        return f"dropout_{str(self.dtype).removeprefix('torch.')}"

    @property
    def _real(self) -> str:
        """The type that is computed in."""
        return "double" if self.dtype == torch.float64 else "float"

    def _scaled(
        self, code: FunctionBuilder, first: Value, keep: Value, scales: Value, inside: Callable[[], Value] | None = None
    ) -> None:
        """Append y = x scale where `keep`, a bit an element, is set, else 0 x, for the elements from `first` on."""
        element, size, lanes = _IN_MEMORY[self.dtype], self.dtype.itemsize, int(keep.type[1:].split(" ")[0])
        kind = vector(element, lanes)
        source, target = (code.at(element, pointer, first) for pointer in ("%x", "%y"))
        mask = inside() if inside else None
        x = code.load(kind, source, align=size) if mask is None else code.masked_load(kind, source, mask, size)
        y = _product(code, self.dtype, x, code.select(keep, scales, 0.0))
        if mask is None:
            code.store(kind, y, target, align=size)
        else:
            code.masked_store(y, target, mask, size)


def _product(code: FunctionBuilder, dtype: torch.dtype, x: Value, factor: Value) -> Value:
    """Return x, as it lies in memory, times a factor, rounded once to the dtype."""
    if dtype in (torch.float32, torch.float64):
        return code.op("fmul", x, factor)
    if dtype == torch.float16:
        return code.convert("fptrunc", code.op("fmul", code.convert("fpext", x, "float"), factor), "half")
    # bfloat16 is the upper half of float32; to the nearest, ties to even; NaN stays NaN
    wide = code.bitcast(code.op("shl", code.convert("zext", x, "i32"), 16), factor.type)
    product = code.op("fmul", wide, factor)
    bits = code.convert("bitcast", product, "i32")
    odd = code.op("and", code.op("lshr", bits, 16), 1)
    rounded = code.op("lshr", code.op("add", bits, code.op("add", odd, 0x7FFF)), 16)
    result = code.select(code.compare("uno", product, 0.0), 0x7FC0, rounded)
    return code.convert("trunc", result, "i16")


@dataclass(frozen=True, slots=True)
class DropoutKernel(_DropoutWriter):
    """A Builder of dropout_<dtype>(begin, end, x, seed, y, n, threshold, scale[, mask to write])."""

    masks: bool = False

    @property
    def entry(self) -> str:
        return f"{self._name}{'_masked' if self.masks else ''}"

    def parameters(self) -> list[str]:
        tensors = ["ptr noalias readonly %x", "ptr noalias readonly %seed", "ptr noalias %y"]
        numbers = ["i64 %n", "i64 %threshold", f"{self._real} %scale"]
        return [*tensors, *numbers, *["ptr noalias %bits"] * self.masks]

    def write(self, code: FunctionBuilder) -> None:
        keys = _round_keys(code)
        lanes = lane_constants("i64", range(COUNTERS))
        threshold = code.broadcast(code.op("shl", "%threshold", 1), COUNTERS)
        scales = code.broadcast("%scale", COUNTERS)
        with code.loop("%begin", "%end") as index:
            group = code.op("lshr", index, (_RUN // COUNTERS).bit_length() - 1)
            offset = code.op("mul", code.op("and", index, _RUN // COUNTERS - 1), COUNTERS)
            counters = code.op("add", code.op("mul", group, _RUN), offset)
            low = code.op("add", code.broadcast(counters, COUNTERS), lanes)
            zero = constant(low.type, 0)
            words = philox(code, [low, code.op("lshr", low, 32), zero, zero], lambda i, side: keys[side][i])
            keep = [code.compare("uge", code.op("and", word, _LOW), threshold) for word in words]
            elements = code.op("mul", group, 4 * _RUN)
            first = code.op("add", elements, offset)
            for whole in code.branches(code.compare("sle", code.op("add", elements, 4 * _RUN), "%n")):
                for run in range(4):
                    at = code.op("add", first, run * _RUN)

                    def inside(at: Value = at) -> Value:
                        index = code.op("add", code.broadcast(at, COUNTERS), lanes)
                        return code.compare("slt", index, code.broadcast("%n", COUNTERS))

                    if self.masks:
                        code.store("i8", code.bitcast(keep[run], "i8"), "%bits", code.op("lshr", at, 3), align=1)
                    self._scaled(code, at, keep[run], scales, None if whole else inside)


def _round_keys(code: FunctionBuilder) -> list[list[Value]]:
    """Return both words of each round's key, in every lane, from %seed."""
    seed = code.load("i64", "%seed", align=8)
    return [
        [code.broadcast(code.op("and", code.op("add", half, i * step & _LOW), _LOW), COUNTERS) for i in range(ROUNDS)]
        for half, step in zip((code.op("and", seed, _LOW), code.op("lshr", seed, 32)), WEYL, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class MaskKernel(_DropoutWriter):
    """A Builder of dropout_<dtype>_unmasked(begin, end, dy, bits, dx, n, scale)."""

    @property
    def entry(self) -> str:
        return f"{self._name}_unmasked"

    def parameters(self) -> list[str]:
        tensors = ["ptr noalias readonly %x", "ptr noalias readonly %bits", "ptr noalias %y"]
        return [*tensors, "i64 %n", f"{self._real} %scale"]

    def write(self, code: FunctionBuilder) -> None:
        scales = code.broadcast("%scale", LANES)
        with code.loop("%begin", "%end") as index:
            first = code.op("mul", index, LANES)
            keep = code.bitcast(code.load(f"i{LANES}", "%bits", index, align=1), vector("i1", LANES))

            def inside(first: Value = first) -> Value:
                left = code.broadcast(code.op("sub", "%n", first), LANES)
                return code.compare("slt", lane_constants("i64", range(LANES)), left)

            for whole in code.branches(code.compare("sle", code.op("add", first, LANES), "%n")):
                self._scaled(code, first, keep, scales, None if whole else inside)
