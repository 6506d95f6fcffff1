"""The text of a program's kernel, in Triton and in portable C.

Three schedules:

    stream   no reductions: the elements in storage order, BLOCK a program; one a thread in C
    whole    rows that fit in registers: ROWS at a time, each value computed once. Sums over the rows are added up by
             each program, and those of the programs by torch
    looped   longer rows, and C: a loop over the columns for each level of reductions, which computes the values that
             lead to it again; sums over the rows are written out in full, and torch sums them

Sums of long rows keep their digits: in float64 on the CPU, elsewhere with compensation (Kahan's sum, in Higham 2002,
Accuracy and Stability of Numerical Algorithms, 4.3).
"""

from __future__ import annotations

import linecache
import math
import sys
from abc import ABC, abstractmethod
from functools import lru_cache
from types import ModuleType
from typing import Literal

import torch

from accelerant.accelerator.fusion.graph import OPERATIONS, Node, Program, leading_to
from accelerant.runtime.compilation.kernel import KernelSource
from accelerant.runtime.compilation.options import CompileOptions
from accelerant.runtime.compilation.triton import TritonKernel

__all__ = ["Schedule", "portable_source", "triton_kernel", "triton_text"]

Schedule = Literal["stream", "whole", "looped"]

_TRITON_TYPES = {torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16", torch.float32: "tl.float32"}


class _Writer(ABC):
    """Writes a program; subclasses have the words of a language."""

    def __init__(self, program: Program, schedule: Schedule) -> None:
        self.program, self.schedule = program, schedule
        self.lines: list[str] = []
        self.depth = 1
        self.known: dict[int, str] = {}
        self.levels: list[int] = []
        for node in program.nodes:
            below = max((self.levels[arg] for arg in node.args), default=0)
            self.levels.append(below + (node.op in ("sum", "max")))

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def value(self, index: int) -> str:
        """Return the name of a value, or its text if it is a constant; write what leads to it."""
        if index not in self.known:
            node = self.program.nodes[index]
            text = self.text_of(node, [self.value(arg) for arg in node.args])
            if node.op == "constant":
                return text
            self.known[index] = f"v{index}"
            self.assign(f"v{index}", text, node)
        return self.known[index]

    @abstractmethod
    def text_of(self, node: Node, args: list[str]) -> str: ...

    @abstractmethod
    def assign(self, name: str, text: str, node: Node) -> None: ...

    def loops(self) -> None:
        """Write a loop over the columns for each level of reductions, and one for the results."""
        nodes = self.program.nodes
        for level in range(1, max(self.levels) + 1):
            reductions = [i for i in range(len(nodes)) if nodes[i].op in ("sum", "max") and self.levels[i] == level]
            if reductions:
                self.reduce(reductions)
        stored = [i for i, result in enumerate(self.program.results) if result.layout in ("full", "row sum")]
        for i, result in enumerate(self.program.results):
            if i not in stored:
                self.store(i, self.value(result.node))
        if stored:
            self.before_loop([self.program.results[i].node for i in stored])
            outer = dict(self.known)
            self.open_loop()
            for i in stored:
                self.store(i, self.value(self.program.results[i].node))
            self.close_loop()
            self.known = outer

    def before_loop(self, targets: list[int]) -> None:
        """Write what a loop needs and does not change in it."""
        for index in leading_to(self.program.nodes, targets, self.known):
            if not self.program.nodes[index].by_column:
                self.value(index)

    def reduce(self, reductions: list[int]) -> None:
        nodes = self.program.nodes
        self.before_loop([arg for i in reductions for arg in nodes[i].args])
        for i in reductions:
            self.begin(i, nodes[i].op)
        outer = dict(self.known)
        self.open_loop()
        for i in reductions:
            self.accumulate(i, nodes[i].op, self.value(nodes[i].args[0]))
        self.close_loop()
        self.known = outer
        for i in reductions:
            self.end(i, nodes[i].op)
            self.known[i] = f"v{i}"

    @abstractmethod
    def begin(self, index: int, op: str) -> None: ...

    @abstractmethod
    def accumulate(self, index: int, op: str, value: str) -> None: ...

    @abstractmethod
    def end(self, index: int, op: str) -> None: ...

    @abstractmethod
    def store(self, number: int, value: str) -> None: ...

    @abstractmethod
    def open_loop(self) -> None: ...

    def close_loop(self) -> None:
        self.depth -= 1


def kernel_name(program: Program) -> str:
    """Return the name of a program's Triton function; the ledger's case ends with the same digits."""
    return f"fused_{program.digest[:6]}"


def used_inputs(program: Program) -> list[int]:
    """Return the inputs that the program reads."""
    return sorted({node.value for node in program.nodes if node.op == "input"})


# --- Triton ----------------------------------------------------------------------------------------------------------


class _TritonWriter(_Writer):
    def text(self) -> str:
        program, stream = self.program, self.schedule == "stream"
        names = [f"x{i}" for i in used_inputs(program)] + [f"y{i}" for i in range(len(program.results))]
        constants = "BLOCK: tl.constexpr" if stream else "ROWS: tl.constexpr, BLOCK: tl.constexpr"
        if stream:
            self.line("at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)")
            self.line("inside = at < M * N.to(tl.int64)")
            for i, result in enumerate(program.results):
                self.store(i, self.value(result.node))
        else:
            self.line("one = tl.zeros([1, 1], tl.int32)")
            self._rows()
        head = f"@triton.jit\ndef {kernel_name(program)}({', '.join(names)}, M, N, {constants}):\n"
        return _TRITON_HEAD + head + "\n".join(self.lines) + "\n"

    def _rows(self) -> None:
        looped = self.schedule == "looped"
        summed = [i for i, each in enumerate(self.program.results) if each.layout.endswith("sum")]
        if not looped:
            self.line("columns = tl.arange(0, BLOCK)[None, :]")
            self.line("in_row = columns < N")
        for i in () if looped else summed:
            width = "BLOCK" if self.program.results[i].layout == "row sum" else "1"
            self.line(f"sum{i} = tl.zeros([1, {width}], tl.float32)")
        self.line("for first in tl.range(tl.program_id(0) * ROWS, M, tl.num_programs(0) * ROWS):")
        self.depth += 1
        self.line("rows = first + tl.arange(0, ROWS)[:, None].to(tl.int64)")
        self.line("present = rows < M")
        if looped:
            self.loops()
        else:
            self.line("inside = present & in_row")
            for i, result in enumerate(self.program.results):
                value = self.value(result.node)
                if i in summed:
                    width = "BLOCK" if result.layout == "row sum" else "1"
                    wide = f"tl.broadcast_to({value}, [ROWS, {width}])"
                    self.line(f"sum{i} += tl.sum(tl.where(present, {wide}, 0.0), 0, keep_dims=True)")
                else:
                    self.store(i, value)
        self.depth -= 1
        for i in () if looped else summed:
            if self.program.results[i].layout == "row sum":
                self.line(f"tl.store(y{i} + tl.program_id(0).to(tl.int64) * N + columns, sum{i}, mask=in_row)")
            else:
                self.line(f"tl.store(y{i} + tl.program_id(0) + one, sum{i})")

    def text_of(self, node: Node, args: list[str]) -> str:
        if node.op == "constant":
            number = node.value if abs(node.value) < 2.0**128 else node.value * math.inf  # else computed in float64
            return repr(number) if math.isfinite(number) else f'float("{number}")'
        if node.op == "input":
            return self._load(node)
        if node.op in ("sum", "max"):  # of a whole row
            identity = "0.0" if node.op == "sum" else 'float("-inf")'
            wide = f"tl.broadcast_to({args[0]}, {self._shape(self.program.nodes[node.args[0]])})"
            args = [f"tl.where(in_row, {wide}, {identity})"]
        return OPERATIONS[node.op].triton.format(*args, dtype=_TRITON_TYPES.get(node.value), value=node.value)

    def _shape(self, node: Node) -> str:
        return f"[{'ROWS' if node.by_row else '1'}, {'BLOCK' if node.by_column else '1'}]"

    def _load(self, node: Node) -> str:
        x = self.program.inputs[node.value]
        kind = "tl.int1" if node.boolean else "tl.float32"
        if self.schedule == "stream":
            where = {"array": "at", "column": "at // N", "row": "at % N", "scalar": "at * 0"}[str(x)]
            mask = "inside"
        else:
            where = {"array": "rows * N + columns", "column": "rows", "row": "columns", "scalar": "one"}[str(x)]
            mask = {"array": "inside", "column": "present", "row": "in_row", "scalar": "one == 0"}[str(x)]
        return f"tl.load(x{node.value} + {where}, mask={mask}, other=0.0).to({kind})"

    def assign(self, name: str, text: str, node: Node) -> None:
        self.line(f"{name} = {text}")

    def store(self, number: int, value: str) -> None:
        full = self.program.results[number].layout in ("full", "row sum")
        if self.schedule == "stream":
            where, mask, shape = "at", "inside", "[BLOCK]"
        elif full:
            where, mask, shape = "rows * N + columns", "inside", "[ROWS, BLOCK]"
        else:
            where, mask, shape = "rows", "present", "[ROWS, 1]"
        element = f"y{number}.dtype.element_ty"
        self.line(f"tl.store(y{number} + {where}, tl.broadcast_to({value}, {shape}).to({element}), mask={mask})")

    def open_loop(self) -> None:
        self.line("for start in tl.range(0, N, BLOCK):")
        self.depth += 1
        self.line("columns = start + tl.arange(0, BLOCK)[None, :]")
        self.line("in_row = columns < N")
        self.line("inside = present & in_row")

    def begin(self, index: int, op: str) -> None:
        identity = "0.0" if op == "sum" else 'float("-inf")'
        self.line(f"all{index} = tl.full([ROWS, BLOCK], {identity}, tl.float32)")
        if op == "sum":
            self.line(f"rest{index} = tl.zeros([ROWS, BLOCK], tl.float32)")

    def accumulate(self, index: int, op: str, value: str) -> None:
        wide = f"tl.broadcast_to({value}, [ROWS, BLOCK])"
        if op == "sum":
            self.line(
                f"all{index}, rest{index} = math.compensated(all{index}, rest{index}, tl.where(in_row, {wide}, 0.0))"
            )
        else:
            self.line(f'all{index} = math.larger(tl.where(in_row, {wide}, float("-inf")), all{index})')

    def end(self, index: int, op: str) -> None:
        self.line(f"v{index} = {OPERATIONS[op].triton.format(f'all{index}')}")


_TRITON_HEAD = """\
import triton
import triton.language as tl
from accelerant.accelerator.fusion import triton_kernels as math


"""


def triton_text(program: Program, schedule: Schedule) -> str:
    """Return the module of a program's kernel `fused_...(inputs, results, M, N, [ROWS,] BLOCK)`."""
    return _TritonWriter(program, schedule).text()


@lru_cache(maxsize=1024)
def triton_kernel(program: Program, schedule: Schedule) -> TritonKernel:
    """Return the kernel of a program; its module exists in memory alone."""
    name = f"accelerant.accelerator.fusion.fused_{schedule}_{program.digest[:32]}"
    if name not in sys.modules:
        text, path = triton_text(program, schedule), f"<{name}>"
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)  # where Triton reads functions
        module = ModuleType(name)
        module.__file__ = path
        exec(compile(text, path, "exec"), vars(module))  # our own text: of operations in the table and of numbers
        sys.modules[name] = module
    arguments = len(used_inputs(program)) + len(program.results)
    return TritonKernel(name, kernel_name(program), widths=(arguments + 1,), contracts=False)


