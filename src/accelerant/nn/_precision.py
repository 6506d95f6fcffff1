"""Weights cast to the compute dtype once a step rather than at each use.

Autocast keeps parameters in float32 and casts them at each use: twice a step for each matrix, and again for each
micro-batch. A `LowWeights` refreshes all copies that layers requested with one multi-tensor cast, and the layers use
them while it is active. Copies are not used outside of that, so no weight has a stale copy.

Some matrices may be cast to 8-bit floating point instead (`float8`), also at the beginning of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from accelerant.ops.linear_fp8.op import Float8Weight, Float8Weights


class LowWeights:
    """Low-precision copies of the parameters that layers requested while it was active.

    Products use the matrices in `float8` in 8-bit floating point; ShapeError for a dimension that is no multiple of 16.
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
        """Return a parameter's copy, created on the first request."""
        if dtype != self._dtype:
            return weight.detach().to(dtype)
        copy = self._by_id.get(id(weight))
        if copy is None:
            copy = weight.detach().to(dtype)
            self._sources.append(weight)  # kept alive, so that its id stays unique
            self._copies.append(copy)
            self._by_id[id(weight)] = copy
        return copy

    @contextmanager
    def refreshed(self) -> Iterator[None]:
        """Refresh all copies and activate them inside the context."""
        if self._copies:
            torch._foreach_copy_(self._copies, [source.detach() for source in self._sources])
        if self._float8 is not None:
            self._float8.fill()
        token = _active.set(self)
        _rounded.update(self._rounded)
        try:
            yield
        finally:
            _active.reset(token)
            for key in self._rounded:
                del _rounded[key]


_active: ContextVar[LowWeights | None] = ContextVar("accelerant_low_weights", default=None)

_rounded: dict[int, Float8Weight] = {}
"""Weight identity -> its 8-bit form while active, for all threads: recomputation runs on autograd's threads."""


def lowered(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight in a dtype, detached: itself, the active copy, or a new one."""
    if weight.dtype == dtype:
        return weight.detach()
    copies = _active.get()
    return weight.detach().to(dtype) if copies is None else copies.of(weight, dtype)


def float8_of(weight: Tensor) -> Float8Weight | None:
    """Return a weight's active 8-bit form; None if there is none."""
    return _rounded.get(id(weight))
