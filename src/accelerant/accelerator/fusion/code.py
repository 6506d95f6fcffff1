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

import linecache
import math
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import ClassVar, Literal, NamedTuple

import torch

from accelerant.accelerator.fusion.graph import OPERATIONS, REDUCTIONS, FusedProgram, Node, leading_to
from accelerant.runtime.compilation.kernel import CompileOptions, KernelSource
from accelerant.runtime.compilation.triton import TritonKernel

Schedule = Literal["stream", "whole", "looped"]

_TRITON_TYPES = {
    torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16", torch.float32: "tl.float32", torch.bool: "tl.int1",
    torch.uint8: "tl.uint8", torch.int8: "tl.int8", torch.int16: "tl.int16", torch.int32: "tl.int32",
    torch.int64: "tl.int64",
}  # fmt: skip


class _Printer(ABC):
    """Writes a program in a subclass's words; `reductions` have lines before, in and after the loop over columns."""

    reductions: ClassVar[Mapping[tuple[str, bool], tuple[Sequence[str], Sequence[str], Sequence[str]]]]

    def __init__(self, program: FusedProgram, schedule: Schedule) -> None:
        self.program, self.schedule = program, schedule
        self.lines: list[str] = []
        self.depth = 1
        self.known: dict[int, str] = {}
        self.by_column = [node.by_column for node in program.nodes]

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

    def loops(self, stores: Sequence[tuple[int, bool, Callable[[str], None]]] | None = None) -> None:
        """Write a loop over the columns for each level of reductions, and one for `stores`, by default the results."""
        nodes = self.program.nodes
        if stores is None:
            stores = [
                (result.node, result.layout in ("full", "row sum"), partial(self.store, number))
                for number, result in enumerate(self.program.results)
            ]
        targets = [index for index, _, _ in stores]
        levels: dict[int, list[int]] = {}
        level: dict[int, int] = {}
        for index in leading_to(nodes, targets, self.known):
            reduces = nodes[index].op in ("sum", "max")
            level[index] = max((level.get(arg, 0) for arg in nodes[index].args), default=0) + reduces
            if reduces:
                levels.setdefault(level[index], []).append(index)
        for each in sorted(levels):
            self.reduce(levels[each])
        columns = [(index, store) for index, wide, store in stores if wide]
        values = [(store, self.value(index)) for index, wide, store in stores if not wide]
        self.before_loop([index for index, _ in columns])
        for store, value in values:  # after all loads: a result may be written over an input
            store(value)
        if columns:
            outer = dict(self.known)
            self.open_loop()
            values = [(store, self.value(index)) for index, store in columns]
            for store, value in values:
                store(value)
            self.close_loop()
            self.known = outer

    def before_loop(self, targets: list[int]) -> None:
        """Write what a loop needs and does not change in it."""
        for index in leading_to(self.program.nodes, targets, self.known):
            if not self.by_column[index]:
                self.value(index)

    def reduce(self, reductions: list[int]) -> None:
        nodes = self.program.nodes
        self.before_loop([arg for i in reductions for arg in nodes[i].args])
        for i in reductions:
            self._part_of(i, 0)
        outer = dict(self.known)
        self.open_loop(reductions)
        for i in reductions:
            self._part_of(i, 1, self.value(nodes[i].args[0]))
        self.close_loop()
        self.known = outer
        for i in reductions:
            self._part_of(i, 2)
            self.known[i] = f"v{i}"

    def _part_of(self, index: int, part: int, value: str = "") -> None:
        """Write the lines of a reduction before (0), in (1) or after (2) the loop."""
        node = self.program.nodes[index]
        kind, floats = C_TYPES.get(node.dtype, ""), node.dtype.is_floating_point
        least = "" if floats else _least(node.dtype)
        for each in self.reductions[node.op, floats][part]:
            self.line(each.format(i=index, v=value, T=kind, least=least))

    @abstractmethod
    def store(self, number: int, value: str) -> None: ...

    @abstractmethod
    def open_loop(self, reductions: Sequence[int] = ()) -> None: ...

    def close_loop(self) -> None:
        self.depth -= 1


# --- Triton ----------------------------------------------------------------------------------------------------------
_WIDE = "tl.broadcast_to({v}, [ROWS, BLOCK])"