# --- portable C ------------------------------------------------------------------------------------------------------


class _CWriter(_Writer):
    def __init__(self, program: Program, schedule: Schedule) -> None:
        super().__init__(program, schedule)
        self._sums: list[int] = []
        self._largest: list[int] = []

    def text(self) -> str:
        program = self.program
        arrays = [
            f"ACL_GLOBAL const {'unsigned char' if program.inputs[i].dtype == torch.bool else 'float'} *x{i}"
            for i in used_inputs(program)
        ]
        arrays += [
            f"ACL_GLOBAL {'unsigned char' if result.dtype == torch.bool else 'float'} *y{i}"
            for i, result in enumerate(program.results)
        ]
        if self.schedule == "stream":
            self.line("i64 at = acl_global_id();")
            self.line("if (at >= M * N) return;")
            for i, result in enumerate(program.results):
                self.store(i, self.value(result.node))
        else:
            self.line("i64 row = acl_global_id();")
            self.line("if (row >= M) return;")
            self.loops()
        return (
            f"{_C_HEAD}ACL_KERNEL void fused({', '.join(arrays)}, i64 M, i64 N) {{\n" + "\n".join(self.lines) + "\n}\n"
        )

    def text_of(self, node: Node, args: list[str]) -> str:
        if node.op == "constant":
            if math.isfinite(node.value):
                return (
                    f"{node.value!r}f" if "." in repr(node.value) or "e" in repr(node.value) else f"{node.value!r}.0f"
                )
            return "ACL_NAN" if math.isnan(node.value) else f"({'-' * (node.value < 0)}ACL_INFINITY)"
        if node.op == "input":
            stream = self.schedule == "stream"
            row, column = ("at / N", "at % N") if stream else ("row", "column")
            whole = "at" if stream else "row * N + column"
            where = {"array": whole, "column": row, "row": column, "scalar": "0"}
            return f"x{node.value}[{where[str(self.program.inputs[node.value])]}]"
        return OPERATIONS[node.op].c.format(*args, value=node.value)

    def assign(self, name: str, text: str, node: Node) -> None:
        self.line(f"{'int' if node.boolean else 'float'} {name} = {text};")

    def store(self, number: int, value: str) -> None:
        full = self.program.results[number].layout in ("full", "row sum")
        where = "at" if self.schedule == "stream" else "row * N + column" if full else "row"
        self.line(f"y{number}[{where}] = {value};")

    def open_loop(self) -> None:
        if self._largest:  # clang's maximum of a loop begins with the least finite number
            self.lines.append("#if !defined(__clang__)")
        sums = [f"sum{i}" for i in self._sums] + [f"nans{i}" for i in self._largest]
        clauses = [f" reduction(+:{', '.join(sums)})"] * bool(sums)
        clauses += [f" reduction(max:{', '.join(f'v{i}' for i in self._largest)})"] * bool(self._largest)
        self.lines.append(f"#pragma omp simd{''.join(clauses)}")
        if self._largest:
            self.lines.append("#endif")
        self.line("for (i64 column = 0; column < N; column++) {")
        self.depth += 1

    def close_loop(self) -> None:
        super().close_loop()
        self.line("}")
        self._sums, self._largest = [], []

    def begin(self, index: int, op: str) -> None:
        (self._sums if op == "sum" else self._largest).append(index)
        identity = f"FUSED_SUM(sum{index})" if op == "sum" else f"float v{index} = -ACL_INFINITY; int nans{index} = 0;"
        self.line(identity)

    def accumulate(self, index: int, op: str, value: str) -> None:
        if op == "sum":
            self.line(f"FUSED_ADD(sum{index}, {value})")
        else:
            self.line(f"nans{index} += {value} != {value};")
            self.line(f"v{index} = {value} > v{index} ? {value} : v{index};")

    def end(self, index: int, op: str) -> None:
        if op == "sum":
            self.line(f"const float v{index} = FUSED_TOTAL(sum{index});")
        else:
            self.line(f"v{index} = nans{index} ? ACL_NAN : v{index};")


