"""The graph of a fused function: its operations, their derivatives, its evaluation by torch, and what else it reads.

A program computes on M rows of N columns. A value is one number for each element, row, column, or for all of them: a
node says whether it differs between rows (`by_row`) and between columns (`by_column`), and its dtype. The table
OPERATIONS has a few dozen, with their text in Triton and C, torch's function and the derivative, which makes new nodes;
everything else (gelu, softmax) is composed of them.
"""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial, reduce
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from accelerant.runtime.dispatch import Cost

OutputLayout = Literal["full", "column", "row", "scalar", "row sum", "sum"]
"""A result's numbers: one for each element; for each row, (M, 1); for each column, (1, N); one, (1, 1). The last two
are sums over the rows, of the parts of a program that one kernel computes."""

REDUCTIONS = {"sum": "sum", "max": "max", "sum0": "sum", "max0": "max"}
"""Operations over the columns, and over the rows (0)."""


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of a dtype are computed: float32 for narrower floats, else the same."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class Node(NamedTuple):
    """One value, a condition if its dtype is bool; `args` are indices of earlier nodes.

    `value`: the number of a "constant", the index of an "input", the dtype of a "cast", the exponent of a "power".
    """

    op: str
    args: tuple[int, ...]
    value: Any
    by_row: bool
    by_column: bool
    dtype: torch.dtype

    @property
    def boolean(self) -> bool:
        """Whether the value is a condition."""
        return self.dtype == torch.bool


class Input(NamedTuple):
    """An input of shape (M or 1, N or 1)."""

    by_row: bool
    by_column: bool
    dtype: torch.dtype

    def __str__(self) -> str:
        return {(1, 1): "array", (1, 0): "column", (0, 1): "row", (0, 0): "scalar"}[self.by_row, self.by_column]

    def elements(self, M: int, N: int) -> int:
        """Return the number of elements."""
        return (M if self.by_row else 1) * (N if self.by_column else 1)


class Output(NamedTuple):
    """A node that is written out."""

    node: int
    layout: OutputLayout
    dtype: torch.dtype


def layout_of(node: Node) -> OutputLayout:
    """Return the layout of a result."""
    layouts: dict[tuple[bool, bool], OutputLayout] = {
        (True, True): "full", (True, False): "column", (False, True): "row", (False, False): "scalar",
    }  # fmt: skip
    return layouts[node.by_row, node.by_column]


