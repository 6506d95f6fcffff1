"""Tapes: straight-line programs of additions, subtractions and products in a prime field, recorded once, run as data.

A Recorder stands for a field: a formula in plain Python that adds and multiplies its values is written down instead of
computed. What it wrote becomes a Segment, and a Program calls segments one after another, on different registers:

    recorder = Recorder(field)
    x, y = recorder.inputs("point", 2)
    step = recorder.segment({"point": (recorder.mul(x, y), recorder.add(x, y))})     point <- (x y, x + y)

    program = Program(field)
    p, q = program.window(2), program.window(2)
    program.call(step, point=p)
    program.call(step, point=q)
    tape = program.assemble()

Registers of a program lie one after another: the constants, the windows in the order in which they were asked for, and
scratch. A segment names windows, and each call says where they begin; they must not overlap. It may write what it
reads: every value it reads is that from before the call.

Recording leaves out what is not used, computes a repeated expression once and knows 0 and 1. Instructions are ordered
so that the same operation comes in long runs: the loop that does them then takes few branches that a processor must
guess, and the products of a run overlap where they do not wait for each other. tape_kernel.py runs tapes.


----

The CPU's kernel that runs tapes (tape.py): one loop over instructions, which are data.

    tape_run    (registers *u64, code *i32, schedule *i64, parts i64, words i64, n i64)

Index i does the parts of the code that the schedule lists, on the registers from word i `words` on. A register is an
element in Montgomery form, R of algebra.field.program.montgomery_radix. Time depends on the tape alone.

An instruction is three loads of a place, two of elements, and the operation: some 2 ns on top of a product's 20 to 40.


----

Tapes (tape.py) in the disk cache of kernels: recording those of a pairing takes 60 ms, reading them 1.

An entry's code is a line of JSON, then the tape's code and its schedule as they lie in memory. Nothing of it is in the
report: the cache's checksum is the code's, and with another constant a verifier would accept other proofs. So what is
said of machine code in cache.py holds for tapes: an altered entry is made again, and a key is of all that a
tape depends on, which is the code below algebra.
"""

from __future__ import annotations

import functools
import heapq
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field.llvm_kernels import SOURCES
from accelerant.algebra.field.llvm_packed import PackedLimbs
from accelerant.algebra.field.parameters import Field, field_of
from accelerant.algebra.field.places import HOST
from accelerant.runtime import registry
from accelerant.runtime.compilation.cache import KernelCache, kernel_key
from accelerant.runtime.compilation.kernel import Binary, Kernel, KernelSource
from accelerant.runtime.compilation.llvm import FunctionBuilder, Value, program
from accelerant.runtime.compilation.sources import builder_key

__all__ = [
    "ADD",
    "MUL",
    "SUB",
    "Program",
    "Recorder",
    "Segment",
    "Tape",
    "TapeKernel",
    "kept",
    "kernel_source",
    "run_tape",
]

ADD, SUB, MUL = 0, 1, 2
_LEAF, _CONSTANT = -1, -2
_ABSOLUTE, _SCRATCH = 0, 1
"""Windows that every segment has: what is not moved (constants come by their value), and scratch."""

_Node = tuple[int, int, int]
"""(operation, operand, operand); (_LEAF, window, place); (_CONSTANT, value, 0)."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Instructions on windows.

    Attributes:
        field: of the values.
        windows: their names; the numbers below count from 2 on.
        runs: (operation, instructions) each; an instruction is three registers (window, place), that of the result
            first. Constants have window 0, and for a place their value.
        scratch: registers it needs.
    """

    field: Field
    windows: tuple[str, ...]
    runs: tuple[tuple[int, tuple[tuple[tuple[int, int], ...], ...]], ...]
    scratch: int

    @property
    def products(self) -> int:
        """How many it does."""
        return sum(len(instructions) for operation, instructions in self.runs if operation == MUL)


