"""Tapes: straight-line programs of additions, subtractions and products in a prime field, recorded once, run as data.

A Recorder records the operations of a formula in plain Python instead of computing them. The recording becomes a
Segment, and a TapeProgram calls segments in sequence on different registers:

    recorder = Recorder(field)
    x, y = recorder.inputs("point", 2)
    step = recorder.segment({"point": (recorder.mul(x, y), recorder.add(x, y))})     point <- (x y, x + y)

    program = TapeProgram(field)
    p, q = program.window(2), program.window(2)
    program.call(step, point=p)
    program.call(step, point=q)
    tape = program.assemble()

The registers of a program are the constants, the windows in the order of their allocation, and scratch. A call binds a
segment's names to registers that do not overlap; all values are read as they were before it. Recording drops unused
values, shares common subexpressions and folds 0 and 1; instructions are ordered into long runs of one operation.

    tape_run    (registers *u64, code *i32, schedule *i64, parts i64, words i64, n i64)        the CPU's kernel

Index i executes the parts of the code that the schedule lists, on the registers from word i `words` on, in Montgomery
form. Time depends on the tape only. Tapes are kept in the disk cache of kernels.
"""

import functools
import heapq
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field.llvm_kernels import SOURCES
from accelerant.algebra.field.llvm_packed import PackedLimbs
from accelerant.algebra.field.memory_space import HOST
from accelerant.algebra.field.parameters import Field
from accelerant.runtime.compilation.cache import KernelCache, kernel_key
from accelerant.runtime.compilation.kernel import Binary, KernelSource, LlvmProgram, builder_key
from accelerant.runtime.compilation.llvm import FunctionBuilder, Value, program
from accelerant.runtime.ledger import launch

T = TypeVar("T")
ADD, SUB, MUL = 0, 1, 2
_INPUT, _CONSTANT = -1, -2
_ABSOLUTE, _SCRATCH = 0, 1  # Windows of every segment: absolute registers (constants, by their value), and scratch
_Node = tuple[int, int, int]  # (operation, operand, operand); (_INPUT, window, offset); (_CONSTANT, value, 0)
_Register = tuple[int, int]  # (window, offset)
_Run = tuple[int, tuple[tuple[_Register, ...], ...]]  # operation, instructions (registers: result, operands)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Runs of instructions on windows of registers, numbered from 2; (0, value) is the register of a constant."""

    windows: tuple[str, ...]
    runs: tuple[_Run, ...]
    scratch: int

    @property
    def products(self) -> int:
        return sum(len(instructions) for operation, instructions in self.runs if operation == MUL)


