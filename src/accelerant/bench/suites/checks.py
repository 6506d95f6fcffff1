"""Results beside the reference in float64, forward and backward, before anything is timed.

The error of a result is ||x - reference|| / ||reference||, the largest of a call's results counts. It may be what the
dtype allows, or twice that of torch's function in the same dtype, whichever is more, but never above one half.
"""

from __future__ import annotations

import importlib
import traceback
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
"""A reference that would hold more elements in float64 is computed on the first rows alone; on a GPU with much memory
more are held, at _ELEMENT_BYTES each.
"""

_ELEMENT_BYTES = 64
"""What an element of a reference takes at its highest: it, its gradient, and what is kept between them, in float64."""

_MOST_FLOPS = 2 * 10**11
_MOST_FLOPS_OF_TENSOR_CORES = 10**13
"""The same for its operations: products in float64 are slow on most devices. A100, H100 and their kin have tensor cores
for them.
"""

_MOST_SCORES = 2**27
"""Elements of attention's scores that its reference holds at a time."""

_UPSTREAM_SEED = 10_000
"""Where the seeds of upstream gradients begin, far from the arguments': with dy = x a sum over rows would be one of
squares, beyond float16's range, and the gradient of a norm next to nothing.
"""


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

    def _can_cut(self) -> bool:
        """Whether fewer rows are another case of the op."""
        first = self.inputs[0]
        return first is not None and first.ndim > 0 and len(first) > 1 and not self.case.name.startswith("attention")

    def _cut(self) -> None:
        """Go on with half of the rows, for want of memory for the reference."""
        self._torch.clear()
        if self.case.device.type == "cuda":
            torch.cuda.empty_cache()
        self.inputs = _cut_to(self.case.name, self.inputs, 0.5)
        self.whole = False

    def _error(self, fn: Callable[..., Any], direction: str) -> float:
        exact = self._reference(direction)
        found = _results(self.case, fn, self.inputs, direction)
        if len(found) != len(exact):
            return float("inf")
        return max((_relative(one, other) for one, other in zip(found, exact, strict=True)), default=0.0)

    def _error_of_torch(self, direction: str) -> float:
        if direction not in self._torch:
            self._torch[direction] = self._error(OPS[self.case.name].theirs, direction)
        return self._torch[direction]

    def _reference(self, direction: str) -> list[Tensor]:
        """The results in float64; those of the last direction are kept, for all that are compared with them."""
        while direction not in self._exact:
            self._exact.clear()
            try:
                self._exact[direction] = self._computed(direction)
            except torch.OutOfMemoryError as error:
                traceback.clear_frames(error.__traceback__)  # its frames hold what is lacking
                if not self._can_cut():
                    raise
            if direction not in self._exact:
                self._cut()
        return self._exact[direction]

    def _computed(self, direction: str) -> list[Tensor]:
        module = importlib.import_module(f"{getattr(ops, self.case.name).__module__.rpartition('.')[0]}.reference")
        reference = getattr(module, f"{self.case.name}_reference")
        wide = tuple(x.double() if x is not None and x.is_floating_point() else x for x in self.inputs)
        compute = _attention_results if self.case.name == "attention" else _results
        return compute(self.case, reference, wide, direction)


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


def _attention_results(
    case: Case, reference: Callable[..., Any], inputs: Sequence[Tensor | None], direction: str
) -> list[Tensor]:
    """The reference's, some batches or heads after the other: all scores at once would be tens of GB in float64."""
    q, k, v = (x for x in inputs if x is not None)
    group = q.shape[1] // k.shape[1]
    of_head = group * q.shape[2] * k.shape[2]
    heads = max(1, min(k.shape[1], _MOST_SCORES // max(of_head, 1)))
    batches = max(1, _MOST_SCORES // max(of_head * k.shape[1], 1)) if heads == k.shape[1] else 1
    dy = None if direction == "forward" else _upstream(q.new_empty(*q.shape[:3], v.shape[3]), case.dtype, 0)
    found = [q.new_empty(*q.shape[:3], v.shape[3])] if dy is None else [torch.empty_like(x) for x in (q, k, v)]
    for b in range(0, q.shape[0], batches):
        for h in range(0, k.shape[1], heads):
            here = (slice(b, b + batches), slice(h, h + heads))
            ours = (slice(b, b + batches), slice(h * group, (h + heads) * group))
            given = [x[place].detach() for x, place in ((q, ours), (k, here), (v, here))]
            if dy is None:
                found[0][ours] = reference(*given, **case.options)
                continue
            for x in given:
                x.requires_grad_()
            gradients = torch.autograd.grad(reference(*given, **case.options), given, dy[ours])
            for whole, part, place in zip(found, gradients, (ours, here, here), strict=True):
                whole[place] = part
    return found


def _upstream(y: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """The same gradient of a result, to a dtype's precision, whatever dtype the result has."""
    generator = torch.Generator(y.device).manual_seed(_UPSTREAM_SEED + seed)
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
    first = case.inputs[0]
    if first is None or not first.ndim or case.name in ("attention", "attention_varlen"):
        return case.inputs  # attention's references hold the scores of a few heads at a time
    elements, operations = _limits(case.device)
    total = sum(x.numel() for x in case.inputs if x is not None)
    if case.name == "linear_cross_entropy" and case.inputs[1] is not None:
        total += len(first) * len(case.inputs[1])  # the logits
    if case.name == "conv2d" and case.inputs[1] is not None:
        total += flops // (2 * len(case.inputs[1]))  # the windows
    share = max(total / elements, flops / operations)
    if share <= 1:
        return case.inputs
    if case.name == "attention_decode":  # each sequence by itself, with its caches and its length
        return tuple(None if x is None else x[: max(1, int(len(x) / share))] for x in case.inputs)
    return _cut_to(case.name, case.inputs, 1 / share)


def _cut_to(name: str, inputs: Inputs, part: float) -> Inputs:
    """The first part of the rows; a multiple of _ROWS, if there are so many."""
    rows = 0 if inputs[0] is None else max(1, int(len(inputs[0]) * part))
    return first_rows(inputs, rows - rows % _ROWS if rows > _ROWS else rows, OPS[name].shared)


_ROWS = 64
"""A cut keeps a multiple of so many rows, if it has them: what a product of torch asks of its sizes stays true."""


def _limits(device: torch.device) -> tuple[float, float]:
    """The most elements, and operations, of a reference on a device."""
    if device.type != "cuda":
        return _MOST_ELEMENTS, _MOST_FLOPS
    about = torch.cuda.get_device_properties(device)
    fast = torch.version.hip is None and (about.major, about.minor) in ((8, 0), (9, 0))
    return max(
        _MOST_ELEMENTS, about.total_memory / _ELEMENT_BYTES
    ), _MOST_FLOPS_OF_TENSOR_CORES if fast else _MOST_FLOPS
