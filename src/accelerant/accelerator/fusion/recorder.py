"""Records a Python function of arrays: one run of it on traced values, which becomes a program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from accelerant.accelerator.fusion.functions import DTYPES, Traced, View, refuse
from accelerant.accelerator.fusion.graph import (
    Expr,
    Graph,
    Input,
    Program,
    Result,
    computed_in,
    layout_of,
    leading_to,
)
from accelerant.errors import UnsupportedCase

_OUTSIDE = 1 << 20
"""The first number of a captured array, until the number of the other inputs is known."""


class Domain:
    """The shape that all inputs broadcast to: `rows` (the leading sizes) of N columns."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.rows = tuple(shape[:-1])
        self.M, self.N = math.prod(self.rows), shape[-1] if shape else 1

    def shape(self, each: Returned) -> tuple[int, ...]:
        """Return the shape of a result."""
        if not each.ndim:
            return ()
        leading = each.ndim if each.dropped else each.ndim - 1
        rows = self.rows[len(self.rows) - leading :] if each.by_row else (1,) * leading
        return rows if each.dropped else (*rows, self.N if each.by_column else 1)


class Returned(NamedTuple):
    """The shape of a result: `size`, of the shapes that were recorded; or, up to the sizes of the domain, the rest."""

    ndim: int
    by_row: bool
    by_column: bool
    dropped: bool
    size: tuple[int, ...]


def view_of(x: Any, steps: Sequence[tuple[str, Any]]) -> Any:
    """Return a view of an array of torch or NumPy; a copy where torch has no view, of steps backwards."""
    for kind, value in steps:
        if kind == "permute":
            x = x.permute(value) if isinstance(x, torch.Tensor) else x.transpose(value)
        elif isinstance(x, torch.Tensor) and any(isinstance(each, slice) and (each.step or 1) < 0 for each in value):
            x = torch.from_numpy(x.numpy(force=True)[value].copy()).to(x.device)
        else:
            x = x[value]
    return x


class Recording:
    """One run of the function on traced values.

    Attributes:
        reads_shape: the program serves this shape alone: the function asked for it, or takes views.
        views: of the arguments, the inputs before the captured ones.
        captured: arrays of no dimension from outside of the function, which are inputs after its own.
        of_torch: methods of arrays have torch's signatures, not NumPy's.
        as_numpy: dtypes of results are NumPy's, not torch's.
    """

    def __init__(
        self, domain: Domain, inputs: Sequence[tuple[Input, tuple[int, ...]]], *, of_torch: bool, as_numpy: bool,
        views: Sequence[View] | None = None, dry: bool = False,
    ) -> None:  # fmt: skip
        """Take the domain, and each input with its shape.

        With `views`, which may be incomplete, the arguments are no inputs themselves, but what is done with views of
        them; the inputs are those that are given, the others are added to `views`. A `dry` run finds them, and the
        shapes.
        """
        self.graph, self.domain, self.of_torch, self.as_numpy = Graph(), domain, of_torch, as_numpy
        self.reads_shape, self.dry = views is not None, dry
        self.views: list[View] | None = None if views is None else list(views)
        self._wanted = len(views or ())
        self.inputs = [] if views is not None else [each for each, _ in inputs]
        self.sizes: dict[int, tuple[int, ...]] = {}
        self.captured: list[torch.Tensor | np.ndarray[Any, Any]] = []
        self._captured: list[Traced] = []
        self.values = []
        for index, (each, size) in enumerate(inputs):
            expr = self._input(index, each) if views is None else None
            self.values.append(Traced(self, expr, each.dtype, size, view=(index, ())))

    def _input(self, index: int, each: Input) -> Expr:
        dtype = computed_in(each.dtype)
        return self.graph.add("input", value=index, by_row=each.by_row, by_column=each.by_column, dtype=dtype)

    def seen(self, x: Traced) -> Expr:
        """Return the value of a view, which becomes an input."""
        assert self.views is not None  # for the type checker, as the next: others have an expression
        assert x.view is not None
        if x.view not in self.views:
            self.views.append(x.view)
        shape = (*self.domain.rows, self.domain.N)
        padded = (1,) * (len(shape) - len(x._size)) + x._size
        by_row = any(size != 1 for size in padded[:-1]) or all(size == 1 for size in self.domain.rows)
        each = Input(by_row, padded[-1] == shape[-1], x.dtype)
        self.sizes[self.views.index(x.view)] = x._size
        return self._input(self.views.index(x.view), each)

    def capture(self, x: torch.Tensor | np.ndarray[Any, Any]) -> Traced:
        """Return the value of an array from outside, which is read at each call."""
        if x.ndim or (isinstance(x, torch.Tensor) and (x.requires_grad or x.device.type != "cpu")):
            refuse("an array from outside of the function: make it an argument")
        for known, traced in zip(self.captured, self._captured, strict=True):
            if known is x:
                return traced
        dtype = x.dtype if isinstance(x, torch.Tensor) else getattr(torch, x.dtype.name, None)
        if dtype not in DTYPES:
            refuse(f"a {x.dtype} array from outside of the function: make it an argument")
        expr = self.graph.add("input", value=_OUTSIDE + len(self.captured), dtype=computed_in(dtype))
        self.captured.append(x)
        self._captured.append(Traced(self, expr, dtype, ()))
        return self._captured[-1]

    def program(self, outputs: Sequence[Any]) -> tuple[Program, tuple[Returned, ...]]:
        """Return the program of the function's results, and their shapes."""
        results, shapes = [], []
        for number, y in enumerate(outputs):
            if not isinstance(y, Traced):
                raise UnsupportedCase(f"fuse: result {number} is a {type(y).__name__}, not computed from the arguments")
            expr = y.expr.convert(computed_in(y.dtype))
            results.append(Result(expr.index, layout_of(expr.node), y.dtype))
            shapes.append(Returned(y.ndim, expr.node.by_row, expr.node.by_column, y.dropped, y._size))
        given = self.inputs if self.views is None else self._given()
        count = len(given)
        for index, node in enumerate(self.graph.nodes):
            if node.op == "input" and node.value >= _OUTSIDE:
                self.graph.nodes[index] = node._replace(value=node.value - _OUTSIDE + count)
        inputs = [*given, *(Input(False, False, computed_in(each.dtype)) for each in self._captured)]
        return Program.of(self.graph, inputs, results), tuple(shapes)

    def used(self, outputs: Sequence[Any]) -> list[tuple[View, tuple[int, ...]]]:
        """Return the views that results are made of, and their shapes."""
        assert self.views is not None  # for the type checker
        nodes = self.graph.nodes
        needed = leading_to(nodes, [y.expr.index for y in outputs if isinstance(y, Traced)])
        indices = sorted({nodes[i].value for i in needed if nodes[i].op == "input" and nodes[i].value < _OUTSIDE})
        return [(self.views[i], self.sizes[i]) for i in indices]

    def _given(self) -> list[Input]:
        """Return the inputs that are views, in their order."""
        assert self.views is not None  # for the type checker
        nodes = {node.value: node for node in self.graph.nodes if node.op == "input"}
        dtypes = [self.values[index].dtype for index, _ in self.views[: self._wanted]]
        return [Input(nodes[i].by_row, nodes[i].by_column, dtype) for i, dtype in enumerate(dtypes)]