class Recorder:
    """A recording of operations on values, which are represented by opaque numbers."""

    def __init__(self, field: Field) -> None:
        self.field = field
        self._nodes: list[_Node] = []
        self._known: dict[_Node, int] = {}
        self._windows: list[str] = []

    def inputs(self, window: str, size: int) -> tuple[int, ...]:
        """Return the values of a window's first registers before the segment."""
        return tuple(self._node((_INPUT, self._window(window), i)) for i in range(size))

    def constant(self, value: int) -> int:
        return self._node((_CONSTANT, value % self.field.modulus, 0))

    def add(self, a: int, b: int) -> int:
        if self._is(a, 0) or self._is(b, 0):
            return b if self._is(a, 0) else a
        return self._node((ADD, min(a, b), max(a, b)))

    def sub(self, a: int, b: int) -> int:
        return a if self._is(b, 0) else self._node((SUB, a, b))

    def neg(self, a: int) -> int:
        return self.sub(self.constant(0), a)

    def mul(self, a: int, b: int) -> int:
        if self._is(a, 1) or self._is(b, 0):
            return b
        if self._is(b, 1) or self._is(a, 0):
            return a
        return self._node((MUL, min(a, b), max(a, b)))

    def square(self, a: int) -> int:
        return self.mul(a, a)

    def times(self, a: int, factor: int) -> int:
        """Return the product of a and a small positive integer, by additions."""
        return multiple(self.add, a, factor)

    def scaled(self, a: int, factor: Sequence[int]) -> int:
        """Return the product of a and a small positive integer, given as a coefficient of Fq."""
        return self.times(a, factor[0])

    def _is(self, a: int, value: int) -> bool:
        return self._nodes[a] == (_CONSTANT, value, 0)

    def _window(self, name: str) -> int:
        if name not in self._windows:
            self._windows.append(name)
        return self._windows.index(name) + 2

    def _node(self, node: _Node) -> int:
        if node not in self._known:
            self._known[node] = len(self._nodes)
            self._nodes.append(node)
        return self._known[node]

    def segment(self, outputs: Mapping[str, Sequence[int]]) -> Segment:
        """Return the instructions for `outputs`: window -> the values of its first registers after the segment."""
        targets: dict[int, _Register] = {}
        zero = self.constant(0)
        for name, values in outputs.items():
            for offset, value in enumerate(values):
                target = (self._window(name), offset)
                if self._nodes[value] == (_INPUT, *target):
                    continue
                if self._nodes[value][0] < 0 or value in targets:  # a copy, which is a node of its own
                    self._nodes.append((ADD, value, zero))
                    value = len(self._nodes) - 1
                targets[value] = target
        runs, scratch = self._allocate(self._schedule(targets), targets)
        return Segment(tuple(self._windows), runs, scratch)

    def _schedule(self, targets: Mapping[int, _Register]) -> list[int]:
        """Return the nodes that the targets need in topological order, greedily in long runs of one operation."""
        needed, stack = set[int](), list(targets)
        while stack:
            i = stack.pop()
            if i not in needed and self._nodes[i][0] >= 0:
                needed.add(i)
                stack += self._nodes[i][1:]
        users: dict[int, list[int]] = {i: [] for i in needed}
        waiting: dict[int, int] = {}
        ready: list[list[int]] = [[], [], []]
        for i in sorted(needed):
            operands = {a for a in self._nodes[i][1:] if a in needed}
            waiting[i] = len(operands)
            for a in operands:
                users[a].append(i)
            if not operands:
                heapq.heappush(ready[self._nodes[i][0]], i)
        order: list[int] = []
        while any(ready):
            operation = max(range(3), key=lambda op: len(ready[op]))
            while ready[operation]:
                i = heapq.heappop(ready[operation])
                order.append(i)
                for user in users[i]:
                    waiting[user] -= 1
                    if not waiting[user]:
                        heapq.heappush(ready[self._nodes[user][0]], user)
        return order

    def _allocate(self, order: Sequence[int], targets: Mapping[int, _Register]) -> tuple[tuple[_Run, ...], int]:
        """Assign registers, a window's own where no later instruction reads its old value; return runs and scratch."""
        last = {a: time for time, i in enumerate(order) for a in self._nodes[i][1:]}
        held = {self._nodes[a][1:]: time for a, time in last.items() if self._nodes[a][0] == _INPUT}
        registers: dict[int, _Register] = {}
        free: list[int] = []
        size = 0
        runs: list[tuple[int, list[tuple[_Register, ...]]]] = []
        late: list[tuple[_Register, ...]] = []
        for time, i in enumerate(order):
            operation, *operands = self._nodes[i]
            read = [self._register(a, registers) for a in operands]
            for a in set(operands):
                if last[a] == time and registers.get(a, (_ABSOLUTE, 0))[0] == _SCRATCH and a not in targets:
                    heapq.heappush(free, registers[a][1])
            target = targets.get(i)
            if target is not None and held.get(target, -1) <= time:
                registers[i] = target
            else:
                if not free:
                    heapq.heappush(free, size)
                    size += 1
                registers[i] = (_SCRATCH, heapq.heappop(free))
                if target is not None:
                    late.append((target, registers[i], (_ABSOLUTE, 0)))
            if not runs or runs[-1][0] != operation:
                runs.append((operation, []))
            runs[-1][1].append((registers[i], *read))
        if late:
            runs.append((ADD, late))
        return tuple((operation, tuple(instructions)) for operation, instructions in runs), size

    def _register(self, a: int, registers: Mapping[int, _Register]) -> _Register:
        kind, first, second = self._nodes[a]
        if kind == _CONSTANT:
            return _ABSOLUTE, first
        return (first, second) if kind == _INPUT else registers[a]