class Recorder:
    """Writes down what is computed with its values, which are numbers of no other meaning."""

    def __init__(self, field: Field) -> None:
        self.field = field
        self._nodes: list[_Node] = []
        self._known: dict[_Node, int] = {}
        self._windows: list[str] = []

    # --- values --------------------------------------------------------------------------------------------------

    def inputs(self, window: str, size: int) -> tuple[int, ...]:
        """The values of a window's first registers before the segment."""
        return tuple(self._node((_LEAF, self._window(window), i)) for i in range(size))

    def constant(self, value: int) -> int:
        """A value known beforehand, taken modulo the modulus."""
        return self._node((_CONSTANT, value % self.field.modulus, 0))

    def add(self, a: int, b: int) -> int:
        """The sum a + b."""
        if self._is(a, 0):
            return b
        if self._is(b, 0):
            return a
        return self._node((ADD, min(a, b), max(a, b)))

    def sub(self, a: int, b: int) -> int:
        """The difference a - b."""
        return a if self._is(b, 0) else self._node((SUB, a, b))

    def neg(self, a: int) -> int:
        """The opposite, -a."""
        return self.sub(self.constant(0), a)

    def mul(self, a: int, b: int) -> int:
        """The product a b."""
        if self._is(a, 1) or self._is(b, 0):
            return b
        if self._is(b, 1) or self._is(a, 0):
            return a
        return self._node((MUL, min(a, b), max(a, b)))

    def _is(self, a: int, value: int) -> bool:
        return self._nodes[a] == (_CONSTANT, value, 0)

    def _window(self, name: str) -> int:
        if name not in self._windows:
            self._windows.append(name)
        return self._windows.index(name) + 2

    def _node(self, node: _Node) -> int:
        found = self._known.get(node)
        if found is None:
            found = self._known[node] = len(self._nodes)
            self._nodes.append(node)
        return found

    # --- segments ------------------------------------------------------------------------------------------------

    def segment(self, outputs: Mapping[str, Sequence[int]]) -> Segment:
        """What was recorded, as far as these values need it.

        Args:
            outputs: window -> the values of its first registers after the segment.
        """
        targets: dict[int, tuple[int, int]] = {}
        zero = self.constant(0)
        for name, values in outputs.items():
            for place, value in enumerate(values):
                target = (self._window(name), place)
                if self._nodes[value] == (_LEAF, *target):
                    continue
                if self._nodes[value][0] < 0 or value in targets:  # a copy, which is a node of its own
                    self._nodes.append((ADD, value, zero))
                    value = len(self._nodes) - 1
                targets[value] = target
        order = self._ordered(targets)
        runs, scratch = self._placed(order, targets)
        return Segment(self.field, tuple(self._windows), runs, scratch)

    def _ordered(self, targets: Mapping[int, tuple[int, int]]) -> list[int]:
        """The nodes that the targets need: operands first, and one operation as long as there is one that can be done.

        Greedy; among those that can be done, in the order of recording.
        """
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

    def _placed(
        self, order: Sequence[int], targets: Mapping[int, tuple[int, int]]
    ) -> tuple[tuple[tuple[int, tuple[tuple[tuple[int, int], ...], ...]], ...], int]:
        """Runs with registers, and how many of scratch they take.

        A value that goes to a register of a window is put there at once if nothing reads what that holds any more; else
        it waits in scratch for the end.
        """
        last: dict[int, int] = {}
        for time, i in enumerate(order):
            for a in self._nodes[i][1:]:
                last[a] = time
        held = {self._nodes[a][1:]: time for a, time in last.items() if self._nodes[a][0] == _LEAF}
        where: dict[int, tuple[int, int]] = {}
        free: list[int] = []
        size = 0
        runs: list[tuple[int, list[tuple[tuple[int, int], ...]]]] = []
        late: list[tuple[tuple[int, int], tuple[int, int]]] = []
        for time, i in enumerate(order):
            operation, *operands = self._nodes[i]
            read = [self._register(a, where) for a in operands]
            for a in set(operands):
                if last[a] == time and where.get(a, (_ABSOLUTE, 0))[0] == _SCRATCH and a not in targets:
                    heapq.heappush(free, where[a][1])
            target = targets.get(i)
            if target is not None and held.get(target, -1) <= time:
                where[i] = target
            else:
                if not free:
                    heapq.heappush(free, size)
                    size += 1
                where[i] = (_SCRATCH, heapq.heappop(free))
                if target is not None:
                    late.append((target, where[i]))
            if not runs or runs[-1][0] != operation:
                runs.append((operation, []))
            runs[-1][1].append((where[i], *read))
        if late:
            runs.append((ADD, [(target, source, (_ABSOLUTE, 0)) for target, source in late]))
        return tuple((operation, tuple(instructions)) for operation, instructions in runs), size

    def _register(self, a: int, where: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
        kind, first, second = self._nodes[a]
        if kind == _CONSTANT:
            return _ABSOLUTE, first
        return (first, second) if kind == _LEAF else where[a]


@dataclass(frozen=True, slots=True, eq=False)
class Tape:
    """A program as data.

    Attributes:
        field: of the values.
        code: int32. Runs one after another: operation, count, and for each instruction the places of result and
            operands, in words from the first register.
        schedule: (m, 2), int64: parts of the code, first and end, in the order in which they are done.
        registers: how many.
        constants: the values of the first registers; the first one is 0.
        products: how many it does.
    """

    field: Field
    code: npt.NDArray[np.int32]
    schedule: npt.NDArray[np.int64]
    registers: int
    constants: tuple[int, ...]
    products: int


class Program:
    """Segments in the order in which they are done."""

    def __init__(self, field: Field) -> None:
        self.field = field
        self._windows = 0
        self._calls: list[tuple[Segment, tuple[int, ...]]] = []

    def window(self, size: int) -> int:
        """The place of new registers, counted from the first one after the constants."""
        self._windows += size
        return self._windows - size

    def call(self, segment: Segment, **windows: int) -> None:
        """Do a segment, its windows beginning at these places.

        Raises:
            ValueError: other windows than the segment's.
        """
        if set(windows) != set(segment.windows):
            raise ValueError(f"the segment has the windows {', '.join(segment.windows)}, got {', '.join(windows)}")
        self._calls.append((segment, tuple(windows[name] for name in segment.windows)))

    def assemble(self) -> Tape:
        """The tape. Where a segment is called on the same windows again, its code is there once."""
        constants = {0: 0}
        for segment in dict.fromkeys(segment for segment, _ in self._calls):
            for _, instructions in segment.runs:
                for instruction in instructions:
                    for window, place in instruction:
                        if window == _ABSOLUTE:
                            constants.setdefault(place, len(constants))
        first = len(constants)
        scratch = first + self._windows
        code: list[npt.NDArray[np.int32]] = []
        parts: dict[tuple[Segment, tuple[int, ...]], tuple[int, int]] = {}
        size = 0
        templates: dict[Segment, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}
        for call in self._calls:
            if call in parts:
                continue
            segment, bases = call
            if segment not in templates:
                templates[segment] = _template(segment, constants)
            places, windows = templates[segment]
            starts = np.array([0, scratch, *(first + base for base in bases), 0])
            words = np.where(windows < 0, 1, self.field.limbs)
            code.append(((places + starts[windows]) * words).astype(np.int32))
            parts[call] = size, size + len(places)
            size += len(places)
        return Tape(
            field=self.field,
            code=np.concatenate(code) if code else np.zeros(0, np.int32),
            schedule=np.array([parts[call] for call in self._calls], np.int64).reshape(-1, 2),
            registers=scratch + max((segment.scratch for segment, _ in self._calls), default=0),
            constants=tuple(constants),
            products=sum(segment.products for segment, _ in self._calls),
        )


def _template(segment: Segment, constants: Mapping[int, int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Places, and the window that each counts from; -1 for what is no register."""
    places: list[int] = []
    windows: list[int] = []
    for operation, instructions in segment.runs:
        places += (operation, len(instructions))
        windows += (-1, -1)
        for instruction in instructions:
            for window, place in instruction:
                places.append(constants[place] if window == _ABSOLUTE else place)
                windows.append(window)
    return np.array(places, np.int64), np.array(windows, np.int64)


_ENTRY = "tape_run"
_OPERATIONS = {ADD: "add", SUB: "sub", MUL: "mul"}
_ARGUMENTS = ("*u64", "*i32", "*i64", "i64", "i64", "i64")


@dataclass(frozen=True, slots=True)
class TapeKernel:
    """A Builder (see runtime/compilation/kernel.py) of tape_run; field: its name."""

    field: str

    written_out = True
    """LLVM has little to do: see runtime/providers/cpu.py."""

    @property
    def least_share(self) -> int:
        """An index is a millisecond of work: two are worth two threads."""
        return 1

    @property
    def key(self) -> str:
        """See builder_key; the text depends on the target in nothing else."""
        return builder_key(self, *SOURCES)

    def build(self, target: str) -> str:
        """LLVM IR."""
        return _text(self.field)


@functools.cache
def _text(name: str) -> str:
    packed = PackedLimbs(field_of(name))
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
                    _write_run(packed, code, _OPERATIONS[number], (instruction, head.get()), file)
    code.ret()
    return program([*packed.functions(), code])


def _write_run(packed: PackedLimbs, code: FunctionBuilder, name: str, run: tuple[Value, Value], file: Value) -> None:
    """Append a run of one operation."""
    instruction = code.variable("ptr", run[0])
    with code.loop_while(lambda: code.compare("ult", instruction.get(), run[1])):
        current = instruction.get()
        offsets = [code.convert("sext", code.load("i32", current, k, align=4), "i64") for k in range(3)]
        z, x, y = (code.at("i64", file, offset) for offset in offsets)
        operands = [code.load(packed.type, pointer, align=8) for pointer in (x, y)]
        code.store(packed.type, packed.call(code, name, *operands), z, align=8)
        instruction.set(code.at("i32", current, 3))


@functools.cache
def kernel_source(field: Field) -> KernelSource:
    """The kernel for a field of several limbs."""
    return KernelSource(
        name=f"{_ENTRY}_{field.name}",
        dialects={"llvm": TapeKernel(field.name)},
        entries={_ENTRY: _ARGUMENTS},
        targets=(),
    )


@functools.cache
def _kernel(field: Field) -> Kernel:
    return registry.create("cpu").compile(kernel_source(field))


def run_tape(tape: Tape, registers: npt.NDArray[np.uint64]) -> None:
    """Run a tape on the CPU.

    Args:
        tape: what to do.
        registers: (n, tape.registers, limbs), contiguous: each of the n is run by itself, in place. The constants are
            in, in Montgomery form.
    """
    pointers = [HOST.pointer(array) for array in (registers, tape.code, tape.schedule)]
    sizes = (len(tape.schedule), tape.registers * tape.field.limbs, len(registers))
    HOST.provider.launch(_kernel(tape.field), (len(registers),), (1,), (*pointers, *sizes))


class _Taped(Protocol):
    """A dataclass with a tape; its other fields are places of registers: integers, or tuples of them."""

    @property
    def tape(self) -> Tape: ...


_T = TypeVar("_T", bound=_Taped)


def kept(kind: Callable[..., _T], name: str, field: Field, make: Callable[[], _T]) -> _T:
    """What `make` gives, from the disk if it is there.

    Args:
        kind: a dataclass as _Taped says.
        name: of the tape; with the code below algebra all that it depends on.
        field: of its values.
        make: records it.
    """
    key = kernel_key(tape=builder_key(name, *SOURCES), byteorder=sys.byteorder)
    found, _ = KernelCache().get_or_build(key, lambda: _binary(make()), name=f"tape_{name}", target="any CPU")
    return _taped(kind, field, found)


def _binary(taped: _Taped) -> Binary:
    tape = taped.tape
    rest = {
        "schedule": len(tape.schedule),
        "registers": tape.registers,
        "constants": [f"{value:x}" for value in tape.constants],
        "products": tape.products,
        "places": {name: getattr(taped, name) for name in _places(type(taped))},
    }
    code = json.dumps(rest).encode() + b"\n" + tape.code.tobytes() + tape.schedule.tobytes()
    return Binary(code=code, symbols={}, resources={})


def _taped(kind: Callable[..., _T], field: Field, binary: Binary) -> _T:
    line, _, words = binary.code.partition(b"\n")
    rest = json.loads(line)
    size = len(words) - 16 * rest["schedule"]
    tape = Tape(
        field=field,
        code=np.frombuffer(words[:size], np.int32),
        schedule=np.frombuffer(words[size:], np.int64).reshape(-1, 2),
        registers=rest["registers"],
        constants=tuple(int(value, 16) for value in rest["constants"]),
        products=rest["products"],
    )
    places = {name: _plain(rest["places"][name]) for name in _places(kind)}
    return kind(tape=tape, **places)


def _places(kind: Any) -> list[str]:
    return [each.name for each in fields(kind) if each.name != "tape"]


def _plain(value: Any) -> Any:
    """JSON's lists are tuples here."""
    return tuple(value) if isinstance(value, list) else value
