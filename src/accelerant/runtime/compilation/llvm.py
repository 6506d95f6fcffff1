"""LLVM IR as text, written one instruction after the other by a FunctionBuilder; `program` joins the functions.

An operand is a Value, the name of one of the function's arguments, or a Python number, which becomes a constant of the
other operand's type. What changes in a loop is a `variable`, of which LLVM's SROA pass makes a register.
"""

from __future__ import annotations

import functools
import math
import platform
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from accelerant.runtime.compilation.kernel import KernelSource, builder_key

INLINE = "alwaysinline nounwind"
NOINLINE = "noinline nounwind"

REGISTERS = "x86_regcallcc" if platform.machine().lower() in ("x86_64", "amd64") else "fastcc"
"""Calling convention that passes and returns arrays of vectors in registers. C's on x86 returns them in memory, and
a vector loaded from words just stored stalls there: a product of six words took twice as long."""

_FLOATS = {"half": "f16", "float": "f32", "double": "f64"}


class Value(str):
    """The text of an operand, a name or a constant, with its type."""

    __slots__ = ("type",)

    type: str

    def __new__(cls, text: str, type: str) -> Value:
        """Return the text with its type."""
        value = super().__new__(cls, text)
        value.type = type
        return value


Operand = str | int | float  # a Value, the name of an argument, or a number


def vector(element: str, lanes: int) -> str:
    """Return the type of a vector; the element's own where lanes is 1."""
    return element if lanes == 1 else f"<{lanes} x {element}>"


@functools.lru_cache(maxsize=1024)
def constant(type: str, value: float) -> Value:
    """Return a number, exact in its type (LLVM reads the bits of a double), as a scalar or in every lane."""
    lanes, element = _split(type)
    if lanes > 1 and not value:
        return Value("zeroinitializer", type)
    if element in _FLOATS:
        text = f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016x}"
    else:
        text = ("false", "true")[int(value)] if element == "i1" else str(int(value))
    return Value(text if lanes == 1 else "<" + ", ".join([f"{element} {text}"] * lanes) + ">", type)


def lane_constants(element: str, values: Iterable[int]) -> Value:
    """Return a constant vector of these numbers."""
    texts = [f"{element} {constant(element, value)}" for value in values]
    return Value("<" + ", ".join(texts) + ">", vector(element, len(texts)))


def suffix(type: str) -> str:
    """Return a type as the names of intrinsics spell it, "v8i64" for <8 x i64>."""
    lanes, element = _split(type)
    scalar = "p0" if element == "ptr" else _FLOATS.get(element, element)
    return scalar if lanes == 1 else f"v{lanes}{scalar}"


@functools.cache
def _split(type: str) -> tuple[int, str]:
    if not type.startswith("<"):
        return 1, type
    lanes, _, element = type[1:-1].partition(" x ")
    return int(lanes), element


@dataclass(frozen=True, slots=True)
class Variable:
    """Memory on the stack for one value."""

    code: FunctionBuilder
    type: str
    pointer: Value

    def get(self) -> Value:
        """Return the present value."""
        return self.code.load(self.type, self.pointer)

    def set(self, value: Operand) -> None:
        """Overwrite the value."""
        self.code.store(self.type, value, self.pointer)


