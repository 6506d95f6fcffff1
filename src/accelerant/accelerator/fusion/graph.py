"""The graph of a fused function: its operations, their derivatives, and its evaluation by torch.

A program computes on M rows of N columns. A value is one number for each element, row, column, or for all of them: a
node says whether it differs between rows (`by_row`) and between columns (`by_column`). The graph has a few dozen
operations, the table OPERATIONS; everything else (gelu, softmax) is composed of them. Each has its text in Triton and
in C, torch's function, and the rule of its derivative, which makes new nodes: the gradient of a program is a program.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from accelerant.runtime.dispatch import Cost

__all__ = [
    "OPERATIONS", "Expr", "Graph", "Input", "Node", "Program", "Result", "gradient_of", "leading_to", "power", "sized",
    "where",
]  # fmt: skip

Layout = Literal["full", "column", "row sum", "sum"]
"""A result's numbers: one for each element; for each row, (M, 1); for each column, summed over the rows; one sum."""


class Node(NamedTuple):
    """One value.

    `args` are indices of earlier nodes. `value` is the number of a "constant", the index of an "input", the dtype that
    a "cast" rounds to, the whole exponent of a "power". `boolean` values are conditions; all others are numbers of the
    compute dtype.
    """

    op: str
    args: tuple[int, ...]
    value: Any
    by_row: bool
    by_column: bool
    boolean: bool


class Input(NamedTuple):
    """An input of shape (M or 1, N or 1)."""

    by_row: bool
    by_column: bool
    dtype: torch.dtype

    def __str__(self) -> str:
        return {(1, 1): "array", (1, 0): "column", (0, 1): "row", (0, 0): "scalar"}[self.by_row, self.by_column]

    def size(self, M: int, N: int) -> tuple[int, int]:
        """Return the shape."""
        return M if self.by_row else 1, N if self.by_column else 1


class Result(NamedTuple):
    """A node that is written out."""

    node: int
    layout: Layout
    dtype: torch.dtype


class Graph:
    """Nodes in the order of their computation; equal ones are one."""

    def __init__(self, nodes: Sequence[Node] = ()) -> None:
        self.nodes = list(nodes)
        self._known = {(node, str(node.value)): index for index, node in enumerate(nodes)}

    def add(
        self, op: str, *args: Expr | float, value: Any = None, by_row: bool = False, by_column: bool = False
    ) -> Expr:
        """Append a node, unless it is known; the layout of an input is given, other nodes have that of their arguments.

        Numbers become constants, and conditions become numbers where the operation computes with them.
        """
        exprs = [arg if isinstance(arg, Expr) else self.constant(arg) for arg in args]
        if op not in _TAKES_CONDITIONS:
            exprs = [self.add("number", each) if each.node.boolean else each for each in exprs]
        nodes = [each.node for each in exprs]
        if nodes and op not in ("where", "power") and all(node.op == "constant" for node in nodes):
            computed = OPERATIONS[op].torch(*(torch.tensor(node.value, dtype=torch.float64) for node in nodes))
            if not OPERATIONS[op].boolean:
                return self.constant(float(computed))
        by_row = by_row or any(node.by_row for node in nodes)
        by_column = op not in _REDUCTIONS and (by_column or any(node.by_column for node in nodes))
        boolean = (op == "input" and value[1]) or (op != "input" and op != "constant" and OPERATIONS[op].boolean)
        index = value[0] if op == "input" else value
        return self._append(Node(op, tuple(each.index for each in exprs), index, by_row, by_column, bool(boolean)))

    def constant(self, value: float) -> Expr:
        """Return a constant."""
        return self._append(Node("constant", (), float(value), False, False, False))

    def _append(self, node: Node) -> Expr:
        key = (node, str(node.value))  # 0.0 and -0.0 are equal
        index = self._known.get(key)
        if index is None:
            index = self._known[key] = len(self.nodes)
            self.nodes.append(node)
        return Expr(self, index)