_C_HEAD = """\
#if defined(__OPENCL_VERSION__)
#define ACL_MATH(name) name
#define ACL_INFINITY INFINITY
#define ACL_NAN NAN
#define FUSED_SUM(sum) float sum = 0.0f, sum##_rest = 0.0f;
#define FUSED_ADD(sum, v) { \\
    const float term = (v) - sum##_rest, next = sum + term; \\
    sum##_rest = (next - sum) - term; \\
    sum##_rest = sum##_rest == sum##_rest ? sum##_rest : 0.0f; /* where a sum is not finite */ \\
    sum = next; \\
}
#define fused_power(x, n) pown(x, n)
#define FUSED_TOTAL(sum) sum
#else
#define FUSED_SUM(sum) double sum = 0.0;
#define FUSED_ADD(sum, v) sum += (v);
#define FUSED_TOTAL(sum) ((float)sum)
static inline float fused_power(float x, int n) {
    double factor = x, y = 1.0;
    for (int left = n < 0 ? -n : n; left; left >>= 1, factor *= factor) {
        y = left & 1 ? y * factor : y;
    }
    return (float)(n < 0 ? 1.0 / y : y);
}
#define ACL_MATH(name) __builtin_##name##f
#define ACL_INFINITY __builtin_inff()
#define ACL_NAN __builtin_nanf("")
#endif
ACL_DEVICE float fused_tanh(float x) {
    float size = x < 0.0f ? -x : x, z = x * x, p = -0.005893945302802656f;
    p = acl_fma_f32(p, z, 0.020794617709806007f);
    p = acl_fma_f32(p, z, -0.053783293000263965f);
    p = acl_fma_f32(p, z, 0.13331915298814714f);
    p = acl_fma_f32(p, z, -0.3333329751012878f);
    float large = 1.0f - 2.0f / (acl_exp_f32(size * 2.0f) + 1.0f);
    return z < 0.36f ? (x == 0.0f ? x : acl_fma_f32(x * z, p, x)) : (x < 0.0f ? -large : large);
}
"""


@lru_cache(maxsize=1024)
def portable_source(program: Program, *, host: bool) -> KernelSource:
    """Return the kernel of a program of float32 arrays and conditions, `fused(inputs, results, M, N)`.

    A thread computes a row; on a device, without reductions, an element. Operations are rounded one by one, in order,
    as torch's are; only the order of a sum's terms is the compiler's, so that a row's loop becomes vectors.
    """
    text = _CWriter(program, "looped" if program.reduces or host else "stream").text()
    pointers = tuple("*" for _ in range(len(used_inputs(program)) + len(program.results)))
    vectors = ("-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math") if host else ()
    options = CompileOptions(fmad=False, cc=vectors)
    return KernelSource(kernel_name(program), {"portable": text}, {"fused": (*pointers, "i64", "i64")}, options=options)