class FunctionBuilder:
    """A function's instructions; arguments are like "i64 %n", the linkage "" for an entry point."""

    def __init__(
        self, name: str, arguments: Sequence[str] = (), result: str = "void", *, linkage: str = "internal",
        attributes: str = INLINE,
    ) -> None:  # fmt: skip
        self.name = name
        self._head = f"define {linkage} {result} @{name}({', '.join(arguments)}) {attributes}"
        self._result = result
        self._types: dict[str, str] = {}
        for argument in arguments:
            kind, _, known = argument.rpartition(" ")
            self._types[known] = kind.removesuffix(" readonly").removesuffix(" noalias")
        self._stack: list[str] = []
        self._lines: list[str] = []
        self._values = 0
        self._blocks = 0
        self.constants: dict[str, str] = {}
        self.declarations: dict[str, str] = {}

    def text(self) -> str:
        """Return the definition."""
        return "\n".join([f"{self._head} {{", *self._stack, *self._lines, "}\n"])

    # --- any instruction ---------------------------------------------------------------------------------------------
    def __call__(self, instruction: str, type: str = "") -> Value:
        """Append an instruction that has a result of a type; return the result."""
        self._values += 1
        name = f"%v{self._values}"
        self._lines.append(f"  {name} = {instruction}")
        return Value(name, type)

    def do(self, instruction: str) -> None:
        """Append an instruction without a result."""
        self._lines.append(f"  {instruction}")

    def label(self, name: str) -> None:
        """Begin a block."""
        self._lines.append(f"{name}:")

    def ret(self, value: Operand | None = None) -> None:
        """Return from the function."""
        self.do("ret void" if value is None else f"ret {self._result} {self._operand(value, self._result)}")

    def typed(self, operand: Operand) -> str:
        """Return a Value or an argument's name after its type."""
        return f"{self._type(operand)} {operand}"

    def _type(self, *operands: Operand) -> str:
        for operand in operands:
            kind = operand.type if isinstance(operand, Value) else self._types.get(str(operand), "")
            if kind:
                return kind
        raise ValueError(f"{self.name}: no type is known of {', '.join(map(str, operands))}")

    def _operand(self, operand: Operand, kind: str) -> str:
        return operand if isinstance(operand, str) else constant(kind, operand)

    # --- arithmetic --------------------------------------------------------------------------------------------------
    def op(self, operation: str, x: Operand, y: Operand) -> Value:
        """Append a binary operation: "add", "sub nsw", "lshr", "fmul"."""
        kind = self._type(x, y)
        return self(f"{operation} {kind} {self._operand(x, kind)}, {self._operand(y, kind)}", kind)

    def i64(self, operation: str, x: Operand, y: Operand) -> Value:
        """Append a binary operation on 64-bit numbers, of which both may be Python's."""
        return self(f"{operation} i64 {x}, {y}", "i64")

    def fneg(self, x: Operand) -> Value:
        """Append the negative of a floating-point operand."""
        kind = self._type(x)
        return self(f"fneg {kind} {x}", kind)

    def compare(self, relation: str, x: Operand, y: Operand) -> Value:
        """Append icmp, or fcmp of floating-point operands; the result is i1, or a vector of them."""
        kind = self._type(x, y)
        lanes, element = _split(kind)
        name = "fcmp" if element in _FLOATS else "icmp"
        return self(f"{name} {relation} {kind} {self._operand(x, kind)}, {self._operand(y, kind)}", vector("i1", lanes))

    def select(self, condition: Operand, x: Operand, y: Operand) -> Value:
        """Append a choice of x where the condition, an i1 or a vector of them, is set, else of y."""
        kind = self._type(x, y)
        return self(
            f"select {self.typed(condition)}, {kind} {self._operand(x, kind)}, {kind} {self._operand(y, kind)}", kind
        )

    def convert(self, operation: str, x: Operand, kind: str) -> Value:
        """Append a conversion to a scalar type, or of a vector lane by lane: "zext", "trunc", "sitofp", "bitcast"."""
        source = self._type(x)
        if not kind.startswith("<"):
            kind = vector(kind, _split(source)[0])
        return self(f"{operation} {source} {x} to {kind}", kind)

    def bitcast(self, x: Operand, kind: str) -> Value:
        """Append a reinterpretation of the same bits as another type."""
        return self(f"bitcast {self.typed(x)} to {kind}", kind)

    # --- calls -------------------------------------------------------------------------------------------------------
    def call(self, result: str, name: str, *operands: Operand, convention: str = "") -> Value:
        """Append a call of a function; a call of result "void" has the empty value."""
        arguments = ", ".join(map(self.typed, operands))
        instruction = f"call {convention + ' ' if convention else ''}{result} @{name}({arguments})"
        if result != "void":
            return self(instruction, result)
        self.do(instruction)
        return Value("", "void")

    def intrinsic(self, result: str, name: str, *operands: Operand) -> Value:
        """Append a call of one of LLVM's own functions, and declare it."""
        if name not in self.declarations:
            kinds = ", ".join(self._type(operand) for operand in operands)
            self.declarations[name] = f"declare {result} @{name}({kinds})\n"
        return self.call(result, name, *operands)

    def smin(self, x: Operand, y: Operand) -> Value:
        """Append the lesser of two signed 64-bit numbers."""
        return self.intrinsic("i64", "llvm.smin.i64", *(Value(str(number), "i64") for number in (x, y)))

    # --- vectors and arrays ------------------------------------------------------------------------------------------
    def broadcast(self, x: Operand, lanes: int) -> Value:
        """Append a vector with a scalar in every lane."""
        kind = vector(self._type(x), lanes)
        single = self(f"insertelement {kind} poison, {self.typed(x)}, i64 0")
        return self(f"shufflevector {kind} {single}, {kind} poison, <{lanes} x i32> zeroinitializer", kind)

    def join(self, values: Sequence[Operand]) -> Value:
        """Append a vector of these scalars."""
        kind = vector(self._type(*values), len(values))
        joined = Value("poison", kind)
        for lane, value in enumerate(values):
            joined = self(f"insertelement {kind} {joined}, {_split(kind)[1]} {value}, i64 {lane}", kind)
        return joined

    def shuffle(self, x: Operand, y: Operand | None, order: Sequence[int]) -> Value:
        """Append a vector of these lanes of x and, numbered after them, of y."""
        source = self._type(x)
        lanes = lane_constants("i32", order)
        return self(
            f"shufflevector {source} {x}, {source} {'poison' if y is None else y}, {lanes.type} {lanes}",
            vector(_split(source)[1], len(order)),
        )

    def lane(self, x: Operand, index: int) -> Value:
        """Append a vector's element."""
        kind = self._type(x)
        return self(f"extractelement {kind} {x}, i64 {index}", _split(kind)[1])

    def parts(self, array: Operand) -> list[Value]:
        """Append the elements of an array."""
        kind = self._type(array)
        count, _, element = kind[1:-1].partition(" x ")
        return [self(f"extractvalue {kind} {array}, {k}", element) for k in range(int(count))]

    def array(self, kind: str, parts: Iterable[Operand]) -> Value:
        """Append an array of a type, of its elements."""
        element = kind[1:-1].partition(" x ")[2]
        joined = Value("poison", kind)
        for k, part in enumerate(parts):
            joined = self(f"insertvalue {kind} {joined}, {element} {part}, {k}", kind)
        return joined

    # --- memory ------------------------------------------------------------------------------------------------------
    def stack(self, element: str, count: Operand = 1, align: int = 0) -> Value:
        """Return a pointer to `count` elements on the stack, for the whole call."""
        name = f"%stack{len(self._stack)}"
        self._stack.append(f"  {name} = alloca {element}, i64 {count}{_aligned(align)}")
        return Value(name, "ptr")

    def variable(self, kind: str, value: Operand) -> Variable:
        """Return a new variable with its first value."""
        variable = Variable(self, kind, self.stack(kind))
        variable.set(value)
        return variable

    def table(self, name: str, element: str, values: Sequence[int], align: int = 0) -> Value:
        """Return a pointer to constants; the name must be the program's only one."""
        text = ", ".join(f"{element} {value}" for value in values)
        self.constants[name] = f"@{name} = internal constant [{len(values)} x {element}] [{text}]{_aligned(align)}\n"
        return Value(f"@{name}", "ptr")

    def at(self, element: str, pointer: Operand, index: Operand) -> Value:
        """Append the address of an array's element."""
        return self(f"getelementptr inbounds {element}, ptr {pointer}, i64 {index}", "ptr")

    def load(self, kind: str, pointer: Operand, index: Operand | None = None, align: int = 0) -> Value:
        """Append a load of what a pointer, or an array's element, holds; align: bytes, the type's own where 0."""
        address = pointer if index is None else self.at(kind, pointer, index)
        return self(f"load {kind}, ptr {address}{_aligned(align)}", kind)

    def store(self, kind: str, value: Operand, pointer: Operand, index: Operand | None = None, align: int = 0) -> None:
        """Append a store, arguments as in load."""
        address = pointer if index is None else self.at(kind, pointer, index)
        self.do(f"store {kind} {self._operand(value, kind)}, ptr {address}{_aligned(align)}")

    def masked_load(self, kind: str, pointer: Operand, mask: Operand, align: int) -> Value:
        """Append a load of the lanes of a vector that the mask has; the others are 0."""
        operands = (Value(str(pointer), "ptr"), constant("i32", align), mask)
        return self.intrinsic(kind, f"llvm.masked.load.{suffix(kind)}.p0", *operands, constant(kind, 0))

    def masked_store(self, value: Operand, pointer: Operand, mask: Operand, align: int) -> None:
        """Append a store of the lanes of a vector that the mask has."""
        operands = (Value(str(pointer), "ptr"), constant("i32", align), mask)
        self.intrinsic("void", f"llvm.masked.store.{suffix(self._type(value))}.p0", value, *operands)

    # --- control -----------------------------------------------------------------------------------------------------
    @contextmanager
    def loop(self, first: Operand, stop: Operand, step: Operand = 1) -> Iterator[Value]:
        """Append a loop over i from first to below stop; yields i."""
        counter = self.variable("i64", first)
        with self.loop_while(lambda: self(f"icmp slt i64 {counter.get()}, {stop}", "i1")):
            i = counter.get()
            yield i
            counter.set(self.i64("add nsw", i, step))

    @contextmanager
    def countdown(self, count: Operand) -> Iterator[Value]:
        """Append a loop over i from count - 1 down to 0; yields i."""
        with self.loop(0, count) as done:
            yield self.i64("sub nsw", self.i64("sub nsw", count, 1), done)

    @contextmanager
    def loop_while(self, condition: Callable[[], str]) -> Iterator[None]:
        """Append a loop for as long as the i1 that `condition` writes is set, evaluated before each turn."""
        head, body, after = self._labels("head", "body", "after")
        self.do(f"br label %{head}")
        self.label(head)
        self.do(f"br i1 {condition()}, label %{body}, label %{after}")
        self.label(body)
        yield
        self.do(f"br label %{head}")
        self.label(after)

    def tiles(self, first: Operand, stop: Operand, heights: Iterable[int]) -> Iterator[tuple[Value, int]]:
        """Append loops over rows in tiles of decreasing heights; yields the first row and the height of each."""
        row = self.variable("i64", first)
        for height in heights:
            fits = functools.partial(self._fits, row, height, stop)
            with self.loop_while(fits):
                at = row.get()
                yield at, height
                row.set(self.i64("add", at, height))

    def _fits(self, row: Variable, height: int, stop: Operand) -> Value:
        return self.compare("sle", self.op("add", row.get(), height), stop)

    @contextmanager
    def when(self, condition: Operand) -> Iterator[None]:
        """Append a block for the case that an i1 is set."""
        body, after = self._labels("body", "after")
        self.do(f"br i1 {condition}, label %{body}, label %{after}")
        self.label(body)
        yield
        self.do(f"br label %{after}")
        self.label(after)

    def branches(self, condition: Operand) -> Iterator[bool]:
        """Append a block for each value of an i1; yields True, then False, to write the one and the other."""
        then, otherwise, after = self._labels("then", "else", "after")
        self.do(f"br i1 {condition}, label %{then}, label %{otherwise}")
        for label, holds in ((then, True), (otherwise, False)):
            self.label(label)
            yield holds
            self.do(f"br label %{after}")
        self.label(after)

    def switch(self, value: Operand, cases: Sequence[int]) -> Iterator[int]:
        """Append a block for each of a value's cases, and nothing for others; yields the cases in turn."""
        kind = self._type(value)
        *labels, after = self._labels(*(f"case{case}_" for case in cases), "after")
        targets = " ".join(f"{kind} {case}, label %{label}" for case, label in zip(cases, labels, strict=True))
        self.do(f"switch {kind} {value}, label %{after} [ {targets} ]")
        for case, label in zip(cases, labels, strict=True):
            self.label(label)
            yield case
            self.do(f"br label %{after}")
        self.label(after)

    def _labels(self, *kinds: str) -> list[str]:
        self._blocks += 1
        return [f"{kind}{self._blocks}" for kind in kinds]


