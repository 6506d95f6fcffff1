"""The sink that receives the factors of per-example gradients during a backward pass, an attribute of a parameter.

An autograd function whose parameters have a sink gives it the two factors of each product, and returns None to
autograd. The owner of the sink counts the calls of a pass, and ends it by autograd's callback
(accelerant.privacy.dp.clipping).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from accelerant.errors import ShapeError

_NAME = "_per_example_sink"
_MARK = "_per_example_forward"


class PerExampleSink(Protocol):
    """Receives the factors of per-example gradients during a backward pass, whose rows are example-major.

    Tensors that are passed stay unchanged until the pass is over. A parameter that is None, or not clipped, costs
    nothing. What several calls give of one parameter is summed for each example. Where an example is left out, its rows
    of dy may be set to 0 when the pass is over. A layer sets `shared` if it takes an input for that of all examples.
    """

    shared: bool

    @property
    def examples(self) -> int | None:
        """Number of examples of the current forward pass; None if unknown."""

    @property
    def batch(self) -> int | None:
        """The same during a call of the model; None outside of one."""

    @property
    def runs_by_example(self) -> bool:
        """Whether the model can be run again for each example by itself."""

    def is_input(self, x: Tensor) -> bool:
        """Return whether x is an input of the running model, or a view of one."""

    def begin(self, *inputs: object) -> None:
        """Begin a forward pass outside of a call of the model; examples are the first dimension of the first tensor."""

    def expect(self, *parameters: Tensor | None) -> None:
        """Announce in the forward pass that each of these parameters will be given factors once more.

        Factors that were not announced are refused, since the graph was traversed twice. The norm of a parameter is
        computed with its last factors, before the end of the pass.
        """

    def wants(self, parameter: Tensor | None) -> bool:
        """Return whether the sink clips a parameter; for others nothing need be saved."""

    def linear(self, weight: Tensor | None, bias: Tensor | None, dy: Tensor, x: Tensor, examples: int) -> None:
        """Take the factors of y = x weight^T + bias: dy (examples T, N), x (examples T, K), of one dtype."""

    def embedding(
        self, weight: Tensor, dy: Tensor, tokens: Tensor, examples: int, padding_idx: int | None = None,
        distinct: bool = False,
    ) -> None:  # fmt: skip
        """Take the factors of y = weight[tokens]: dy (examples T, D), tokens (examples T,), `distinct` in each."""

    def norm(
        self, weight: Tensor | None, bias: Tensor | None, dy: Tensor, x: Tensor, statistics: Tensor, examples: int
    ) -> None:
        """Take the factors of a norm: dy and x (examples T, N), statistics (examples T, 1 or 2), [mean,] 1 / std."""

    def columns(self, bias: Tensor | None, dy: Tensor, examples: int) -> None:
        """Take the factor of y = x + bias: dy (examples T, N)."""

    def gradients(
        self, parameter: Tensor, each: Tensor, squares: Tensor | None = None, factor: Tensor | None = None
    ) -> None:
        """Take per-example gradients (examples, *shape), yet to be multiplied by `factor`, and their squared norms."""

    def form(self, a: Tensor, g: Tensor, out: Tensor) -> Tensor:
        """Form each g_i^T a_i, of a (B, T, K) and g (B, T, N), into out (B, N, K): their squared norms, (B,)."""


class Forming:
    """Forms the gradients of a matrix for a few examples at a time, and keeps their squared norms, (examples,)."""

    def __init__(self, sink: PerExampleSink, examples: int) -> None:
        self.examples = examples
        self.squares: Tensor | None = None
        self._sink = sink

    def __call__(self, part: slice, a: Tensor, g: Tensor, out: Tensor) -> None:
        """Form the gradients of a part of the examples, as PerExampleSink.form does."""
        squares = self._sink.form(a, g, out)
        if self.squares is None:
            self.squares = squares.new_empty(self.examples)
        self.squares[part] = squares


def first_sink(parameters: Iterable[Tensor | None]) -> PerExampleSink | None:
    """Return the first sink among those of the parameters, or None."""
    for parameter in parameters:
        sink: PerExampleSink | None = getattr(parameter, _NAME, None)
        if sink is not None:
            return sink
    return None


def sink_of(parameter: Tensor | None) -> PerExampleSink | None:
    """Return the sink of a parameter; None where autograd computes its gradient."""
    return None if parameter is None else getattr(parameter, _NAME, None)


def attach(sink: PerExampleSink, parameters: Iterable[Tensor]) -> None:
    """Give parameters a sink."""
    for parameter in parameters:
        setattr(parameter, _NAME, sink)


def detach(parameters: Iterable[Tensor]) -> None:
    """Take their sink from parameters; those that have none stay as they are."""
    for parameter in parameters:
        parameter.__dict__.pop(_NAME, None)


def mark_traced(forward: object) -> None:
    """Mark a function as a module's forward that differs from its class's only in feeding a sink."""
    setattr(forward, _MARK, True)


def is_traced(module: object) -> bool:
    """Return whether a module's forward was replaced for a sink, so that a fused function that feeds it may be used."""
    return getattr(module.__dict__.get("forward"), _MARK, False)


def announce(sink: PerExampleSink, x: Tensor, *parameters: Tensor | None) -> int:
    """Announce parameters in a forward pass over x (examples, ...); return the number of examples."""
    batch = sink.batch
    if batch is not None and x.shape[0] != batch:
        raise ShapeError(
            f"a layer got {tuple(x.shape)}, whose first dimension is not the batch of {batch} examples that the model "
            "got: per-example gradients need the examples first in each layer"
        )
    sink.expect(*parameters)
    return x.shape[0]


def examples_of(sink: PerExampleSink, rows: int) -> int:
    """Return the number of examples for a function that sees only their rows; the rows where it is not known."""
    return rows if (found := sink.examples) is None else found