class _TritonPrinter(_Printer):
    reductions: ClassVar = {
        ("sum", True): (
            ("all{i} = tl.full([ROWS, BLOCK], 0.0, tl.float32)", "rest{i} = tl.zeros([ROWS, BLOCK], tl.float32)"),
            (f"all{{i}}, rest{{i}} = math.compensated(all{{i}}, rest{{i}}, tl.where(in_row, {_WIDE}, 0.0))",),
            ("v{i} = tl.sum(all{i}, 1, keep_dims=True)",),
        ),
        ("max", True): (
            ('all{i} = tl.full([ROWS, BLOCK], float("-inf"), tl.float32)',),
            (f'all{{i}} = math.larger(tl.where(in_row, {_WIDE}, float("-inf")), all{{i}})',),
            ("v{i} = math.largest(all{i})",),
        ),
    }

    def text(self) -> str:
        program, stream = self.program, self.schedule == "stream"
        names = [f"x{i}" for i in program.used] + [f"y{i}" for i in range(len(program.results))]
        constants = "BLOCK: tl.constexpr" if stream else "ROWS: tl.constexpr, BLOCK: tl.constexpr"
        if stream:
            self.line("at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)")
            self.line("inside = at < M * N.to(tl.int64)")
            for i, result in enumerate(program.results):
                self.store(i, self.value(result.node))
        else:
            self.line("one = tl.zeros([1, 1], tl.int32)")
            self._rows()
        head = f"@triton.jit\ndef {program.kernel_name}({', '.join(names)}, M, N, {constants}):\n"
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
            if not node.dtype.is_floating_point:
                return f"tl.full((), {node.value}, {_TRITON_TYPES[node.dtype]})"
            number = node.value if abs(node.value) < 2.0**128 else node.value * math.inf  # else computed in float64
            return repr(number) if math.isfinite(number) else f'float("{number}")'
        if node.op == "input":
            return self._load(node)
        if node.op == "convert" and node.boolean:
            return f"({args[0]} != 0)"
        if node.op in ("sum", "max"):  # of a whole row
            identity = "0.0" if node.op == "sum" else 'float("-inf")'
            wide = f"tl.broadcast_to({args[0]}, {self._shape(self.program.nodes[node.args[0]])})"
            args = [f"tl.where(in_row, {wide}, {identity})"]
        return OPERATIONS[node.op].triton.format(*args, dtype=_TRITON_TYPES.get(node.value), value=node.value)

    def _shape(self, node: Node) -> str:
        return f"[{'ROWS' if node.by_row else '1'}, {'BLOCK' if node.by_column else '1'}]"

    def _load(self, node: Node) -> str:
        x = self.program.inputs[node.value]
        kind = _TRITON_TYPES[node.dtype]
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

    def open_loop(self, reductions: Sequence[int] = ()) -> None:
        self.line("for start in tl.range(0, N, BLOCK):")
        self.depth += 1
        self.line("columns = start + tl.arange(0, BLOCK)[None, :]")
        self.line("in_row = columns < N")
        self.line("inside = present & in_row")


_TRITON_HEAD = """\
import triton
import triton.language as tl
from accelerant.accelerator.fusion import triton_kernels as math


"""


@lru_cache(maxsize=1024)
def triton_kernel(program: FusedProgram, schedule: Schedule) -> TritonKernel:
    """Return a program's kernel `fused_...(inputs, results, M, N, [ROWS,] BLOCK)`, of a module in memory alone."""
    name = f"accelerant.accelerator.fusion.fused_{schedule}_{program.digest[:32]}"
    if name not in sys.modules:
        text, path = _TritonPrinter(program, schedule).text(), f"<{name}>"
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)  # where Triton reads functions
        module = ModuleType(name)
        module.__file__ = path
        exec(compile(text, path, "exec"), vars(module))  # our own text: of operations in the table and of numbers
        sys.modules[name] = module
    arguments = len(program.used) + len(program.results)
    return TritonKernel(name, program.kernel_name, widths=(arguments + 1,), contracts=False)


