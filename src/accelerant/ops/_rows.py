"""Products of rows with a weight on the CPU as LLVM IR, whose result of a row does not depend on the other rows.

    y[m, n] = scale[n] sum_k x[m, k] w[n, k]        or, in groups of 128 columns,  w = (q - zero) scale

Layout: x (M, K) and y (M, N) float32, or float64 as the weight; the weight (N, K) in a floating dtype or int8; or int4
        (N, K / 2): byte i of a group of 64 bytes has column i in its lower half and column i + 64 in its upper one, and
        the group's scale and zero, (N, K / 128), are float32. All dense. An index is `share` rows of the weight.
        A tile is up to `columns` rows of the weight and `rows` of x, each pair with a vector of sums of its own, over
        all of K: in any tile, so with any number of rows, the additions are the same and in the same order.
        `block` rows of x, which stay in the cache, are multiplied with the whole weight before the next.
Bound:  one row: memory, or the conversion of the weight; many: the multiply-add units.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from accelerant.config import launch_log
from accelerant.ops._launch import ceil_div
from accelerant.runtime import registry
from accelerant.runtime.compilation import llvm
from accelerant.runtime.compilation.kernel import Kernel
from accelerant.runtime.compilation.llvm import FunctionBuilder, IndexKernel, Operand, Value, Variable, suffix, vector
from accelerant.runtime.provider import ComputeProvider

GROUP = 128  # columns of an int4 weight that share a scale and a zero

KINDS = {
    torch.float64: "double", torch.float32: "float", torch.bfloat16: "bfloat", torch.float16: "half",
    torch.int8: "int8", torch.uint8: "int4",
}  # fmt: skip
"""Dtype of the weight -> its kind."""

_IN_MEMORY = {
    "double": ("double", 8), "float": ("float", 4), "bfloat": ("i16", 2), "half": ("half", 2), "int8": ("i8", 1),
    "int4": ("i8", 1),
}  # fmt: skip
"""Kind -> type and bytes of what lies in memory."""

_BLOCK_BYTES = 2**20  # bytes of x that are multiplied with the whole weight at a time: a typical L2 cache
_SHARE_PRODUCTS = 2**19  # products that a further thread repays


@dataclass(frozen=True, slots=True)
class RowsKernel(IndexKernel):
    """A Builder of rows_<kind>(begin, end, x, weight, scale, zero, y, M, N, K, share, block), see the module.

    What a kind lacks of scale and zero is not read. A vector has `lanes` numbers; the sums of a tile, `columns` times
    `rows` vectors, fit the registers.
    """

    kind: str
    lanes: int
    columns: int
    rows: int
    written_out, least_share, sources = True, 1, "ops/_rows.py"

    @property
    def entry(self) -> str:
        return f"rows_{self.kind}"

    def parameters(self) -> list[str]:
        pointers = [f"ptr noalias readonly %{name}" for name in ("x", "weight", "scale", "zero")]
        return [*pointers, "ptr noalias %y", *(f"i64 %{name}" for name in ("M", "N", "K", "share", "block"))]

    def write(self, code: FunctionBuilder) -> None:
        _RowsWriter(self, code).write()


class _RowsWriter:
    """Writes the kernel; `m` and `n` are the first rows of x and of the weight of a tile."""

    def __init__(self, kernel: RowsKernel, code: FunctionBuilder) -> None:
        self.kernel, self.code, self.lanes = kernel, code, kernel.lanes
        self.element = "double" if kernel.kind == "double" else "float"
        self.real = vector(self.element, kernel.lanes)
        self.memory, self.align = _IN_MEMORY[kernel.kind]

    def write(self) -> None:
        """Append the loops over blocks of x and tiles."""
        code = self.code
        first = code.i64("mul", "%begin", "%share")
        stop = code.smin(code.i64("mul", "%end", "%share"), "%N")
        with code.loop(0, "%M", "%block") as start:
            end = code.smin(code.i64("add", start, "%block"), "%M")
            for n, columns in code.tiles(first, stop, (self.kernel.columns, 1)):
                for m, rows in code.tiles(start, end, range(self.kernel.rows, 0, -1)):
                    self._tile(m, rows, n, columns)

    def _tile(self, m: Value, rows: int, n: Value, columns: int) -> None:
        code, kernel = self.code, self.kernel
        lines = [code.i64("add", n, i) for i in range(columns)]
        xs = [code.at(self.element, "%x", code.i64("mul", code.i64("add", m, r), "%K")) for r in range(rows)]
        sums = [[code.variable(self.real, 0.0) for _ in xs] for _ in lines]
        if kernel.kind == "int4":
            self._groups(lines, xs, sums)
        else:
            weights = [code.at(self.memory, "%weight", code.i64("mul", line, "%K")) for line in lines]
            left = code.i64("srem", "%K", self.lanes)
            full = code.i64("sub", "%K", left)
            with code.loop(0, full, self.lanes) as k:
                self._add([self._weight(w, k) for w in weights], xs, k, sums)
            with code.when(code.compare("sgt", left, 0)):
                inside = code.compare(
                    "slt", llvm.lane_constants("i64", range(self.lanes)), code.broadcast(left, self.lanes)
                )
                self._add([self._weight(w, full, inside) for w in weights], xs, full, sums, inside)
        for line, of_line in zip(lines, sums, strict=True):
            scale = code.load("float", "%scale", line) if kernel.kind == "int8" else None
            for r, total in enumerate(of_line):
                y = self._sum(total.get())
                y = y if scale is None else code.op("fmul", y, scale)
                code.store(self.element, y, "%y", code.i64("add", code.i64("mul", code.i64("add", m, r), "%N"), line))

    def _add(
        self, weights: list[Value], xs: list[Value], k: Operand, sums: list[list[Variable]], inside: Value | None = None
    ) -> None:
        """Append the products of one vector of columns; inside: those of a last, partial vector."""
        for r, x in enumerate(xs):
            value = self._load(self.element, self.code.at(self.element, x, k), 4, inside)
            for weight, of_line in zip(weights, sums, strict=True):
                of_line[r].set(self._fma(weight, value, of_line[r].get()))

    def _load(self, element: str, address: Value, align: int, inside: Value | None = None) -> Value:
        kind = vector(element, self.lanes)
        if inside is None:
            return self.code.load(kind, address, align=align)
        return self.code.masked_load(kind, address, inside, align)

    def _weight(self, row: Value, k: Operand, inside: Value | None = None) -> Value:
        """Append the load of a vector of weights, in float32."""
        code = self.code
        found = self._load(self.memory, code.at(self.memory, row, k), self.align, inside)
        if self.memory == self.element:
            return found
        if self.kernel.kind == "half":
            return code.convert("fpext", found, "float")
        if self.kernel.kind == "bfloat":
            return code.bitcast(code.op("shl", code.convert("zext", found, "i32"), 16), self.real)
        return code.convert("sitofp", code.convert("sext", found, "i32"), "float")

    def _groups(self, lines: list[Value], xs: list[Value], sums: list[list[Variable]]) -> None:
        """Append the sums over the groups of an int4 weight."""
        code, half = self.code, GROUP // 2
        groups = code.i64("sdiv", "%K", GROUP)
        bytes_of = [code.at("i8", "%weight", code.i64("mul", line, code.i64("mul", groups, half))) for line in lines]
        tables = [code.i64("mul", line, groups) for line in lines]
        with code.loop(0, groups) as g:
            at = [code.i64("add", table, g) for table in tables]
            scales = [code.broadcast(code.load("float", "%scale", i), self.lanes) for i in at]
            terms = [
                code.fneg(code.op("fmul", code.broadcast(code.load("float", "%zero", i), self.lanes), scale))
                for i, scale in zip(at, scales, strict=True)
            ]
            first, column = code.i64("mul", g, half), code.i64("mul", g, GROUP)
            for j in range(0, half, self.lanes):
                words = [
                    code.convert("zext", self._load("i8", code.at("i8", row, code.i64("add", first, j)), 1), "i32")
                    for row in bytes_of
                ]
                for upper in (0, 1):
                    nibbles = [code.op("lshr", w, 4) if upper else code.op("and", w, 15) for w in words]
                    weights = [
                        self._fma(code.convert("sitofp", nibble, "float"), scale, term)
                        for nibble, scale, term in zip(nibbles, scales, terms, strict=True)
                    ]
                    self._add(weights, xs, code.i64("add", column, j + upper * half), sums)

    def _fma(self, x: Value, y: Value, z: Value) -> Value:
        return self.code.intrinsic(self.real, f"llvm.fmuladd.{suffix(self.real)}", x, y, z)

    def _sum(self, value: Value) -> Value:
        """Append the sum of a vector's lanes, halves added to halves."""
        code, width = self.code, self.lanes
        while width > 2:
            width //= 2
            value = code.op("fadd", *(code.shuffle(value, None, range(at, at + width)) for at in (0, width)))
        return code.op("fadd", code.lane(value, 0), code.lane(value, 1))