@dataclass(frozen=True, slots=True)
class Expr:
    """A value of a graph; operators append to the graph."""

    graph: Graph
    index: int

    @property
    def node(self) -> Node:
        """The node."""
        return self.graph.nodes[self.index]

    def do(self, op: str, *others: Expr | float, value: Any = None) -> Expr:
        """Return the result of an operation whose first argument this is."""
        return self.graph.add(op, self, *others, value=value)

    def over_row(self, op: Literal["sum", "max"]) -> Expr:
        """Return the sum or the maximum over the columns; a value with one column is its own."""
        if self.node.by_column:
            return self.do(op)
        return self.do("number") if self.node.boolean else self

    def __neg__(self) -> Expr:
        return self.do("neg")

    def __add__(self, other: Expr | float) -> Expr:
        return self.do("add", other)

    def __radd__(self, other: float) -> Expr:
        return self.graph.add("add", other, self)

    def __sub__(self, other: Expr | float) -> Expr:
        return self.do("sub", other)

    def __rsub__(self, other: float) -> Expr:
        return self.graph.add("sub", other, self)

    def __mul__(self, other: Expr | float) -> Expr:
        return self if other == 1 else self.do("mul", other)

    def __rmul__(self, other: float) -> Expr:
        return self.graph.add("mul", other, self)

    def __truediv__(self, other: Expr | float) -> Expr:
        return self.do("div", other)

    def __rtruediv__(self, other: float) -> Expr:
        return self.graph.add("div", other, self)

    def __lt__(self, other: Expr | float) -> Expr:
        return self.do("lt", other)

    def __le__(self, other: Expr | float) -> Expr:
        return self.do("le", other)

    def __gt__(self, other: Expr | float) -> Expr:
        return self.graph.add("lt", other, self)

    def __ge__(self, other: Expr | float) -> Expr:
        return self.graph.add("le", other, self)

    def equals(self, other: Expr | float) -> Expr:
        """Return where two numbers are equal; NaN equals nothing."""
        return self.do("eq", other)


def where(condition: Expr, x: Expr | float, y: Expr | float) -> Expr:
    """Return x where the condition holds, else y."""
    return condition.graph.add("where", condition, x, y)


def power(x: Expr, n: int) -> Expr:
    """Return x^n, rounded once; exponents from -2 to 3 are products, as in torch."""
    if n < 0 and n >= -2:
        return 1.0 / power(x, -n)
    if n == 0:
        return where(x.equals(x), 1.0, 1.0)  # also of NaN and infinities
    return (x, x * x, x * x * x)[n - 1] if n in (1, 2, 3) else x.do("power", value=n)


def sized(x: Expr) -> Expr:
    """Return the number of columns."""
    return x.graph.add("columns")


# --- operations ------------------------------------------------------------------------------------------------------

Slopes = tuple[Expr | None, ...]
Slope = Callable[[Expr, tuple[Expr, ...], Expr], Slopes]


class Op(NamedTuple):
    """An operation: its text in Triton and in C ({0}, {1} are the arguments), torch's function, and its derivative.

    `slope` takes the result, the arguments and the gradient of the result, and returns that of each argument.
    """

    triton: str
    c: str
    torch: Callable[..., Any]
    slope: Slope | None = None
    boolean: bool = False


def _half_where_equal(y: Expr, args: tuple[Expr, ...], dy: Expr) -> Slopes:
    a, b = args
    shared = where(a.equals(b), 0.5 * dy, dy)
    return where(a < b, 0.0, shared), where(b < a, 0.0, shared)


def _max_slope(y: Expr, args: tuple[Expr, ...], dy: Expr) -> Slopes:
    largest = args[0].equals(y).do("number")  # no element of a row with NaN: its gradient is NaN, as torch's
    return ((dy * largest) / largest.over_row("sum"),)


def _pow_slope(y: Expr, args: tuple[Expr, ...], dy: Expr) -> Slopes:
    a, b = args
    limit = where(b < 0.0, a * math.nan, 0.0)  # of y log a as a becomes 0
    return dy * (b * a.graph.add("pow", a, b - 1.0)), dy * where(a.equals(0.0), limit, y * a.do("log"))


def _abs_slope(y: Expr, args: tuple[Expr, ...], dy: Expr) -> Slopes:
    (x,) = args
    return (where(x < 0.0, -dy, where(x > 0.0, dy, dy * 0.0)),)