# --- portable C ------------------------------------------------------------------------------------------------------
C_TYPES = {
    torch.float32: "float", torch.float64: "double", torch.bool: "unsigned char", torch.uint8: "unsigned char",
    torch.int8: "signed char", torch.int16: "short", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


def _double(text: str) -> str:
    """Return the text of an operation on float64."""
    text = re.sub(r"(\d\.\d*)f\b", r"\1", text)
    for name, wide in (("acl_exp_f32", "__builtin_exp"), ("acl_erf_f32", "__builtin_erf")):
        text = text.replace(name, wide)
    text = re.sub(r"ACL_MATH\((\w+)\)", r"__builtin_\1", text)
    return (
        text.replace("fused_tanh", "__builtin_tanh").replace("fused_power", "__builtin_pow").replace("_mod", "_mod_d")
    )


class _CPrinter(_Printer):
    """Writes OpenCL C: a thread computes an element, or a row where there are reductions."""

    reductions: ClassVar = {
        ("sum", True): (
            ("FUSED_SUM(sum{i})",),
            ("FUSED_ADD(sum{i}, {v})",),
            ("const {T} v{i} = ({T})FUSED_TOTAL(sum{i});",),
        ),
        ("sum", False): (
            ("i64 sum{i} = 0;",),
            ("sum{i} = (i64)((u64)sum{i} + {v});",),
            ("const {T} v{i} = ({T})sum{i};",),
        ),
        ("max", True): (
            ("{T} v{i} = -ACL_INFINITY; int nans{i} = 0;",),
            ("nans{i} += {v} != {v};", "v{i} = {v} > v{i} ? {v} : v{i};"),
            ("v{i} = nans{i} ? ACL_NAN : v{i};",),
        ),
        ("max", False): (("{T} v{i} = {least};",), ("v{i} = {v} > v{i} ? {v} : v{i};",), ()),
    }

    def text(self) -> str:
        program = self.program
        arrays = [f"ACL_GLOBAL const {C_TYPES[program.inputs[i].dtype]} *x{i}" for i in program.used]
        arrays += [f"ACL_GLOBAL {C_TYPES[result.dtype]} *y{i}" for i, result in enumerate(program.results)]
        if self.schedule == "stream":
            self.line("i64 at = acl_global_id();")
            self.line("if (at >= M * N) return;")
            for i, result in enumerate(program.results):
                self.store(i, self.value(result.node))
        else:
            self.line("i64 row = acl_global_id();")
            self.line("if (row >= M) return;")
            self.loops()
        arguments = ", ".join(arrays)
        return f"{self.heads()}ACL_KERNEL void fused({arguments}, i64 M, i64 N) {{\n" + "\n".join(self.lines) + "\n}\n"

    def heads(self) -> str:
        """Return the definitions that the operations need."""
        used = {node.op for node in self.program.nodes if node.dtype.is_floating_point}
        wanted = [("TANH", {"tanh"}), ("POWER", {"power"}), ("MOD", {"mod", "floordiv"})]
        return "".join(f"#define FUSED_HAS_{name}\n" for name, ops in wanted if ops & used) + _c_text("fused.h")

    def text_of(self, node: Node, args: list[str]) -> str:
        kind = self.program.nodes[node.args[0]].dtype if node.args else node.dtype
        made = C_TYPES[node.dtype]
        if node.op == "constant":
            return _constant(node)
        if node.op == "input":
            return self.load(node)
        op = OPERATIONS[node.op]
        if node.op == "convert" and node.boolean:
            return f"({args[0]} != 0)"
        if op.integers and not kind.is_floating_point:
            unsigned = "u64" if node.dtype == torch.int64 else "u32"
            return op.integers.format(*args, T=made, U=unsigned)
        text = op.c if kind != torch.float64 else _double(op.c)
        return text.format(*args, value=node.value, T=made)

    def load(self, node: Node) -> str:
        stream = self.schedule == "stream"
        row, column = ("at / N", "at % N") if stream else ("row", "column")
        whole = "at" if stream else "row * N + column"
        where = {"array": whole, "column": row, "row": column, "scalar": "0"}
        return f"x{node.value}[{where[str(self.program.inputs[node.value])]}]"

    def assign(self, name: str, text: str, node: Node) -> None:
        self.line(f"{'int' if node.boolean else C_TYPES[node.dtype]} {name} = {text};")

    def store(self, number: int, value: str) -> None:
        full = self.program.results[number].layout in ("full", "row sum")
        where = "at" if self.schedule == "stream" else "row * N + column" if full else "row"
        self.line(f"y{number}[{where}] = {value};")

    def open_loop(self, reductions: Sequence[int] = ()) -> None:
        nodes = self.program.nodes
        largest = [i for i in reductions if nodes[i].op == "max"]
        sums = [f"sum{i}" for i in reductions if nodes[i].op == "sum"]
        sums += [f"nans{i}" for i in largest if nodes[i].dtype.is_floating_point]
        clauses = [f" reduction(+:{', '.join(sums)})"] * bool(sums)
        clauses += [f" reduction(max:{', '.join(f'v{i}' for i in largest)})"] * bool(largest)
        pragma = f"#pragma omp simd{''.join(clauses)}"  # clang's maximum of a loop begins with the least finite number
        self.lines += ["#if !defined(__clang__)", pragma, "#endif"] if largest else [pragma]
        self.line(f"for (i64 column = {self.columns[0]}; column < {self.columns[1]}; column++) {{")
        self.depth += 1

    columns = ("0", "N")

    def close_loop(self) -> None:
        super().close_loop()
        self.line("}")


def _least(kind: torch.dtype) -> str:
    least = torch.iinfo(kind).min
    return f"({least + 1}{'L' * (kind == torch.int64)} - 1)"


def _constant(node: Node) -> str:
    if not node.dtype.is_floating_point:
        least = node.dtype != torch.bool and node.value == torch.iinfo(node.dtype).min
        return _least(node.dtype) if least else f"({node.value}{'L' * (node.dtype == torch.int64)})"
    wide = node.dtype == torch.float64
    if math.isfinite(node.value) and (wide or abs(node.value) < 2.0**128):
        text = repr(node.value)
        return f"({text if '.' in text or 'e' in text else text + '.0'}{'' if wide else 'f'})"
    return "ACL_NAN" if math.isnan(node.value) else f"({'-' * (node.value < 0)}ACL_INFINITY)"


class Stage(NamedTuple):
    """A pass of the CPU's kernel over the elements: row sums that it computes or joins, and results that it stores."""

    sums: tuple[int, ...]
    stores: tuple[int, ...]
    joining: bool


def stages_of(program: FusedProgram) -> list[Stage]:
    """Return the stages of a program on the CPU: more than one where it reduces over the rows."""
    depth, stages = program.depths, []
    for level in range(max(depth) + 1):
        sums = tuple(i for i, node in enumerate(program.nodes) if node.op in ("sum0", "max0") and depth[i] == level + 1)
        own = [i for i, each in enumerate(program.results) if depth[each.node] == level]
        stores = tuple(i for i in own if program.results[i].layout in ("full", "column"))
        if sums or stores:
            stages.append(Stage(sums, stores, False))
        if sums:
            stages.append(Stage(sums, (), True))
    alone = tuple(i for i, each in enumerate(program.results) if each.layout in ("row", "scalar"))
    return [*stages, Stage((), alone, True)] if alone else stages


class _HostPrinter(_CPrinter):
    """Writes the CPU's C for a part of the rows and columns; `steps` are the inputs' moves: "0", "1", "s"."""

    columns = ("left", "right")

    def __init__(self, program: FusedProgram, steps: str, outer: int) -> None:
        super().__init__(program, "looped")
        self.outer = outer
        self.steps = dict(zip(program.used, steps, strict=True))
        self.by_column = []
        for node in program.nodes:
            moves = node.op == "input" and self.steps[node.value] != "0"
            moves = moves or (node.op in ("sum0", "max0") and node.by_column)
            inner = node.op not in (*REDUCTIONS, "input") and any(self.by_column[arg] for arg in node.args)
            self.by_column.append(moves or inner)
        self._all = [i for i, node in enumerate(program.nodes) if node.op in ("sum0", "max0")]

    def text(self) -> str:
        program, used = self.program, self.program.used
        for i, each in enumerate(used):
            self.line(f"const {C_TYPES[program.inputs[each].dtype]} *x{each} = (const void *)t[{i}];")
        for i, result in enumerate(program.results):
            self.line(f"{C_TYPES[result.dtype]} *y{i} = (void *)t[{len(used) + i}];")
        at = len(used) + len(program.results)
        names = ("M", "N", "tall", "wide", "across", "parts", "begin", "end", "scratch")
        for i, name in enumerate((*names, *(f"d{k}" for k in range(1, self.outer)))):
            self.line(f"const i64 {name} = t[{at + i}];")
        at += len(names) + self.outer - 1
        for each in used:
            for k in range(self.outer):
                self.line(f"const i64 s{each}_{k} = t[{at + k}];")
            self.line(f"const i64 c{each} = t[{at + self.outer}];")
            at += self.outer + 1
        self.line("const i64 part = acl_group_id(), top = part / across * tall, left = part % across * wide;")
        self.line("const i64 bottom = top + tall < M ? top + tall : M, right = left + wide < N ? left + wide : N;")
        self.line("(void)scratch, (void)parts, (void)right;")
        rows = columns = 0
        for i in self._all:  # where the parts of a reduction are, one after the other
            kind = self._kept(i)
            self.line(f"{kind} *all{i} = ({kind} *)((i64 *)scratch + parts * ({rows} * N + {columns}));")
            rows, columns = rows + program.nodes[i].by_column, columns + (not program.nodes[i].by_column)
        for number, stage in enumerate(stages_of(program)):
            self.line(f"if (begin <= {number} && {number} < end) {{")
            self.depth += 1
            self._stage(stage)
            self.depth -= 1
            self.line("}")
        text = "\n".join(self.lines)
        return f"{self.heads()}ACL_KERNEL void fused(ACL_GLOBAL i64 *t) {{\n{text}\n}}\n{_c_text('fused_call.c')}"

    def _kept(self, index: int) -> str:
        """Return the type in which a reduction over the rows is kept; all have eight bytes or less."""
        node = self.program.nodes[index]
        if node.op == "max0":
            return C_TYPES[node.dtype]
        return "double" if node.dtype.is_floating_point else "i64"

    def _stage(self, stage: Stage) -> None:
        nodes = self.program.nodes
        self.known = {}
        if stage.joining and stage.sums:
            for i in stage.sums:
                many = "N" if nodes[i].by_column else "1"
                self.line("for (i64 each = 1; each < parts; each++)")
                self.line(f"    for (i64 column = 0; column < {many}; column++)")
                self.line("        " + self._added(i, f"all{i}[column]", f"all{i}[each * {many} + column]"))
            return
        for i in stage.sums:
            least = "-ACL_INFINITY" if nodes[i].dtype.is_floating_point else _least(nodes[i].dtype)
            first = "0" if nodes[i].op == "sum0" else least
            if nodes[i].by_column:
                self.line(f"{self._kept(i)} *own{i} = all{i} + part * N;")
                self.line(f"for (i64 column = 0; column < N; column++) own{i}[column] = {first};")
            else:
                self.line(f"{self._kept(i)} own{i} = {first};")
        self.line("i64 row = 0;" if stage.joining else "for (i64 row = top; row < bottom; row++) {")
        self.depth += not stage.joining
        self._offsets()
        stores: list[tuple[int, bool, Callable[[str], None]]] = [
            (nodes[i].args[0], nodes[i].by_column, partial(self._add, i)) for i in stage.sums
        ]
        for i in stage.stores:
            result = self.program.results[i]
            stores.append((result.node, result.layout in ("full", "row"), partial(self.store, i)))
        self.loops(stores)
        if not stage.joining:
            self.depth -= 1
            self.line("}")
        for i in stage.sums:
            if not nodes[i].by_column:
                self.line(f"all{i}[part] = own{i};")

    def _offsets(self) -> None:
        if self.outer > 1:
            self.line("i64 rest = row;")
        for k in range(self.outer - 1, 0, -1):
            self.line(f"const i64 i{k} = rest % d{k}; rest /= d{k};")
        first = "rest" if self.outer > 1 else "row"
        for each in self.steps:
            terms = [f"{first} * s{each}_0"] + [f"i{k} * s{each}_{k}" for k in range(1, self.outer)]
            self.line(f"const {C_TYPES[self.program.inputs[each].dtype]} *p{each} = x{each} + {' + '.join(terms)};")

    def _added(self, index: int, total: str, value: str) -> str:
        if self.program.nodes[index].op == "sum0":
            return f"{total} += {value};"
        return f"{total} = {value} > {total} || {value} != {value} ? {value} : {total};"

    def _add(self, index: int, value: str) -> None:
        own = f"own{index}[column]" if self.program.nodes[index].by_column else f"own{index}"
        self.line(self._added(index, own, value))

    def value(self, index: int) -> str:
        node = self.program.nodes[index]
        if index not in self.known and node.op in ("sum0", "max0"):  # computed in a stage before
            self.known[index] = f"v{index}"
            self.assign(f"v{index}", f"({C_TYPES[node.dtype]})all{index}[{'column' if node.by_column else 0}]", node)
        return super().value(index)

    def load(self, node: Node) -> str:
        where = {"0": "0", "1": "column", "s": f"column * c{node.value}"}
        return f"p{node.value}[{where[self.steps[node.value]]}]"

    def store(self, number: int, value: str) -> None:
        layout = self.program.results[number].layout
        where = {"full": "row * N + column", "column": "row", "row": "column", "scalar": "0"}[layout]
        self.line(f"y{number}[{where}] = {value};")


@cache
def _c_text(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


@lru_cache(maxsize=1024)
def portable_source(program: FusedProgram, *, steps: str | None = None, outer: int = 1) -> KernelSource:
    """Return a program's kernel `fused(inputs, results, M, N)`; on the CPU, with `steps`, `fused(table)`."""
    if steps is not None:
        text = _HostPrinter(program, steps, outer).text()
        kinds: tuple[str, ...] = ("*",)
        options = CompileOptions(fmad=False, cc=("-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"))
    else:
        text = _CPrinter(program, "looped" if program.reduces else "stream").text()
        kinds = (*["*"] * (len(program.used) + len(program.results)), "i64", "i64")
        options = CompileOptions(fmad=False)
    return KernelSource(program.kernel_name, {"portable": text}, {"fused": kinds}, options=options)
