"""The kernels of generated text, in OpenCL C or WGSL: four templates that are specialized by expression and layout.

A kernel is compiled once for each expression, combination of dtypes and number of dimensions that remain after those
that lie together in memory are merged. Offsets, sizes, strides and scalars are arguments. The innermost stride of an
operand is part of the text where it is 0 or 1, so that CPU devices load vectors. In both languages the text has a type
T of expressions and a type I of indices. `opencl.py` and `webgpu.py` have the words, and products of matrices.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from accelerant.runtime.compilation.kernel import Kernel
from accelerant.runtime.provider import Buffer, ComputeProvider
from accelerant.tensors import creation, neural  # noqa: F401  with table.py, the table's operations
from accelerant.tensors.tensor import DeviceTensor, TensorDevice, expanded, merged, span

LANES = 64
"""Threads that share a long reduction."""

FLOATS = ("float", "double", "f32")
"""Types of expressions with floating values."""

_BLOCK, _BLOCK_OF_ROWS = 256, 64
_LAUNCHES = 4096
"""Launches that a device keeps."""

_COMBINE = {"sum": (0, "a + v"), "prod": (1, "a * v"), "max": (2, "max(a, v)"), "min": (3, "min(a, v)")}
"""Kind of reduction -> index of its neutral number in `numbers`, and combination of `a` and `v`."""


@cache
def file_text(name: str) -> str:
    """Return the text of a file in this folder."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


class Text:
    """A kernel under construction: its operands, then numbers, which end with the scalars of the expression.

    `numbers` has their types, `values` those that are no scalars, `begins` the text of each operand's offset.
    """

    let = "const I {} = {};"

    def __init__(self, operands: Mapping[str, DeviceTensor], offsets: Sequence[int], scalars: int, integers: int):
        self.operands, self._counts = operands, (scalars, integers)
        self.numbers: dict[str, str] = {}
        self.values: list[int] = []
        self.begins = {name: self.number(f"{name}_at", at) for name, at in zip(operands, offsets, strict=True)}

    def number(self, name: str, value: int) -> str:
        """Add an argument; return the text that reads it."""
        self.numbers[name] = "I"
        self.values.append(value)
        return name

    def scalars(self, kind: str) -> list[str]:
        """Add the last arguments, s0, s1, ... of a type and integers n0, n1, ...; return lines that name them."""
        scalars, integers = self._counts
        self.numbers |= {f"s{at}": kind for at in range(scalars)} | {f"n{at}": "I" for at in range(integers)}
        return []

    def step(self, name: str, coordinate: str, value: int) -> str:
        """Return a term of an offset: nothing for a stride of 0, the coordinate for 1."""
        if value == 0:
            return ""
        return f" + {coordinate}" if value == 1 else f" + {coordinate} * {self.number(name, value)}"

    def offset(self, operand: str, steps: Sequence[int], name: str = "c") -> str:
        """Return the sum of an operand's strides times the coordinates."""
        return "".join(self.step(f"{operand}_step{at}", f"{name}{at}", step) for at, step in enumerate(steps))

    def places(self, steps: Sequence[Sequence[int]]) -> list[str]:
        """Return the index of each operand's element at the coordinates."""
        return [f"{self.begins[name]}{self.offset(name, each)}" for name, each in zip(self.begins, steps, strict=False)]

    def coordinates(self, sizes: Sequence[int], source: str, name: str = "c") -> list[str]:
        """Return lines that split a linear index into coordinates, the first dimension outermost."""
        lines, rest = [], source
        for at in range(len(sizes) - 1, 0, -1):
            size = self.number(f"{name}size{at}", sizes[at])
            lines.append(self.let.format(f"{name}{at}", f"{rest} % {size}"))
            lines.append(self.let.format(f"{name}rest{at}", f"{rest} / {size}"))
            rest = f"{name}rest{at}"
        return [*lines, self.let.format(f"{name}0", rest)] if sizes else []