def _aligned(align: int) -> str:
    return f", align {align}" if align else ""


def program(functions: Iterable[FunctionBuilder]) -> str:
    """Return the text of some functions, with their constants, and what they declare once."""
    functions = list(functions)
    constants = dict(item for function in functions for item in function.constants.items())
    declarations = dict(item for function in functions for item in function.declarations.items())
    return "".join((*constants.values(), *declarations.values(), *(function.text() for function in functions)))


_KINDS = {"ptr": "*", "i64": "i64", "float": "f32", "double": "f64"}


class IndexKernel(ABC):
    """A Builder (see kernel.py) of one function over the indices [begin, end); its fields choose the function."""

    __slots__ = ()
    sources: ClassVar[str]  # of the package, on which the text depends

    @property
    def key(self) -> str:
        """See builder_key."""
        return builder_key(self, self.sources)

    @property
    @abstractmethod
    def entry(self) -> str:
        """The function's name."""

    @abstractmethod
    def parameters(self) -> Iterable[str]:
        """Return the arguments after begin and end, as a FunctionBuilder takes them."""

    @abstractmethod
    def write(self, code: FunctionBuilder) -> None:
        """Append the function's instructions, but for the return."""

    def build(self, target: str) -> str:
        """Return LLVM IR."""
        arguments = ["i64 %begin", "i64 %end", *self.parameters()]
        code = FunctionBuilder(self.entry, arguments, linkage="", attributes="nounwind")
        self.write(code)
        code.ret()
        return program([code])

    def source(self) -> KernelSource:
        """Return the source that a provider compiles."""
        kinds = tuple(_KINDS[parameter.split(" ")[0]] for parameter in self.parameters())
        return KernelSource(self.entry, {"llvm": self}, {self.entry: kinds})