def multiple(add: Callable[[T, T], T], a: T, factor: int) -> T:
    """Return the product of a and a positive integer by additions: double and add, from the highest bit."""
    result = a
    for bit in bin(factor)[3:]:
        result = add(result, result)
        if bit == "1":
            result = add(result, a)
    return result


Fq2 = tuple[int, int]


def pairs(values: Sequence[int]) -> tuple[Fq2, ...]:
    """Group coefficients into elements of Fq2."""
    return tuple((values[i], values[i + 1]) for i in range(0, len(values), 2))


def flat(elements: Sequence[Fq2]) -> tuple[int, ...]:
    """Return the coefficients of elements of Fq2."""
    return tuple(value for pair in elements for value in pair)


class RecordedPairs:
    """Fq2 = Fq[u] / (u^2 + 1) over a recorder, `base`: elements are pairs of its values. M is a product in Fq."""

    def __init__(self, base: Recorder) -> None:
        self.base = base

    def pair(self, value: Fq2) -> Fq2:
        """Return a constant of Fq2."""
        return self.base.constant(value[0]), self.base.constant(value[1])

    def add(self, a: Fq2, b: Fq2) -> Fq2:
        return self.base.add(a[0], b[0]), self.base.add(a[1], b[1])

    def sub(self, a: Fq2, b: Fq2) -> Fq2:
        return self.base.sub(a[0], b[0]), self.base.sub(a[1], b[1])

    def neg(self, a: Fq2) -> Fq2:
        return self.base.neg(a[0]), self.base.neg(a[1])

    def conjugate(self, a: Fq2) -> Fq2:
        """Return c0 - c1 u, which is a^q."""
        return a[0], self.base.neg(a[1])

    def times(self, a: Fq2, factor: int) -> Fq2:
        """Return the product of a and a small positive integer, by additions."""
        return multiple(self.add, a, factor)

    def mul(self, a: Fq2, b: Fq2) -> Fq2:
        """Return a b by Karatsuba; 3M."""
        k = self.base
        low, high = k.mul(a[0], b[0]), k.mul(a[1], b[1])
        cross = k.mul(k.add(a[0], a[1]), k.add(b[0], b[1]))
        return k.sub(low, high), k.sub(k.sub(cross, low), high)

    def square(self, a: Fq2) -> Fq2:
        """Return a^2 = (c0 + c1) (c0 - c1) + 2 c0 c1 u; 2M."""
        k = self.base
        product = k.mul(a[0], a[1])
        return k.mul(k.add(a[0], a[1]), k.sub(a[0], a[1])), k.add(product, product)

    def scale(self, a: Fq2, factor: int) -> Fq2:
        """Return the product of a and a value of Fq; 2M."""
        return self.base.mul(a[0], factor), self.base.mul(a[1], factor)

    def times_constant(self, a: Fq2, factor: Fq2) -> Fq2:
        """Return the product of a and a constant; 3M, or 2M for a constant of Fq."""
        return self.mul(a, self.pair(factor)) if factor[1] else self.scale(a, self.base.constant(factor[0]))


@dataclass(frozen=True, slots=True, eq=False)
class Tape:
    """A program as data: `constants` are the values of the first registers, the first of them 0."""

    field: Field
    code: npt.NDArray[np.int32]  # runs: operation, count, each instruction's offsets of result and operands, in words
    schedule: npt.NDArray[np.int64]  # (m, 2): first and end of parts of the code, in order
    registers: int
    constants: tuple[int, ...]
    products: int