@dataclass(frozen=True, slots=True)
class KernelBody:
    """The text of a kernel's body and how it is launched; `count` elements, expressions of the type `kind`."""

    entry: str
    kind: str
    count: int
    body: Sequence[str]
    grid: Sequence[int]
    block: Sequence[int]
    head: str = ""


class GeneratedKernels(TensorDevice):
    """A device whose kernels are written in a language; subclasses have its words.

    Attributes:
        numbers: type of expressions -> 0, 1, the least and the largest number.
        thread, linear, group: index of a thread in its block, in the grid, and of its block.
        counter, variable: type of a loop's variable; declaration of a variable of a type, name and value.
        out_of_range: statements that write an index `j` to the array `fault`; the length of the dimension is inserted.
        join: declarations, and lines that combine the values `a` of a block's lanes, by halves.
    """

    numbers: ClassVar[Mapping[str, tuple[str, str, str, str]]]
    thread: ClassVar[str]
    linear: ClassVar[str]
    group: ClassVar[str]
    counter: ClassVar[str]
    variable: ClassVar[str]
    nan: ClassVar[str]
    out_of_range: ClassVar[str]
    join: ClassVar[tuple[str, str]]
    text: ClassVar[type[Text]] = Text
    is_cpu: bool

    def __init__(self, provider: ComputeProvider, index: int) -> None:
        super().__init__(provider, index)
        self._kernels: dict[Any, Kernel] = {}
        self._launches: dict[Any, tuple[Kernel, Sequence[int], Sequence[int], Sequence[Any], str]] = {}

    # --- the words of a language -------------------------------------------------------------------------------------
    @abstractmethod
    def _kind(self, dtype: torch.dtype) -> str:
        """Return the type that expressions of a dtype are evaluated in."""

    @abstractmethod
    def _expression(self, expression: str, kind: str) -> tuple[str, str]:
        """Return an expression in the language, and its kind."""

    @abstractmethod
    def _cast(self, value: str, kind: str, to: str) -> str:
        """Return a value of a kind as one of another."""

    @abstractmethod
    def _load(self, dtype: torch.dtype, operand: str, index: str) -> str:
        """Return an element of an operand."""

    @abstractmethod
    def _operand(self, dtype: torch.dtype, operand: str, index: str, compute: torch.dtype) -> str:
        """Return a line that gives an element the name of its operand, as a value that is computed in a dtype."""

    @abstractmethod
    def _index(self, dtype: torch.dtype, operand: str, index: str) -> str:
        """Return a line that gives an element, an index, the name j."""

    @abstractmethod
    def _store(self, dtype: torch.dtype, index: str, value: str, kind: str) -> str:
        """Return statements that write a value of a kind to an element of `out`."""

    @abstractmethod
    def _added(self, dtype: torch.dtype, value: str, kind: str) -> str:
        """Return the sum of the element `at` of `out` and a value."""

    @abstractmethod
    def _long_sum(self, loop: str, first: str, length: str, lanes: int) -> tuple[list[str], str, list[str]]:
        """Return lines that open the loop of a long sum, that add `v`, and that close it."""

    @abstractmethod
    def _lanes(self, length: int, outputs: int, innermost: int) -> int:
        """Return the threads that share a reduction of a length, whose elements have a stride."""

    @abstractmethod
    def _compile(self, text: Text, program: KernelBody) -> Kernel:
        """Compile a kernel."""

    def _values(self, scalars: Sequence[float], kind: str) -> list[Any]:
        """Return scalars as a kernel's arguments."""
        return [*map(float if kind in FLOATS else int, scalars)]

    def _bound(self, x: DeviceTensor) -> tuple[Buffer, int]:
        """Return what a kernel gets for a tensor, and the element of it at which the tensor begins."""
        return x.buffer, int(x.storage_offset())

    def _check_rounds(self, rounds: int) -> None:
        """Raise UnsupportedCase for a loop that is too long."""

    # --- the kernels -------------------------------------------------------------------------------------------------
    def map(
        self, out: DeviceTensor, expression: str, inputs: Sequence[DeviceTensor] = (), scalars: Sequence[float] = (),
        integers: Sequence[int] = (), *, compute: torch.dtype | None = None, first: int = 0,
    ) -> None:  # fmt: skip
        """As TensorDevice.map; `first` is the linear index of the first element, of a part of a larger result."""
        args = (expression, out.dtype if compute is None else compute, first)
        self._run(self._write_map, (out, *inputs), args, scalars, integers)

    def _write_map(self, text: Text, expression: str, compute: torch.dtype, first: int) -> KernelBody:
        out, *inputs = text.operands.values()
        shape, count, kind = tuple(out.shape), out.numel(), self._kind(compute)
        strides = tuple(expanded(tuple(x.shape), tuple(x.stride()), shape) for x in text.operands.values())
        sizes, steps = merged(shape, strides)
        coordinates = text.coordinates(sizes, "e")
        target, *places = text.places(steps)
        body = [
            text.let.format("e", self.linear),
            f"if (e >= {text.number('count', count)}) {{ return; }}",
            text.let.format("i", f"e + {text.number('first', first)}" if first else "e"),
            *coordinates,
            *(self._operand(x.dtype, f"x{at}", places[at], compute) for at, x in enumerate(inputs)),
            *text.scalars(kind),
            self._store(out.dtype, target, *self._expression(expression, kind)),
        ]
        return KernelBody("map", kind, count, body, (-(-count // _BLOCK),), (_BLOCK,))

    def reduce(
        self, out: DeviceTensor, kind: str, inputs: Sequence[DeviceTensor], dims: Sequence[int], *, pre: str = "x0",
        post: str = "a", scalars: Sequence[float] = (), compute: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        args = (kind, pre, post, tuple(dims), inputs[0].dtype if compute is None else compute)
        self._run(self._write_reduce, (out, *inputs), args, scalars)

    def _write_reduce(
        self, text: Text, reduction: str, pre: str, post: str, dims: Sequence[int], compute: torch.dtype
    ) -> KernelBody:
        out, *inputs = text.operands.values()
        shape = tuple(torch.broadcast_shapes(*(x.shape for x in inputs)))
        strides = [expanded(tuple(x.shape), tuple(x.stride()), shape) for x in inputs]
        kept = [at for at in range(len(shape)) if at not in dims]
        sizes, steps = _merged_at(kept, shape, [tuple(out.stride()), *strides])
        inner, inner_steps = _merged_at(dims, shape, strides)
        outputs, length = out.numel(), math.prod(shape[at] for at in dims)
        kind, indexed = self._kind(compute), reduction.startswith("arg")
        lanes = 1 if indexed else self._lanes(length, outputs, inner_steps[0][-1] if inner else 1)
        self._check_rounds(-(-length // lanes))
        along = text.number("length", length)
        neutral, combination = _COMBINE[reduction.removeprefix("arg")]
        accumulate = f"a = {self._expression(combination, kind)[0]};"
        if indexed:
            better, *nan = (
                self._expression(each, kind)[0]
                for each in ("v > a" if reduction == "argmax" else "v < a", "is_nan(a)", "is_nan(v)")
            )
            accumulate = f"if (r == 0 || (!{nan[0]} && ({nan[1]} || {better}))) {{ a = v; best = r; }}"
        first = self.thread if lanes > 1 else "0"
        loop = f"for ({self.counter} r = {{}}; r < {{}}; r += {lanes}) {{{{"
        opened, added, closed = [loop.format(first, along)], accumulate, ["}"]
        if reduction == "sum" and kind in FLOATS and length > 32 * lanes:
            opened, added, closed = self._long_sum(loop, first, along, lanes)
        outer = text.coordinates(sizes, "i")
        target, *bases = text.places(steps)
        loads = text.coordinates(inner, "r", "e")
        for at, x in enumerate(inputs):
            place = f"b{at}{text.offset(f'r{at}', inner_steps[at], 'e')}"
            loads.append(self._operand(x.dtype, f"x{at}", place, compute))
        body = [
            text.let.format("i", self.group if lanes > 1 else self.linear),
            f"if (i >= {text.number('count', outputs)}) {{ return; }}",
            *outer,
            *(text.let.format(f"b{at}", base) for at, base in enumerate(bases)),
            *text.scalars(kind),
            self.variable.format("T", "a", self.numbers[kind][neutral]),
            self.variable.format("I", "best", "0"),
            *opened,
            *loads,
            self.variable.format("T", "v", self._cast(*self._expression(pre, kind), kind)),
            added,
            *closed,
        ]
        head = ""
        if lanes > 1:
            head, joined = self.join
            body.append(joined.replace("ACCUMULATE", accumulate))
        value = ("best", self._kind(torch.int32)) if indexed else self._expression(post, kind)
        body.append(self._store(out.dtype, target, *value))
        block, grid = (lanes, outputs) if lanes > 1 else (_BLOCK_OF_ROWS, -(-outputs // _BLOCK_OF_ROWS))
        return KernelBody("reduce", kind, outputs * max(length, 1) + 32 * LANES, body, (grid,), (block,), head)

    def gather(
        self, out: DeviceTensor, x: DeviceTensor, dim: int, index: DeviceTensor, rows: tuple[int, int] | None = None
    ) -> None:
        """As TensorDevice.gather; `rows` are the first of x within a larger tensor, and the larger one's number."""
        args = (dim, (0, x.shape[dim]) if rows is None else rows)
        self._run(self._write_gather, (out, x, index, self.fault()), args, names=_WITH_FAULT)

    def _write_gather(self, text: Text, dim: int, rows: tuple[int, int]) -> KernelBody:
        out, x, index, _ = text.operands.values()
        count, kind = out.numel(), self._kind(out.dtype)
        strides = [
            tuple(out.stride()),
            tuple(0 if at == dim else s for at, s in enumerate(x.stride())),
            expanded(tuple(index.shape), tuple(index.stride()), tuple(out.shape)),
        ]
        sizes, steps = merged(tuple(out.shape), tuple(strides))
        length = text.number("length", rows[1])
        coordinates = text.coordinates(sizes, "i")
        target, source, place = text.places(steps)
        value = self._load(x.dtype, "x0", "at")
        if x.dtype.is_floating_point:
            value = f"select({value}, {self.nan}, outside)"
        body = [
            text.let.format("i", self.linear),
            f"if (i >= {text.number('count', count)}) {{ return; }}",
            *coordinates,
            self._index(index.dtype, "x1", place),
            text.let.format("outside", f"j < 0 || j >= {length}"),
            f"if (outside) {{ {self.out_of_range.format(length)} }}",
            *_row(text, f"select(select(j, 0, j < 0), {length} - 1, j >= {length})", x.shape[dim], rows, "return;"),
            text.let.format("at", f"{source} + row * {text.number('along', x.stride(dim))}"),
            self._store(out.dtype, target, value, self._kind(x.dtype)),
        ]
        return KernelBody("gather", kind, count, body, (-(-count // _BLOCK),), (_BLOCK,))

    def scatter(
        self, out: DeviceTensor, dim: int, index: DeviceTensor, source: DeviceTensor, *, add: bool,
        check: bool = True, rows: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        """As TensorDevice.scatter; `rows`: first row of `out` within a larger tensor, and the larger one's number."""
        args = (dim, add, (0, out.shape[dim]) if rows is None else rows)
        fault = (self.fault(),) if check else ()
        self._run(self._write_scatter, (out, index, source, *fault), args, names=_WITH_FAULT)

    def _write_scatter(self, text: Text, dim: int, add: bool, rows: tuple[int, int]) -> KernelBody:
        out, index, source, *fault = text.operands.values()
        shape, kind = tuple(source.shape), self._kind(out.dtype)
        others = [at for at in range(len(shape)) if at != dim]
        at_index = expanded(tuple(index.shape), tuple(index.stride()), shape)
        strides = [tuple(out.stride()), at_index, tuple(source.stride())]
        sizes, steps = _merged_at(others, shape, strides)
        count = math.prod(shape[at] for at in others)
        length = text.number("length", rows[1])
        coordinates = text.coordinates(sizes, "i")
        bases = text.places(steps)
        along = [text.number(f"along{at}", each[dim]) for at, each in enumerate(strides)]
        self._check_rounds(shape[dim])
        value = self._cast(self._load(source.dtype, "x1", f"b2 + r * {along[2]}"), self._kind(source.dtype), kind)
        body = [
            text.let.format("i", self.linear),
            f"if (i >= {text.number('count', count)}) {{ return; }}",
            *coordinates,
            *(text.let.format(f"b{at}", base) for at, base in enumerate(bases)),
            f"for ({self.counter} r = 0; r < {text.number('rows', shape[dim])}; r++) {{",
            self._index(index.dtype, "x0", f"b1 + r * {along[1]}"),
            f"if (j < 0 || j >= {length}) {{ {self.out_of_range.format(length) if fault else ''} continue; }}",
            *_row(text, "j", out.shape[dim], rows, "continue;"),
            text.let.format("at", f"b0 + row * {along[0]}"),
            self._store(out.dtype, "at", self._added(out.dtype, value, kind) if add else value, kind),
            "}",
        ]
        return KernelBody("scatter", kind, source.numel(), body, (-(-count // _BLOCK_OF_ROWS),), (_BLOCK_OF_ROWS,))

    # --- launches ----------------------------------------------------------------------------------------------------
    def _run(
        self, write: Callable[..., KernelBody], operands: Sequence[DeviceTensor], args: tuple[Any, ...],
        scalars: Sequence[float] = (), integers: Sequence[int] = (), names: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Launch the kernel that `write` writes, once: that takes most of a small call's time."""
        bound = [self._bound(x) for x in operands]
        layouts = [(x.shape, x.stride(), at, x.dtype) for x, (_, at) in zip(operands, bound)]  # noqa: B905  a hot path
        key = (write.__name__, args, len(scalars), len(integers), *layouts)
        if (known := self._launches.get(key)) is None:
            names = (names or ("out", *(f"x{at}" for at in range(len(operands)))))[: len(operands)]
            named = dict(zip(names, operands, strict=True))
            text = self.text(named, [at for _, at in bound], len(scalars), len(integers))
            program = write(text, *args)
            source = (program.entry, program.kind, program.head, *program.block, *program.body, *text.numbers.items())
            source += tuple(x.dtype for x in operands), self._is_wide(operands, program.count)
            if source not in self._kernels:
                self._kernels[source] = self._compile(text, program)
            if len(self._launches) >= _LAUNCHES:
                self._launches.clear()
            known = (self._kernels[source], program.grid, program.block, text.values, program.kind)
            self._launches[key] = known
        kernel, grid, block, numbers, kind = known
        arguments: list[Any] = [buffer for buffer, _ in bound]
        arguments += numbers
        if scalars or integers:
            arguments += self._values(scalars, kind)
            arguments += map(int, integers)
        self.provider.launch(kernel, grid, block, arguments)

    @staticmethod
    def _is_wide(operands: Sequence[DeviceTensor], count: int) -> bool:
        """Return whether indices need 64 bits."""
        return max(count, *(int(x.storage_offset()) + span(x) for x in operands)) >= 2**31


_WITH_FAULT = ("out", "x0", "x1", "fault")


def _merged_at(
    dims: Sequence[int], shape: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[list[int], list[list[int]]]:
    """Merge the dimensions of some numbers; see `merged`."""
    return merged(tuple(shape[at] for at in dims), tuple(tuple(each[at] for at in dims) for each in strides))


def _row(text: Text, row: str, size: int, rows: tuple[int, int], leave: str) -> list[str]:
    """Return lines that declare `row` within a part of a tensor, and that run `leave` where the part lacks the row."""
    if rows == (0, size):
        return [text.let.format("row", row)]
    first, here = text.number("first", rows[0]), text.number("here", size)
    return [text.let.format("row", f"{row} - {first}"), f"if (row < 0 || row >= {here}) {{ {leave} }}"]