def lane_sums(code: FunctionBuilder, vectors: Sequence[Value]) -> Value:
    """Append the sums of the lanes of each vector, as one vector; there are as many vectors as lanes, or fewer."""
    parts, lanes = list(vectors), _split(vectors[0].type)[0]
    while lanes > len(vectors):
        lanes //= 2
        parts = [code.op("fadd", *(code.shuffle(x, None, range(at, at + lanes)) for at in (0, lanes))) for x in parts]
    width = lanes
    while len(parts) > 1:
        # Of two vectors, each the runs of `width` lanes of some sums, the halves of runs are added.
        half = width // 2
        runs = [at + lanes * side for at in range(0, lanes, width) for side in (0, 1)]
        order = [at + i for at in runs for i in range(half)]
        upper = [at + half for at in order]
        parts = [
            code.op("fadd", code.shuffle(x, y, order), code.shuffle(x, y, upper))
            for x, y in zip(parts[: len(parts) // 2], parts[len(parts) // 2 :], strict=True)
        ]
        width = half
    return parts[0]


def exponential(code: FunctionBuilder, x: Value) -> tuple[Value, Value]:
    """Append e^x = 2^n e^r without overflow, n = round(x / ln 2), for |x| up to 700, or 87 in float; NaN stays NaN."""
    lanes, element = _split(x.type)
    double = element == "double"
    bits, terms = (52, 13) if double else (23, 7)

    def number(value: float) -> Value:
        return constant(x.type, value if double else float(struct.unpack("<f", struct.pack("<f", value))[0]))

    def fma(*operands: Value) -> Value:
        return code.intrinsic(x.type, f"llvm.fmuladd.{suffix(x.type)}", *operands)

    magic = number(1.5 * 2.0**bits)  # the sum with it has n in its lowest bits
    shifted = fma(x, number(1 / math.log(2)), magic)
    n = code.op("fsub", shifted, magic)
    high = round(math.log(2) * 2**9) / 2**9  # n times it is exact
    r = fma(n, number(-(math.log(2) - high)), fma(n, number(-high), x))
    series = number(1 / math.factorial(terms))
    for k in range(terms - 1, 0, -1):
        series = fma(series, r, number(1 / math.factorial(k)))
    exponent = code.op("shl", code.bitcast(shifted, vector("i64" if double else "i32", lanes)), bits)
    one = 0x3FF << 52 if double else 0x7F << 23
    return code.bitcast(code.op("add", exponent, one), x.type), code.op("fmul", r, series)


ROUNDS = 10
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the two words of the key after each round, modulo 2^32

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_LOW = 0xFFFFFFFF


def philox(code: FunctionBuilder, counter: Sequence[Operand], key: Callable[[int, int], Value]) -> list[Operand]:
    """Append the rounds; return the four words (low halves of 64-bit lanes); key(round, word) has a round's key."""
    words = list(counter)
    for i in range(ROUNDS):
        keys = [key(i, side) for side in (0, 1)]
        products = [code.op("mul", code.op("and", words[2 * s], _LOW), _MULTIPLIERS[s]) for s in (0, 1)]
        mixed = []
        for side in (0, 1):
            high = code.op("lshr", products[1 - side], 32)
            mixed.append(code.op("xor", code.op("xor", high, words[2 * side + 1]), keys[side]))
        words = [mixed[0], products[1], mixed[1], products[0]]
    return words
