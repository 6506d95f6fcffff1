"""Weights in the precision to compute in, made once a step rather than at each use.

Autocast leaves parameters in float32 and casts them where they are used: twice a step for each matrix, and again for
each micro-batch. A `LowWeights` makes the copies that the layers asked for with one multi-tensor cast, and while it is
in force the layers take them from it. Nothing is remembered beyond that: a weight that changes has no stale copy.

Some matrices may be wanted as 8-bit numbers instead (`float8`): those are made at the beginning of a step, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from accelerant.ops.linear_fp8.op import Float8Weight, Float8Weights

__all__ = ["LowWeights", "float8_of", "lowered"]


class LowWeights:
    """Copies of parameters in a dtype, of those that were asked for while it was in force.

    Args:
        dtype: of the copies.
        float8: matrices that products take as 8-bit numbers.

    Raises:
        ShapeError: a size of such a matrix is no multiple of 16.
    """

    def __init__(self, dtype: torch.dtype, float8: Iterable[Tensor] = ()) -> None:
        self._dtype = dtype
        self._sources: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._by_id: dict[int, Tensor] = {}
        sources = list(float8)
        self._float8 = Float8Weights(sources) if sources else None
        self._rounded = dict(zip(map(id, sources), self._float8.each, strict=True)) if self._float8 else {}

    def of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """A parameter's copy, made now if nobody asked before."""
        if dtype != self._dtype:
            return weight.detach().to(dtype)
        found = self._by_id.get(id(weight))
        if found is None:
            found = weight.detach().to(dtype)
            self._sources.append(weight)  # held, so that its identity is no other's
            self._copies.append(found)
            self._by_id[id(weight)] = found
        return found

    @contextmanager
    def refreshed(self) -> Iterator[None]:
        """Make all copies anew, and put them in force inside."""
        if self._copies:
            torch._foreach_copy_(self._copies, [source.detach() for source in self._sources])
        if self._float8 is not None:
            self._float8.fill()
        token = _in_force.set(self)
        _rounded.update(self._rounded)
        try:
            yield
        finally:
            _in_force.reset(token)
            for key in self._rounded:
                del _rounded[key]


_in_force: ContextVar[LowWeights | None] = ContextVar("accelerant_low_weights", default=None)

_rounded: dict[int, Float8Weight] = {}
"""By the weight's identity, while in force, for every thread: a recomputed forward pass runs on one of autograd's."""


def lowered(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight in a dtype, without its history: itself, the copy in force, or a new one."""
    if weight.dtype == dtype:
        return weight.detach()
    copies = _in_force.get()
    return weight.detach().to(dtype) if copies is None else copies.of(weight, dtype)


def float8_of(weight: Tensor) -> Float8Weight | None:
    """A weight as 8-bit numbers, where it is wanted so."""
    return _rounded.get(id(weight))