@dataclass(frozen=True, slots=True, eq=False)
class TapeFunction:
    """A tape, and the first registers of its inputs and outputs."""

    tape: Tape
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class TapeProgram:
    """Segments in the order of their execution."""

    def __init__(self, field: Field) -> None:
        self.field = field
        self._windows = 0
        self._calls: list[tuple[Segment, tuple[int, ...]]] = []

    def window(self, size: int) -> int:
        """Allocate registers; return the first one's number, not counting the constants."""
        self._windows += size
        return self._windows - size

    def call(self, segment: Segment, **windows: int) -> None:
        """Append a segment with its windows bound to the registers from these numbers; ValueError for other windows."""
        if set(windows) != set(segment.windows):
            raise ValueError(f"the segment has the windows {', '.join(segment.windows)}, got {', '.join(windows)}")
        self._calls.append((segment, tuple(windows[name] for name in segment.windows)))

    def function(self, inputs: Sequence[int], outputs: Sequence[int]) -> TapeFunction:
        """Return the tape as a function from windows to windows, given by the numbers that `window` returned."""
        tape = self.assemble()
        first = len(tape.constants)
        return TapeFunction(tape, tuple(first + i for i in inputs), tuple(first + i for i in outputs))

    def assemble(self) -> Tape:
        """Return the tape; calls of a segment on the same windows share their code."""
        constants = {0: 0}  # value -> register
        templates = {segment: _template(segment, constants) for segment in dict.fromkeys(s for s, _ in self._calls)}
        first = len(constants)
        scratch = first + self._windows
        code = [np.zeros(0, np.int32)]
        parts: dict[tuple[Segment, tuple[int, ...]], tuple[int, int]] = {}
        size = 0
        for call in dict.fromkeys(self._calls):
            segment, bases = call
            offsets, windows = templates[segment]
            starts = np.array([0, scratch, *(first + base for base in bases), 0])
            words = np.where(windows < 0, 1, self.field.limbs)
            code.append(((offsets + starts[windows]) * words).astype(np.int32))
            parts[call] = size, size + len(offsets)
            size += len(offsets)
        return Tape(
            field=self.field,
            code=np.concatenate(code),
            schedule=np.array([parts[call] for call in self._calls], np.int64).reshape(-1, 2),
            registers=scratch + max((segment.scratch for segment, _ in self._calls), default=0),
            constants=tuple(constants),
            products=sum(segment.products for segment, _ in self._calls),
        )


def _template(segment: Segment, constants: dict[int, int]) -> npt.NDArray[np.int64]:
    """Return the code's offsets and windows (-1 for operations and counts); new constants get the next registers."""
    columns: list[tuple[int, int]] = []
    for operation, instructions in segment.runs:
        columns += [(operation, -1), (len(instructions), -1)]
        for window, offset in itertools.chain.from_iterable(instructions):
            register = constants.setdefault(offset, len(constants)) if window == _ABSOLUTE else offset
            columns.append((register, window))
    return np.array(columns, np.int64).reshape(-1, 2).T


# --- kernel ----------------------------------------------------------------------------------------------------------
_ENTRY = "tape_run"
_OPERATIONS = {ADD: "add", SUB: "sub", MUL: "mul"}