OPERATIONS: dict[str, Op] = {
    "columns": Op("(N * 1.0)", "((float)N)", lambda: None),
    "neg": Op("-{0}", "-{0}", torch.neg, lambda y, a, dy: (-dy,)),
    "abs": Op("tl.abs({0})", "ACL_MATH(fabs)({0})", torch.abs, _abs_slope),
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
    "floor": Op("tl.floor({0})", "ACL_MATH(floor)({0})", torch.floor),
    "ceil": Op("tl.ceil({0})", "ACL_MATH(ceil)({0})", torch.ceil),
    "add": Op("({0} + {1})", "({0} + {1})", operator.add, lambda y, a, dy: (dy, dy)),
    "sub": Op("({0} - {1})", "({0} - {1})", operator.sub, lambda y, a, dy: (dy, -dy)),
    "mul": Op("({0} * {1})", "({0} * {1})", operator.mul, lambda y, a, dy: (dy * a[1], dy * a[0])),
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
    "where": Op(
        "tl.where({0}, {1}, {2})", "({0} ? {1} : {2})", torch.where,
        lambda y, a, dy: (None, where(a[0], dy, 0.0), where(a[0], 0.0, dy)),
    ),
    "number": Op("tl.where({0}, 1.0, 0.0)", "({0} ? 1.0f : 0.0f)", lambda x: x),
    "cast": Op(
        "{0}.to({dtype}).to(tl.float32)", "{0}", lambda x: x, lambda y, a, dy: (dy.do("cast", value=y.node.value),)
    ),
    "stop": Op("{0}", "{0}", torch.detach),
    "sum": Op("tl.sum({0}, 1, keep_dims=True)", "", lambda x: x.sum(-1, keepdim=True), lambda y, a, dy: (dy,)),
    "max": Op("math.largest({0})", "", lambda x: x.amax(-1, keepdim=True), _max_slope),
}  # fmt: skip

_REDUCTIONS = ("sum", "max")
_TAKES_CONDITIONS = ("where", "number", "and", "or", "not")
_TAKES_TENSORS = ("where", "maximum")


# --- programs --------------------------------------------------------------------------------------------------------


def leading_to(nodes: Sequence[Node], targets: list[int], known: Collection[int] = ()) -> list[int]:
    """Return the indices of the nodes that lead to some, in order, without known ones and what leads only to these."""
    found, waiting = set[int](), list(targets)
    while waiting:
        index = waiting.pop()
        if index not in found and index not in known:
            found.add(index)
            waiting += nodes[index].args
    return sorted(found)


