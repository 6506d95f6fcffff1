"""Results beside the reference in float64, forward and backward, before anything is timed.

The error of a result is ||x - reference|| / ||reference||, the largest of a call's results counts. It may be what the
dtype allows, or twice that of torch's function in the same dtype, whichever is more, but never above one half.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from accelerant import ops
from accelerant.bench.subjects import OPS
from accelerant.bench.suites.cases import Case, Inputs, as_tuple, first_rows, leaves_of

__all__ = ["ALLOWED_ERROR", "Oracle"]

ALLOWED_ERROR = {torch.float32: 2e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""What a dtype allows; float32 products may be TF32's."""

_MOST_ERROR = 0.5
"""What is further off is wrong whatever torch gives."""

_MOST_ELEMENTS = 2**28
"""A reference that would hold more elements in float64 is computed on the first rows alone."""

_MOST_FLOPS = 2 * 10**11
"""The same for its operations: products in float64 are slow on most devices, convolutions most of all."""


class Oracle:
    """What a case's results must be; computed once, at the first question.

    Args:
        case: whose results.
        flops: of its forward pass, 0 where bandwidth bounds it.
    """

    def __init__(self, case: Case, flops: int = 0) -> None:
        self.case = case
        self.inputs = _affordable(case, flops)
        self.whole = self.inputs is case.inputs
        self._exact: dict[str, list[Tensor]] = {}
        self._torch: dict[str, float] = {}

    def wrong(self, fn: Callable[..., Any], direction: str) -> tuple[float | None, str]:
        """The error of a function's results, and what is wrong with them: "" where nothing is.

        Args:
            fn: an op, ours or a peer's.
            direction: "forward", "backward", or "both".

        Returns:
            None for the error of what is another at each call.
        """
        if OPS[self.case.name].random:
            return None, ""
        found = self._error(fn, direction)
        allowed = ALLOWED_ERROR[self.case.dtype]
        if found <= allowed:
            return found, ""
        allowed = max(allowed, min(2 * self._error_of_torch(direction), _MOST_ERROR))
        if found <= allowed:
            return found, ""
        return found, f"wrong: relative error {found:.3g} against the float64 reference, allowed {allowed:.3g}"

    def _error(self, fn: Callable[..., Any], direction: str) -> float:
        found = _results(self.case, fn, self.inputs, direction)
        exact = self._reference(direction)
        if len(found) != len(exact):
            return float("inf")
        return max((_relative(one, other) for one, other in zip(found, exact, strict=True)), default=0.0)

    def _error_of_torch(self, direction: str) -> float:
        if direction not in self._torch:
            self._torch[direction] = self._error(OPS[self.case.name].theirs, direction)
        return self._torch[direction]

    def _reference(self, direction: str) -> list[Tensor]:
        if direction not in self._exact:
            module = importlib.import_module(f"{getattr(ops, self.case.name).__module__.rpartition('.')[0]}.reference")
            reference = getattr(module, f"{self.case.name}_reference")
            wide = tuple(x.double() if x is not None and x.is_floating_point() else x for x in self.inputs)
            self._exact[direction] = _results(self.case, reference, wide, direction)
        return self._exact[direction]


def _results(case: Case, fn: Callable[..., Any], inputs: Sequence[Tensor | None], direction: str) -> list[Tensor]:
    """Of a call on copies, since one may write over its arguments: its results, its gradients, or both."""
    given = [None if x is None else x.clone() for x in inputs]
    if direction == "forward":
        with torch.no_grad():
            return list(as_tuple(fn(*given, **case.options)))
    args = leaves_of(case.name, given)
    outs = [y for y in as_tuple(fn(*args, **case.options)) if y.requires_grad]
    leaves = [x for x in args if x is not None and x.requires_grad]
    if direction == "both":
        return [outs[0].detach().clone(), *torch.autograd.grad(outs[0], leaves)]
    return list(torch.autograd.grad(outs, leaves, [_upstream(y, case.dtype, i) for i, y in enumerate(outs)]))


def _upstream(y: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """The same gradient of a result, to a dtype's precision, whatever dtype the result has."""
    generator = torch.Generator(y.device).manual_seed(seed)
    drawn = torch.randn(y.shape, generator=generator, device=y.device, dtype=torch.float32)
    return drawn.to(dtype).to(y.dtype)


def _relative(found: Tensor, exact: Tensor) -> float:
    if found.shape != exact.shape:
        return float("inf")
    exact, wide = exact.double(), found.double()
    if found.dtype == torch.float16:  # a number beyond its range is an infinity in it, the sums of many rows for one
        most, finite = torch.finfo(torch.float16).max, exact.isfinite()
        exact, wide = (torch.where(finite, x.clamp(-most, most), x) for x in (exact, wide))
    norm = torch.linalg.vector_norm(exact)
    off = torch.linalg.vector_norm(wide - exact)
    error = float(off / norm.clamp_min(1e-30))
    return error if error == error else float("inf")  # NaN is as wrong as can be


def _affordable(case: Case, flops: int) -> Inputs:
    """The arguments, cut to what a reference in float64 has memory and time for."""
    if case.name == "attention":  # its reference holds the scores; a few heads are as good as all
        q, k, *_ = case.inputs
        if q is None or k is None or q.shape[1] * q.shape[2] * k.shape[2] * q.shape[0] <= 2**24:
            return case.inputs
        group = q.shape[1] // k.shape[1]
        return tuple(None if x is None else x[:1, : (group if x is q else 1), :2048].contiguous() for x in case.inputs)
    if case.name == "attention_varlen":
        return case.inputs
    first = case.inputs[0]
    total = sum(x.numel() for x in case.inputs if x is not None)
    if first is None or not first.ndim:
        return case.inputs
    if case.name == "attention_decode":  # each sequence by itself, with its caches and its length
        return tuple(None if x is None else x[:1] for x in case.inputs)
    share = max(total / _MOST_ELEMENTS, flops / _MOST_FLOPS, 16 if case.name == "linear_cross_entropy" else 1)
    return case.inputs if share <= 1 else first_rows(case.inputs, max(1, int(len(first) / share)))