@functools.cache
def _text(field: Field) -> str:
    packed = PackedLimbs(field)
    arguments = ["i64 %begin", "i64 %end", "ptr %registers", "ptr %code", "ptr %schedule"]
    arguments += ["i64 %parts", "i64 %words", "i64 %n"]
    code = FunctionBuilder(_ENTRY, arguments, linkage="", attributes="nounwind")
    with code.loop("%begin", code.smin("%end", "%n")) as i:
        file = code.at("i64", "%registers", code.op("mul", i, "%words"))
        with code.loop(0, "%parts") as part:
            bounds = code.at("[2 x i64]", "%schedule", part)
            first, last = (code.load("i64", bounds, k, align=8) for k in (0, 1))
            end = code.at("i32", "%code", last)
            head = code.variable("ptr", code.at("i32", "%code", first))
            with code.loop_while(lambda end=end, head=head: code.compare("ult", head.get(), end)):  # type: ignore[misc]
                run = head.get()
                operation, count = (code.load("i32", run, k, align=4) for k in (0, 1))
                instruction = code.at("i32", run, 2)
                head.set(code.at("[3 x i32]", instruction, code.convert("sext", count, "i64")))
                for number in code.switch(operation, list(_OPERATIONS)):
                    _write_run(packed, code, _OPERATIONS[number], instruction, head.get(), file)
    code.ret()
    return program([*packed.functions(), code])


def _write_run(packed: PackedLimbs, code: FunctionBuilder, name: str, first: Value, end: Value, file: Value) -> None:
    instruction = code.variable("ptr", first)
    with code.loop_while(lambda: code.compare("ult", instruction.get(), end)):
        current = instruction.get()
        offsets = [code.convert("sext", code.load("i32", current, k, align=4), "i64") for k in range(3)]
        z, x, y = (code.at("i64", file, offset) for offset in offsets)
        operands = [code.load(packed.type, pointer, align=8) for pointer in (x, y)]
        code.store(packed.type, packed.call(code, name, *operands), z, align=8)
        instruction.set(code.at("i32", current, 3))


@functools.cache
def kernel_source(field: Field) -> KernelSource:
    """Return the kernel for a field of several limbs."""
    types = ("*u64", "*i32", "*i64", "i64", "i64", "i64")
    # An index is a millisecond of work: two are worth two threads.
    builder = LlvmProgram(("tape", field), SOURCES, functools.partial(_text, field), least_share=1)
    return KernelSource(f"{_ENTRY}_{field.name}", {"llvm": builder}, {_ENTRY: types}, targets=())


def run_tape(tape: Tape, registers: npt.NDArray[np.uint64]) -> None:
    """Run a tape on n register files, (n, tape.registers, limbs), Montgomery form, constants set; in place."""
    n, arrays = len(registers), (registers, tape.code, tape.schedule)
    sizes = (len(tape.schedule), tape.registers * tape.field.limbs, n)
    launch(HOST, kernel_source(tape.field), _ENTRY, n, 1, arrays, *sizes)


# --- disk cache ------------------------------------------------------------------------------------------------------
def cached(name: str, parameters: str, field: Field, make: Callable[[], TapeFunction]) -> TapeFunction:
    """Return the tape that `make` records, or the disk's, all of it under a checksum: a verifier depends on it."""
    key = kernel_key(tape=builder_key(f"{name} {parameters}", *SOURCES), byteorder=sys.byteorder)
    binary, _ = KernelCache().get_or_build(key, lambda: _binary(make()), name=f"tape_{name}", target="any CPU")
    line, _, words = binary.code.partition(b"\n")
    header = json.loads(line)
    size = len(words) - 16 * header["schedule"]
    tape = Tape(
        field=field,
        code=np.frombuffer(words[:size], np.int32),
        schedule=np.frombuffer(words[size:], np.int64).reshape(-1, 2),
        registers=header["registers"],
        constants=tuple(int(value, 16) for value in header["constants"]),
        products=header["products"],
    )
    return TapeFunction(tape, tuple(header["inputs"]), tuple(header["outputs"]))


def _binary(function: TapeFunction) -> Binary:
    tape = function.tape
    header = {
        "schedule": len(tape.schedule),
        "registers": tape.registers,
        "constants": [f"{value:x}" for value in tape.constants],
        "products": tape.products,
        "inputs": function.inputs,
        "outputs": function.outputs,
    }
    code = json.dumps(header).encode() + b"\n" + tape.code.tobytes() + tape.schedule.tobytes()
    return Binary(code=code, symbols={}, resources={})