@dataclass(frozen=True, eq=False)
class Program:
    """A graph with its inputs and results; equal if the same kernel computes them.

    Attributes:
        compute: float64 if an input is float64, else float32.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Input, ...]
    results: tuple[Result, ...]

    @classmethod
    def of(cls, graph: Graph, inputs: Sequence[Input], results: Sequence[Result]) -> Program:
        """Return the program of some results of a graph, without what they do not need."""
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
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Program) and self.digest == other.digest)

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.inputs))}: {self.operations} operations #{self.digest[:6]}"

    @cached_property
    def operations(self) -> int:
        """Number of operations on each element."""
        return sum(node.op not in ("input", "constant", "columns", "cast", "stop") for node in self.nodes)

    @cached_property
    def compute(self) -> torch.dtype:
        """The dtype of the computation."""
        return torch.float64 if any(each.dtype == torch.float64 for each in self.inputs) else torch.float32

    @cached_property
    def reduces(self) -> bool:
        """Whether rows are reduced, or results summed over the rows."""
        summed = any(result.layout.endswith("sum") for result in self.results)
        return summed or any(node.op in _REDUCTIONS for node in self.nodes)

    def cost(self, M: int, N: int) -> Cost:
        """Return the least bytes and operations."""
        read = sum(math.prod(each.size(M, N)) * each.dtype.itemsize for each in self.inputs)
        sizes = {"full": M * N, "column": M, "row sum": N, "sum": 1}
        written = sum(sizes[each.layout] * each.dtype.itemsize for each in self.results)
        return Cost(read + written, self.operations * M * N)

    def run_torch(self, N: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Compute by torch's functions, which autograd can record.

        The inputs are (M or 1, N or 1), the results (M, N), (M, 1), (1, N) or (1, 1).
        """
        M = max((x.shape[0] for x, each in zip(tensors, self.inputs, strict=True) if each.by_row), default=1)
        values: list[Any] = []
        for node in self.nodes:
            values.append(self._torch_value(node, values, tensors, N))
        outputs, shared = [], set[int]()
        for index, layout, dtype in self.results:
            y = values[index].expand(M, 1 if layout in ("column", "sum") else N)
            if layout.endswith("sum"):
                y = y.sum(0, keepdim=True)
            y = y.to(dtype)
            own = self._memory_of(index)  # of an input or of another result
            aliases = own in shared or self.nodes[own].op == "input"
            shared.add(own)
            outputs.append(y.clone(memory_format=torch.contiguous_format) if aliases else y.contiguous())
        return tuple(outputs)

    def _memory_of(self, index: int) -> int:
        """Return the node whose memory torch's value of a node may be."""
        while self.nodes[index].op in ("cast", "stop", "number"):
            (index,) = self.nodes[index].args
        return index

    def _torch_value(self, node: Node, values: list[Any], tensors: tuple[Tensor, ...], N: int) -> Any:
        if node.op == "constant":
            return node.value
        if node.op == "columns":
            return float(N)
        if node.op == "input":
            x = tensors[node.value]
            return x if node.boolean else x.to(self.compute)
        args = [values[arg] for arg in node.args]
        if node.op in _TAKES_TENSORS:
            given = next(arg for arg in args if isinstance(arg, Tensor))
            full = [
                torch.full((), x, dtype=self.compute, device=given.device) if isinstance(x, float) else x for x in args
            ]
            return OPERATIONS[node.op].torch(*full)
        if node.op == "power":
            return torch.pow(args[0], node.value)
        if node.op == "cast":
            return args[0].to(node.value).to(self.compute)
        return args[0].to(self.compute) if node.op == "number" else OPERATIONS[node.op].torch(*args)


@lru_cache(maxsize=4096)
def gradient_of(program: Program, wanted: tuple[int, ...]) -> tuple[Program | None, tuple[int, ...]]:
    """Return the program of the gradients of some inputs, and those that the results depend on.

    Its inputs are the program's, then the gradient of each result. It is None where no result depends on an input.
    """
    graph = Graph(program.nodes)
    inputs = list(program.inputs)
    gradients: dict[int, Expr] = {}
    for index, _, dtype in program.results:
        if dtype.is_floating_point:
            given = Input(True, program.nodes[index].by_column, dtype)
            dy = graph.add("input", value=(len(inputs), False), by_row=True, by_column=given.by_column)
            gradients[index] = gradients[index] + dy if index in gradients else dy
        else:
            given = Input(True, program.nodes[index].by_column, torch.float32)
        inputs.append(given)
    differs: list[bool] = []  # numbers that depend on the wanted inputs
    for node in program.nodes:
        itself = node.op == "input" and node.value in wanted
        differs.append(not node.boolean and (itself or any(differs[arg] for arg in node.args)))
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
                if node.by_column and not arg.node.by_column:  # it was broadcast along the row
                    counted = slope_of_arg.node.by_column
                    slope_of_arg = slope_of_arg.do("sum") if counted else slope_of_arg * sized(slope_of_arg)
                known = gradients.get(arg.index)
                gradients[arg.index] = slope_of_arg if known is None else known + slope_of_arg
    layouts: dict[tuple[bool, bool], Layout] = {
        (True, True): "full", (True, False): "column", (False, True): "row sum", (False, False): "sum",
    }  # fmt: skip
    results, found = [], []
    for index, node in enumerate(program.nodes):
        if node.op == "input" and node.value in wanted and index in gradients:
            results.append(
                Result(gradients[index].index, layouts[node.by_row, node.by_column], inputs[node.value].dtype)
            )
            found.append(node.value)
    return (Program.of(graph, inputs, results) if results else None), tuple(found)