class ExpressionGraph:
    """Nodes in the order of their computation; equal ones are one."""

    def __init__(self, nodes: Sequence[Node] = ()) -> None:
        self.nodes = list(nodes)
        self._known = {(node, str(node.value)): index for index, node in enumerate(nodes)}

    def add(
        self, op: str, *args: Expr | float, value: Any = None, by_row: bool = False, by_column: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Expr:  # fmt: skip
        """Return a node, an equal one if it is there; arguments are converted to the widest dtype among them."""
        kinds = {arg.node.dtype for arg in (args[1:] if op == "where" else args) if isinstance(arg, Expr)}
        common = reduce(torch.promote_types, kinds) if kinds else torch.float32
        if common == torch.bool and op not in _TAKES_CONDITIONS:
            common = torch.float32
        exprs = []
        for position, arg in enumerate(args):
            if not isinstance(arg, Expr):
                arg = self.constant(arg, common)
            exprs.append(arg if (op == "where" and not position) or op == "convert" else arg.convert(common))
        nodes = [each.node for each in exprs]
        made = torch.bool if op in OPERATIONS and OPERATIONS[op].boolean else dtype or common
        if nodes and op not in ("where", "power") and all(node.op == "constant" for node in nodes):
            kind = common if not common.is_floating_point else torch.float64
            computed = OPERATIONS[op].torch(*(torch.tensor(node.value, dtype=kind) for node in nodes))
            if made != torch.bool:
                return self.constant(computed.item(), made)
        by_row = op not in ("sum0", "max0") and (by_row or any(node.by_row for node in nodes))
        by_column = op not in ("sum", "max") and (by_column or any(node.by_column for node in nodes))
        return self._append(Node(op, tuple(each.index for each in exprs), value, by_row, by_column, made))

    def constant(self, value: float, dtype: torch.dtype = torch.float32) -> Expr:
        """Return a constant; one of integers wraps."""
        number: float = float(value) if dtype.is_floating_point else int(value)
        if not dtype.is_floating_point and dtype != torch.bool:
            least, size = torch.iinfo(dtype).min, 1 << torch.iinfo(dtype).bits
            number = (int(value) - least) % size + least
        return self._append(Node("constant", (), number, False, False, dtype))

    def _append(self, node: Node) -> Expr:
        key = (node, str(node.value))  # 0.0 and -0.0 are equal
        if (index := self._known.get(key)) is None:
            index = self._known[key] = len(self.nodes)
            self.nodes.append(node)
        return Expr(self, index)


def _operator(op: str, *, reflected: bool = False) -> Callable[[Expr, Expr | float], Expr]:
    if reflected:
        return lambda self, other: self.graph.add(op, other, self)
    return lambda self, other: self.graph.add(op, self, other)


@dataclass(frozen=True, slots=True)
class Expr:
    """A value of a graph; operators append to the graph."""

    graph: ExpressionGraph
    index: int

    @property
    def node(self) -> Node:
        """The node."""
        return self.graph.nodes[self.index]

    def do(self, op: str, *others: Expr | float, value: Any = None) -> Expr:
        """Return the result of an operation whose first argument this is."""
        return self.graph.add(op, self, *others, value=value)

    def convert(self, dtype: torch.dtype) -> Expr:
        """Return the value in another dtype."""
        if self.node.dtype == dtype:
            return self
        if self.node.op == "constant":
            return self.graph.constant(self.node.value, dtype)
        return self.graph.add("convert", self, value=dtype, dtype=dtype)

    def over(self, op: Literal["sum", "max"], *, columns: bool, rows: bool) -> Expr:
        """Return the sum or the maximum over the columns, the rows, or both; one number is its own."""
        y = self.do(op) if columns and self.node.by_column else self
        return y.do(f"{op}0") if rows and y.node.by_row else y

    def __neg__(self) -> Expr:
        return self.do("neg")

    def __mul__(self, other: Expr | float) -> Expr:
        return self if other == 1 else self.do("mul", other)

    __add__, __radd__ = _operator("add"), _operator("add", reflected=True)
    __sub__, __rsub__ = _operator("sub"), _operator("sub", reflected=True)
    __rmul__ = _operator("mul", reflected=True)
    __truediv__, __rtruediv__ = _operator("div"), _operator("div", reflected=True)
    __lt__, __gt__ = _operator("lt"), _operator("lt", reflected=True)
    __le__, __ge__ = _operator("le"), _operator("le", reflected=True)

    def equals(self, other: Expr | float) -> Expr:
        """Return where two numbers are equal; NaN equals nothing."""
        return self.do("eq", other)


def where(condition: Expr, x: Expr | float, y: Expr | float) -> Expr:
    """Return x where the condition holds, else y."""
    return condition.graph.add("where", condition, x, y)


def power(x: Expr, n: int) -> Expr:
    """Return x^n, rounded once; exponents from -2 to 3 are products, as in torch. Powers of integers wrap."""
    if n < 0 and n >= -2:
        return 1.0 / power(x, -n)
    if n == 0:
        return where(x.equals(x), x.graph.constant(1, x.node.dtype), 1)  # also of NaN and infinities
    if not x.node.dtype.is_floating_point and n > 3:
        half = power(x, n // 2)
        return half * half * x if n % 2 else half * half
    return (x, x * x, x * x * x)[n - 1] if n in (1, 2, 3) else x.do("power", value=n)


def counted(x: Expr, *, columns: bool, rows: bool) -> Expr:
    """Return the number of elements that a reduction of x takes together, in x's dtype."""
    one = x.graph.constant(1, x.node.dtype)
    sizes = [x.graph.add(op, dtype=x.node.dtype) for op, wanted in (("columns", columns), ("rows", rows)) if wanted]
    return reduce(lambda a, b: a * b, sizes) if sizes else one


# --- operations ------------------------------------------------------------------------------------------------------
Slopes = tuple[Expr | None, ...]
Slope = Callable[[Expr, tuple[Expr, ...], Expr], Slopes]


class Op(NamedTuple):
    """An operation: its text in Triton and in C ({0}, {1} are the arguments), torch's function, and its derivative.

    `integers` is the text in C of integers where it differs ({T} is the type, {U} the unsigned one, which wraps).
    Without a text in Triton torch runs it there. `slope` takes the result, the arguments and the gradient of the
    result.
    """

    triton: str
    c: str
    torch: Callable[..., Any]
    slope: Slope | None = None
    boolean: bool = False
    integers: str = ""


def _half_where_equal(y: Expr, args: tuple[Expr, ...], dy: Expr) -> Slopes:
    a, b = args
    shared = where(a.equals(b), 0.5 * dy, dy)
    return where(a < b, 0.0, shared), where(b < a, 0.0, shared)


def _max_slope(y: Expr, args: tuple[Expr, ...], dy: Expr) -> Slopes:
    largest = args[0].equals(y).convert(dy.node.dtype)  # no element of a row with NaN: its gradient is NaN, as torch's
    return ((dy * largest) / largest.over("sum", columns=not y.node.by_column, rows=not y.node.by_row),)


def _pow_slope(y: Expr, args: tuple[Expr, ...], dy: Expr) -> Slopes:
    a, b = args
    limit = where(b < 0.0, a * math.nan, 0.0)  # of y log a as a becomes 0
    return dy * (b * a.graph.add("pow", a, b - 1.0)), dy * where(a.equals(0.0), limit, y * a.do("log"))


def _leading(x: Tensor) -> tuple[int, ...]:
    return tuple(range(x.ndim - 1))


OPERATIONS: dict[str, Op] = {
    "columns": Op("(N * 1.0)", "(({T})N)", lambda: None),
    "rows": Op("(M * 1.0)", "(({T})M)", lambda: None),
    "neg": Op("-{0}", "-{0}", torch.neg, lambda y, a, dy: (-dy,), integers="({T})-({U}){0}"),
    "abs": Op(
        "tl.abs({0})", "ACL_MATH(fabs)({0})", torch.abs,
        lambda y, a, dy: (where(a[0] < 0.0, -dy, where(a[0] > 0.0, dy, dy * 0.0)),),
        integers="({T})({0} < 0 ? -({U}){0} : ({U}){0})",
    ),
    "exp": Op("math.exp({0})", "acl_exp_f32({0})", torch.exp, lambda y, a, dy: (dy * y,)),
    "expm1": Op("math.expm1({0})", "ACL_MATH(expm1)({0})", torch.expm1, lambda y, a, dy: (dy * a[0].do("exp"),)),
    "elu": Op(  # expm1 of numbers that are not positive, with a gradient that keeps its digits
        "math.expm1({0})", "ACL_MATH(expm1)({0})", torch.nn.functional.elu, lambda y, a, dy: (dy * a[0].do("exp"),)
    ),
    "exp2": Op("tl.exp2({0})", "ACL_MATH(exp2)({0})", torch.exp2, lambda y, a, dy: (dy * y * math.log(2),)),
    "log": Op("tl.log({0})", "ACL_MATH(log)({0})", torch.log, lambda y, a, dy: (dy / a[0],)),
    "log2": Op("tl.log2({0})", "ACL_MATH(log2)({0})", torch.log2, lambda y, a, dy: (dy / (a[0] * math.log(2)),)),
    "log10": Op(
        "math.log10({0})", "ACL_MATH(log10)({0})", torch.log10, lambda y, a, dy: (dy / (a[0] * math.log(10)),)
    ),
    "log1p": Op("math.log1p({0})", "ACL_MATH(log1p)({0})", torch.log1p, lambda y, a, dy: (dy / (a[0] + 1.0),)),
    "sqrt": Op("tl.sqrt({0})", "ACL_MATH(sqrt)({0})", torch.sqrt, lambda y, a, dy: (dy * 0.5 / y,)),
    "rsqrt": Op(
        "tl.rsqrt({0})", "(1.0f / ACL_MATH(sqrt)({0}))", torch.rsqrt, lambda y, a, dy: (dy * -0.5 * y * y * y,)
    ),
    "sin": Op("tl.sin({0})", "ACL_MATH(sin)({0})", torch.sin, lambda y, a, dy: (dy * a[0].do("cos"),)),
    "cos": Op("tl.cos({0})", "ACL_MATH(cos)({0})", torch.cos, lambda y, a, dy: (-dy * a[0].do("sin"),)),
    "tanh": Op("math.tanh({0})", "fused_tanh({0})", torch.tanh, lambda y, a, dy: (dy * (1.0 - y * y),)),
    "sigmoid": Op(
        "(1.0 / (1.0 + math.exp(-{0})))", "(1.0f / (1.0f + acl_exp_f32(-{0})))", torch.sigmoid,
        lambda y, a, dy: (dy * (y * (1.0 - y)),),
    ),
    "softplus": Op(
        "math.softplus({0})", "(({0} > 0.0f ? {0} : 0.0f) + ACL_MATH(log1p)(acl_exp_f32(-ACL_MATH(fabs)({0}))))",
        partial(torch.nn.functional.softplus, threshold=40.0), lambda y, a, dy: (dy * a[0].do("sigmoid"),),
    ),
    "erf": Op(
        "tl.erf({0})", "acl_erf_f32({0})", torch.erf,
        lambda y, a, dy: (dy * (-(a[0] * a[0])).do("exp") * (2.0 / math.sqrt(math.pi)),),
    ),
    "erfc": Op(
        "math.erfc({0})", "ACL_MATH(erfc)({0})", torch.erfc,
        lambda y, a, dy: (dy * (-(a[0] * a[0])).do("exp") * (-2.0 / math.sqrt(math.pi)),),
    ),
    "power": Op(
        "math.power({0}, {value})", "fused_power({0}, {value})", torch.pow,
        lambda y, a, dy: (dy * (power(a[0], y.node.value - 1) * y.node.value),),
    ),
    "pow": Op("math.power({0}, {1})", "ACL_MATH(pow)({0}, {1})", torch.pow, _pow_slope),
    "atan2": Op(
        "", "ACL_MATH(atan2)({0}, {1})", torch.atan2,
        lambda y, a, dy: (dy * a[1] / (a[0] * a[0] + a[1] * a[1]), -dy * a[0] / (a[0] * a[0] + a[1] * a[1])),
    ),
    "floor": Op("tl.floor({0})", "ACL_MATH(floor)({0})", torch.floor, integers="{0}"),
    "ceil": Op("tl.ceil({0})", "ACL_MATH(ceil)({0})", torch.ceil, integers="{0}"),
    "round": Op("math.round({0})", "ACL_MATH(rint)({0})", torch.round, integers="{0}"),
    "floordiv": Op(
        "", "fused_mod_floor({0}, {1})", torch.floor_divide,
        integers="({0} / {1} - ({0} % {1} != 0 && ({0} < 0) != ({1} < 0)))",
    ),
    "mod": Op(
        "", "fused_mod({0}, {1})", torch.remainder,
        lambda y, a, dy: (dy, -dy * a[0].do("floordiv", a[1])),
        integers="({0} % {1} + (({0} % {1} != 0 && ({0} < 0) != ({1} < 0)) ? {1} : 0))",
    ),
    "signed": Op("", "ACL_MATH(copysign)({0}, {1})", torch.copysign, lambda y, a, dy: (dy, None)),
    "add": Op(
        "({0} + {1})", "({0} + {1})", operator.add, lambda y, a, dy: (dy, dy), integers="({T})(({U}){0} + ({U}){1})"
    ),
    "sub": Op(
        "({0} - {1})", "({0} - {1})", operator.sub, lambda y, a, dy: (dy, -dy), integers="({T})(({U}){0} - ({U}){1})"
    ),
    "mul": Op(
        "({0} * {1})", "({0} * {1})", operator.mul, lambda y, a, dy: (dy * a[1], dy * a[0]),
        integers="({T})(({U}){0} * ({U}){1})",
    ),
    "div": Op("({0} / {1})", "({0} / {1})", operator.truediv, lambda y, a, dy: (dy / a[1], -dy * y / a[1])),
    "maximum": Op(
        "tl.where(({0} > {1}) | ({0} != {0}), {0}, {1})", "((({0} > {1}) || ({0} != {0})) ? {0} : {1})",
        torch.maximum, _half_where_equal,
    ),
    "lt": Op("({0} < {1})", "({0} < {1})", operator.lt, boolean=True),
    "le": Op("({0} <= {1})", "({0} <= {1})", operator.le, boolean=True),
    "eq": Op("({0} == {1})", "({0} == {1})", operator.eq, boolean=True),
    "ne": Op("({0} != {1})", "({0} != {1})", operator.ne, boolean=True),
    "and": Op("({0} & {1})", "({0} && {1})", operator.and_, boolean=True),
    "or": Op("({0} | {1})", "({0} || {1})", operator.or_, boolean=True),
    "not": Op("({0} == 0)", "(!{0})", torch.logical_not, boolean=True),
    "bit_and": Op("({0} & {1})", "", operator.and_, integers="({0} & {1})"),
    "bit_or": Op("({0} | {1})", "", operator.or_, integers="({0} | {1})"),
    "bit_xor": Op("({0} ^ {1})", "", operator.xor, integers="({0} ^ {1})"),
    "where": Op(
        "tl.where({0}, {1}, {2})", "({0} ? {1} : {2})", torch.where,
        lambda y, a, dy: (None, where(a[0], dy, 0.0), where(a[0], 0.0, dy)),
    ),
    "convert": Op(
        "{0}.to({dtype})", "({T}){0}", lambda x: x,
        lambda y, a, dy: (dy if a[0].node.dtype.is_floating_point else None,),
    ),
    "cast": Op(
        "{0}.to({dtype}).to(tl.float32)", "{0}", lambda x: x, lambda y, a, dy: (dy.do("cast", value=y.node.value),)
    ),
    "stop": Op("{0}", "{0}", torch.detach),
    "sum": Op("tl.sum({0}, 1, keep_dims=True)", "", lambda x: x.sum(-1, keepdim=True), lambda y, a, dy: (dy,)),
    "max": Op("math.largest({0})", "", lambda x: x.amax(-1, keepdim=True), _max_slope),
    "sum0": Op("", "", lambda x: x.sum(_leading(x), keepdim=True), lambda y, a, dy: (dy,)),
    "max0": Op("", "", lambda x: x.amax(_leading(x), keepdim=True), _max_slope),
}  # fmt: skip

_TAKES_CONDITIONS = ("where", "convert", "and", "or", "not", "eq", "ne")
_TAKES_TENSORS = ("where", "maximum", "atan2", "floordiv", "mod", "signed")


# --- programs --------------------------------------------------------------------------------------------------------
def leading_to(nodes: Sequence[Node], targets: list[int], known: Collection[int] = ()) -> list[int]:
    """Return the indices of the nodes that the targets depend on, in order, without known ones and what these need."""
    found, waiting = set[int](), list(targets)
    while waiting:
        index = waiting.pop()
        if index not in found and index not in known:
            found.add(index)
            waiting += nodes[index].args
    return sorted(found)


@dataclass(frozen=True, eq=False, repr=False)
class FusedProgram:
    """A graph with its inputs and results, computed in float32 or float64; equal if the same kernel computes them."""

    nodes: tuple[Node, ...]
    inputs: tuple[Input, ...]
    results: tuple[Output, ...]

    @classmethod
    def of(cls, graph: ExpressionGraph, inputs: Sequence[Input], results: Sequence[Output]) -> FusedProgram:
        """Return the program of some results of a graph, with the nodes that they need."""
        needed = leading_to(graph.nodes, [result.node for result in results])
        number = {old: new for new, old in enumerate(needed)}
        nodes = [graph.nodes[old] for old in needed]
        kept = tuple(node._replace(args=tuple(number[arg] for arg in node.args)) for node in nodes)
        return cls(kept, tuple(inputs), tuple(each._replace(node=number[each.node]) for each in results))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that the kernel's text depends on, in hexadecimal."""
        return hashlib.sha256(repr((self.nodes, self.inputs, self.results)).encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, FusedProgram) and self.digest == other.digest)

    def __repr__(self) -> str:
        return f"{' '.join(map(str, self.inputs))}: {self.operations} operations #{self.digest[:6]}"

    @property
    def kernel_name(self) -> str:
        """The name of its Triton function; the ledger's case ends with the same digits."""
        return f"fused_{self.digest[:6]}"

    @cached_property
    def used(self) -> list[int]:
        """The inputs that it reads."""
        return sorted({node.value for node in self.nodes if node.op == "input"})

    @cached_property
    def depths(self) -> list[int]:
        """The number of reductions over the rows that lead to each node, one after the other, itself included."""
        depths: list[int] = []
        for node in self.nodes:
            depths.append(max((depths[arg] for arg in node.args), default=0) + (node.op in ("sum0", "max0")))
        return depths

    @cached_property
    def operations(self) -> int:
        """Number of operations on each element."""
        return sum(node.op not in ("input", "constant", "columns", "cast", "stop") for node in self.nodes)

    @cached_property
    def compute(self) -> torch.dtype:
        """The widest dtype of the computation."""
        return reduce(torch.promote_types, {node.dtype for node in self.nodes})

    @cached_property
    def reduces(self) -> bool:
        """Whether elements are reduced, or a result has fewer than the inputs: a kernel then goes by rows."""
        fewer = any(result.layout != "full" for result in self.results)
        return fewer or any(node.op in REDUCTIONS for node in self.nodes)

    @cached_property
    def over_rows(self) -> bool:
        """Whether there are reductions over the rows, or results that do not differ between them."""
        return any(node.op in ("sum0", "max0") for node in self.nodes) or any(
            result.layout in ("row", "scalar") for result in self.results
        )

    def cost(self, M: int, N: int) -> Cost:
        """Return the least bytes and operations."""
        read = sum(each.elements(M, N) * each.dtype.itemsize for each in self.inputs)
        sizes = {"full": M * N, "column": M, "row": N, "scalar": 1, "row sum": N, "sum": 1}
        written = sum(sizes[each.layout] * each.dtype.itemsize for each in self.results)
        return Cost(read + written, self.operations * M * N)

    @cached_property
    def split(self) -> tuple[FusedProgram, FusedProgram, tuple[int, ...]]:
        """The program of what one kernel computes, the program of the rest, and the results of the first.

        The first has all reductions over the rows that need no other one, and the results that need none. Its results
        are sums over the rows (-1), values whose maximum over the rows is to be taken (-2), and results, by number. The
        sums and maxima are the last inputs of the rest.
        """
        depth = self.depths
        sums = [i for i, node in enumerate(self.nodes) if node.op in ("sum0", "max0") and depth[i] == 1]
        done = [i for i, each in enumerate(self.results) if not depth[each.node] and each.layout in ("full", "column")]
        layouts: dict[tuple[str, bool], OutputLayout] = {
            ("sum0", True): "row sum", ("sum0", False): "sum", ("max0", True): "full", ("max0", False): "column",
        }  # fmt: skip
        nodes = [self.nodes[i] for i in sums]
        parts = [Output(node.args[0], layouts[node.op, node.by_column], node.dtype) for node in nodes]
        parts += [self.results[i] for i in done]
        graph = ExpressionGraph(self.nodes)
        inputs = [*self.inputs, *(Input(False, self.nodes[i].by_column, self.nodes[i].dtype) for i in sums)]
        for number, i in enumerate(sums):
            graph.nodes[i] = self.nodes[i]._replace(op="input", args=(), value=len(self.inputs) + number)
        rest = [each for i, each in enumerate(self.results) if i not in done]
        first = FusedProgram.of(ExpressionGraph(self.nodes), self.inputs, parts)
        return (
            first,
            FusedProgram.of(graph, inputs, rest),
            (*(-1 if node.op == "sum0" else -2 for node in nodes), *done),
        )

    def run_torch(self, shape: Sequence[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Compute by torch's functions on tensors that broadcast to a shape; results have size 1 where they may."""
        values: list[Any] = []
        for node in self.nodes:
            values.append(self._torch_value(node, values, tensors, shape))
        outputs, shared = [], set[int]()
        for index, layout, dtype in self.results:
            y = values[index]
            whole = _sized(shape, layout not in ("row", "scalar"), layout in ("full", "row", "row sum"))
            y = y.expand(whole) if isinstance(y, Tensor) else torch.full(whole, y, dtype=self.nodes[index].dtype)
            if layout.endswith("sum"):
                y = y.sum(_leading(y), keepdim=True)
            y = y.to(dtype)
            own = index  # the node whose memory it may be
            while self.nodes[own].op in ("cast", "stop", "convert", "floor", "ceil", "round"):
                (own,) = self.nodes[own].args
            aliases = own in shared or self.nodes[own].op == "input"
            shared.add(own)
            outputs.append(y.clone(memory_format=torch.contiguous_format) if aliases else y.contiguous())
        return tuple(outputs)

    def _torch_value(self, node: Node, values: list[Any], tensors: tuple[Tensor, ...], shape: Sequence[int]) -> Any:
        if node.op == "constant":
            return node.value
        if node.op in ("columns", "rows"):
            count = shape[-1] if node.op == "columns" else math.prod(shape[:-1])
            return float(count) if node.dtype.is_floating_point else count
        if node.op == "input":
            return tensors[node.value].to(node.dtype)
        args = [values[arg] for arg in node.args]
        if node.op in _TAKES_TENSORS:
            given = next(arg for arg in args if isinstance(arg, Tensor))
            args = [
                arg if isinstance(arg, Tensor) else torch.full((), arg, dtype=kind, device=given.device)
                for arg, kind in zip(args, (self.nodes[i].dtype for i in node.args), strict=True)
            ]
        if node.op == "power":
            return torch.pow(args[0], node.value)
        if node.op == "cast":
            return args[0].to(node.value).to(node.dtype)
        if node.op == "convert":
            return args[0].to(node.dtype)
        if node.op in REDUCTIONS:  # a value with fewer dimensions, or of size 1, is one of more rows or columns
            flags = self.nodes[node.args[0]]
            args = [args[0].expand(_sized(shape, flags.by_row, flags.by_column))]
        y = OPERATIONS[node.op].torch(*args)
        return y.to(node.dtype) if isinstance(y, Tensor) and y.dtype != node.dtype else y


def _sized(shape: Sequence[int], by_row: bool, by_column: bool) -> tuple[int, ...]:
    rows = tuple(shape[:-1]) if by_row else (1,) * (len(shape) - 1)
    return (*rows, shape[-1] if by_column else 1)


@lru_cache(maxsize=4096)
def gradient_of(program: FusedProgram, wanted: tuple[int, ...]) -> tuple[FusedProgram | None, tuple[int, ...]]:
    """Return the program of the gradients of some inputs, None for none, and those that the results depend on."""
    graph = ExpressionGraph(program.nodes)
    inputs = list(program.inputs)
    gradients: dict[int, Expr] = {}
    for index, _, dtype in program.results:
        if dtype.is_floating_point:
            node = program.nodes[index]
            dy = graph.add(
                "input", value=len(inputs), by_row=node.by_row, by_column=node.by_column, dtype=computed_in(dtype)
            ).convert(node.dtype)
            gradients[index] = gradients[index] + dy if index in gradients else dy
        given = dtype if dtype.is_floating_point else torch.float32
        inputs.append(Input(program.nodes[index].by_row, program.nodes[index].by_column, given))
    differs: list[bool] = []  # numbers that depend on the wanted inputs
    for node in program.nodes:
        itself = node.op == "input" and node.value in wanted
        differs.append(node.dtype.is_floating_point and (itself or any(differs[arg] for arg in node.args)))
    for index in reversed(range(len(program.nodes))):
        node = program.nodes[index]
        if index not in gradients or not node.args or not differs[index]:
            continue
        slope = None if node.op == "stop" else OPERATIONS[node.op].slope
        if slope is None:
            continue
        args = tuple(Expr(graph, arg) for arg in node.args)
        for arg, slope_of_arg in zip(args, slope(Expr(graph, index), args, gradients[index]), strict=True):
            if slope_of_arg is not None and differs[arg.index]:
                columns = node.by_column and not arg.node.by_column  # it was broadcast along the row
                rows = node.by_row and not arg.node.by_row
                alike = [columns and not slope_of_arg.node.by_column, rows and not slope_of_arg.node.by_row]
                summed = slope_of_arg.over("sum", columns=columns, rows=rows)
                slope_of_arg = summed * counted(summed, columns=alike[0], rows=alike[1]) if any(alike) else summed
                slope_of_arg = slope_of_arg.convert(arg.node.dtype)
                known = gradients.get(arg.index)
                gradients[arg.index] = slope_of_arg if known is None else known + slope_of_arg
    results, found = [], []
    for index, node in enumerate(program.nodes):
        if node.op == "input" and node.value in wanted and index in gradients:
            results.append(Output(gradients[index].index, layout_of(node), inputs[node.value].dtype))
            found.append(node.value)
    return (FusedProgram.of(graph, inputs, results) if results else None), tuple(found)


Reads: TypeAlias = list[tuple[Callable[[Any, Any], Any], Any, Any, Any]]
"""Function that reads, its two arguments, and what it returned."""

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, np.generic)
_FUNCTIONS = (BuiltinFunctionType, FunctionType, np.ufunc, type(np.sum))
_LIBRARIES = ("torch", "numpy", "math")
_PURE = (abs, len, min, max, sum, range, zip, enumerate, isinstance, tuple, list, dict, str, bool, int, float, round)
_WRITES = ("IMPORT_", "STORE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR", "DELETE_", "LOAD_CLASS", "LOAD_BUILD")
"""Instructions of code whose next run may differ, or that is not followed."""

_MOST = 256  # values that are compared at a call, at most


class _UnknownError(Exception):
    """The function reads something whose change cannot be seen."""


class _Name(NamedTuple):
    """A variable that code reads, and the attributes that follow; `space` is "" for what is not followed."""

    space: str
    name: str
    attributes: tuple[str, ...]


def reads_of(
    function: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any], names: frozenset[str]
) -> Reads | None:
    """Return what a call reads, None where unknown; functions of `names` depend on their arguments alone."""
    reads: Reads = []
    try:
        if type(function) is FunctionType:
            known = function.__code__.co_varnames[: function.__code__.co_argcount]
            _read_function(function, {**dict(zip(known, args, strict=False)), **options}, reads, names)
            for each in args[len(known) :]:
                _read(each, reads, names)
        else:
            for each in (function, *args, *options.values()):
                _read(each, reads, names)
    except (_UnknownError, RecursionError):
        return None
    return reads


def unchanged(reads: Reads | None) -> bool:
    """Return whether nothing that a call read has changed."""
    if reads is None:
        return False
    try:
        for read, space, name, value in reads:
            if read(space, name) is not value:
                return False
    except (AttributeError, ValueError):  # it is no longer there
        return False
    return True


def _items(x: Any, before: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the items of a list or dict; the same object as before where they are the same."""
    items = (*x, *x.values()) if type(x) is dict else tuple(x)
    return before if len(items) == len(before) and all(map(operator.is_, items, before)) else None


def _read(x: Any, reads: Reads, names: frozenset[str]) -> None:
    """Add what is read of a value."""
    kind = type(x)
    if len(reads) > _MOST:
        raise _UnknownError
    if kind in (tuple, list, dict):
        items = (*x, *x.values()) if kind is dict else tuple(x)
        if len(items) > _MOST:
            raise _UnknownError
        if kind is not tuple:
            reads.append((_items, x, items, items))
        for each in items:
            _read(each, reads, names)
    elif kind is FunctionType and x.__module__.partition(".")[0] not in _LIBRARIES:
        _read_function(x, {}, reads, names)
    elif not (
        isinstance(x, _CONSTANTS)
        or (isinstance(x, _FUNCTIONS) and (x.__name__ in names or x.__module__ == "math"))
        or any(x is each for each in _PURE)
        or (isinstance(x, type) and issubclass(x, np.generic))
    ):
        raise _UnknownError


def _read_function(function: FunctionType, given: Mapping[str, Any], reads: Reads, names: frozenset[str]) -> None:
    code = function.__code__
    if any(space is function for _, space, _, _ in reads):  # it calls itself
        return
    reads += [(getattr, function, name, getattr(function, name)) for name in ("__code__", "__defaults__")]
    _read(function.__defaults__, reads, names)
    _read(function.__kwdefaults__, reads, names)
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    for space, name, attributes in _names(code):
        if space == "global":
            value = function.__globals__.get(name)
            reads.append((dict.get, function.__globals__, name, value))
            if name not in function.__globals__:
                value = getattr(builtins, name, builtins)
        elif space == "cell" and name in cells:
            value = cells[name].cell_contents
            reads.append((getattr, cells[name], "cell_contents", value))
        elif space == "argument":
            value = given.get(name)  # the caller's key has the value itself
        elif space:
            continue
        else:
            raise _UnknownError
        for attribute in attributes:
            if isinstance(value, _CONSTANTS):
                break
            if type(value) is not ModuleType and not _is_plain(value, attribute):
                break
            space_of, value = value, getattr(value, attribute)
            reads.append((getattr, space_of, attribute, value))
        _read(value, reads, names)


def _is_plain(x: Any, attribute: str) -> bool:
    """Return whether an object's attribute is what its dictionary, or a class's, has."""
    kind = type(x)
    if any("__getattribute__" in vars(base) or "__getattr__" in vars(base) for base in kind.__mro__[:-1]):
        return False
    found = next((vars(base)[attribute] for base in kind.__mro__ if attribute in vars(base)), None)
    return not hasattr(type(found), "__get__") and hasattr(x, attribute)


@functools.lru_cache(maxsize=1024)
def _names(code: CodeType) -> tuple[_Name, ...]:
    """Return the variables that code reads."""
    return tuple(dict.fromkeys(_each_name(code)))


def _each_name(code: CodeType) -> Iterator[_Name]:
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "PUSH_NULL", "EXTENDED_ARG")]
    for at, (op, value) in enumerate((step.opname, step.argval) for step in steps):
        end = at + 1
        while end < len(steps) and steps[end].opname in ("LOAD_ATTR", "LOAD_METHOD"):
            end += 1
        attributes = tuple(each.argval for each in steps[at + 1 : end])
        if op in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield _Name("global", value, attributes)
        elif op in ("LOAD_DEREF", "LOAD_CLASSDEREF"):
            yield _Name("cell", value, attributes)
        elif op.startswith("LOAD_FAST"):
            several = (value,) if isinstance(value, str) else value
            for each in several:
                if each in arguments:
                    yield _Name("argument", each, attributes if each is several[-1] else ())
        elif op.startswith(_WRITES) or (op == "STORE_DEREF" and value in code.co_freevars):
            yield _Name("", "", ())
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from (name for name in _each_name(each) if name.space != "argument")