@functools.cache
def _compiled(kind: str) -> tuple[ComputeProvider, Kernel]:
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"  # 32 registers of 16 numbers, else 16 of 8
    columns, rows = ((4, 4) if kind == "int4" else (4, 6)) if wide else (2, 4)
    kernel = RowsKernel(kind, (16 if wide else 8) // (2 if kind == "double" else 1), columns, rows)
    provider = registry.create("cpu")
    return provider, provider.compile(kernel.source())


def products(x: Tensor, weight: Tensor, scale: Tensor | None = None, zero: Tensor | None = None) -> Tensor:
    """Return the products (M, N) of x (M, K) and a weight; the module describes them."""
    (M, K), N = x.shape, weight.shape[0]
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    y = torch.empty(M, N, dtype=dtype, device="cpu")
    if not y.numel():
        return y
    x, weight = x.detach().to(dtype).contiguous(), weight.detach().contiguous()
    scale = x if scale is None else scale.detach().float().contiguous()
    zero = x if zero is None else zero.detach().float().contiguous()
    block = max(48, _BLOCK_BYTES // (4 * K or 1) // 24 * 24)
    threads = max(1, min(torch.get_num_threads(), M * N * K // _SHARE_PRODUCTS, N // 4))
    share = ceil_div(ceil_div(N, threads), 4) * 4
    provider, kernel = _compiled(KINDS[weight.dtype])
    if share >= N and not launch_log.enabled:  # saves 10 us, more than a small product takes
        pointers = (x.data_ptr(), weight.data_ptr(), scale.data_ptr(), zero.data_ptr(), y.data_ptr())
        kernel.handle(0, 1, *pointers, M, N, K, share, block)
    else:
        provider.launch(kernel, (ceil_div(N, share),), (1,), (x, weight, scale, zero, y, M, N, K, share, block))
    return y
